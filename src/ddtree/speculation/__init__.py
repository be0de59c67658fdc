"""Speculation: modes and plans, sampling, and the round that drafts, verifies and commits."""

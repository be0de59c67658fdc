"""The OpenAI-compatible server, and its page."""

"""The engine: requests in, pieces of text out."""

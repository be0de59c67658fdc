"""Training data: prompts, and the target's own answers to them."""

"""Tree speculative decoding over block-diffusion drafters."""

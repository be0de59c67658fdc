"""Training drafters: examples, features, blocks, loss, the loop and its checkpoints."""

"""Training: the loop, its checkpoints, and the supervised warm start."""

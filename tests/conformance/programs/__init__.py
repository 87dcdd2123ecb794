"""Training scripts as people write them, by subject; each is right with DDP."""

"""What is particular to each architecture: its attention over blocks, its slices, its weights."""

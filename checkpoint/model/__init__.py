"""What a checkpoint says of its model: its configuration, and how its tensors are named and kept."""

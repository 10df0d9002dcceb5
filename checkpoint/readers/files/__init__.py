"""The tensors of a single file, whichever trainer wrote it."""

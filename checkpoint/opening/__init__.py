"""Opens a folder of any layout: recognises it, refuses what cannot be trusted, reads slices of its tensors."""

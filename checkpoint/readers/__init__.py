"""Readers: each finds the tensors of one kind of file and proves their places; ``checkpoint.opening.slices`` reads them."""

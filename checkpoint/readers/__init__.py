"""Readers: each finds the tensors of one kind of file and proves their places; ``checkpoint.slices`` reads them."""

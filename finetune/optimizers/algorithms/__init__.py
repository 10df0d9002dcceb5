"""The optimizers, one file each: its name is the file's, and ``KIND`` in it is what it declares. Nothing lists them."""

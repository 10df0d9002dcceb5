"""The optimizers that Tessera has itself, and what each keeps of every parameter."""

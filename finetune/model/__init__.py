"""The model that is trained: built, filled, with adapters, its loss, and what is computed again in the backward pass."""

"""torch's hook on gradients, with the types that torch leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class _Leaf(Protocol):
    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> object: ...


def after_each_gradient(leaf: _Leaf, hook: Callable[[torch.Tensor], None]) -> None:
    """Have ``hook`` called with a leaf tensor, each time a backward pass has added to its gradient."""
    leaf.register_post_accumulate_grad_hook(hook)

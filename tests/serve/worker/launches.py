"""What a step launches on a device: operations of torch that make or change something, and Triton's kernels by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serve.model.cuda import backend, layers, residuals

_NOTHING = ("empty", "empty_strided", "empty_like", "new_empty", "detach")
"""Operations that launch nothing."""


class _Kernel:
    """In the place of a kernel: is launched on tensors without numbers."""

    def __init__(self, name: str, found: list[str]) -> None:
        self._name, self._found = name, found

    def __getitem__(self, grid: tuple[int, ...]) -> _Kernel:
        assert all(size > 0 for size in grid), "a launch of no programs fails"
        return self

    def __call__(self, *_: object, **__: object) -> None:
        self._found.append(self._name)


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = any(_storage(leaf) not in given for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        name = func.overloadpacket.__name__
        if (made or func._schema.is_mutable) and name not in _NOTHING:
            self._found.append(name)
        return out


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def without_kernels(found: list[str]) -> Iterator[None]:
    """Triton's kernels are named when they are launched, and do nothing."""
    kernels = SimpleNamespace(**{name: _Kernel(name, found) for name in ("write_kv", "attend", "combine")})
    with (
        mock.patch.object(backend, "kernels", kernels),
        mock.patch.object(layers, "rms_norm", _Kernel("rms_norm", found)),
        mock.patch.object(residuals, "sum_and_norm", _Kernel("sum_and_norm", found)),
    ):
        yield


@contextmanager
def launches() -> Iterator[list[str]]:
    """What is launched meanwhile, in its order, Triton's kernels doing nothing."""
    found: list[str] = []
    with without_kernels(found), _Operations(found):
        yield found

"""What has the host wait for the device: operations are looked at, of models on ``meta``, where tensors have no numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serve.model.attention import Backend
from serve.model.cuda.device import launch_less
from serve.model.cuda.graphs import waits_for_device
from serve.model.lean import call_leaves_directly
from serve.model.sending import send
from serve.worker import loader
from serve.worker.complete import whole_head
from serve.worker.loader import RankModel
from serve.worker.parallel import Ranks
from serve.worker.sampling.backend import TorchSampling
from serve.worker.sizing import Blocks
from tests.serve.worker.family_worker import BLOCK_TOKENS, settings

META = torch.device("meta")


class Waits(TorchDispatchMode):
    """Which operations the host waits for the device in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if waits_for_device(func, args):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class OnlyDevice(Waits):
    """Besides: which operations mix the host's tensors with the device's, or copy from the one to the other."""

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if _made_of_numbers(func) or "cpu" in _devices(args, kwargs, out):
            self.found.append(str(func))
        return out


class WholeStep(TorchDispatchMode):
    """What a step does to a device that has the host wait for it; the host's own tensors and what ``send`` sends do not.

    ``Tensor.tolist`` stands for reading from the device: it gives ones, and whatever is launched after the first is found, too.
    """

    def __init__(self, *, reads_between: bool = False) -> None:
        """``reads_between``: something may be launched after what was read."""
        super().__init__()
        self._reads_between = reads_between
        self.found: list[str] = []
        self.reads = 0
        self._tolist, self._tensor = Tensor.tolist, torch.tensor
        self._made: dict[int, Tensor] = {}
        """What operations gave, held so that no other tensor is taken for it."""

    def __enter__(self) -> WholeStep:
        super().__enter__()

        def tensor(*args: Any, **kwargs: Any) -> Tensor:
            if torch.device(kwargs.get("device") or "cpu") == META:
                self.found.append("torch.tensor, on the device")
            return self._tensor(*args, **kwargs)

        def read(tensor: Tensor) -> Any:
            if tensor.device != META:
                return self._tolist(tensor)
            self.reads += 1
            return torch.ones(tensor.shape, dtype=tensor.dtype).numpy().tolist()

        Tensor.tolist, torch.tensor = read, tensor  # type: ignore[method-assign]
        return self

    def __exit__(self, *raised: object) -> None:
        Tensor.tolist, torch.tensor = self._tolist, self._tensor  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = _devices(args, kwargs, out)
        if "meta" not in devices:
            return out
        if self.reads and not self._reads_between:
            self.found.append(f"{func}, launched after the host has read")
        elif waits_for_device(func, args) or _made_of_numbers(func) or ("cpu" in devices and not _is_sent()):
            self.found.append(str(func))
        elif func.overloadpacket.__name__ in ("index", "index_put_") and not self._knows(args[1]):
            self.found.append(f"{func}, by a list of the host's")  # which torch makes a tensor of where no mode sees it
        self._made.update((id(leaf), leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out

    def _knows(self, indices: object) -> bool:
        return all(id(leaf) in self._made for leaf in tree_leaves(indices) if isinstance(leaf, Tensor))


def _made_of_numbers(func: Any) -> bool:
    """Whether it is what ``torch.tensor`` does, on the CPU and on meta."""
    return func.overloadpacket.__name__ in ("lift_fresh", "detach_")


def _devices(*of: object) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(of) if isinstance(leaf, Tensor)}


def _is_sent() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not send.__code__:
        frame = frame.f_back
    return frame.f_code is send.__code__


def on_meta(folder: Path, backend: Backend) -> RankModel:
    """A checkpoint's model in bfloat16, whole and ready to run steps on ``meta``; with CUDA's back end all as it is there."""
    config, alone = settings(folder, 1, "bfloat16"), Ranks(0, 1)
    with loader.opened(config, everything=False) as checkpoint:
        plan = loader.survey(checkpoint, config, META)
    model = plan.blueprint.model.to(META)
    if backend.rotates_by_any:
        launch_less(model, by_triton=True)
    blocks = Blocks(count=99, kv_heads=plan.heads.shared_heads(0).width, memory="")
    caches = loader._blank(plan, blocks, config, alone, META, keys_by_position=backend.keys_by_position)
    state = loader._with_cache(plan, caches, alone, backend)
    call_leaves_directly(model)
    return RankModel(
        body=model.base_model,
        head=whole_head(model),
        head_widths=(plan.vocab_size,),
        state=state,
        caches=caches,
        facts=loader._facts(plan, blocks, BLOCK_TOKENS, META, ("", "", "")),
        device=META,
        sampling=TorchSampling(),
        graph_sizes=(),
        filler=cast(Any, None),
        settle=lambda: None,
        survey=plan,
    )

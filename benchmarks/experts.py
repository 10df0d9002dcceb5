"""What a step's experts cost: ``python -m benchmarks.experts``.

Experts of Mixtral's form, few large and many small ones, in layers with weights of their own so that they come from memory, for
1 to 1,024 tokens: packed one by one for the compiled kernels, plain and as whole numbers, beside transformers'
own two ways, all experts in one grouped product and one after the other, in turns in one process.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from benchmarks import kernels
from serve.model.linear import Packer, choose_packer
from serve.model.packed_experts import Expert, Mix, PackedExperts
from serve.model.quantized import quantizing_packer

LAYERS: Final = 3
TOKENS: Final = (1, 8, 32, 256, 1024)
GROUP: Final = 64


@dataclass(frozen=True)
class Form:
    """Sizes of a layer's experts, and how many of them each token has."""

    hidden: int
    inner: int
    experts: int
    chosen: int

    def __str__(self) -> str:
        return f"{self.chosen} of {self.experts} experts of {self.hidden} by {self.inner}"


FORMS: Final = (Form(1024, 1792, 8, 2), Form(768, 768, 32, 4), Form(512, 384, 128, 4))


def by_transformers(way: str, layer: MixtralExperts, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What transformers computes, in one of its ways."""
    cast(MixtralConfig, layer.config)._experts_implementation = way
    out: Tensor = layer(hidden_TH, experts_TK, weights_TK)
    return out


def packed(layer: MixtralExperts, form: Form, pack: Packer) -> Mix:
    """A layer's experts, packed one by one."""
    pairs = zip(layer.gate_up_proj, layer.down_proj, strict=True)
    gate = cast(Callable[[Tensor], Tensor], layer._apply_gate)
    made = [Expert(pack(gate_up, None), pack(down, None), (form.hidden, form.inner)) for gate_up, down in pairs]
    return PackedExperts(made, gate)


def mixes(form: Form, dtype: torch.dtype, library: ctypes.CDLL) -> dict[str, list[Mix]]:
    """The experts of every layer, by who computes them."""
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=form.hidden, intermediate_size=form.inner, num_local_experts=form.experts)
    layers = [MixtralExperts(config).to(dtype).requires_grad_(False) for _ in range(LAYERS)]
    for layer in layers:
        for stack in layer.parameters():
            stack.normal_(0.0, 0.02)
    _, plain = choose_packer(torch.device("cpu"), dtype, library)
    assert plain is not None, "the kernels pack"
    packers = {"kernel": plain} | {name: quantizing_packer(name, GROUP, dtype, library)[1] for name in ("int8", "int4")}
    ways: dict[str, list[Mix]] = {
        f"transformers, {way}": [partial(by_transformers, way, layer) for layer in layers] for way in ("grouped_mm", "eager")
    }
    ours = {who: [packed(layer, form, pack) for layer in layers] for who, pack in packers.items()}
    return ways | ours


def measure(dtype: torch.dtype, library: ctypes.CDLL, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a layer's experts by form and tokens, and by who computes them; medians."""
    found: dict[str, dict[str, float]] = {}
    for form in FORMS:
        layers_of = mixes(form, dtype, library)
        for tokens in TOKENS:
            hidden_TH, weights_TK = torch.randn(tokens, form.hidden).to(dtype), torch.rand(tokens, form.chosen)
            experts_TK = torch.stack([torch.randperm(form.experts)[: form.chosen] for _ in range(tokens)])
            seconds: dict[str, list[float]] = {who: [] for who in layers_of}
            for number in range(repeats + 1):
                for who, layers in kernels.in_turns(layers_of, number):
                    began = time.perf_counter()
                    for mix in layers:
                        mix(hidden_TH, experts_TK, weights_TK)
                    seconds[who].append((time.perf_counter() - began) / LAYERS)
            cell = f"{form}, {tokens} tokens"
            found[cell] = {who: round(1e3 * statistics.median(each[1:]), 3) for who, each in seconds.items()}
            said = "  ".join(f"{who} {value:.2f}" for who, value in found[cell].items())
            print(f"{dtype} {cell}: {said}", flush=True)
    return found


def main() -> int:
    """Run, print and record."""
    options = kernels.parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    with kernels.kernels_of(options.level) as library, torch.inference_mode():
        record = kernels.record_of(
            f"milliseconds of a layer's experts by their form and the number of tokens; {options.threads} threads, medians",
            library,
            lambda dtype: measure(dtype, library, options.repeats),
        )
    if not options.no_record:
        kernels.keep(record, "experts")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Sums of a layer's parts with its input, and the norms that follow them, by one launch: norms find what they shall give.

Shapes.  W features of a hidden state
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from serve.model.cuda.layers import warps_for
from serve.model.cuda.norm_kernels import sum_and_norm
from serve.model.cuda.tiling import power_of_two
from serve.model.norms import RMS_ROUNDINGS
from serve.model.recording import row_stride


class _Parts(NamedTuple):
    """What a layer's parts are called, and what is peculiar to it."""

    first_norm: str
    attention: str
    second_norm: str
    """Empty where attention and feed-forward part share the first."""
    feed_forward: str = "mlp"
    gives_weights: bool = False
    """Whether it gives, beside its sum, what attention gives beside its own."""
    is_scored: bool = False
    """Whether its feed-forward part gives something beside its result."""


_AS_IN_LLAMA: Final = _Parts("input_layernorm", "self_attn", "post_attention_layernorm")
_AS_IN_GPT2: Final = _Parts("ln_1", "attn", "ln_2")
_AS_IN_GPTJ: Final = _Parts("ln_1", "attn", "", gives_weights=True)
_LAYERS: Final = {
    "GPTNeoXLayer": _Parts("input_layernorm", "attention", "post_attention_layernorm"),
    "GPT2Block": _AS_IN_GPT2,
    "GPTBigCodeBlock": _AS_IN_GPT2,
    "GPTNeoBlock": _AS_IN_GPT2._replace(gives_weights=True),
    "GPTJBlock": _AS_IN_GPTJ,
    "CodeGenBlock": _AS_IN_GPTJ,
    "PhiDecoderLayer": _Parts("input_layernorm", "self_attn", ""),
    "GptOssDecoderLayer": _AS_IN_LLAMA._replace(is_scored=True),
    **{
        f"{family}DecoderLayer": _AS_IN_LLAMA
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "StableLm", "Mixtral")
    },
}
"""By class of transformers'. Where attention and feed-forward part have the same input, both are summed first."""
_LAST_NORMS: Final = ("final_layer_norm", "final_layernorm", "ln_f", "norm")
"""What the norm behind the last layer is called."""


class _Norm:
    """A norm's ``forward``, which gives what was computed with the sum that it is of, once; else what it gave before."""

    __slots__ = ("_found", "_of", "_plain", "epsilon", "module", "rounding")

    def __init__(self, module: nn.Module) -> None:
        """``module``: one that ``_is_known_norm``."""
        self.module = module
        self.rounding = RMS_ROUNDINGS.get(type(module).__name__, "layer")
        """As the kernel has it."""
        self.epsilon = float(getattr(module, "variance_epsilon", None) or module.eps)  # type: ignore[arg-type]  # a number in each
        self._plain: Callable[[Tensor], Tensor] = module.forward
        self._of: Tensor | None = None
        self._found: Tensor | None = None
        module.__dict__["forward"] = self

    def keep(self, of: Tensor, found: Tensor) -> None:
        """``found``: what it is to give of this very tensor."""
        self._of, self._found = of, found

    def __call__(self, x: Tensor) -> Tensor:
        found, is_of = self._found, x is self._of
        self._of = self._found = None
        return found if is_of and found is not None else self._plain(x)


def sum_by_one_launch(model: nn.Module) -> None:
    """Let the layers of families that are known compute a sum and the norms that follow it, here or in the next layer, at once.

    Sums are rounded where transformers rounds them.
    """
    for name, layers in list(model.named_modules()):
        if not isinstance(layers, nn.ModuleList) or not layers or not all(map(_is_known_layer, layers)):
            continue
        made = [tuple(_Norm(norm) for norm in _norms_of(layer)) for layer in layers]
        holder = model.get_submodule(name.rpartition(".")[0])
        last = next((norm for each in _LAST_NORMS if _is_known_norm(norm := getattr(holder, each, None))), None)
        entered = [norms if _is_parallel(layer) else norms[:1] for layer, norms in zip(layers, made, strict=True)]
        following = [*entered[1:], () if last is None else (_Norm(last),)]
        for layer, own, behind in zip(layers, made, following, strict=True):
            layer.__dict__["forward"] = _forward(layer, own, behind)


def _norms_of(layer: nn.Module) -> list[nn.Module]:
    parts = _LAYERS[type(layer).__name__]
    return [getattr(layer, name) for name in (parts.first_norm, parts.second_norm) if name]


def _is_known_layer(layer: nn.Module) -> bool:
    kind = type(layer).__name__
    if kind not in _LAYERS or (kind == "StableLmDecoderLayer" and _is_parallel(layer)):  # summed in another order
        return False
    return all(map(_is_known_norm, _norms_of(layer)))


def _is_known_norm(module: Any) -> bool:
    return (type(module) is nn.LayerNorm and module.bias is not None) or type(module).__name__ in RMS_ROUNDINGS


def _is_parallel(layer: nn.Module) -> bool:
    """Whether attention and feed-forward part have the same input."""
    return not _LAYERS[type(layer).__name__].second_norm or bool(getattr(layer, "use_parallel_residual", False))


def _forward(layer: nn.Module, own: Sequence[_Norm], following: Sequence[_Norm]) -> Callable[..., object]:
    """A layer's ``forward``.

    Args:
        own: its norms.
        following: those of what it gives.
    """
    parts, is_parallel = _LAYERS[type(layer).__name__], _is_parallel(layer)
    first, second = own[0], own[-1]
    _, _, *names = inspect.signature(type(layer).forward).parameters

    def fed_forward(x: Tensor) -> Tensor:
        found = getattr(layer, parts.feed_forward)(x)
        return found[0] if parts.is_scored else found  # type: ignore[no-any-return]  # a tensor, or one and its scores

    def forward(hidden_states: Tensor, *others: object, **options: object) -> object:
        normed = first(hidden_states)
        options.update(zip(names, others, strict=False))
        given, beside = getattr(layer, parts.attention)(normed, **options)
        if is_parallel:
            ahead = fed_forward(normed if first is second else second(hidden_states))
            total = _sum((ahead, given, hidden_states), following)
        else:
            middle = _sum((given, hidden_states), (second,))
            total = _sum((fed_forward(second(middle)), middle), following)
        return (total, beside) if parts.gives_weights else total

    return forward


def _sum(parts: Sequence[Tensor], norms: Sequence[_Norm]) -> Tensor:
    """Two or three of a shape, summed in their order; the norms of the sum are kept where they are asked for."""
    x, y, *rest = parts
    z = rest[0] if rest else x
    weights = [norm.module._parameters["weight"] for norm in norms]
    width = x.shape[-1]
    if not norms or any(weight is None or weight.dtype != x.dtype for weight in weights):
        return x + y + z if rest else x + y
    strides = []
    for place, part in enumerate(parts):
        assert part.shape == x.shape, "what is summed is of one shape"
        if row_stride(part, width) is None:
            parts = [*parts[:place], part.contiguous(), *parts[place + 1 :]]
        strides.append(row_stride(parts[place], width))
    x, y, z = parts[0], parts[1], parts[-1]
    out, *normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(1 + len(norms)))
    biases = [norm.module._parameters.get("bias") for norm in norms]
    padded = power_of_two(width)
    sum_and_norm[(x.numel() // width,)](
        x,
        y,
        z,
        out,
        weights[0],
        weights[0] if biases[0] is None else biases[0],
        normed[0],
        weights[-1],
        weights[-1] if biases[-1] is None else biases[-1],
        normed[-1],
        strides[0],
        strides[1],
        strides[-1],
        norms[0].epsilon,
        W=width,
        W2=padded,
        THREE=bool(rest),
        NORMS=len(norms),
        ROUNDING=norms[0].rounding,
        num_warps=warps_for(padded),
    )
    for norm, found in zip(norms, normed, strict=True):
        norm.keep(out, found)
    return out

"""Puts paged attention behind transformers' attention modules. Shapes: see ``serve.model.attention``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Final

from torch import Tensor, nn
from transformers import AttentionInterface

from serve.errors import ConfigError
from serve.model.attention import PagedAttention
from serve.model.families import Family
from serve.model.forwards import forward_of

INTERFACE_NAME: Final = "tessera_paged"
_WITHOUT_MEANING: Final = frozenset(("dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"))
"""Keywords of transformers' attention modules that change nothing here: the step's layout says what they would."""


def _through_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call: q [1, H, T, D], k and v [1, G, T, D]; returns [1, T, H, D].

    Raises:
        ConfigError: the module asks for more than is computed here.
    """
    unknown = [name for name, value in others.items() if name not in _WITHOUT_MEANING and value is not None]
    if unknown or attention_mask is not None:
        asked = ", ".join(unknown or ["attention_mask"])
        raise ConfigError(
            f"{type(module).__name__} asks attention for {asked}, which is not computed; this model is not served"
        )
    # What ``s_aux`` holds is the module's ``sinks``, which ``attach`` has read already.
    attention: PagedAttention = module.tessera_attention  # type: ignore[assignment]  # nn.Module names modules and tensors only
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    assert (s_aux is None) == (attention.rules.sinks_H is None), "sinks that were not attached, or are not asked for"
    return attention(query, key, value, scale, sliding_window or 0, softcap or 0.0), None


def _as_attn(attention: PagedAttention, scale: float) -> Callable[..., tuple[Tensor, None]]:
    """A replacement for the ``_attn`` of GPT-J, GPT-Neo and CodeGen, which want [1, H, T, D] back."""

    def attn(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        # Turned by angles in fp32, as CodeGen does, queries and keys come in fp32 whatever the model is in.
        query, key = query.to(value.dtype), key.to(value.dtype)
        return attention(query, key, value, scale, attention.window).transpose(1, 2), None

    return attn


def register_interface() -> None:
    """Make ``tessera_paged`` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(INTERFACE_NAME, _through_interface)


def attach(module: nn.Module, attention: PagedAttention, family: Family, scale: float) -> None:
    """Give one attention module its paged attention.

    Families outside transformers' interface get another ``_attn`` or ``forward`` on the instance, and ``scale`` multiplies
    their scores; otherwise the module finds it through the interface, which brings its own scale. Where the back end can, it
    turns queries and keys in place of the module's forward.
    """
    backend = attention.backend
    if family.replaces_forward or (family.turns_pairs and backend.rotates_by_any):
        module.forward = forward_of(family.name, module, attention, scale)
        return
    if family.replaces_attn:
        module._attn = _as_attn(attention, scale)  # type: ignore[assignment]  # a function where a module stood
    else:
        object.__setattr__(module, "tessera_attention", attention)
    if family.rotary_function and (backend.rotates_by_any if family.other_angles else backend.rotates):
        postpone = partial(attention.state.postpone_rotary, told_once=family.angles_told_once)
        module.forward = _with_global(module, family.rotary_function, postpone)


def _with_global(module: nn.Module, name: str, value: object) -> MethodType:
    """The module's own forward, one global name of which means something else; other modules are left as they are."""
    forward = inspect.unwrap(type(module).forward)
    assert name in forward.__code__.co_names, f"{type(module).__name__}.forward has no {name}"
    changed = FunctionType(
        forward.__code__, {**forward.__globals__, name: value}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(changed, module)

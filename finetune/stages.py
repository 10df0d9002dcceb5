"""A transformers model as a list of pipeline layers: the model's own modules, under the model's own names.

The model is built once on every rank with its parameters on ``meta``; a rank gives real memory to the layers of its own stage
alone. A layer takes and returns the hidden states, followed by the positions where samples are packed.

Shapes.  B samples of a micro-batch   L tokens of a sample   H hidden size
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from finetune.errors import ConfigError
from finetune.model import build_empty

Flow = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""What passes from layer to layer: [B, L, H] (token ids [B, L] into the first), or that and positions, int64 [B, L]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Where a model type keeps its parts, as attributes of its inner model."""

    tokens: str
    positions: str | None
    dropout: str | None
    blocks: str
    norm: str
    rotary: str | None


FAMILIES: Final[Mapping[str, _Family]] = {
    "gpt_neox": _Family(
        tokens="embed_in",
        positions=None,
        dropout="emb_dropout",
        blocks="layers",
        norm="final_layer_norm",
        rotary="rotary_emb",
    ),
    "gpt2": _Family(tokens="wte", positions="wpe", dropout="drop", blocks="h", norm="ln_f", rotary=None),
    "llama": _Family(
        tokens="embed_tokens", positions=None, dropout=None, blocks="layers", norm="norm", rotary="rotary_emb"
    ),
}


class Layer(nn.Module):
    """One piece of the model that goes to one stage whole."""

    kind: str
    """Layers of one model and one kind cost the same."""


class Surroundings:
    """What blocks need besides hidden states: mask and rotary tables of the micro-batch at hand, made once per stage."""

    def __init__(self, config: Any, rotary: nn.Module | None) -> None:
        self._config, self._rotary = config, rotary
        self._of: object = None
        self._last: dict[str, Any] = {}

    def of(self, hidden_BLH: torch.Tensor, positions_BL: torch.Tensor | None) -> dict[str, Any]:
        """Keyword arguments of a block."""
        key = positions_BL if positions_BL is not None else (hidden_BLH.shape, hidden_BLH.dtype, hidden_BLH.device)
        if self._of is key or (positions_BL is None and self._of == key):
            return self._last
        positions = positions_BL
        if positions is None:
            positions = torch.arange(hidden_BLH.shape[1], device=hidden_BLH.device).unsqueeze(0)
        mask = create_causal_mask(
            config=self._config, inputs_embeds=hidden_BLH, attention_mask=None, past_key_values=None, position_ids=positions
        )
        self._last = {"attention_mask": mask, "position_ids": positions}
        if self._rotary is not None:
            self._last["position_embeddings"] = self._rotary(hidden_BLH, position_ids=positions)
        self._of = key
        return self._last


class EmbeddingLayer(Layer):
    """Token ids to hidden states, with learned positions where the model has them."""

    kind = "embedding"

    def __init__(self, tokens: nn.Module, positions: nn.Module | None, dropout: nn.Module | None) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, flow: Flow) -> Flow:
        ids_BL, positions_BL = _parts(flow)
        hidden_BLH = self.tokens(ids_BL)
        if self.positions is not None:
            given = positions_BL if positions_BL is not None else torch.arange(ids_BL.shape[1], device=ids_BL.device)[None]
            hidden_BLH = hidden_BLH + self.positions(given)
        if self.dropout is not None:
            hidden_BLH = self.dropout(hidden_BLH)
        return _joined(hidden_BLH, positions_BL)


class BlockLayer(Layer):
    """One transformer block."""

    kind = "block"

    def __init__(self, block: nn.Module, surroundings: Surroundings, *, checkpointed: bool) -> None:
        super().__init__()
        self.block = block
        self._surroundings, self._checkpointed = surroundings, checkpointed

    def forward(self, flow: Flow) -> Flow:
        hidden_BLH, positions_BL = _parts(flow)
        around = self._surroundings.of(hidden_BLH, positions_BL)
        if self._checkpointed and torch.is_grad_enabled():
            # Computed again in the backward pass, from the same random state.
            hidden_BLH = checkpoint(self.block, hidden_BLH, use_reentrant=False, preserve_rng_state=True, **around)
        else:
            hidden_BLH = self.block(hidden_BLH, **around)
        return _joined(hidden_BLH, positions_BL)


class HeadLayer(Layer):
    """The last norm and the head: hidden states to logits [B, L, V]. Positions end here."""

    kind = "head"

    def __init__(self, head: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.head, self.norm = head, norm

    def forward(self, flow: Flow) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(_parts(flow)[0]))
        return logits


def _parts(flow: Flow) -> tuple[torch.Tensor, torch.Tensor | None]:
    return flow if isinstance(flow, tuple) else (flow, None)


def _joined(hidden_BLH: torch.Tensor, positions_BL: torch.Tensor | None) -> Flow:
    return hidden_BLH if positions_BL is None else (hidden_BLH, positions_BL)


# -- building


def check_family(model_type: object, key: str) -> None:
    """Refuse a model whose parts are not known here.

    Raises:
        ConfigError: names the model types that can be split.
    """
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{key} is {model_type!r}; pretrain splits {', '.join(FAMILIES)} into pipeline stages; "
            "train other models with `tessera-finetune tune`"
        )


def build_on_meta(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model without memory for its parameters. Buffers, such as rotary tables, are real."""
    model = build_empty(config, dtype, _parameters_on_meta())
    model.train()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def split(model: PreTrainedModel, device: torch.device, *, checkpointed: bool) -> list[Layer]:
    """The model's modules as pipeline layers: embeddings, each block, final norm with head.

    Args:
        checkpointed: blocks keep their inputs alone for the backward pass, and compute the rest again.
    """
    family = FAMILIES[model.config.model_type]
    inner = model.base_model

    def part(name: str | None) -> Any:
        return None if name is None else getattr(inner, name)

    rotary = part(family.rotary)
    if rotary is not None:
        rotary.to(device)
    surroundings = Surroundings(inner.config, rotary)
    blocks = [BlockLayer(block, surroundings, checkpointed=checkpointed) for block in part(family.blocks)]
    return [
        EmbeddingLayer(part(family.tokens), part(family.positions), part(family.dropout)),
        *blocks,
        HeadLayer(model.get_output_embeddings(), part(family.norm)),
    ]


def type_of(layer: Layer) -> str:
    """Class of the transformers module that does the layer's work, such as ``GPTNeoXLayer``."""
    return type(next(layer.children())).__name__


def num_parameters(layer: Layer) -> int:
    """Elements of the layer's parameters, held here or not."""
    return sum(parameter.numel() for parameter in layer.parameters())


def give_memory(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Turn parameters on ``meta`` into unset ones on ``device``: the same objects, wherever they are used."""
    for parameter in parameters:
        if parameter.is_meta:
            real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, real)


@contextmanager
def lent_memory(parameters: Iterable[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Memory for those of ``parameters`` that are on ``meta``, unset, until the end of the context."""
    borrowers = [parameter for parameter in parameters if parameter.is_meta]
    give_memory(borrowers, device)
    try:
        yield
    finally:
        for parameter in borrowers:
            nothing = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, nothing)


def positions_of(segments_BL: torch.Tensor) -> torch.Tensor:
    """Position of each token in its own segment, int64 [B, L], from the numbers of the segments."""
    index = torch.arange(segments_BL.shape[1], device=segments_BL.device).expand_as(segments_BL)
    starts = torch.zeros_like(segments_BL, dtype=torch.bool)
    starts[:, 1:] = segments_BL[:, 1:] != segments_BL[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values

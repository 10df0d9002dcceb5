"""A transformers model as a list of pipeline layers: the model's own modules, under the model's own names.

The model is built once on every rank with its parameters on ``meta``; a rank gives real memory to the layers of its own stage
alone. What passes from layer to layer are tensors that DeepSpeed can send: hidden states, targets and, where samples are
packed, positions. The head can be cut into pieces that each take a part of the tokens, because with a large vocabulary it
alone may cost more than a stage should.

Shapes.  B samples of a micro-batch   L tokens of a sample   N = B x L   H hidden size   V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from finetune.config import ActivationConfig
from finetune.data.targets import IGNORE_INDEX
from finetune.model.build import build_empty
from finetune.model.loss import linear_cross_entropy, token_losses
from finetune.model.pretrained import head_of
from finetune.model.recompute import computed_again

Flow = tuple[torch.Tensor, ...]
"""Into the first layer: token ids, targets and, where samples are packed, positions, each int64 [B, L]. Then hidden states
[B, L, H] in place of the ids. After the last norm: hidden states [n, H] and targets [n] of the n tokens without a loss yet."""


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
    "llama": _Family(tokens="embed_tokens", positions=None, dropout=None, blocks="layers", norm="norm", rotary="rotary_emb"),
}


class Layer(nn.Module):
    """One piece of the model that goes to one stage whole."""

    kind: str

    @property
    def signature(self) -> str:
        """Layers of the same cost have the same one: kind, class and size."""
        return f"{self.kind} {type_of(self)} {num_parameters(self)}"


class BlockInputs:
    """What blocks need besides hidden states: mask and rotary tables of the micro-batch at hand, made once per stage."""

    def __init__(self, config: PretrainedConfig, rotary: nn.Module | None) -> None:
        self._config, self._rotary = config, rotary
        self._of: object = None
        self._last: dict[str, object] = {}

    def of(self, hidden_BLH: torch.Tensor, positions_BL: torch.Tensor | None) -> dict[str, object]:
        """The keyword arguments of a block's forward pass besides its hidden states: mask, positions and rotary tables."""
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
        ids_BL, *rest = flow
        hidden_BLH = self.tokens(ids_BL)
        if self.positions is not None:
            positions = rest[1] if len(rest) == 2 else torch.arange(ids_BL.shape[1], device=ids_BL.device)[None]
            hidden_BLH = hidden_BLH + self.positions(positions)
        if self.dropout is not None:
            hidden_BLH = self.dropout(hidden_BLH)
        return hidden_BLH, *rest


class BlockLayer(Layer):
    """One transformer block."""

    kind = "block"

    def __init__(self, block: nn.Module, surroundings: BlockInputs, activations: ActivationConfig) -> None:
        super().__init__()
        self.block = block
        self._surroundings, self._where = surroundings, activations.checkpoint

    def forward(self, flow: Flow) -> Flow:
        hidden_BLH, *rest = flow
        around = self._surroundings.of(hidden_BLH, rest[1] if len(rest) == 2 else None)
        return computed_again(self.block, self._where, hidden_BLH, **around), *rest


class NormLayer(Layer):
    """The norm before the head. Samples end here: only tokens are left."""

    kind = "norm"

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, flow: Flow) -> Flow:
        hidden_BLH, targets_BL, *_ = flow
        return self.norm(hidden_BLH).flatten(0, 1), targets_BL.flatten()


class LossTally:
    """Adds up the losses of a step on this rank and says how much each counts for the gradient."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.scale = 1.0
        """What a loss counts in the gradient: it is multiplied with this before the backward pass."""
        self.last_scale = 1.0
        """``scale`` for the last layer's loss, which DeepSpeed divides by the number of micro-batches."""

    def start(self, scale: float, micro_batches: int) -> None:
        self.total.zero_()
        self.scale, self.last_scale = scale, scale * micro_batches

    def add(self, loss: torch.Tensor) -> None:
        self.total += loss.detach()


class HeadLayer(Layer):
    """The head and the loss of one of ``pieces`` equal parts of a micro-batch's tokens.

    Every piece uses the same weight. The last one returns the scaled loss of its part, which DeepSpeed starts the backward pass
    from; the others hand on the remaining tokens, and their own loss joins the backward pass when it comes by.
    """

    kind = "head"

    def __init__(self, head: nn.Module, tally: LossTally, piece: int, pieces: int, activations: ActivationConfig) -> None:
        super().__init__()
        self.head = head
        self._tally, self._left, self._pieces = tally, pieces - piece, pieces
        self._rows = activations.loss_rows
        # After the last one the backward pass follows at once; parts of one are computed again by themselves.
        self._where = "none" if self._left == 1 or self._rows else activations.checkpoint
        self._where_of_rows = "cpu" if activations.checkpoint == "cpu" else "device"

    def forward(self, flow: Flow) -> Flow | torch.Tensor:
        hidden_nH, targets_n = flow
        count = -(-len(targets_n) // self._left)
        mine = hidden_nH[None, :count], targets_n[None, :count]
        loss = computed_again(self._loss, self._where, *mine)
        self._tally.add(loss)
        if self._left == 1:
            return loss * self._tally.last_scale
        rest_nH: torch.Tensor = _Joined.apply(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            hidden_nH[count:], loss, self._tally.scale
        )
        return rest_nH, targets_n[count:]

    @property
    def signature(self) -> str:
        return f"{'last ' if self._left == 1 else ''}1/{self._pieces} {super().signature}"

    @property
    def share(self) -> float:
        """Part of a micro-batch's tokens that have no loss yet when they come to this piece."""
        return self._left / self._pieces

    def _loss(self, hidden_BLH: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
        if self._rows == 0:
            return token_losses(self.head(hidden_BLH), targets_BL)
        hidden_NH, targets_N = hidden_BLH.flatten(0, 1), targets_BL.flatten()
        if self._left == 1 and type(self.head) is nn.Linear:  # its backward pass follows at once, so gradients may come early
            return linear_cross_entropy(hidden_NH, self.head.weight, self.head.bias, targets_N, self._rows)
        if self._rows is None:
            return token_losses(self.head(hidden_BLH), targets_BL)
        return self._loss_in_rows(hidden_NH, targets_N, self._rows)

    def _loss_in_rows(self, hidden_NH: torch.Tensor, targets_N: torch.Tensor, rows: int) -> torch.Tensor:
        """The loss with the logits of ``rows`` targets at once; they are made again in the backward pass.

        Gradients that came early, as the last piece's do, would wait for it in every micro-batch under way.
        """
        index_T = (targets_N != IGNORE_INDEX).nonzero().squeeze(1)
        hidden_TH, targets_T = hidden_NH[index_T], targets_N[index_T]
        parts = [
            computed_again(
                self._loss_of, self._where_of_rows, hidden_TH[None, begin : begin + rows], targets_T[begin : begin + rows]
            )
            for begin in range(0, max(1, len(index_T)), rows)
        ]
        return torch.stack(parts).sum()

    def _loss_of(self, hidden_BLH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        return token_losses(self.head(hidden_BLH), targets_N)


class _Kept(Protocol):
    """What the forward pass leaves for the backward pass; torch makes it."""

    scale: float
    like: torch.Tensor
    """1, as a loss."""


class _Joined(torch.autograd.Function):
    """Hands tensors on unchanged; their gradient, when it comes back, brings ``scale`` as the gradient of ``loss`` along."""

    @staticmethod
    def forward(ctx: _Kept, tensor: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale, ctx.like = scale, loss.new_ones(())
        return tensor.clone()

    @staticmethod
    def backward(ctx: _Kept, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradients[0], ctx.like * ctx.scale, None


# -- building


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model without memory for its parameters. Buffers, such as rotary tables, are real."""
    model = build_empty(config, dtype, _parameters_on_meta())
    model.train()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]  # until the end of the context
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as it was


def split(
    model: PreTrainedModel, device: torch.device, tally: LossTally, activations: ActivationConfig, *, head_pieces: int = 1
) -> list[Layer]:
    """The model's modules as pipeline layers: embeddings, each block, final norm, head.

    Args:
        tally: is told the losses.
        activations: which inputs of blocks, and of pieces of the head, are kept alone and where; how many logits exist at once.
    """
    family = FAMILIES[model.config.model_type]
    inner = cast(PreTrainedModel, model.base_model)

    def part(name: str | None) -> Any:
        return None if name is None else getattr(inner, name)

    rotary = part(family.rotary)
    if rotary is not None:
        rotary.to(device)
    surroundings = BlockInputs(inner.config, rotary)
    head = head_of(model)
    assert head is not None, "every family above has one"
    return [
        EmbeddingLayer(part(family.tokens), part(family.positions), part(family.dropout)),
        *(BlockLayer(block, surroundings, activations) for block in part(family.blocks)),
        NormLayer(part(family.norm)),
        *(HeadLayer(head, tally, piece, head_pieces, activations) for piece in range(head_pieces)),
    ]


def type_of(layer: Layer) -> str:
    """Class of the transformers module that does the layer's work, such as ``GPTNeoXLayer``."""
    return type(next(layer.children())).__name__


def num_parameters(*layers: Layer) -> int:
    """Elements of the layers' parameters, held here or not, shared ones once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(layers).parameters())


def give_memory(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Turn parameters on ``meta`` into unset ones on ``device``: the same objects, wherever they are used."""
    for parameter in parameters:
        if parameter.is_meta:
            real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]  # torch leaves it unannotated


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
            torch.utils.swap_tensors(parameter, nothing)  # type: ignore[no-untyped-call]  # torch leaves it unannotated

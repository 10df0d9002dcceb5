"""Layers of steps with prompts on the CPU, recorded once and replayed for any number of tokens.

Shapes.  T tokens of the step   E features of a hidden state
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from serve.model.attention import StepState
from serve.model.cuda.graphs import CaptureError
from serve.model.kernel_attention import CpuKernelBackend
from serve.model.recording import NO_SOCKET, Recorder, Steps, active
from serve.model.stages import layers_of
from serve.worker.elastic import Elastic, ElasticMemory, tokens_of
from serve.worker.loader import RankModel
from serve.worker.overtaking import Overtaken, Overtaking
from serve.worker.parallel import Ranks

_LEAST_TOKENS: Final = 2
"""Strides of what is computed for one token do not tell where a second one would lie."""
_LEAST_CAPACITY: Final = 256
MOST_BYTES: Final = 256 << 20
"""What the replayed layers may take for what they compute; of steps that would take more Python's part is small."""

_log = logging.getLogger(__name__)


class ReplayedLayers:
    """Stands in for all of a model's layers but the last, of which only the rows that are read are computed.

    The first step whose layers Python calls tells what they are given, the second one records them, the third is replayed and
    computed beside that: if both gave the same bits, further ones are replayed. Where the third had as many tokens as the
    second, that is so for as many, and the first of another number is computed both ways, too. A step with more tokens than
    there is memory for records them anew, with more. Layers that cannot be recorded go on as before, and the log says so.
    """

    def __init__(
        self, layers: Sequence[nn.Module], state: StepState, backend: CpuKernelBackend, steps: Steps, overtaking: Overtaking
    ) -> None:
        """``layers`` without the last. Their ``forward`` is replaced, for good."""
        self._layers, self._state, self._backend = layers, state, backend
        self._steps, self._overtaking = steps, overtaking
        self._forwards: list[Callable[..., Any]] = [layer.forward for layer in layers]
        self._given: tuple[object, ...] | None = None
        """What all layers of a step are given beside hidden states, but for the numbers in it: once a step has told."""
        self._seen: list[object] | None = None
        """What the first layer of the step under way was given, while the others tell whether they are given the same."""
        self._beside: int | None = None
        """How many things, none of which is anything, layers give beside hidden states; ``None``: hidden states themselves."""
        self._left = 0
        """How many of the layers to come are computed already."""
        self._elastic: Elastic | None = None
        self._proven: int | None = None
        """For how many tokens a replay gave what Python gives: as many as were recorded tell nothing of others; or ``None``."""
        self._begun = False
        self._most_tokens: float = float("inf")
        self.aside = False
        """Whether layers are computed as usual meanwhile."""
        layers[0].forward = self._first
        for place, layer in enumerate(layers[1:], 1):
            layer.forward = partial(self._other, place)

    @property
    def replays(self) -> bool:
        """Whether steps of all numbers of tokens that there is memory for are replayed by now."""
        return self._elastic is not None and self._proven not in (None, self._elastic.recorded_tokens)

    def serves(self, tokens: int) -> bool:
        """Whether a step of so many tokens is replayed from now on."""
        return self.replays and self._elastic is not None and _LEAST_TOKENS <= tokens <= self._elastic.capacity

    def begin(self) -> None:
        """Record from now on."""
        self._begun = True

    def forget(self) -> None:
        """Give up what was recorded: before weights are exchanged, whose addresses it holds."""
        self._begun = False
        self._elastic = self._proven = None

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Within, layers are computed as usual."""
        before, self.aside = self.aside, True
        try:
            yield
        finally:
            self.aside = before

    def _first(self, hidden_1TE: Tensor, *others: object, **options: object) -> object:
        self._left, self._seen = 0, None
        if not self._begun or self.aside or active() is not None or self._is_watched():
            return self._forwards[0](hidden_1TE, *others, **options)
        tokens = hidden_1TE.shape[1]
        given, spec = tree_flatten((others, options))
        if self._given is None:
            out = self._forwards[0](hidden_1TE, *others, **options)
            self._seen = given
            self._compare(0, tokens, out, given)
            return out
        if _without_numbers(given, tokens) != self._given or not _LEAST_TOKENS <= tokens <= self._most_tokens:
            return self._forwards[0](hidden_1TE, *others, **options)
        inputs = [hidden_1TE, *(leaf for leaf in given if isinstance(leaf, Tensor))]

        def compute(inputs: Sequence[Tensor]) -> Tensor:
            leaves = iter(inputs[1:])
            own_others, own_options = tree_unflatten([next(leaves) if isinstance(x, Tensor) else x for x in given], spec)
            return self._compute(inputs[0], own_others, own_options)

        out_1TE = self._replay(inputs, tokens, compute)
        self._left = len(self._layers) - 1
        return self._as_given(out_1TE)

    def _is_watched(self) -> bool:
        return any(layer._forward_hooks or layer._forward_pre_hooks for layer in self._layers)

    def _other(self, place: int, hidden_1TE: Tensor, *others: object, **options: object) -> object:
        if self._left:
            assert place == len(self._layers) - self._left, "layers are called in their order"
            self._left -= 1
            return self._as_given(hidden_1TE)
        out = self._forwards[place](hidden_1TE, *others, **options)
        if self._seen is not None:
            self._compare(place, hidden_1TE.shape[1], out, tree_flatten((others, options))[0])
        return out

    def _compare(self, place: int, tokens: int, out: object, given: list[object]) -> None:
        """Note whether a layer was given what the first was."""
        first = self._seen
        assert first is not None, "the first layer was called before"
        same = len(given) == len(first) and all(
            x is y if isinstance(x, Tensor) else x == y for x, y in zip(given, first, strict=True)
        )
        known = _without_numbers(first, tokens)
        beside = out[1:] if isinstance(out, tuple) else ()
        if not same or known is None or any(each is not None for each in beside):
            self._seen = None
            self._give_up("they are given different things")
        elif place == len(self._layers) - 1:
            self._seen, self._given = None, known
            self._beside = len(beside) if isinstance(out, tuple) else None

    def _compute(self, hidden_1TE: Tensor, others: tuple[object, ...], options: dict[str, object]) -> Tensor:
        for forward in self._forwards:
            out = forward(hidden_1TE, *others, **options)
            hidden_1TE = out if self._beside is None else out[0]
        return hidden_1TE

    def _as_given(self, hidden_1TE: Tensor) -> object:
        """Hidden states as a layer gives them."""
        return hidden_1TE if self._beside is None else (hidden_1TE, *[None] * self._beside)

    def _replay(self, inputs: Sequence[Tensor], tokens: int, compute: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        if self._elastic is None or tokens > self._elastic.capacity:
            return self._record(inputs, tokens, compute)
        layout = self._state.layout
        assert layout is not None, "layers were called outside a step"
        is_proven = self.replays or self._proven == tokens
        socket = self._overtaking.descriptor if is_proven else NO_SOCKET
        out_1TE = self._elastic.replay(inputs, layout, self._backend, socket)
        if out_1TE is None:
            raise Overtaken
        if is_proven:
            return out_1TE
        with self._overtaking.undisturbed():
            expected_1TE = compute(inputs)
        if torch.equal(out_1TE, expected_1TE) or torch.equal(out_1TE.nan_to_num(), expected_1TE.nan_to_num()):
            self._proven = tokens
        else:
            self._give_up("a replay gave other numbers")
        return expected_1TE

    def _record(self, inputs: Sequence[Tensor], tokens: int, compute: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        self._elastic = self._proven = None
        memory = ElasticMemory(tokens, max(_LEAST_CAPACITY, 1 << (tokens - 1).bit_length()))
        held = [memory.like(each) for each in inputs]
        for own, each in zip(held, inputs, strict=True):
            own.copy_(each)
        try:
            with self._overtaking.undisturbed(), Recorder(self._steps, memory) as recorder:
                out_1TE = compute(held)
            elastic = Elastic(recorder, memory, held, out_1TE)
        except CaptureError as error:
            self._give_up(f"they cannot be recorded: {error}")
            return compute(inputs)
        if memory.num_bytes > MOST_BYTES:
            self._most_tokens = memory.capacity // 2 if memory.capacity > _LEAST_CAPACITY else 0
        else:
            self._elastic = elastic
        return out_1TE

    def _give_up(self, why: str) -> None:
        _log.info("the layers of steps with prompts are called by Python in every step: %s", why)
        self.forget()


def replayed_layers(model: RankModel, ranks: Ranks, overtaking: Overtaking) -> ReplayedLayers | None:
    """The layers of a model that one rank computes by kernels; ``None`` of several ranks, which exchange what they compute."""
    layers = list(layers_of(model.survey.blueprint.model, model.survey.family))[:-1]
    if ranks.count > 1 or model.kernels is None or not layers:
        return None
    return ReplayedLayers(layers, model.state, CpuKernelBackend(model.kernels), Steps(model.kernels), overtaking)


def _without_numbers(given: Sequence[object], tokens: int) -> tuple[object, ...] | None:
    """What layers are given, of tensors the type and the features of a token; ``None`` where one has no row for each token."""
    known: list[object] = []
    for leaf in given:
        if not isinstance(leaf, Tensor):
            known.append(leaf)
        elif tokens_of(leaf) == tokens and leaf.is_contiguous():
            known.append((leaf.dtype, leaf.dim(), leaf.shape[2:]))
        else:
            return None
    return tuple(known)

"""Proves that a model's numbers are finite before it is served: a few made-up tokens through every layer, on every rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch
from torch import Tensor, nn

from checkpoint import CheckpointError, open_checkpoint
from serve.config import ModelConfig
from serve.engine.executor import ModelFacts
from serve.engine.plan import Span, Start, StepPlan
from serve.errors import ConfigError
from serve.model.fit import given_of
from serve.model.linear import Product
from serve.model.packed_experts import PackedExperts
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.finite import check_weights, is_finite
from serve.worker.loader import RankModel
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner

_PROMPT_TOKENS: Final = 8
_MORE_PROMPT_TOKENS: Final = 300
"""A second prompt on a GPU has so many: more than a tile of any attention kernel, and enough positions that decoding splits
them. What is compiled when it is first used is compiled before the first request."""
_SEQUENCE: Final = SequenceId(-1)
"""No request's: the engine counts from 0."""

_Output = Tensor | tuple[Tensor, ...]
"""What a layer gives on: hidden states, alone or before others."""

_log = logging.getLogger(__name__)


def check_forward(config: ModelConfig, model: RankModel, ranks: Ranks, runner: Runner) -> None:
    """Compute a prompt and one more token of a sequence that nobody asked for; all ranks together.

    It leaves nothing behind but finite keys and values in blocks that the engine knows nothing of yet. What such a short
    sequence does not touch, most rows of an embedding and experts that none is routed to, is looked at directly.

    Args:
        config: where the checkpoint is, read again only to name the tensor that is at fault.

    Raises:
        ConfigError: on every rank, where any rank's numbers are NaN or infinite; names the tensor, or else the layer.
    """
    weights_are_finite = all(is_finite(weight) for part in (model.body, model.head) for weight in part.parameters())
    weights_are_finite = weights_are_finite and _experts_are_finite(model)
    is_good, layer = _try_forward(model, runner, _plans(model.facts))
    bad = _first_bad_stage(ranks, is_good and weights_are_finite)
    if bad == ranks.stage.count:
        return
    # One rank reads the whole checkpoint once more; the others wait for what it finds.
    tells = (ranks.stage.number, ranks.rank) == (bad, 0)
    raise ConfigError(ranks.told_by_first(_fault(config, model, layer) if tells else "", bad))


def _experts_are_finite(model: RankModel) -> bool:
    """Whether every expert's packed weights are, which are no parameters any more."""
    dtype = getattr(torch, model.facts.dtype)
    products = [module.__dict__.get("forward") for module in model.body.modules()]
    mixes = [product.matmul for product in products if isinstance(product, Product)]
    return all(mix.are_finite(dtype, model.device) for mix in mixes if isinstance(mix, PackedExperts))


def forward_fault(model: RankModel, ranks: Ranks, runner: Runner) -> str:
    """What is wrong with the numbers of weights that were proved to be finite, on any rank; empty where nothing is.

    All ranks together, between two steps: no block may hold anything that is wanted still. Streams wait meanwhile, so that the
    weights are gone through once: one more token would take the same ones, by kernels that have been used before.
    """
    is_good, layer = _try_forward(model, runner, [_prompt(model.facts, _PROMPT_TOKENS, 0, logprobs=None)])
    runner.execute(StepPlan(step=0, dropped=(_SEQUENCE,)))
    if ranks.all_say(is_good, model.device):
        return ""
    bad = _first_bad_stage(ranks, is_good)
    tells = (ranks.stage.number, ranks.rank) == (bad, 0)
    return ranks.told_by_first(_bad_range(model, layer) if tells else "", bad)


def _first_bad_stage(ranks: Ranks, is_good: bool) -> int:
    """The first stage with a rank whose numbers are bad: those behind it have them from there. All stages' number, if none."""
    return ranks.smallest(ranks.stage.count if is_good else ranks.stage.number)


def _try_forward(model: RankModel, runner: Runner, plans: Iterable[StepPlan]) -> tuple[bool, str | None]:
    """Compute made-up tokens: whether this rank's numbers were finite, and after which layer they first were not."""
    with _first_bad_layer(model.body) as bad_layer:
        faults = [fault for plan in plans if (result := runner.execute(plan)) for fault in result.faults]
        return not faults and bad_layer() is None, bad_layer()


def _fault(config: ModelConfig, model: RankModel, layer: str | None) -> str:
    """What is wrong, in words; reads the whole checkpoint, which may take long: the log says first what is known."""
    where = "in weights or logits" if layer is None else f"first after {layer}"
    _log.warning("the model's numbers are not finite, %s; looking for the tensor that is at fault", where)
    return _bad_tensor(config, model) or _bad_range(model, layer)


def _plans(facts: ModelFacts) -> Iterator[StepPlan]:
    step = 0
    for wanted in (_PROMPT_TOKENS,) if facts.device == "cpu" else (_PROMPT_TOKENS, _MORE_PROMPT_TOKENS):
        prompt = _prompt(facts, wanted, step, logprobs=0)
        yield prompt
        (start,), (span,) = prompt.starts, prompt.spans
        if span.count < _most(facts):
            again = Span(sequence=_SEQUENCE, start=span.count, count=1, new_tokens=start.token_ids[:1], sample=True)
            yield StepPlan(step=step + 1, spans=(again,))
        yield StepPlan(step=step + 2, dropped=(_SEQUENCE,))
        step += 3


def _most(facts: ModelFacts) -> int:
    return min(facts.max_model_len, facts.num_blocks * facts.block_tokens)


def _prompt(facts: ModelFacts, wanted: int, step: int, logprobs: int | None) -> StepPlan:
    """A prompt of so many tokens, or as many as there is room for, with room for one more where there is."""
    most = _most(facts)
    count = max(1, min(wanted, most - 1))
    ids = tuple(facts.vocab_size * place // count for place in range(count))  # from the whole vocabulary: of every rank's part
    blocks = tuple(BlockId(block) for block in range(-(-min(count + 1, most) // facts.block_tokens)))
    start = Start(
        sequence=_SEQUENCE, index=0, token_ids=ids, num_prompt_tokens=count, sampling=SamplingParams(), prompt_logprobs=logprobs
    )
    span = Span(sequence=_SEQUENCE, start=0, count=count, new_blocks=blocks, sample=True)
    return StepPlan(step=step, starts=(start,), spans=(span,))


@contextlib.contextmanager
def _first_bad_layer(body: nn.Module) -> Iterator[Callable[[], str | None]]:
    """Within, the layers look at what they give on; asks which was the first whose numbers were not finite."""
    bad: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, _Output], None]:
        def look(module: nn.Module, inputs: object, output: _Output) -> None:
            if not bad and not is_finite(output[0] if isinstance(output, tuple) else output):
                bad.append(name)

        return look

    layers = [
        (f"{path}.{name}", layer)
        for path, parent in body.named_modules()
        if isinstance(parent, nn.ModuleList)
        for name, layer in parent.named_children()
    ]
    handles = [layer.register_forward_hook(watch(name)) for name, layer in layers]
    try:
        yield lambda: bad[0] if bad else None
    finally:
        for handle in handles:
            handle.remove()


def _bad_tensor(config: ModelConfig, model: RankModel) -> str | None:
    """What is wrong with the first tensor that is not finite in the type it is served in."""
    try:
        with open_checkpoint(config.path, given=given_of(config)) as checkpoint:
            check_weights(checkpoint, model.stored, getattr(torch, model.facts.dtype))
    except CheckpointError as error:
        return str(error)
    return None


def _bad_range(model: RankModel, layer: str | None) -> str:
    where = "in the logits" if layer is None else f"after {layer}"
    return (
        f"the model's numbers are not finite {where}, though its weights are: in {model.facts.dtype} it cannot be served; "
        "choose another model.dtype"
    )

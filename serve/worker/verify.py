"""Proves that the ranks together compute what one process alone does: the logits of a made-up prompt, layer by layer."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Final

import torch
from torch import Tensor, nn

from serve.config import ServerConfig
from serve.engine.plan import Span, Start, StepPlan
from serve.errors import ConfigError
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.batch import SequenceTable
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks

_PROMPT_TOKENS: Final = 24
_SEQUENCE: Final = SequenceId(-1)
_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Largest difference of a number, as a share of the largest number beside it, that rounding alone may make."""

_log = logging.getLogger(__name__)


def verify_logits(config: ServerConfig, model: RankModel, ranks: Ranks) -> None:
    """Compare the ranks' logits of a prompt with those of the whole model, which rank 0 loads beside its own part.

    Rank 0 needs the whole model's memory for it, once; the others wait. With one rank there is nothing to compare.

    Raises:
        ConfigError: on every rank, where the logits differ by more than rounding does; names the first layer that does.
    """
    if ranks.size == 1:
        _log.info("model.verify_logits: there is one rank, which is the whole model")
        return
    layers, logits = _probe(model, ranks)
    fault = ""
    if ranks.rank == 0:
        length = min(_PROMPT_TOKENS, model.facts.max_model_len)  # its cache is for the prompt alone
        alone = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, tensor_parallel_size=1, verify="structure", max_model_len=length),
            scheduler=dataclasses.replace(config.scheduler, max_num_seqs=1),
        )
        whole, _ = load_rank(alone, 0, model.device, lambda: Ranks(0, 1), Stopwatch())
        whole_layers, whole_logits = _probe(whole, Ranks(0, 1))
        assert logits is not None
        assert whole_logits is not None
        whole.filler.take_waiting().leases.give_back()  # nobody packs it: it is gone in a moment
        fault = _compare(model.facts.dtype, [*layers, ("the logits", logits)], [*whole_layers, ("the logits", whole_logits)])
    told = ranks.told_by_first(fault)
    if told:
        raise ConfigError(told)


def _probe(model: RankModel, ranks: Ranks) -> tuple[list[tuple[str, Tensor]], Tensor | None]:
    """What each layer gives for the prompt, by its path, and the logits [T, V], which rank 0 has."""
    facts = model.facts
    count = min(_PROMPT_TOKENS, facts.max_model_len)
    ids = tuple(facts.vocab_size * place // count for place in range(count))  # of every rank's part of the vocabulary
    start = Start(sequence=_SEQUENCE, index=0, token_ids=ids, num_prompt_tokens=count, sampling=SamplingParams())
    blocks = tuple(BlockId(block) for block in range(-(-count // facts.block_tokens)))
    span = Span(sequence=_SEQUENCE, start=0, count=count, new_blocks=blocks, sample=True)
    table = SequenceTable(facts.block_tokens, model.device, facts.length_rule)
    batch = table.apply(StepPlan(step=0, starts=(start,), spans=(span,)))
    assert batch is not None
    given: list[tuple[str, Tensor]] = []

    def keep(name: str) -> object:
        def look(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            given.append((name, (output[0] if isinstance(output, tuple) else output).detach().clone()))

        return look

    handles = [
        layer.register_forward_hook(keep(f"{path}.{name}"))  # type: ignore[arg-type]  # hooks may give nothing back
        for path, parent in model.body.named_modules()
        if isinstance(parent, nn.ModuleList) and path.count(".") < 2
        for name, layer in parent.named_children()
    ]
    try:
        with torch.inference_mode():
            model.state.layout = batch.layout
            hidden_1TE = model.body(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, return_dict=True
            ).last_hidden_state
            logits_TV = ranks.gather_columns(model.head(hidden_1TE)[0].float(), model.head_widths)
    finally:
        for handle in handles:
            handle.remove()
    return given, logits_TV


def _compare(dtype: str, ours: list[tuple[str, Tensor]], theirs: list[tuple[str, Tensor]]) -> str:
    """What differs, in words; "" where nothing does. Every layer's difference is logged where the logits differ."""
    shares = [
        (name, float((mine.float() - whole.float()).abs().max() / whole.float().abs().max().clamp_min(1e-30)))
        for (name, mine), (_, whole) in zip(ours, theirs, strict=True)
    ]
    last = shares[-1][1]
    if not math.isfinite(last):
        return ""  # the first forward comes next, and names the tensor
    if last <= _TOLERANCE[dtype]:
        _log.info("the ranks' logits are those of the whole model to %.1e of the largest", last)
        return ""
    for name, share in shares:
        _log.warning("ranks and whole model differ by %.1e of the largest number after %s", share, name)
    first = next(name for name, share in shares if share > _TOLERANCE[dtype])
    return (
        f"model.verify_logits: the ranks' logits differ from the whole model's by {last:.1e} of the largest, first after "
        f"{first}; the model is not served on several ranks"
    )

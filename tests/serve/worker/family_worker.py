"""One rank that loads model after model, in one process group, and generates: ``python -m … RANK SIZE FOLDER STAGES``.

FOLDER has a checkpoint in each of its folders. The rank that answers writes what was generated, by folder and prompt, to
tokens-SIZExSTAGES.json, and the first prompt's logits in bf16, by folder, to logits-SIZExSTAGES.pt.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from serve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from serve.engine.plan import Span, Start, StepPlan
from serve.errors import ConfigError
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import loader
from serve.worker.batch import SequenceTable
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks, join_ranks
from serve.worker.progress import Progress
from serve.worker.runner import Runner
from serve.worker.verify import verify_logits

PROMPTS = tuple(
    tuple((7 * place * place + 3 * seed) % 500 + 1 for place in range(size)) for seed, size in enumerate((45, 13, 290))
)
NEW_TOKENS = 16
CHUNK = 32
"""Longer prompts are computed in several steps, beside one another's tokens."""
BLOCK_TOKENS = 16
IN_INT8 = "int8-cache"
"""A folder of this name is served with a KV cache of whole numbers."""
WHOLE, BY_TORCH = "-whole", "-torch"
"""What is in the name of a folder whose experts are dealt out whole, and of one whose linear layers torch computes."""
VERIFIED, VERDICTS = "phi3", "verdicts"


def settings(folder: Path, size: int, dtype: str, stages: int = 1) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(
            path=str(folder),
            dtype=dtype,
            device="cpu",
            tensor_parallel_size=size,
            pipeline_parallel_size=stages,
            max_model_len=512,
            experts="whole" if WHOLE in folder.name else "inside",
        ),
        cache=CacheConfig(
            kv_cache_gib=0.004, block_tokens=BLOCK_TOKENS, kv_cache_dtype="int8" if folder.name == IN_INT8 else "auto"
        ),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )


def load(folder: Path, size: int, ranks: Ranks, dtype: str = "float32") -> RankModel:
    """This rank's part of a checkpoint."""
    config = settings(folder, size, dtype, ranks.stage.count)
    with pytest.MonkeyPatch.context() as patch:
        if BY_TORCH in folder.name:
            patch.setattr(loader, "choose_linear", lambda *_, **__: ("torch", None))
        return load_rank(config, ranks.number, torch.device("cpu"), lambda: ranks, Stopwatch())[0]


def verdicts(folder: Path, ranks: Ranks, model: RankModel) -> list[str]:
    """What is said of the ranks as they are, and with one number of the last rank's second layer changed."""
    config, said = settings(folder, ranks.size, "float32"), []
    for factor in (1.0, 1.5):
        if ranks.rank == ranks.size - 1:
            dict(model.body.named_parameters())["layers.1.input_layernorm.weight"].mul_(factor)
        try:
            verify_logits(config, model, ranks)
            said.append("the same")
        except ConfigError as refused:
            said.append(str(refused))
    return said


@torch.inference_mode()
def logits(model: RankModel, ranks: Ranks, prompt: tuple[int, ...] = PROMPTS[0]) -> torch.Tensor | None:
    """What the ranks make of a prompt, [T, V] in fp32, on the rank that answers."""
    sequence, blocks = SequenceId(0), tuple(BlockId(block) for block in range(-(-len(prompt) // BLOCK_TOKENS)))
    start = Start(sequence=sequence, index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=SamplingParams())
    span = Span(sequence=sequence, start=0, count=len(prompt), new_blocks=blocks, sample=True)
    table = SequenceTable(BLOCK_TOKENS, model.device, model.facts.length_rule)
    batch = table.apply(StepPlan(step=0, starts=(start,), spans=(span,)))
    assert batch is not None
    model.state.layout = batch.layout
    hidden_1TE = model.body(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, return_dict=True
    ).last_hidden_state
    if not ranks.stage.is_last:
        ranks.hand_on(hidden_1TE[0])
        return None
    return ranks.gather_columns(model.head(hidden_1TE)[0].float(), model.head_widths)


def generate(
    runner: Runner,
    ranks: Ranks,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    sampling: Sequence[SamplingParams] = (),
) -> list[list[int]]:
    """Continuations of all prompts, greedy where nothing else is said, computed side by side; every rank gets them."""
    blocks_each = -(-(max(map(len, prompts)) + NEW_TOKENS) // BLOCK_TOKENS)
    got: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    step = 0
    while any(len(tokens) < NEW_TOKENS for tokens in got):
        starts, spans = [], []
        for i, (prompt, tokens) in enumerate(zip(prompts, got, strict=True)):
            if len(tokens) == NEW_TOKENS:
                continue
            total = len(prompt) + len(tokens)
            count = min(CHUNK, total - done[i])
            new_blocks = tuple(BlockId(i * blocks_each + block) for block in range(blocks_each)) if step == 0 else ()
            if step == 0:
                params = sampling[i] if sampling else SamplingParams()
                start = Start(sequence=SequenceId(i), index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params)
                starts.append(start)
            span = Span(
                sequence=SequenceId(i),
                start=done[i],
                count=count,
                new_tokens=tuple(tokens[-1:]),
                new_blocks=new_blocks,
                sample=done[i] + count == total,
            )
            spans.append(span)
            done[i] += count
        result = runner.execute(StepPlan(step=step, starts=tuple(starts), spans=tuple(spans)))
        sampled = {item.sequence: item.token_id for item in result.sampled} if result is not None else {}
        for sequence, token in json.loads(ranks.told_by_first(json.dumps(list(sampled.items())), ranks.stage.count - 1)):
            got[sequence].append(token)
        step += 1
    runner.execute(StepPlan(step=step, dropped=tuple(SequenceId(i) for i in range(len(prompts)))))
    return got


def main(rank: int, size: int, root: Path, stages: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    way = f"{size}x{stages}"
    memory = os.open(root / f"memory-{way}-{rank // size}", os.O_RDWR | os.O_CREAT)
    ranks = join_ranks(rank, size, torch.device("cpu"), root / f"meeting-{way}", memory, 120.0, Progress(), stages)
    answers: dict[str, object] = {}
    in_bf16: dict[str, torch.Tensor | None] = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        try:
            model = load(folder, size, ranks)
            answers[folder.name] = generate(Runner(model, ranks), ranks)
            if folder.name == VERIFIED and stages == 1:
                answers[VERDICTS] = verdicts(folder, ranks, model)
            in_bf16[folder.name] = logits(load(folder, size, ranks, "bfloat16"), ranks)
        except ConfigError as refused:
            answers[folder.name] = str(refused)
    if ranks.answers:
        (root / f"tokens-{way}.json").write_text(json.dumps(answers))
        torch.save(in_bf16, root / f"logits-{way}.pt")
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))

"""Steps with prompts whose layers are replayed give the bits of the same steps computed by Python, whatever their length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint import open_checkpoint
from serve.engine.plan import Span, Start, StepPlan
from serve.model.attention import StepLayout, StepState
from serve.model.cuda.graphs import CaptureError
from serve.model.kernel_attention import CpuKernelBackend
from serve.model.recording import Recorder, Steps
from serve.model.stages import layers_of
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import replayed_layers, wire
from serve.worker.batch import Batch
from serve.worker.elastic import Elastic, ElasticMemory
from serve.worker.kv_cache import allocate
from serve.worker.loader import RankModel, survey
from serve.worker.overtaking import Overtaking
from serve.worker.parallel import Ranks
from serve.worker.recorded_steps import RecordedSteps
from serve.worker.replayed_layers import ReplayedLayers
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import BLOCK_TOKENS, settings
from tests.serve.worker.recorded import load_recorded
from tests.serve.worker.test_loader import VARIANTS
from tests.serve.worker.test_overtaking import LATE, Overtaken, begin
from tests.support.kernels import cpu_kernels
from tests.support.models import save

pytestmark = pytest.mark.usefixtures("one_thread_of_kernels")

ALONE = Ranks(0, 1)
REPLAYED = {
    "gpt_neox", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "falcon",
    "gpt_neox sequential", "gpt_neox, a head of 20", "gpt2, relu", "gpt2, a scale for each layer", "llama, yarn",
    "llama, llama3 angles", "gpt_bigcode, as many keys", "opt, norms behind and projections",
}  # fmt: skip
"""Between whose layers' kernels torch computes nothing; of the others Python calls the layers in every step."""
UNRECORDED = "llama, dynamic angles"
"""Whose decoding steps are not recorded either: the host says their angles."""
PROMPTS = ((20,), (9, 30), (33,), (2,), (5, 40, 17), (120,), (3, 3))
"""Tokens of the sequences of each step."""


class Prompting:
    """A runner of whose steps is kept what they gave in the rows that are read."""

    def __init__(self, model: RankModel, *, replays: bool) -> None:
        self.runner = Runner(model, ALONE)
        self.given: list[torch.Tensor] = []
        if replays:
            assert self.runner.graphs is not None
            self.runner.graphs.capture()
        self._step = self._sequence = 0
        self._compute = self.runner._compute
        self.runner._compute = self._follow  # type: ignore[method-assign]  # what a step gave is seen nowhere else

    @property
    def layers(self) -> ReplayedLayers:
        graphs = self.runner.graphs
        assert isinstance(graphs, RecordedSteps)
        assert graphs._layers is not None
        return graphs._layers

    def _follow(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        hidden_TE, replayed = self._compute(batch)
        self.given.append(hidden_TE[list(batch.sample_rows)].clone())
        return hidden_TE, replayed

    def prompts(self, lengths: Sequence[int], chunk: int = 10**6) -> None:
        """Sequences of these lengths, each in parts of ``chunk`` tokens; two more tokens of each."""
        own = range(self._sequence, self._sequence + len(lengths))
        self._sequence += len(lengths)
        done, starts, width = [0] * len(lengths), [], -(-(max(lengths) + 2) // BLOCK_TOKENS)
        for i, (sequence, length) in enumerate(zip(own, lengths, strict=True)):
            ids = tuple((7 * place * place + 31 * i) % 500 + 1 for place in range(length))
            starts.append(
                Start(
                    sequence=SequenceId(sequence), index=0, token_ids=ids, num_prompt_tokens=length, sampling=SamplingParams()
                )
            )
        first = True
        while any(count < length + 2 for count, length in zip(done, lengths, strict=True)):
            spans = []
            for i, (sequence, length) in enumerate(zip(own, lengths, strict=True)):
                if done[i] >= length + 2:
                    continue
                count = min(chunk, length - done[i]) if done[i] < length else 1
                spans.append(
                    Span(
                        sequence=SequenceId(sequence), start=done[i], count=count, continues=done[i] >= length,
                        new_blocks=tuple(BlockId(width * i + block) for block in range(width)) if first else (),
                        sample=done[i] + count >= length,
                    )
                )  # fmt: skip
                done[i] += count
            self._execute(starts=tuple(starts) if first else (), spans=tuple(spans))
            first = False
        self._execute(dropped=tuple(map(SequenceId, own)))

    def _execute(self, **parts: Any) -> None:
        self._step += 1
        self.runner.execute(StepPlan(step=self._step, **parts))


def saved(name: str, folder: Path, **more: Any) -> Path:
    family, changes = VARIANTS[name]
    return save(family, folder, with_tokenizer=False, **{"num_hidden_layers": 4, **changes, **more})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != UNRECORDED])
def test_replayed_layers_give_what_layers_give_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    model = load_recorded(saved(name, tmp_path / "model"), ALONE, dtype)
    eager, replaying = Prompting(model, replays=False), Prompting(model, replays=True)
    for each in (eager, replaying):
        for lengths in PROMPTS:
            each.prompts(lengths)
        each.prompts((50, 8), chunk=16)
    assert len(eager.given) == len(replaying.given)
    assert all(map(torch.equal, eager.given, replaying.given))
    assert replaying.layers.replays is (name in REPLAYED)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_so_they_do_on_two_threads_and_with_more_tokens_than_there_was_memory_for(quantization: str, tmp_path: Path) -> None:
    model = load_recorded(saved("llama", tmp_path / "model"), ALONE, "bfloat16", quantization=quantization)
    torch.set_num_threads(2)
    eager, replaying = Prompting(model, replays=False), Prompting(model, replays=True)
    for each in (eager, replaying):
        for lengths in ((20,), (33,), (257,), (300,), (11, 290), (4,)):
            each.prompts(lengths)
    assert all(map(torch.equal, eager.given, replaying.given))
    assert replaying.layers.replays
    assert replaying.layers._elastic is not None
    assert replaying.layers._elastic.capacity == 512


def test_what_would_take_too_much_memory_is_not_replayed_nor_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_recorded(saved("llama", tmp_path / "model"), ALONE, "float32")
    eager, replaying = Prompting(model, replays=False), Prompting(model, replays=True)
    for lengths in ((20,), (20,), (20,)):
        replaying.prompts(lengths)
    elastic = replaying.layers._elastic
    assert elastic is not None
    monkeypatch.setattr(replayed_layers, "MOST_BYTES", elastic._memory.num_bytes * 3 // 2)
    recordings = []
    record = replaying.layers._record
    replaying.layers._record = lambda *given: (recordings.append(given), record(*given))[1]  # type: ignore[method-assign]
    replaying.given.clear()
    for each in (eager, replaying):
        for lengths in ((300,), (300,), (20,), (30,), (301,), (40,)):
            each.prompts(lengths)
    assert all(map(torch.equal, eager.given, replaying.given))
    assert len(recordings) == 2, "once for 300 tokens, and once more for the few that there is memory for"
    assert replaying.layers.replays
    monkeypatch.setattr(replayed_layers, "MOST_BYTES", 1)
    replaying.layers.forget()
    replaying.layers.begin()
    for lengths in ((20,), (20,), (20,)):
        replaying.prompts(lengths)
    assert len(recordings) == 3
    assert not replaying.layers.replays


def test_layers_that_give_something_else_each_time_are_told_of_once_and_called_by_python(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_recorded(saved("llama", tmp_path / "model"), ALONE, "float32")
    layers = layers_of(model.survey.blueprint.model, model.survey.family)
    calls, forward = [0.0], layers[1].forward

    def other(hidden: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        calls[0] += 1.0
        out: torch.Tensor = forward(hidden, *others, **options)
        return out.mul_(calls[0])

    layers[1].forward = other
    replaying = Prompting(model, replays=True)
    with caplog.at_level(logging.INFO, replayed_layers.__name__):
        for lengths in ((20,), (20,), (20,), (20,)):
            replaying.prompts(lengths)
    (said,) = (record.getMessage() for record in caplog.records if record.name == replayed_layers.__name__)
    assert "called by Python in every step" in said
    assert calls[0] >= 4.0
    assert not replaying.layers.replays


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("before", [False, True])
def test_who_watches_one_layer_sees_all_of_them_called(place: int, before: bool, tmp_path: Path) -> None:
    replaying = Prompting(load_recorded(saved("llama", tmp_path / "model"), ALONE, "float32"), replays=True)
    for lengths in ((20,), (20,), (30,)):
        replaying.prompts(lengths)
    assert replaying.layers.replays
    called: list[int] = []
    layers = replaying.layers
    for number, forward in enumerate(layers._forwards):
        layers._forwards[number] = lambda *given, number=number, forward=forward, **more: (
            called.append(number), forward(*given, **more)
        )[1]  # fmt: skip
    layer = layers._layers[place]
    register = layer.register_forward_pre_hook if before else layer.register_forward_hook
    handle = register(lambda *_: None)
    replaying.prompts((20,))
    handle.remove()
    assert called == [0, 1, 2]
    replaying.prompts((20,))
    assert called == [0, 1, 2]
    graphs = replaying.runner.graphs
    assert isinstance(graphs, RecordedSteps)
    graphs.aside = True
    replaying.prompts((20,))
    assert called == [0, 1, 2, 0, 1, 2, *[0, 1, 2] * 2], "of the prompt, and of two tokens more"


def test_a_number_of_tokens_that_was_recorded_proves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaying = Prompting(load_recorded(saved("llama", tmp_path / "model"), ALONE, "float32"), replays=True)
    computed: list[int] = []
    compute = replaying.layers._compute
    monkeypatch.setattr(
        replaying.layers, "_compute", lambda hidden, *more: (computed.append(hidden.shape[1]), compute(hidden, *more))[1]
    )
    for lengths in ((20,), (20,), (20,), (20,)):
        replaying.prompts(lengths)
    assert computed == [20, 20], "recorded and proved"
    assert not replaying.layers.replays
    for lengths in ((31,), (31,), (20,), (7,)):
        replaying.prompts(lengths)
    assert computed == [20, 20, 31]
    assert replaying.layers.replays


def test_after_other_weights_were_taken_they_are_recorded_anew(tmp_path: Path) -> None:
    model = load_recorded(saved("llama", tmp_path / "old"), ALONE, "float32")
    replaying = Prompting(model, replays=True)
    for lengths in ((20,), (20,), (20,)):
        replaying.prompts(lengths)
    graphs = replaying.runner.graphs
    assert graphs is not None
    graphs.forget()
    other = saved("llama", tmp_path / "new", seed=5)
    with open_checkpoint(other) as checkpoint:
        found = survey(checkpoint, settings(other, 1, "float32"), model.device)
        for value in model.filler.read(checkpoint, found.blueprint):
            value.put()
    graphs.capture()
    assert not replaying.layers.replays
    replaying.given.clear()
    expected = Prompting(load_recorded(other, ALONE, "float32"), replays=False)
    for each in (replaying, expected):
        for lengths in ((20,), (20,), (30,), (7,)):
            each.prompts(lengths)
    assert all(map(torch.equal, expected.given, replaying.given))
    assert replaying.layers.replays


def test_a_replayed_prompt_gives_way_to_a_plan_that_overtakes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("llama", tmp_path / "model")
    answers, ended = [], list[bool]()
    replay = Elastic.replay

    def watched(*given: Any) -> torch.Tensor | None:
        out = replay(*given)
        ended.append(out is not None)
        return out

    monkeypatch.setattr(Elastic, "replay", watched)
    for overtakes in (True, False):
        each, rows = Overtaken(folder), (0, 1, 2)
        for step, own in zip(range(0, 8, 2), (rows, rows, rows[:2], rows), strict=True):
            each.execute(begin(step, own))
            each.execute(StepPlan(step=step + 1, dropped=tuple(map(SequenceId, own))))
        late, prompts = begin(100, (LATE,)), begin(50, rows)
        if overtakes:
            wire.send(each.ours, wire.encode(late), overtakes=True)
            ended.clear()
            each.execute(prompts)
            assert ended == [False, True, True], "it gave way itself; then the other's, then its own"
            assert [answer.step for answer in each.answers[-2:]] == [100, 50], "it did not overtake"
        else:
            each.execute(prompts)
            each.execute(late)
        answers.append(sorted(each.answers, key=lambda answer: answer.step))
        each.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("tokens", [3, 6])
def test_what_does_not_lie_token_by_token_is_refused(tokens: int) -> None:
    kernels, memory = cpu_kernels(), ElasticMemory(tokens, 64)
    steps = Steps(kernels)
    x_1TE = memory.empty((1, tokens, 8), torch.float32).fill_(1.0)
    with torch.inference_mode(), Recorder(steps, memory) as recorder:
        out_1TE = x_1TE + x_1TE
    assert Elastic(recorder, memory, [x_1TE], out_1TE).capacity == 64
    with torch.inference_mode(), Recorder(steps, memory) as recorder:
        part_1TE = x_1TE[:, :-1] + x_1TE[:, 1:]
    with pytest.raises(CaptureError, match=f"add has {tokens - 1} rows for {tokens} tokens"):
        Elastic(recorder, memory, [x_1TE], part_1TE)
    with torch.inference_mode(), Recorder(steps, memory) as recorder:
        sines_1TE = x_1TE.sin()
    with pytest.raises(CaptureError, match=r"Python has a part in them \(aten\.sin\.default\)"):
        Elastic(recorder, memory, [x_1TE], sines_1TE)


def layout_of(tokens: int) -> StepLayout:
    """One sequence's first tokens, in one block."""
    return StepLayout(
        slots=torch.arange(tokens), positions=torch.arange(tokens, dtype=torch.int32), query_starts=(0, tokens),
        context_lengths=(tokens,), block_tables=torch.zeros(1, 1, dtype=torch.int32), table_rows=(0,),
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "head_first", "lies"), [(2, False, True), (2, True, False), (1, True, True)])
def test_attention_whose_heads_lie_before_its_tokens_lies_not_by_token(heads: int, head_first: bool, lies: bool) -> None:
    tokens, width = 5, 16
    memory = ElasticMemory(tokens, 64)
    backend = CpuKernelBackend(cpu_kernels())
    (cache,) = allocate(
        layers=1, num_blocks=1, kv_heads=heads, head_dim=width, block_tokens=16, dtype=torch.float32, device=torch.device("cpu")
    )
    layout = layout_of(tokens)
    by_token = memory.empty((tokens, heads, width), torch.float32).fill_(0.5)
    by_head = memory.empty((heads, tokens, width), torch.float32).fill_(0.5).transpose(0, 1)
    key_TGD = by_head if head_first else by_token
    with torch.inference_mode(), Recorder(Steps(cpu_kernels()), memory) as recorder:
        out_THD = backend.attend(by_token, key_TGD, by_token, cache, layout, scale=1.0, window=0)
    if lies:
        assert Elastic(recorder, memory, [], out_THD).recorded_tokens == tokens
    else:
        with pytest.raises(CaptureError, match="heads lie before tokens"):
            Elastic(recorder, memory, [], out_THD)


class _Doubling(nn.Module):
    """A layer that adds or multiplies, as it is told."""

    def forward(self, hidden: torch.Tensor, *, adds: bool, more: torch.Tensor) -> torch.Tensor:
        return hidden + more if adds else hidden * more


class _Stack:
    """Three such layers, the first two of which are replayed."""

    def __init__(self) -> None:
        self.layers = [_Doubling() for _ in range(3)]
        self.state = StepState()
        kernels = cpu_kernels()
        self.replayed = ReplayedLayers(self.layers[:-1], self.state, CpuKernelBackend(kernels), Steps(kernels), Overtaking())
        self.replayed.begin()

    def step(self, tokens: int, *adds: bool, several: bool = False) -> bool:
        """Whether a step gave what its layers say; ``adds`` of each, ``several`` has each given a tensor of its own."""
        self.state.layout = layout_of(tokens)
        hidden = expected = torch.full((1, tokens, 4), 3.0)
        more = torch.full((1, tokens, 4), 5.0)
        with torch.inference_mode():
            for number, (layer, each) in enumerate(zip(self.layers, adds, strict=True)):
                own = more + number if several else more
                hidden = layer(hidden, adds=each, more=own)
                expected = expected + own if each else expected * own
        return torch.equal(hidden, expected)


def test_layers_are_called_where_they_are_told_something_else_than_was_recorded() -> None:
    stack = _Stack()
    assert all(stack.step(tokens, True, True, True) for tokens in (20, 20, 31, 7))
    assert stack.replayed.replays
    assert stack.step(20, False, False, False)
    assert stack.step(20, True, True, False)
    assert stack.replayed.replays


@pytest.mark.parametrize("several", [False, True])
def test_layers_that_are_told_different_things_are_not_replayed(several: bool) -> None:
    stack = _Stack()
    assert all(stack.step(tokens, True, several, True, several=several) for tokens in (20, 20, 31, 7))
    assert not stack.replayed.replays

"""Captured decoding steps on the CPU: replayed with other inputs they give what the same step gives, in every family."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from serve.config import KernelsConfig, ServerConfig
from serve.engine.plan import Span, Start, StepPlan
from serve.errors import ConfigError, StartError
from serve.model.attention import LayerCache
from serve.model.cuda.graphs import graph_sizes
from serve.model.cuda.static import StaticTorchBackend
from serve.model.experts import stacked_experts
from serve.model.families import FAMILIES
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import loader
from serve.worker.computing import _obstacle, sizes_to_capture
from serve.worker.decode_graphs import DecodeGraphs
from serve.worker.decode_inputs import DecodeInputs
from serve.worker.loader import Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.rank_process import rank_environment
from serve.worker.runner import Runner
from serve.worker.sampling.backend import TorchSampling
from tests.serve.worker.captured import load_captured, tokens_of_both_ways
from tests.serve.worker.family_worker import BLOCK_TOKENS, generate, load, settings
from tests.serve.worker.layers_of_gpu import layers_of_a_gpu
from tests.serve.worker.test_loader import VARIANTS
from tests.serve.worker.waits import META, OnlyDevice, Waits, on_meta
from tests.support import warm
from tests.support.models import SMALL, VOCABULARY, save

ALONE = Ranks(0, 1)
NOT_CAPTURED = "llama, dynamic angles"
CASES = [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != NOT_CAPTURED]


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


def saved(name: str, tmp_path: Path) -> Path:
    family, changes = VARIANTS[name]
    return save(family, tmp_path / "model", with_tokenizer=False, **changes)


@pytest.mark.parametrize("name", CASES)
def test_a_captured_step_gives_what_the_step_gives_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(name, tmp_path)
    tokens = tokens_of_both_ways(load_captured(folder, ALONE), ALONE, monkeypatch)
    assert tokens == generate(Runner(load(folder, 1, ALONE), ALONE), ALONE), "and those of the kernels"


def decode_plan(step: int, lengths: tuple[int, ...], sampling: tuple[SamplingParams, ...]) -> tuple[StepPlan, StepPlan]:
    """Sequences of these lengths, 8 blocks each from block 1 on, computed up to their last token, and the step of that."""
    starts, before, last = [], [], []
    for i, length in enumerate(lengths):
        ids = tuple((11 * i + 3 * place) % 500 + 1 for place in range(length))
        blocks = tuple(BlockId(1 + 8 * i + block) for block in range(8))
        starts.append(Start(sequence=SequenceId(i), index=0, token_ids=ids, num_prompt_tokens=length, sampling=sampling[i]))
        before.append(Span(sequence=SequenceId(i), start=0, count=length - 1, new_blocks=blocks))
        last.append(Span(sequence=SequenceId(i), start=length - 1, count=1, sample=True))
    return (
        StepPlan(step=step, starts=tuple(starts), spans=tuple(before)),
        StepPlan(step=step + 1, spans=tuple(last)),
    )


GREEDY = SamplingParams()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_of_no_sequence_write_nothing_to_the_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[LayerCache] = []
    allocate = loader.allocate
    monkeypatch.setattr(loader, "allocate", lambda **sizes: caches.extend(made := allocate(**sizes)) or made)
    runner = Runner(load_captured(saved(name, tmp_path), ALONE), ALONE)
    assert runner.graphs is not None
    source = torch.Generator().manual_seed(3)
    for cache in caches:
        for part in (cache.keys, cache.values):
            part.copy_(torch.randn(part.shape, generator=source))

    def kept() -> list[Tensor]:
        return [part.clone() for cache in caches for part in (cache.keys.transpose(2, 3), cache.values)]

    before = kept()
    runner.graphs.capture()
    assert all(map(torch.equal, before, kept())), "capturing writes nothing either"
    lengths = (17, 40, 33)  # three rows in a step of four
    first, second = decode_plan(1, lengths, (GREEDY,) * 3)
    runner.execute(first)
    before = kept()
    runner.execute(second)
    written = {(1 + 8 * i + (n - 1) // BLOCK_TOKENS, (n - 1) % BLOCK_TOKENS) for i, n in enumerate(lengths)}
    for old, new in zip(before, kept(), strict=True):
        changed = (old != new).any(dim=3).any(dim=1).nonzero().tolist()  # (block, offset)
        assert {(block, offset) for block, offset in changed} == written


@pytest.mark.parametrize("name", CASES)
def test_no_familys_decoding_step_copies_anything_between_host_and_device(name: str, tmp_path: Path) -> None:
    """On ``meta``, where a tensor has no numbers: whoever asks for one fails, and so does who mixes devices."""
    model = on_meta(saved(name, tmp_path), StaticTorchBackend())
    by_length = model.facts.length_rule is not None
    inputs = DecodeInputs((4,), model.facts.max_model_len, BLOCK_TOKENS, META, by_length=by_length)
    graphs = DecodeGraphs(model, inputs, ALONE)
    place_TV = graphs.place_for_logits()
    with torch.inference_mode(), OnlyDevice() as looked:
        _, logits_TV, likeliest_2T = graphs.compute(inputs.steps[4])
        graphs.gather(logits_TV, place_TV)
    assert logits_TV.shape == place_TV.shape == (4, VOCABULARY)
    assert likeliest_2T.shape == (2, 4)
    assert looked.found == []


SAMPLING = (
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.05, seed=4),
    SamplingParams(temperature=0.7, typical_p=0.8, repetition_penalty=1.2, presence_penalty=0.1, banned_ids=(3,), seed=5),
)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_a_step_of_greedy_and_drawn_tokens_waits_for_nothing_before_they_are_told(captured: bool, tmp_path: Path) -> None:
    runner = Runner(load_captured(saved("llama", tmp_path), ALONE), ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    if not captured:
        runner.graphs.forget()
    runner._model = dataclasses.replace(runner._model, sampling=TorchSampling())
    first, second = decode_plan(1, (5, 20, 33, 12), SAMPLING)
    runner.execute(first)
    with Waits() as waits:
        result = runner.execute(second)
    assert result is not None
    assert len(result.sampled) == 4
    assert waits.found == []


def test_rows_that_sample_nothing_and_prompts_are_told_as_they_are_without_graphs(tmp_path: Path) -> None:
    """One token of each of three sequences: a prompt's, told with its logprob, between two that are continued."""
    model, results = load_captured(saved("gemma2", tmp_path), ALONE), []
    first, _ = decode_plan(1, (5, 20, 33), SAMPLING[:3])
    starts = (first.starts[0], dataclasses.replace(first.starts[1], prompt_logprobs=2), first.starts[2])
    before = (first.spans[0], msgspec.structs.replace(first.spans[1], count=10), first.spans[2])
    spans = tuple(
        Span(sequence=SequenceId(i), start=start, count=1, sample=sample)
        for i, (start, sample) in enumerate(((4, True), (10, False), (32, True)))
    )
    for captured in (False, True):
        runner = Runner(model, ALONE)
        assert runner.graphs is not None
        if captured:
            runner.graphs.capture()
        runner.execute(StepPlan(step=1, starts=starts, spans=before))
        results.append(runner.execute(StepPlan(step=2, spans=spans)))
    assert results[0] == results[1]
    assert results[0] is not None
    assert [answer.sequence for answer in results[0].sampled] == [0, 2]
    assert [(told.sequence, told.first) for told in results[0].prompt_logprobs] == [(1, 11)]


def test_every_way_to_sample_stays_on_the_device() -> None:
    """Tensors of ``meta`` have no numbers, so whoever asks for one fails."""
    logits_RV = torch.empty(4, 500, device="meta")
    choice = TorchSampling().choose(logits_RV, SAMPLING, [0.1, 0.2, 0.3, 0.4], [None] * 4)
    assert {part.device.type for part in choice} == {"meta"}


def test_sizes_follow_from_the_configuration_alone(tmp_path: Path) -> None:
    folder = saved("gpt_neox", tmp_path)
    runner = Runner(load_captured(folder, ALONE, most=2), ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    assert runner.graphs.sizes == (2, 1), "the largest first"
    kernels = load(folder, 1, ALONE)
    assert kernels.graph_sizes == (() if kernels.kernels is None else (1, 2, 3, 4)), (
        "on the CPU they are recorded, each for itself"
    )
    assert load_captured(folder, ALONE).graph_sizes == (1, 2, 4), "no more than sequences run at once"


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "gptj", "llama", "stablelm", "gemma2", "gpt_oss"])
def test_so_does_one_whose_layers_find_sums_and_norms_at_once_as_on_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(name, tmp_path)
    with layers_of_a_gpu() as kernels:
        model = load_captured(folder, ALONE)
        tokens = tokens_of_both_ways(model, ALONE, monkeypatch)
    assert sum(kernel.launches for kernel in kernels.values()) > 0
    assert tokens == generate(Runner(load(folder, 1, ALONE), ALONE), ALONE)


def test_what_cannot_be_captured_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = saved(NOT_CAPTURED, tmp_path)
    with pytest.raises(ConfigError, match=r"^kernels.cuda_graphs is on; its angles follow each length"):
        load_captured(folder, ALONE)


def test_quantized_experts_are_not_captured(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path, with_tokenizer=False)
    assert load_captured(folder, ALONE).graph_sizes
    with pytest.raises(ConfigError, match=r"^kernels.cuda_graphs is on; the host counts the rows of each of its experts"):
        load_captured(folder, ALONE, quantization="int8")


@pytest.mark.parametrize(("capability", "are_captured"), [((8, 0), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)])
def test_experts_are_captured_on_devices_whose_grouped_products_the_host_does_not_wait_for(
    capability: tuple[int, int], are_captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    survey, device = load_captured(save("mixtral", tmp_path, with_tokenizer=False), ALONE).survey, torch.device("cuda:0")
    model = survey.blueprint.model.to(torch.bfloat16)
    why = _obstacle(survey.family, None, model, device, "triton")
    assert bool(why) is not are_captured
    for module in stacked_experts(model, survey.family):
        module.num_experts = 1  # type: ignore[assignment]  # a number in every module of this kind
    assert _obstacle(survey.family, None, model, device, "triton"), "torch looks at the data for the width of their histogram"
    assert _obstacle(survey.family, None, model.float(), device, "triton"), "in bfloat16 alone, wherever"


def test_where_one_rank_cannot_capture_none_does_and_each_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks of unlike machines would wait for one another: one exchanges in what it captures, and the other has nothing to."""

    class OfTwo(Ranks):
        """One of two ranks, of which the other has no compiler."""

        def smallest(self, value: int) -> int:
            return 0

    model, device, ranks = load_captured(saved("gpt_neox", tmp_path), ALONE), torch.device("cuda:0"), OfTwo(0, 2)
    survey, auto = model.survey, dataclasses.replace(settings(tmp_path, 2, "float32"), kernels=KernelsConfig())

    def sizes(config: ServerConfig, attention: str) -> tuple[int, ...]:
        return sizes_to_capture(config, survey.family, None, survey.blueprint.model, device, attention, ranks)

    caplog.set_level("INFO", "serve.worker.computing")
    assert sizes(auto, "triton") == sizes(auto, "torch") == ()
    mine, others = ("another rank cannot capture its own", "attention in plain torch reads lengths on the host")
    assert [record.getMessage().partition(": ")[2].partition(",")[0] for record in caplog.records[-2:]] == [mine, others]
    on = dataclasses.replace(auto, kernels=KernelsConfig(cuda_graphs="on"))
    for attention, why in (("triton", mine), ("torch", others)):
        caplog.clear()
        with pytest.raises(ConfigError, match=rf"^kernels.cuda_graphs is on; {why}"):
            sizes(on, attention)
        assert why in caplog.text, "whose answer is the first is nobody's choice"


@pytest.mark.parametrize("changed", [{"quantization": "int4"}, {"kv_cache_dtype": "int8"}], ids=["int4 weights", "int8 cache"])
def test_smaller_weights_and_caches_are_captured_too(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(saved("llama", tmp_path), 1, "float32")
    within = {
        name: dataclasses.replace(section, **{key: value for key, value in changed.items() if hasattr(section, key)})
        for name, section in (("model", config.model), ("cache", config.cache))
    }
    on = dataclasses.replace(config, **within, kernels=KernelsConfig(cuda_graphs="on"))
    model, _ = load_rank(on, 0, torch.device("cpu"), lambda: ALONE, Stopwatch())
    tokens_of_both_ways(model, ALONE, monkeypatch)


def test_a_model_that_waits_for_the_device_is_told_with_what_serves_it(tmp_path: Path) -> None:
    model = load_captured(saved("gpt_neox", tmp_path), ALONE)
    head = model.head
    model = dataclasses.replace(model, head=_Looking(head))
    graphs = Runner(model, ALONE).graphs
    assert graphs is not None
    with pytest.raises(StartError, match=r"a step of 4 rows cannot be captured: .*; --cuda-graphs off serves without"):
        graphs.capture()


def test_a_step_without_memory_is_told_with_what_would_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Runner(load_captured(saved("gpt_neox", tmp_path), ALONE), ALONE).graphs
    assert graphs is not None

    def compute(step: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(graphs, "compute", compute)
    with pytest.raises(StartError, match=r"no memory left for a step of 4 rows beside .*; a smaller --cuda-graph-max-batch"):
        graphs.capture()


class _Looking(torch.nn.Module):
    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits * float(logits.amax().isfinite().item())


def test_a_step_of_more_sequences_than_the_largest_size_is_computed_as_it_is(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    runner = Runner(load_captured(folder, ALONE, most=2), ALONE)
    assert runner.graphs is not None
    runner.graphs.capture()
    assert generate(runner, ALONE) == generate(Runner(load(folder, 1, ALONE), ALONE), ALONE)


def test_inputs_of_a_step_are_in_the_same_memory_and_what_a_step_before_left_is_gone() -> None:
    inputs = DecodeInputs(graph_sizes(4), 64, 16, torch.device("cpu"), by_length=True)
    tables = torch.arange(24, dtype=torch.int32).view(6, 4)
    places = None
    for rows in ([(7, 20, 37, 5, 21), (8, 3, 19, 2, 9), (9, 1, 2, 0, 2)], [(4, 5, 6, 1, 6)] * 4, [(1, 2, 3, 4, 5)] * 3):
        step = inputs.fill(rows, tables)
        padding = 4 - len(rows)
        assert step.input_ids.tolist() == [[row[0] for row in rows] + [0] * padding]
        assert step.position_ids.tolist() == [[row[1] for row in rows] + [0] * padding]
        assert step.layout.positions.tolist() == [row[1] for row in rows] + [-1] * padding
        assert step.layout.slots.tolist() == [row[2] for row in rows] + [-1] * padding
        assert step.layout.block_tables[: len(rows)].tolist() == [tables[row[3]].tolist() for row in rows]
        assert step.layout.lengths is not None
        assert step.layout.lengths.tolist() == [row[4] for row in rows] + [1] * padding
        now = [part.data_ptr() for part in (step.input_ids, step.layout.positions, step.layout.slots, step.layout.block_tables)]
        places = places or now
        assert places == now
    assert inputs.fits(4)
    assert not inputs.fits(5)
    assert not inputs.fits(0)


def test_two_ranks_capture_the_same_sizes_in_the_same_order_and_replay_what_they_exchange(tmp_path: Path) -> None:
    names = ("gpt_neox", "mixtral", "gpt_neox layers", "mixtral whole layers")
    for name in names:
        save(name.partition(" ")[0], tmp_path / name, with_tokenizer=False)
    words = ["2", str(tmp_path), "cpu", "float32"]
    ranks = [
        warm.start("tests.serve.worker.graph_worker", [str(rank), *words], rank_environment(rank, 2, "cpu"))
        for rank in range(2)
    ]
    said = warm.all_ended(ranks, 600.0)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (json.loads((tmp_path / f"graphs-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for name in names:
        assert first[name]["sizes"] == [4, 2, 1]
        assert first[name]["greedy"] == generate(Runner(load(tmp_path / name, 1, ALONE), ALONE), ALONE)
        assert first[name]["drawn"] == first[name]["drawn eager"] != first[name]["greedy"]
        for how in ("greedy", "drawn", "drawn without penalties"):
            assert first[name][f"{how} ahead"] == first[name][how]
    layers = SMALL["gpt_neox"]["num_hidden_layers"]
    assert first["gpt_neox layers"]["exchanged"] == first["gpt_neox"]["exchanged"], "in the layers' form of a GPU, too"
    for size, (step, gathering) in zip((4, 2, 1), first["gpt_neox"]["exchanged"], strict=True):
        *sums, likeliest = step
        assert {name for name, _ in sums} == {"c10d.allreduce_.default"}, "what layers sum is in the step"
        assert len(sums) == 1 + layers, "the embedding, and attention and feed-forward part of each layer together"
        assert likeliest == ["c10d.gather_.default", [size, 2]], "so are each row's largest logit and its place"
        assert gathering == [["c10d.gather_.default", [size, -(-VOCABULARY // 2)]]], "all logits, for who wants more"

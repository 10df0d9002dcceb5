"""What is said when a device fails, and by whom it is heard."""

from __future__ import annotations

import dataclasses
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from serve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from serve.engine.executor import loss_reason
from serve.engine.plan import Span, StepPlan
from serve.errors import ConfigError
from serve.model.filling import Filler
from serve.types import SequenceId
from serve.worker import wire
from serve.worker.device_faults import fault, is_out_of_memory, step_fault, weights_that_do_not_fit
from serve.worker.executor import RankExecutor
from serve.worker.overtaking import Overtaking
from serve.worker.parallel import Ranks
from serve.worker.progress import Progress
from serve.worker.rank import Rank
from serve.worker.step_loop import StepLoop
from serve.worker.vitals import PULSE, LastWords, Vitals
from tests.serve.runtime.ranks import FACTS
from tests.serve.worker.family_worker import load
from tests.support.models import save

DEVICE = "cuda:1 (NVIDIA H200, GPU-8f1c)"
GIB = 1 << 30
OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.64 GiB of which 312.00 MiB is free."
)


def _config(**cache: float) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(path="model"), cache=CacheConfig(**cache), scheduler=SchedulerConfig(max_step_tokens=512)
    )


def _plan(*counts: int) -> StepPlan:
    return StepPlan(step=7, spans=tuple(Span(sequence=SequenceId(i), start=0, count=count) for i, count in enumerate(counts)))


def _said(plan: StepPlan, error: Exception = OUT_OF_MEMORY, *, num_blocks: int = 2000, **cache: float) -> LastWords | None:
    return step_fault(error, DEVICE, plan, _config(**cache), num_blocks=num_blocks, block_bytes=8 << 20)


def test_a_step_without_memory_is_told_with_a_cache_and_a_step_that_would_fit() -> None:
    assert _said(_plan(400, 100, 12)) == LastWords(
        "memory",
        f"{DEVICE} ran out of memory in a step of 512 tokens of 3 sequences, for want of 2.00 GiB: --kv-cache-gib 13.1 leaves "
        "room for it, with 1680 blocks (26880 positions) of now 2000; --max-step-tokens 256 makes such a step half as large; "
        "a --memory-fraction below 0.9 leaves more to steps",
    )


def test_a_step_of_decoding_without_memory_is_told_with_fewer_sequences() -> None:
    words = _said(_plan(1, 1, 1, 1), kv_cache_gib=15.6)
    assert words is not None
    assert "--max-num-seqs 2 makes such a step half as large" in words.sentence
    assert "--max-step-tokens" not in words.sentence
    assert "--memory-fraction" not in words.sentence, "the size of the cache was given"


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Triton Error [CUDA]: out of memory",
        "NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ],
    ids=["driver", "cublas", "triton", "nccl"],
)
def test_memory_that_others_than_torchs_allocator_wanted_is_told_as_memory_too(said: str) -> None:
    error = torch.AcceleratorError(said)
    assert is_out_of_memory(error)
    words = _said(_plan(1, 1), error)
    assert words == LastWords(
        "memory",
        f"{DEVICE}, or the host for what it pins, ran out of memory in a step of 2 tokens of 2 sequences: "
        "--max-num-seqs 1 makes such a step half as large; "
        "a --memory-fraction below 0.9 leaves more to steps",
    )
    words = _said(_plan(1), error, kv_cache_gib=15.6)
    assert words is not None
    assert words.sentence.endswith(": a --kv-cache-gib below 15.6 leaves more to the driver and its libraries")
    assert fault(error, DEVICE, "while the model was loaded") == LastWords(
        "memory",
        f"{DEVICE}, or the host for what it pins, ran out of memory while the model was loaded: {said.partition(chr(10))[0]}",
    )


def test_memory_that_another_rank_wanted_is_an_exchange_that_was_lost() -> None:
    words = _said(_plan(1), RuntimeError("NCCL error, ncclRemoteError: remote process exited, Cuda failure 2 'out of memory'"))
    assert words is not None
    assert words.kind == "exchange"


def test_a_cache_that_could_not_give_enough_is_not_advised() -> None:
    words = _said(_plan(512), num_blocks=100)
    assert words is not None
    assert "--kv-cache-gib" not in words.sentence


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nmore"), "device", "uncorrectable ECC error"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device", "illegal memory access"),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), "device", "CUBLAS_STATUS_EXECUTION_FAILED"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), "device", "Triton Error"),
        (RuntimeError("NCCL communicator was aborted on rank 1. CUDA error: x"), "exchange", "NCCL communicator was aborted"),
        (RuntimeError("[/x/third_party/gloo/gloo/pair.cc:537] Read error [::1]:9: reset"), "exchange", "Read error [::1]:9"),
        (torch.distributed.DistNetworkError("the socket has timed out\nmore"), "exchange", "the socket has timed out"),
    ],
    ids=["ecc", "access", "cublas", "triton", "nccl", "gloo", "store"],
)
def test_a_broken_device_is_told_by_its_name_and_a_lost_exchange_as_such(error: Exception, kind: str, said: str) -> None:
    words = _said(_plan(1), error)
    assert words is not None
    assert words.kind == kind
    assert said in words.sentence
    assert "\n" not in words.sentence
    assert (DEVICE in words.sentence) == (kind == "device")


def test_what_is_no_fault_of_the_device_is_told_as_before() -> None:
    assert fault(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), DEVICE, "") is None
    assert _said(_plan(1), ValueError("no")) is None


def test_weights_that_do_not_fit_are_told_with_ranks_and_types_that_do() -> None:
    said = weights_that_do_not_fit(
        ServerConfig(model=ModelConfig(path="model")), DEVICE, weight_bytes=40 * GIB, free_bytes=22 * GIB, itemsize=2
    )
    assert said == (
        f"the weights take 40.0 GiB on each of 1 ranks, and {DEVICE} had 22.0 GiB free: --tensor-parallel-size 3 leaves each "
        "rank 13.3 GiB of them; --quantization int8 takes about 55%; --quantization int4 takes about 30%"
    )


def test_last_words_are_heard_among_heartbeats_and_cut_where_they_are_long() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        vitals = Vitals(1, 0, ours, 0.0)
        theirs.send(PULSE.pack(False, 3, 40))
        theirs.send(LastWords("device", "é" * 5000).encode())
        vitals.listen(1.0)
    assert (vitals.count, vitals.device_bytes) == (3, 40)
    assert vitals.last_words is not None
    assert vitals.last_words.kind == "device"
    assert 900 < len(vitals.last_words.sentence) < 1100


def test_weights_without_memory_are_refused_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(Filler, "fill", fill)
    folder = save("gpt2", tmp_path / "model", with_tokenizer=False)
    with pytest.raises(
        ConfigError, match=r"^the weights take 0.0 GiB on each of 1 ranks, and the cpu had .* GiB free: --tensor"
    ):
        load(folder, 1, Ranks(0, 1))


class _Failing:
    """A runner whose device fails in its first step."""

    may_be_overtaken = goes_ahead = False

    def execute(self, plan: StepPlan) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")


class _FailingInAnother:
    """A runner whose device fails in the plan that overtakes its first step."""

    may_be_overtaken, goes_ahead = True, False

    def __init__(self) -> None:
        self.overtaking = Overtaking()

    def execute(self, plan: StepPlan) -> None:
        if plan.step:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        self.overtaking.compute_other()


def _in_a_step(error: Exception, plan: StepPlan) -> LastWords | None:
    return fault(error, DEVICE, f"in step {plan.step}")


@pytest.mark.parametrize(("runner", "step"), [(_Failing, 0), (_FailingInAnother, 1)])
def test_a_rank_whose_device_fails_in_a_step_says_so_and_ends(
    runner: type[_Failing | _FailingInAnother], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", end)
    (told, steps), (heard, pulse) = socket.socketpair(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with told, steps, heard, pulse:
        heard.setblocking(False)
        for number in range(2):
            wire.send(told, wire.encode(dataclasses.replace(_plan(1), step=number)))
        told_nothing = SimpleNamespace(profiler=SimpleNamespace(is_on=False), exchange=None)
        with pytest.raises(SystemExit) as ended:
            StepLoop(runner(), told_nothing, steps, Progress(), pulse, _in_a_step).run()
        vitals = Vitals(1, 0, heard, 0.0)
        vitals.listen(1.0)
    assert ended.value.code == 1
    assert vitals.last_words == LastWords("device", f"{DEVICE} failed in step {step}: CUDA error: unspecified launch failure")


class _Ended:
    """A process that has ended with a return code."""

    def __init__(self, code: int) -> None:
        self.pid, self.code = 0, code

    def poll(self) -> int:
        return self.code


@pytest.mark.parametrize(
    ("words", "codes", "said", "reason"),
    [
        ({1: LastWords("device", "cuda:1 failed")}, (-6, 1), "rank 1 died: cuda:1 failed", "died"),
        ({0: LastWords("exchange", "NCCL"), 1: LastWords("memory", "none left")}, (1, 1), "rank 1 died: none left", "memory"),
        ({0: LastWords("exchange", "NCCL")}, (1, -9), "rank 1 died: signal SIGKILL", "died"),
        ({0: LastWords("exchange", "NCCL")}, (1, 0), "rank 0 died: NCCL", "died"),
    ],
    ids=["device before abort", "memory before exchange", "a signal before exchange", "exchange alone"],
)
def test_of_several_deaths_that_which_brought_the_others_is_named(
    words: dict[int, LastWords], codes: tuple[int, int], said: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host.limits.killed_for_memory", lambda before: None)
    executor = RankExecutor(_config())
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in codes]
    for number, (code, (ours, theirs)) in enumerate(zip(codes, pairs, strict=True)):
        ours.setblocking(False)
        if number in words:
            theirs.send(words[number].encode())
        vitals = Vitals(number, 0, ours, 0.0)
        executor._ranks.append(Rank(number, _Ended(code), ours, ours, ours, 0.0, vitals, None, 0))
    executor._ready = True
    loss = executor.dead_rank()
    assert (loss, loss_reason(loss)) == (said, reason)
    for pair in pairs:
        for end in pair:
            end.close()


class _Lives(_Ended):
    """A process that has not ended."""

    def __init__(self) -> None:
        super().__init__(0)

    def poll(self) -> None:
        return None


def test_a_rank_that_falls_silent_is_told_with_its_gpu() -> None:
    executor, facts = RankExecutor(_config()), dataclasses.replace(FACTS, gpus=("GPU-8f1c", "GPU-77aa"))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        now = time.monotonic()
        for number, heard in enumerate((now, now - 60.0)):
            executor._ranks.append(Rank(number, _Lives(), ours, ours, ours, 0.0, Vitals(number, 0, ours, heard), None, 0))
        executor._ready, executor._called = True, facts.called
        loss = executor.dead_rank()
    assert str(loss).startswith("rank 1 (GPU-77aa) is frozen: no heartbeat for 60.")
    assert loss_reason(loss) == "frozen"
    assert facts.called(2) == "rank 2", "one without a GPU"

"""Weights change places where there is memory for both, and a layer at a time where there is not; another model starts anew."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.errors import CheckpointError
from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.engine.executor import Prepared, Unlike
from serve.engine.plan import StepPlan, StepResult
from serve.errors import ConfigError
from serve.model import weight_memory
from serve.model.filling import Filling
from serve.model.slice_reading import SliceReader
from serve.model.weight_memory import _Mapping
from serve.worker import gpus, wire
from serve.worker.exchange import Exchange
from serve.worker.kv_cache import LIBRARIES_BYTES
from serve.worker.loader import Stopwatch, load_rank
from serve.worker.orders import Orders
from serve.worker.packing import Packing
from serve.worker.parallel import Ranks
from serve.worker.preparation import Preparation
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import NEW_TOKENS, PROMPTS, generate
from tests.support import reference
from tests.support.models import save, save_gpt_oss
from tests.support.mxfp4 import in_four_bits

GIB = 1 << 30
PATIENCE_SECONDS = 120.0


def config_of(folder: Path) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(path=str(folder), dtype="float32", device="cpu", max_model_len=512),
        cache=CacheConfig(kv_cache_gib=0.01, block_tokens=16),
    )


@contextmanager
def told(answers: list[list[wire.Report]]) -> Iterator[tuple[list[socket.socket], list[list[wire.Order]]]]:
    """Ranks that answer their orders with these, one after the other, and keep what they were told."""
    pairs = [socket.socketpair() for _ in answers]
    heard: list[list[wire.Order]] = [[] for _ in answers]

    def follow(rank: int) -> None:
        for answer in answers[rank]:
            heard[rank].append(wire.decode_order(wire.receive(pairs[rank][1])))
            wire.send(pairs[rank][1], wire.encode(answer))

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(len(answers))]
    for thread in threads:
        thread.start()
    try:
        yield [ours for ours, _ in pairs], heard
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), "an order that it was to answer never came"
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


@pytest.mark.parametrize(
    ("free", "shared", "limit_gib", "beside"),
    [
        ((20, 20), True, None, True),
        ((6, 6), True, None, False),  # 3 GiB on each rank, of the same memory, a tenth of which stays free
        ((6, 6), False, None, True),  # of each rank's own
        ((6, 3), False, None, False),
        ((20, 20), True, 5.0, False),
        ((20, 20), True, 6.0, True),
    ],
)
def test_weights_are_read_beside_the_old_where_all_ranks_have_memory_for_both(
    free: tuple[int, int], shared: bool, limit_gib: float | None, beside: bool
) -> None:
    answers: list[list[wire.Report]] = [[wire.Alike(3 * GIB, gib * GIB, checkpoint_step=7), wire.Fine()] for gib in free]
    config = ServerConfig(model=ModelConfig(path="newer", swap_memory_gib=limit_gib))
    with told(answers) as (orders, heard):
        assert Preparation(Orders(orders, 60.0), shared_memory=shared).prepare(config, 4) == Prepared(7, beside)
    assert heard == [[wire.Look(config), wire.Prepare(4, beside)]] * 2


def test_ranks_that_find_another_model_forget_it_and_it_is_told() -> None:
    alike, differs = wire.Alike(1, GIB, None), wire.Differs("config.json has another hidden_size")
    config = ServerConfig(model=ModelConfig(path="newer"))
    with told([[alike, wire.Fine()], [differs, wire.Fine()]]) as (orders, heard):
        assert Preparation(Orders(orders, 60.0), shared_memory=True).prepare(config, 1) == Unlike(differs.reason)
    assert heard == [[wire.Look(config), wire.Forget()]] * 2


def test_a_rank_that_cannot_read_makes_all_forget() -> None:
    failed = wire.Failed("model.safetensors: is missing", configured=True)
    config = ServerConfig(model=ModelConfig(path="newer"))
    alike, fine = wire.Alike(1, GIB, None), wire.Fine()
    with told([[alike, fine, fine], [alike, failed, fine]]) as (orders, heard), pytest.raises(ConfigError, match="is missing"):
        Preparation(Orders(orders, 60.0), shared_memory=True).prepare(config, 1)
    assert [orders_of[-1] for orders_of in heard] == [wire.Forget()] * 2


@pytest.mark.parametrize("full", [(1,), (0, 1)])
def test_a_rank_that_runs_out_of_memory_has_all_read_into_place(
    full: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    alike, fine, no_room = wire.Alike(1, GIB, 7), wire.Fine(), wire.NoRoom("tried to allocate 2.00 MiB")
    answers: list[list[wire.Report]] = [[alike, no_room if rank in full else fine, fine] for rank in range(2)]
    config = ServerConfig(model=ModelConfig(path="newer"))
    with told(answers) as (orders, heard):
        assert Preparation(Orders(orders, 60.0), shared_memory=True).prepare(config, 4) == Prepared(7, beside=False)
    assert heard == [[wire.Look(config), wire.Prepare(4, True), wire.Prepare(4, False)]] * 2
    assert f"rank {full[0]} has no room for other weights" in caplog.text
    assert "tried to allocate 2.00 MiB" in caplog.text


class Served:
    """A model on one rank, and the exchange of its weights, told what to do from here."""

    def __init__(self, folder: Path) -> None:
        ranks = Ranks(0, 1)
        model, _ = load_rank(config_of(folder), 0, torch.device("cpu"), lambda: ranks, Stopwatch())
        self.runner = Runner(model, ranks)
        packing = Packing([model.filler.take_waiting()], self.runner.rest)
        self.exchange = Exchange(config_of(folder), model, ranks, self.runner, packing)

    def take(self, folder: Path, *, beside: bool) -> str:
        """Why the weights were refused; "" where they were taken."""
        assert isinstance(self.exchange.answer(wire.Look(config_of(folder))), wire.Alike)
        assert self.exchange.answer(wire.Prepare(1, beside)) == wire.Fine()
        with torch.inference_mode():
            result = self.exchange.take(StepPlan(step=9, swap=1))
        assert result is not None
        assert self.exchange.answer(wire.Forget()) == wire.Fine()
        return result.refused

    def tokens(self) -> list[int]:
        return generate(self.runner, Ranks(0, 1), PROMPTS[:1])[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("editions")
    return tuple(save("gpt2", root / str(seed), seed=seed, with_tokenizer=False, n_layer=2) for seed in (0, 1))  # type: ignore[return-value]


@pytest.mark.parametrize("beside", [True, False])
def test_taken_weights_make_the_tokens_and_those_that_are_not_finite_leave_them(
    folders: tuple[Path, Path], beside: bool, tmp_path: Path
) -> None:
    first, second = folders
    expected = [reference.greedy(reference.load(folder), PROMPTS[0], NEW_TOKENS) for folder in folders]
    served = Served(first)
    assert served.tokens() == expected[0]
    assert served.take(second, beside=beside) == ""
    assert served.tokens() == expected[1]
    broken = save("gpt2", tmp_path, with_tokenizer=False, n_layer=2)
    stored = load_file(broken / "model.safetensors")
    stored["transformer.h.1.mlp.c_proj.bias"].fill_(float("inf"))
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    assert "not finite" in served.take(broken, beside=beside)
    assert served.tokens() == expected[1], "what was served before is served again"


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("four_bits", [False, True], ids=["in fp32", "in four bits"])
def test_attention_sinks_and_experts_are_taken_and_given_back_too(four_bits: bool, beside: bool, tmp_path: Path) -> None:
    folders = [save_gpt_oss(tmp_path / str(seed), seed, intermediate_size=96) for seed in (0, 1)]
    plain = [in_four_bits(folder, tmp_path / f"decoded-{folder.name}") for folder in folders] if four_bits else folders
    expected = [reference.greedy(reference.load(folder), PROMPTS[0], NEW_TOKENS) for folder in plain]
    assert expected[0] != expected[1]
    served = Served(folders[0])
    assert served.tokens() == expected[0]
    assert served.take(folders[1], beside=beside) == ""
    assert served.tokens() == expected[1]
    broken = Path(shutil.copytree(folders[0], tmp_path / "broken"))
    stored = load_file(broken / "model.safetensors")
    stored["model.norm.weight"].fill_(float("nan"))
    save_file(stored, broken / "model.safetensors", metadata={"format": "pt"})
    assert "not finite" in served.take(broken, beside=beside)
    assert served.tokens() == expected[1], "with the sinks of what is served"


def test_weights_that_take_the_old_ones_places_do_so_a_module_at_a_time(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fill, put = SliceReader._fill, Filling.put
    monkeypatch.setattr(
        SliceReader,
        "_fill",
        lambda self, stored, index, out: events.append(stored.rpartition(".")[0]) or fill(self, stored, index, out),
    )
    monkeypatch.setattr(Filling, "put", lambda self: events.append("put") or put(self))
    served = Served(folders[0])
    events.clear()
    assert served.take(folders[1], beside=False) == ""
    pending: set[str] = set()
    for event in events:
        pending = set() if event == "put" else pending | {event}
        assert len(pending) <= 1, "the weights of one module at most are in memory beside the old"
    assert "put" in events


def of_torch() -> RuntimeError:
    """What torch says when the machine has not so much memory."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    return caught.value


def of_a_file() -> CheckpointError:
    """What is said of a file that could not be read for want of memory."""
    error = CheckpointError("model.safetensors", "reading at byte 8 failed: Cannot allocate memory")
    error.__cause__ = OSError(errno.ENOMEM, "Cannot allocate memory")
    return error


out_of_memory = pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory\nand more"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        of_torch(),
        of_a_file(),
    ],
    ids=["a device's", "Python's", "the system's", "torch's", "a file's"],
)


@out_of_memory
def test_weights_for_which_there_is_no_memory_are_given_back_and_read_into_place(
    error: Exception, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, names, fill = Served(folders[0]), list[str](), SliceReader._fill
    areas: list[weakref.ref[_Mapping]] = []
    given_back: list[threading.Event] = []

    class Noted(_Mapping):
        """Memory that weights are read to."""

        def __init__(self, *_: object, **__: object) -> None:
            gone = threading.Event()
            areas.append(weakref.ref(self, lambda _: gone.set()))
            given_back.append(gone)

    def read_some(self: SliceReader, stored: str, index: tuple[slice, ...] | None, out: torch.Tensor) -> None:
        names.append(stored)
        if len(names) > 5:
            raise error
        fill(self, stored, index, out)

    with monkeypatch.context() as patch:
        patch.setattr(SliceReader, "_fill", read_some)
        patch.setattr(weight_memory, "_Mapping", Noted)
        assert isinstance(served.exchange.answer(wire.Look(config_of(folders[1]))), wire.Alike)
        answer = served.exchange.answer(wire.Prepare(1, beside=True))
    assert isinstance(answer, wire.NoRoom)
    assert answer.reason == (str(error).partition("\n")[0] or "out of memory")
    error.__traceback__ = None
    assert areas
    assert all(gone.wait(PATIENCE_SECONDS) for gone in given_back), "what was read is given back"  # once its page is large
    assert served.tokens() == reference.greedy(reference.load(folders[0]), PROMPTS[0], NEW_TOKENS)
    assert served.exchange.answer(wire.Prepare(1, beside=False)) == wire.Fine()
    with torch.inference_mode():
        result = served.exchange.take(StepPlan(step=9, swap=1))
    assert result == StepResult(step=9)
    assert served.tokens() == reference.greedy(reference.load(folders[1]), PROMPTS[0], NEW_TOKENS)


def test_room_is_counted_when_what_the_last_weights_lay_in_is_given_back(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream's freed memory is nobody else's: each exchange would find less."""
    served, order = Served(folders[0]), list[str]()
    served.exchange._model = dataclasses.replace(served.exchange._model, steps_bytes=7)
    monkeypatch.setattr(gpus, "give_back", lambda _: order.append("given back"))
    monkeypatch.setattr(gpus, "bytes_left", lambda device, cache, kept: order.append(f"counted beside {kept}") or 5)  # type: ignore[func-returns-value]  # None is meant
    answer = served.exchange.answer(wire.Look(config_of(folders[1])))
    assert isinstance(answer, wire.Alike)
    assert answer.free_bytes == 5
    assert order == ["given back", f"counted beside {7 + LIBRARIES_BYTES}"]


@out_of_memory
def test_memory_that_ends_while_weights_are_read_into_place_leaves_the_old_ones(
    error: Exception, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, fill = Served(folders[0]), SliceReader._fill
    left = iter([None] * 5 + [error])

    def read_some(self: SliceReader, stored: str, index: tuple[slice, ...] | None, out: torch.Tensor) -> None:
        if (failure := next(left, None)) is not None:
            raise failure
        fill(self, stored, index, out)

    with monkeypatch.context() as patch:
        patch.setattr(SliceReader, "_fill", read_some)
        refused = served.take(folders[1], beside=False)
    assert (str(error).partition("\n")[0] or "out of memory") in refused
    assert served.tokens() == reference.greedy(reference.load(folders[0]), PROMPTS[0], NEW_TOKENS)
    assert served.take(folders[1], beside=False) == "", "the next one has memory"


def test_a_rank_that_is_told_to_read_into_place_after_all_gives_back_what_it_has_read(folders: tuple[Path, Path]) -> None:
    served = Served(folders[0])
    assert isinstance(served.exchange.answer(wire.Look(config_of(folders[1]))), wire.Alike)
    served.exchange.answer(wire.Prepare(1, beside=True))
    candidate = served.exchange._candidate
    assert candidate is not None
    assert candidate.values
    served.exchange.answer(wire.Prepare(1, beside=False))
    assert candidate.values is None
    with torch.inference_mode():
        served.exchange.take(StepPlan(step=9, swap=1))
    assert served.tokens() == reference.greedy(reference.load(folders[1]), PROMPTS[0], NEW_TOKENS)


def test_a_checkpoint_of_other_shapes_is_told_as_another_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    served = Served(folders[0])
    answer = served.exchange.answer(wire.Look(config_of(save("gpt2", tmp_path, with_tokenizer=False, n_layer=2, n_embd=32))))
    assert answer == wire.Differs("config.json has another n_embd")

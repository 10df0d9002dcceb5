"""A model serves from its files, with the same tokens as when its weights are packed; then they are, and files given back."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from serve.config import CacheConfig, KernelsConfig, ModelConfig, ServerConfig
from serve.model import filling
from serve.model.filling import Waiting
from serve.model.linear import KernelPacker, Panels
from serve.worker import kv_cache, packing
from serve.worker.kv_cache import GIB, choose_memory
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.packing import Packing
from serve.worker.parallel import Ranks
from serve.worker.rest import Rest
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import PROMPTS, generate
from tests.support.kernels import cpu_kernels
from tests.support.leases import needs_leases
from tests.support.models import build

CPU = torch.device("cpu")
ALONE = Ranks(0, 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings of small models are large, too, and nobody waits."""
    cpu_kernels()
    monkeypatch.setattr(filling, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(packing, "FIRST_SECONDS", 0.0)


def loaded(folder: Path, dtype: str = "auto", *, later: bool = True, quantized: Literal["none", "int8"] = "none") -> RankModel:
    config = ServerConfig(
        model=ModelConfig(path=str(folder), dtype=dtype, device="cpu", quantization=quantized),  # type: ignore[arg-type]
        cache=CacheConfig(kv_cache_gib=0.05),
        kernels=KernelsConfig(pack_later=later),
    )
    return load_rank(config, 0, CPU, lambda: ALONE, Stopwatch())[0]


def is_mapped(folder: Path) -> bool:
    return str(folder.resolve()) in Path("/proc/self/maps").read_text()


def tokens(model: RankModel) -> list[list[int]]:
    return generate(Runner(model, ALONE), ALONE, PROMPTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "llama, tied", "gpt2"])
def test_tokens_are_the_same_from_files_while_weights_are_packed_and_afterwards(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    if not cpu_kernels().tessera_linear_supported(dtype == torch.bfloat16):
        pytest.skip("this processor has no packed route for the type")
    kind, _, tied = family.partition(", ")
    folder = tmp_path / "model"
    build(kind, tie_word_embeddings=bool(tied) or kind == "gpt2").to(dtype).save_pretrained(folder)
    expected = tokens(loaded(folder, later=False))
    assert not is_mapped(folder)

    model = loaded(folder)
    promised, waiting = model.filler.waiting_bytes, model.filler.take_waiting()
    assert model.filler.take_waiting() == Waiting(), "they are given once"
    assert len(waiting.panels) == 1 + sum(isinstance(module, nn.Linear) for module in model.body.modules())
    assert waiting.views
    assert promised >= sum(panels.packed.nbytes for panels in waiting.panels) + waiting.views[0].nbytes
    assert is_mapped(folder)
    assert tokens(model) == expected

    runner, stop, made = Runner(model, ALONE), threading.Event(), list[list[list[int]]]()

    def serve() -> None:
        while not stop.is_set():
            made.append(generate(runner, ALONE, PROMPTS))

    serving = threading.Thread(target=serve)
    serving.start()
    packer = Packing([waiting], runner.rest)
    while not made:
        serving.join(0.01)
    packer.finish()
    stop.set()
    serving.join()
    assert all(each == expected for each in made)
    assert not is_mapped(folder)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"")
    assert tokens(model) == expected


@needs_leases
def test_who_cuts_a_file_waits_until_its_weights_are_packed_which_is_done_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a processor that is never free."""
    monkeypatch.setattr(packing, "FIRST_SECONDS", 600.0)
    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    [file] = folder.glob("*.safetensors")
    model = loaded(folder)
    expected, waiting = tokens(model), model.filler.take_waiting()
    assert waiting.panels
    assert waiting.views
    cutter = threading.Thread(target=os.truncate, args=(file, 0))
    cutter.start()
    while not waiting.leases.is_awaited:
        cutter.join(0.001)
    assert tokens(model) == expected, "the file is as it was"
    with caplog.at_level(logging.INFO):
        Packing([waiting], Rest())
        cutter.join(60)
    assert file.stat().st_size == 0
    assert not is_mapped(folder)
    assert tokens(model) == expected
    assert "somebody waits to write to a file of the checkpoint, until its weights are packed" in caplog.text


@needs_leases
def test_what_lies_in_a_file_that_somebody_writes_is_read_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    [file] = folder.glob("*.safetensors")
    with file.open("r+b"):
        model = loaded(folder)
    assert model.filler.waiting_bytes == 0
    assert not is_mapped(folder)
    assert tokens(model) == tokens(loaded(folder))


def test_what_is_cast_quantized_or_not_for_later_is_read_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    for model in (loaded(folder, "bfloat16"), loaded(folder, later=False), loaded(folder, quantized="int8")):
        assert not model.filler.take_waiting().panels
        assert model.filler.waiting_bytes == 0
        del model
    assert not is_mapped(folder)


class Part:
    """A weight that waits to be packed, and tells when its rows are given back."""

    def __init__(self) -> None:
        packer = KernelPacker(cpu_kernels())
        made, expected = (packer.begin((100, 32), torch.float32, later=later) for later in (True, False))
        assert made is not None
        assert expected is not None
        rows_OI = torch.randn(100, 32)
        expected.put(0, rows_OI)
        made.read_from(rows_OI)
        self.panels, self.expected = made, expected.packed
        self.given_back = threading.Event()
        weakref.finalize(rows_OI, self.given_back.set)

    @property
    def is_packed(self) -> bool:
        return self.panels.rows is None and torch.equal(self.panels.packed, self.expected)


def test_rows_that_a_step_may_read_are_given_back_when_it_has_ended() -> None:
    rest, first, second = Rest(), Part(), Part()
    with rest.interrupted():
        packer = Packing([Waiting([first.panels]), Waiting([second.panels])], rest)
        while not first.is_packed:
            rest.between_steps(0.001)
        assert not first.given_back.is_set(), "a product of the step that has not ended may read them"
        assert not second.is_packed
    packer.finish()
    assert first.given_back.wait(60)
    assert second.given_back.wait(60)
    assert second.is_packed


def test_steps_that_never_end_hold_nobody_up_but_for_a_while() -> None:
    rest, part = Rest(), Part()
    stop = threading.Event()

    def steps() -> None:
        while not stop.is_set():
            with rest.interrupted():
                stop.wait(0.001)

    computing = threading.Thread(target=steps)
    computing.start()
    Packing([Waiting([part.panels])], rest)
    assert part.given_back.wait(60)
    stop.set()
    computing.join()
    assert part.is_packed


def test_whoever_waited_for_the_start_has_the_processor_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "FIRST_SECONDS", 600.0)
    part = Part()
    packer = Packing([Waiting([part.panels])], Rest())
    assert not part.is_packed
    packer.finish()  # at once, if somebody needs it
    assert part.is_packed


def test_an_embedding_without_room_for_a_copy_stays_in_its_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def keep(view: Tensor) -> None:
        raise MemoryError("no memory for 2097152 bytes of a weight")

    monkeypatch.setattr(packing, "keep", lambda view: map(keep, [view]))
    with caplog.at_level(logging.WARNING):
        Packing([Waiting([], [torch.ones(3, 3)])], Rest()).finish()
    assert "a weight stays in its file, which must not be written over while it is served: no memory for" in caplog.text


def test_a_weight_that_cannot_be_packed_is_told_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a step, which reads both."""
    rest, first, broken, last = Rest(), Part(), Part(), Part()
    put = Panels.put

    def fail(panels: Panels, begin: int, rows_RI: Tensor, threads: int | None = None) -> None:
        if panels is broken.panels:
            raise ZeroDivisionError
        put(panels, begin, rows_RI, threads)

    monkeypatch.setattr(Panels, "put", fail)
    with rest.interrupted():
        packer = Packing([Waiting([each.panels for each in (first, broken, last)])], rest)
        while not last.is_packed:
            rest.between_steps(0.001)
        assert not first.given_back.is_set(), "the step may read its rows, whatever became of another"
    packer.finish()
    assert first.given_back.wait(60)
    assert last.given_back.wait(60)
    assert broken.panels.rows is not None, "it is read where it lies, as before"
    assert not broken.given_back.is_set()
    assert "a weight stays in its file, which must not be written over while it is served: ZeroDivisionError" in caplog.text
    assert not packer._waiting, "nobody keeps it but its product"


def test_what_weights_will_take_is_not_free_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache.limits, "memory_available", lambda: 10 * GIB)
    assert choose_memory(CacheConfig(), CPU, 2).num_bytes == 10 * GIB // 8
    assert choose_memory(CacheConfig(), CPU, 2, promised_bytes=3 * GIB).num_bytes == 4 * GIB // 8
    assert choose_memory(CacheConfig(), CPU, 2, promised_bytes=30 * GIB).num_bytes == 0


def test_a_part_of_rows_is_packed_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BLOCK_BYTES", 1)
    part, blocks, put = Part(), list[tuple[int, int]](), Panels.put

    def noted(panels: Panels, begin: int, rows_RI: Tensor, threads: int | None = None) -> None:
        blocks.append((begin, len(rows_RI)))
        put(panels, begin, rows_RI, threads)

    monkeypatch.setattr(Panels, "put", noted)
    Packing([Waiting([part.panels])], Rest()).finish()
    assert blocks == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert part.is_packed

"""A model is filled by several threads with what one would read: each layer once, its own weights, none of the threads left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from checkpoint import Checkpoint, open_checkpoint
from checkpoint.opening.leases import Leases
from serve.config import ModelConfig, ServerConfig
from serve.errors import ConfigError
from serve.model import filling
from serve.model.filling import Filler, ReadExpert, Staging
from serve.model.heads import Piece
from serve.model.linear import KernelPacker, Matmul, Panels, plain
from serve.model.load import Blueprint
from serve.model.shards import ShardOf
from serve.model.slice_reading import SliceReader
from serve.worker import loader
from tests.support.kernels import cpu_kernels
from tests.support.models import save

CPU = torch.device("cpu")


class Copies:
    """Makes of a layer the product with a copy of its weight, and notes which thread did with how many of torch's."""

    copies = True

    def __init__(self) -> None:
        self.made: dict[nn.Module, tuple[str, int]] = {}

    def begin(self, shape: tuple[int, int], dtype: torch.dtype, *, later: bool = False) -> Panels | None:
        return None

    def experts(self, module: nn.Module, read: ReadExpert) -> None:
        return None

    def __call__(self, module: nn.Module, weight_OI: Tensor | Panels, bias_O: Tensor | None) -> Matmul:
        assert module not in self.made
        assert isinstance(weight_OI, Tensor)
        self.made[module] = (threading.current_thread().name, torch.get_num_threads())
        return plain(weight_OI.clone(), None if bias_O is None else bias_O.clone())


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@contextmanager
def surveyed(path: Path) -> Iterator[tuple[Checkpoint, Blueprint]]:
    config = ServerConfig(model=ModelConfig(path=str(path), dtype="float32", device="cpu"))
    with open_checkpoint(path) as checkpoint:
        yield checkpoint, loader.survey(checkpoint, config, CPU).blueprint


def filled(path: Path, make: Copies) -> nn.Module:
    with surveyed(path) as (checkpoint, blueprint):
        Filler(blueprint.model, {}, CPU, make).fill(checkpoint, blueprint)
        return blueprint.model


def state(model: nn.Module, make: Copies) -> dict[str, Tensor]:
    """All that a model computes with: its parameters, and what each layer makes of ones."""
    products = {path: module(torch.eye(module.in_features)) for path, module in model.named_modules() if module in make.made}
    return products | {name: value.detach() for name, value in model.named_parameters() if not value.is_meta}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("threads")
def test_threads_read_what_one_reads(tmp_path: Path, tied: bool) -> None:
    path = save("llama", tmp_path / "model", with_tokenizer=False, tie_word_embeddings=tied)
    by_several, by_one = Copies(), Copies()
    several = filled(path, by_several)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    one = filled(path, by_one)

    found, expected = state(several, by_several), state(one, by_one)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
    helpers = {name for name, num in by_several.made.values() if num == 1}
    assert helpers
    assert all(name.startswith("weights") for name in helpers)
    assert {name for name, _ in by_one.made.values()} == {threading.current_thread().name}
    head = several.get_output_embeddings()  # type: ignore[operator]  # transformers' own method
    assert (by_several.made[head][0] == threading.current_thread().name) == tied, "what is shared is for one thread alone"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


@pytest.mark.usefixtures("threads")
def test_what_is_large_is_read_by_one_thread_so_that_no_two_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Staging, "MOST_BYTES", 64)
    make = Copies()
    filled(save("llama", tmp_path / "model", with_tokenizer=False), make)
    assert {name for name, _ in make.made.values()} == {threading.current_thread().name}


@pytest.mark.usefixtures("threads")
def test_a_file_that_ends_early_is_told_and_no_thread_goes_on(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "model", with_tokenizer=False)
    with surveyed(path) as (checkpoint, blueprint):
        for file in path.glob("*.safetensors"):
            with file.open("rb+") as opened:
                opened.truncate(file.stat().st_size // 2)
        with pytest.raises(ConfigError, match=r"safetensors.*ends at byte \d+"):
            Filler(blueprint.model, {}, CPU, Copies()).fill(checkpoint, blueprint)
    assert torch.get_num_threads() == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


class Elsewhere(Copies):
    """Notes on which device it was given each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def experts(self, module: nn.Module, read: ReadExpert) -> None:
        if hasattr(module, "num_experts") and hasattr(module, "act_fn"):
            self.devices.add(read("gate_up_proj", 0).device.type)

    def __call__(self, module: nn.Module, weight_OI: Tensor | Panels, bias_O: Tensor | None) -> Matmul:
        assert isinstance(weight_OI, Tensor)
        self.devices.add(weight_OI.device.type)
        return super().__call__(module, weight_OI, bias_O)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_what_is_made_on_a_device_is_made_of_weights_that_lie_there(tmp_path: Path, family: str) -> None:
    """A device that computes nothing stands for a GPU."""
    make = Elsewhere()
    with surveyed(save(family, tmp_path / "model", with_tokenizer=False)) as (checkpoint, blueprint):
        Filler(blueprint.model, {}, torch.device("meta"), make).fill(checkpoint, blueprint)
    assert make.made
    assert make.devices == {"meta"}


class Packs:
    """Packs each layer with the CPU kernel, by blocks or as a whole, and notes who did."""

    copies = True

    def __init__(self, *, by_rows: bool) -> None:
        self.packer = KernelPacker(cpu_kernels())
        self.by_rows = by_rows
        self.packed: list[str] = []
        self.made: dict[nn.Module, str] = {}

    def begin(self, shape: tuple[int, int], dtype: torch.dtype, *, later: bool = False) -> Panels | None:
        panels = self.packer.begin(shape, dtype, later=later) if self.by_rows else None
        if panels is not None:
            put = panels.put

            def noted(begin: int, rows_RI: Tensor) -> None:
                self.packed.append(threading.current_thread().name)
                put(begin, rows_RI)

            panels.put = noted  # type: ignore[method-assign]
        return panels

    def experts(self, module: nn.Module, read: ReadExpert) -> None:
        return None

    def __call__(self, module: nn.Module, weight: Tensor | Panels, bias_O: Tensor | None) -> Matmul:
        self.made[module] = type(weight).__name__
        if isinstance(weight, Panels):
            return self.packer.product(weight, bias_O)
        return self.packer(weight, bias_O)


@pytest.mark.parametrize("most_bytes", [1, 64 << 20], ids=["by several threads", "by one"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.usefixtures("threads")
def test_weights_packed_by_blocks_of_rows_are_those_packed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, most_bytes: int
) -> None:
    """GPT-2's, stored the other way round, are packed whole."""
    path = save(family, tmp_path / "model", with_tokenizer=False, tie_word_embeddings=False)
    monkeypatch.setattr(filling, "BLOCK_BYTES", 1)  # the smallest there are: of 32 rows
    monkeypatch.setattr(Staging, "MOST_BYTES", most_bytes)
    whole, blocks = Packs(by_rows=False), Packs(by_rows=True)
    expected = state(filled(path, whole), whole)
    model = filled(path, blocks)
    found = state(model, blocks)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
    head = model.get_output_embeddings()
    by_rows = {path for path, module in model.named_modules() if blocks.made.get(module) == "Panels"}
    assert len(by_rows) == (len(blocks.made) if family == "llama" else 1)
    assert blocks.made[head] == "Panels"
    assert len(blocks.packed) > len(by_rows), "in more than one block"
    assert all(name.startswith("weights") for name in blocks.packed)


@pytest.mark.parametrize(
    "shard",
    [
        None,
        ShardOf(full_shape=(64, 64), dim=0, pieces=(Piece(8, 24), Piece(40, 41), Piece(50, 64))),
        ShardOf(full_shape=(64, 64), dim=1, pieces=(Piece(3, 20), Piece(32, 64))),
    ],
    ids=["whole", "rows", "columns"],
)
@pytest.mark.parametrize("step", [1, 7, 32, 1000])
def test_rows_of_a_part_are_those_of_the_part(tmp_path: Path, shard: ShardOf | None, step: int) -> None:
    path = save("llama", tmp_path / "model", with_tokenizer=False)
    name = "model.layers.1.self_attn.q_proj.weight"
    with surveyed(path) as (checkpoint, blueprint):
        assert checkpoint.tensors[name].shape == (64, 64)
        reader = SliceReader(checkpoint, blueprint, {} if shard is None else {name: shard}, CPU)
        assert reader.reads_rows(name)
        part = reader.read(name)
        assert part.shape == reader.shape(name)
        for begin in range(0, len(part), step):
            rows = torch.full_like(part[begin : begin + step], torch.nan)
            reader.read_rows(name, begin, rows)
            assert torch.equal(rows, part[begin : begin + step])


@pytest.mark.parametrize(
    ("shard", "is_mapped"),
    [
        (None, True),
        (ShardOf(full_shape=(256, 64), dim=1, pieces=(Piece(16, 40),)), True),
        (ShardOf(full_shape=(256, 64), dim=0, pieces=(Piece(32, 96),)), False),
        (ShardOf(full_shape=(256, 64), dim=1, pieces=(Piece(0, 8), Piece(16, 24))), False),
    ],
    ids=["whole", "of the inputs", "of the outputs", "in two pieces"],
)
def test_a_part_that_is_stored_transposed_is_mapped_where_it_lies_together(
    tmp_path: Path, shard: ShardOf | None, is_mapped: bool
) -> None:
    path = save("gpt2", tmp_path / "model", with_tokenizer=False)
    name = "transformer.h.1.mlp.c_fc.weight"
    with surveyed(path) as (checkpoint, blueprint):
        assert name in blueprint.transposed
        reader, leases = SliceReader(checkpoint, blueprint, {} if shard is None else {name: shard}, CPU), Leases()
        part, view = reader.read(name), reader.view(name, leases)
        assert part.shape == reader.shape(name)
        assert (view is not None) == is_mapped
        if view is not None:
            assert torch.equal(view, part)
            assert view.stride(0) == 1, "as the file has it"
        leases.give_back()


def test_a_layer_of_an_odd_number_of_bf16_inputs_is_not_packed_by_rows() -> None:
    packer = KernelPacker(cpu_kernels())
    assert packer.begin((64, 33), torch.bfloat16) is None
    assert packer.begin((64, 33), torch.float32) is not None

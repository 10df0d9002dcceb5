"""Folders of every layout that lack a file, have one cut short, or name what makes a reader work without end."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from checkpoint import CheckpointError, open_checkpoint
from tests.checkpoint.readers.hostile import MOST_SECONDS, Target, Tensors, nothing_reached, read_all
from tests.checkpoint.readers.test_hostile import LAYOUTS, SEED


def opened(root: Path, target: Target, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Tensors | CheckpointError:
    """What the checkpoint holds, or why it is refused; nothing else happens, and that soon."""
    begun = time.thread_time()
    try:
        with nothing_reached(root), open_checkpoint(target.path, given=target.given) as checkpoint:
            checkpoint.check_tensors(shapes or {})
            return {name: checkpoint.read(name) for name in checkpoint.tensors}
    except CheckpointError as error:
        refused = error
    assert refused.file
    assert refused.rule
    assert time.thread_time() - begun < MOST_SECONDS
    return refused


def assert_no_less(found: Tensors | CheckpointError, want: Tensors, what: object) -> None:
    if not isinstance(found, CheckpointError):
        assert found.keys() == want.keys(), what
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items()), what


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_file_that_is_missing_cut_short_or_a_link_makes_less_of_a_checkpoint(layout: str, tmp_path: Path) -> None:
    root = tmp_path / "save"
    target = LAYOUTS[layout](root)
    want = read_all(target)
    # Nothing but the model says how long the tensors are of which each rank keeps its own rows in a file of its own.
    shapes = {name: tuple(tensor.shape) for name, tensor in want.items()} if layout == "dcp-safetensors" else None
    away = tmp_path / "away"
    refused = 0
    for path in sorted(path for path in root.rglob("*") if path.is_file() and not path.name.endswith(target.spared or ("\0",))):
        shutil.move(path, away)
        found = opened(root, target, shapes)
        assert_no_less(found, want, f"{path.name} is missing")
        refused += isinstance(found, CheckpointError)
        path.symlink_to(away)
        found = opened(root, target, shapes)
        assert_no_less(found, want, f"{path.name} is a link out of the folder")
        path.unlink()
        os.mkfifo(path)
        assert_no_less(opened(root, target, shapes), want, f"{path.name} is a pipe")
        path.unlink()
        data = away.read_bytes()
        for part in (data[:-1], data[: len(data) // 2], b""):
            path.write_bytes(part)
            assert_no_less(opened(root, target, shapes), want, f"{path.name} has {len(part)} of {len(data)} bytes")
        path.unlink()
        shutil.move(away, path)
    assert refused, "no file of the layout is needed"
    assert_no_less(read_all(target), want, SEED)


def dcp_ranks(root: Path) -> None:
    (root / "__9999999999.metadata").write_bytes((root / ".metadata").read_bytes())
    (root / ".metadata").unlink()


def dcp_shards(root: Path) -> None:
    (root / "shard-00003-model-00001-of-00001.safetensors").rename(root / "shard-99999999999-model-00001-of-00001.safetensors")


def many_keys(root: Path) -> None:
    keys = ", ".join(f'"{number}": 0' for number in [*range(300_000), 299_999])
    (root / "config.json").write_text(f'{{"model_type": "gpt2", "vocab_size": 11, {keys}}}')


def many_sizes(root: Path) -> None:
    sizes = ", ".join(["9223372036854775807"] * 1_000_000)
    header = f'{{"w": {{"dtype": "F32", "shape": [{sizes}], "data_offsets": [0, 4]}}}}'.encode()
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


def many_dimensions(root: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]}}).encode()
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


def one_stage(root: Path) -> None:
    (stage,) = root.glob("*/layer_06-model_states.pt")
    torch.save({"module": None, "mp_world_size": 2}, stage.with_name("mp_rank_00_model_states.pt"))


def no_last_norm(root: Path) -> None:
    for number in (5, 6):
        next(root.glob(f"*/layer_{number:02d}-model_states.pt")).unlink()


@pytest.mark.parametrize(
    ("layout", "change", "rule"),
    [
        ("dcp", dcp_ranks, "though there is __9999999999.metadata"),
        ("dcp-safetensors", dcp_shards, "there is none of rank 3"),
        ("hf", many_keys, "key '299999' is given twice"),
        ("hf", many_sizes, "list of counts, at most 16"),
        ("hf", many_dimensions, "list of counts, at most 16"),
        ("pipeline", no_last_norm, "has no layer with the last norm behind its blocks"),
        ("pipeline", one_stage, "there are 2 stages; the folder has the files of 1"),
    ],
)
def test_names_and_numbers_that_call_for_endless_work_are_refused_at_once(
    layout: str, change: Callable[[Path], None], rule: str, tmp_path: Path
) -> None:
    target = LAYOUTS[layout](tmp_path / "save")
    change(tmp_path / "save")
    found = opened(tmp_path / "save", target)
    assert isinstance(found, CheckpointError)
    assert rule in found.rule

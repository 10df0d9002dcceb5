"""``export``: what was interrupted leaves nothing that counts, and what was written is what was there, from every layout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import CheckpointError, open_checkpoint
from finetune.errors import ConfigError, RunError
from finetune.machine.process import stopped_in_order
from finetune.model.build import load_model
from finetune.output.new_checkpoint import write_new
from finetune.trained.export import export
from tests.checkpoint.folders import CONFIG, some_tensors
from tests.checkpoint.readers import deepspeed_folders, test_hostile
from tests.checkpoint.readers.hostile import Target
from tests.support.models import save
from tests.support.reference import load

SETTINGS: dict[str, Any] = {"step": 1, "config": CONFIG}


def then(act: Callable[[], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Some tensors, and ``act`` between the second and the third."""
    for number, tensor in enumerate(some_tensors().items()):
        if number == 2:
            act()
        yield tensor


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_ended_by_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), stopped_in_order():
        write_new(tmp_path / "out", then(lambda: os.kill(os.getpid(), number)), **SETTINGS)
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) == before


def test_what_a_killed_export_left_is_removed_by_the_next_and_never_taken_for_it(tmp_path: Path) -> None:
    left = tmp_path / ".out.export"
    write_new(left / "step-00000000", some_tensors(seed=1).items(), **SETTINGS)
    (left / f"step-00000001.tmp-{'0' * 32}").mkdir()
    write_new(tmp_path / "out", some_tensors(seed=2).items(), **SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with open_checkpoint(tmp_path / "out", verify="sha256") as checkpoint:
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in some_tensors(seed=2).items())


def adapted_in_16_bits(folder: Path) -> tuple[Path, torch.Tensor, str]:
    """An adapter on a base in bfloat16; what its adapted weight is in float32, and that one's name."""
    model = save("llama", folder / "base")
    file = model / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    name = "model.layers.0.self_attn.q_proj.weight"
    with open_checkpoint(model) as base:
        weight = base.read(name).float()
    down, up = torch.randn(2, weight.shape[1]) / 30, torch.randn(weight.shape[0], 2) / 30
    where = f"base_model.model.{name.removesuffix('.weight')}"
    (folder / "adapter").mkdir()
    save_file({f"{where}.lora_A.weight": down, f"{where}.lora_B.weight": up}, folder / "adapter" / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(model)}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(described))
    return folder / "adapter", weight + 2 * up @ down, name


def test_what_an_adapter_adds_to_a_base_in_16_bits_is_rounded_once(tmp_path: Path) -> None:
    adapter, want, name = adapted_in_16_bits(tmp_path)
    assert not torch.allclose(want.bfloat16().float(), want, rtol=0, atol=1e-5)
    with open_checkpoint(export(adapter, tmp_path / "wide", dtype=torch.float32)) as checkpoint:
        assert torch.allclose(checkpoint.read(name), want, rtol=0, atol=1e-6)
    with open_checkpoint(export(adapter, tmp_path / "kept")) as checkpoint:
        assert torch.equal(checkpoint.read(name), want.bfloat16())
    with open_checkpoint(adapter) as checkpoint:
        loaded = load_model(checkpoint, torch.float32).get_parameter(name)
        half = load_model(checkpoint, torch.float16).get_parameter(name)
    assert torch.allclose(loaded, want, rtol=0, atol=1e-6)
    assert torch.equal(half, want.half())


HELD_IN_THE_MIDDLE = """
import sys
from checkpoint import CheckpointWriter
from finetune.__main__ import main

add, added = CheckpointWriter.add, []

def add_and_wait(self, name, tensor):
    add(self, name, tensor)
    added.append(name)
    if len(added) == 5:
        print("in the middle", flush=True)
        sys.stdin.read()

CheckpointWriter.add = add_and_wait
main(sys.argv[1:])
"""
"""The command, which says when it has written five tensors and goes no further."""


def test_the_command_that_is_killed_in_the_middle_leaves_no_folder_and_ends_well_when_run_again(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "exported" / "out"
    save("gpt_neox", source)
    words = ["export", str(source), str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", HELD_IN_THE_MIDDLE, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as held:
        assert held.stdout is not None
        try:
            assert held.stdout.readline() == "in the middle\n"
        finally:
            held.kill()
    assert held.returncode == -signal.SIGKILL
    assert [path.name for path in out.parent.iterdir()] == [".out.export"]
    for left in (out, out.parent, *out.parent.rglob("*")):
        with pytest.raises(CheckpointError), open_checkpoint(left):
            pass
    again = subprocess.run([sys.executable, "-m", "finetune", *words], capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, f"{out}\n"), again.stderr
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with open_checkpoint(source) as stored, open_checkpoint(out, verify="sha256") as written:
        assert set(written.tensors) == set(stored.tensors)
        assert all(torch.equal(written.read(name), stored.read(name)) for name in stored.tensors)


def test_two_exports_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(ConfigError, match="another process is writing it"):
            write_new(tmp_path / "out", some_tensors(seed=2).items(), **SETTINGS)

    write_new(tmp_path / "out", then(second), **SETTINGS)
    with open_checkpoint(tmp_path / "out", verify="sha256") as checkpoint:
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in some_tensors().items())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_was_filled_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fill() -> None:
        out.mkdir()
        (out / "mine").touch()

    with pytest.raises(RunError, match="could not be written"):
        write_new(out, then(fill), **SETTINGS)
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_no_folder_can_be_made_is_said_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for out, says in (
        (tmp_path / "file" / "out", "no folder can be made there"),
        (tmp_path / "loop", "no folder can be made there"),
        (tmp_path / ("x" * 300), "no folder can be made there"),
        (tmp_path / "file", "exists already"),
        (tmp_path, "exists already"),
    ):
        with pytest.raises(ConfigError, match=says):
            export(tmp_path / "absent", out)


def test_the_working_folder_and_a_link_to_an_empty_one_are_places_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path(), tmp_path / "link"):
        open_checkpoint(write_new(out, some_tensors().items(), **SETTINGS)).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "there"]


def test_too_little_space_is_said_before_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = LAYOUTS["neox"](tmp_path / "source").path
    with open_checkpoint(source) as checkpoint:
        needed = sum(tensor.numel() * 4 for tensor in map(checkpoint.read, checkpoint.tensors))
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage(needed))
    monkeypatch.setattr("checkpoint.opening.open.read_stored", None)
    with pytest.raises(RunError, match=rf"needs {1.2 * needed:.0f} bytes free"):
        export(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def zero3(root: Path) -> Target:
    """A whole model with one matrix for embedding and head, in the masters of two ranks."""
    model = test_hostile.tiny("llama", tie_word_embeddings=True)
    deepspeed_folders.zero3_of(root, dict(model.named_parameters()), 2)
    model.config.save_pretrained(root)
    return Target(root)


LAYOUTS: dict[str, Callable[[Path], Target]] = {
    "zero3": zero3,
    "neox": lambda root: test_hostile.gpt_neox(root, family="gpt_neox", layers=True),
    "neox-llama": lambda root: test_hostile.gpt_neox(root, family="llama", layers=False),
    "megatron": test_hostile.megatron_lm,
    "megatron-dist": lambda root: test_hostile.megatron_dist(root, beside=False),
    "megatron-deepspeed": lambda root: test_hostile.megatron_deepspeed(root, layers=True),
    "adapter": lambda root: test_hostile.adapter(root, archive=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_exported_is_what_was_there_cut_or_whole_in_any_type(layout: str, tmp_path: Path) -> None:
    target = LAYOUTS[layout](tmp_path / "source")
    for ranks, dtype in ((1, None), (2, torch.bfloat16), (5, torch.float16)):
        out = export(target.path, tmp_path / f"out{ranks}", dtype=dtype, ranks=ranks, given=target.given)
        with open_checkpoint(out, verify="sha256") as written, open_checkpoint(target.path, given=target.given) as source:
            assert written.tensors.keys() == source.tensors.keys()
            for name in source.tensors:
                assert torch.equal(written.read(name), source.read(name).to(dtype)), (name, ranks)
    again = export(tmp_path / "out5", tmp_path / "again")
    with open_checkpoint(again) as written, open_checkpoint(tmp_path / "out5") as source:
        assert all(torch.equal(written.read(name), source.read(name)) for name in source.tensors)
        assert written.config["dtype"] == "float16"
    ids = torch.arange(16)[None]
    with torch.inference_mode():
        logits = load(tmp_path / "out1")(ids).logits
        torch.testing.assert_close(load(again).float()(ids).logits, logits, rtol=0, atol=1e-2)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 900; the longest side"):
        export(target.path, tmp_path / "out900", ranks=900, given=target.given)

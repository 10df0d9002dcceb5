"""What ``tessera-serve`` will not serve: exit code 2, one line that names the fault, and never a ready line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint import CheckpointWriter, open_checkpoint
from tests.support.server import ROOT


@pytest.fixture
def written(folder: Path, tmp_path: Path) -> Path:
    """The model as Tessera writes it: sharded, with a manifest."""
    with open_checkpoint(folder) as source:
        files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
        with CheckpointWriter(
            tmp_path / "run", step=7, config=source.config, tokenizer_files=files, max_shard_bytes=200_000
        ) as writer:
            for name in source.tensors:
                writer.add(name, source.read(name))
    return next((tmp_path / "run").glob("step-*"))


def _refusal(model: Path, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "serve",
        "--model",
        str(model),
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--device",
        "cpu",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_flipped_byte(written: Path) -> None:
    shard = sorted(written.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    assert shard.name in _refusal(written)


def test_swapped_shards(written: Path) -> None:
    one, two = sorted(written.glob("*.safetensors"))[:2]
    spare = written / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    assert one.name in _refusal(written)


def test_a_missing_shard_and_a_missing_folder(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").unlink()
    assert "model.safetensors" in _refusal(copy)
    assert "must exist" in _refusal(tmp_path / "nowhere")


def test_a_family_that_is_not_served(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    assert "gpt2, gpt_bigcode, gpt_neo, gpt_neox, gpt_oss, gptj, llama, mistral, mixtral" in _refusal(copy)


@pytest.mark.parametrize(
    ("change", "options", "rule"),
    [
        ({}, ("--tensor-parallel-size", "5"), "1, 2, 3, 4"),
        ({}, ("--pipeline-parallel-size", "4"), "the model's 3 layers can be dealt out to at most as many stages"),
        ({}, ("--max-model-len", "513"), "the model has 512 positions"),
        ({"model_type": "bert"}, (), "model_type is 'bert'"),
        ({"eos_token_id": 509}, (), "from 0 to 508"),
        ({"rope_scaling": {"type": "longrope"}}, (), "rope_scaling.short_factor is None"),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, (), "rope_scaling.factor is -1"),
        ({"vocab_size": 300}, (), "ids go up to 299"),
    ],
)
def test_what_config_json_alone_decides_is_refused_before_anything_heavy_is_imported(
    folder: Path, tmp_path: Path, change: dict[str, object], options: tuple[str, ...], rule: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **change}))
    program = (
        "import sys; from serve.cli import main; code = main(); "
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--model", str(copy), "--port", "0", "--metrics-port", "0", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=400,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert rule in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_public_address_without_saying_so(folder: Path) -> None:
    assert "loopback" in _refusal(folder, "--host", "0.0.0.0")

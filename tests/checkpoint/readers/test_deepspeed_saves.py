"""What DeepSpeed itself saved, opened where it lies: equal to the trainer's own weights and logits, slice by slice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint import CheckpointError, Given, open_checkpoint, open_structure, pinned
from finetune.machine import inventory, ops
from tests.checkpoint.readers.deepspeed_folders import zero3_of

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("deepspeed_saves.py")
IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79]])
RANKS = {"zero3-groups": 4, "zero2-masters": 1, "zero2-lora": 1, "zero2-lora-alone": 1}
"""Ranks that save each; the others are two."""
MASTERS = Given(master_weights=True)
ON_DISK = "zero3-disk"
NEEDS_LIBAIO = pytest.mark.skipif(inventory.libaio() is None, reason="libaio is missing: apt-get install libaio-dev")


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all saves, made by one process and its forks."""
    folder = tmp_path_factory.mktemp("saves")
    names = [name for name in CASES if name != ON_DISK or inventory.libaio() is not None]
    for op in (ops.CPU_ADAM, ops.PIN_MEMORY, ops.ASYNC_IO)[: 3 if ON_DISK in names else 1]:
        built = ops.ensure(op, print)
        assert built.available, built.reason
    command = [sys.executable, str(SCRIPT), str(folder), *(f"{name}:{RANKS.get(name, 2)}" for name in names)]
    environment = os.environ | {"PYTHONPATH": "", "PYTHONWARNINGS": "ignore", "OPS": str(ops.extensions_folder())}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


CASES = {
    "zero3-groups": ("DeepSpeed ZeRO-3", 2),
    "zero3-float": ("DeepSpeed ZeRO-3", 2),
    "zero3-offload": ("DeepSpeed ZeRO-3", 2),
    "zero2-masters": ("DeepSpeed ZeRO-0, 1 or 2", 2),
    "zero3-half": ("DeepSpeed ZeRO-3", 2),
    "zero3-half-offload": ("DeepSpeed ZeRO-3", 2),
    "zero2-half": ("DeepSpeed ZeRO-0, 1 or 2", 2),
    "zero2-half-offload": ("DeepSpeed ZeRO-0, 1 or 2", 2),
    "zero1-half": ("DeepSpeed ZeRO-0, 1 or 2", 2),
    "zero3-disk": ("DeepSpeed ZeRO-3", 2),
    "zero0": ("DeepSpeed ZeRO-0, 1 or 2", 2),
    "pipeline": ("DeepSpeed pipeline", 1),
    "pipeline-neox": ("DeepSpeed pipeline", 1),
    "pipeline-gpt2": ("DeepSpeed pipeline", 1),
    "universal3": ("DeepSpeed universal", 2),
    "universal2": ("DeepSpeed universal", 2),
    "parallel-llama": ("DeepSpeed tensor-parallel", 0),
    "parallel-tied": ("DeepSpeed tensor-parallel", 0),
    "parallel-neox": ("DeepSpeed tensor-parallel", 0),
    "parallel-uneven": ("DeepSpeed tensor-parallel", 0),
    "zero1-robin": ("DeepSpeed ZeRO-0, 1 or 2", 2),
    "zero3-lora": ("DeepSpeed ZeRO-3", 2),
    "zero2-lora": ("DeepSpeed ZeRO-0, 1 or 2", 2),
    "universal3-lora": ("DeepSpeed universal", 2),
    "zero2-lora-alone": ("", 0),
}
"""What each save is called, and the step it is of."""
IN_CLIENT_STATE = [
    "zero3-groups",
    "zero2-masters",
    "zero1-robin",
    "zero0",
    "parallel-llama",
    "pipeline",
    "universal3",
    "zero3-lora",
]
ADAPTED = ["zero3-lora", "zero2-lora", "universal3-lora"]
IN_FLOAT = [name for name in CASES if name.startswith(("parallel", "pipeline")) or name in ("zero3-float", "zero0", *ADAPTED)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[NEEDS_LIBAIO] if name == ON_DISK else [])
        for name in CASES
        if name != "zero1-robin" and "lora" not in name
    ],
)
def test_every_tensor_is_the_trainer_s_bit_for_bit_whole_and_in_slices(saves: Path, name: str) -> None:
    expected = torch.load(saves / name / "expected.pt")
    with open_checkpoint(saves / name / "save", given=MASTERS) as checkpoint:
        assert (checkpoint.layout, checkpoint.step) == CASES[name]
        assert checkpoint.tensors.keys() == expected.keys()
        for stored, tensor in expected.items():
            assert torch.equal(checkpoint.read(stored, dtype=torch.float32), tensor), stored
            for dim, size in enumerate(tensor.shape):
                before = checkpoint.bytes_read
                index = (slice(None),) * dim + (slice(size // 3, size - size // 4),)
                part = checkpoint.read(stored, index)
                assert torch.equal(part.float(), tensor[index]), stored
                assert checkpoint.bytes_read - before == part.nbytes


@pytest.mark.parametrize("name", [name for name in CASES if "half" in name])
def test_masters_that_training_kept_in_bfloat16_are_read_in_it(saves: Path, name: str) -> None:
    with open_checkpoint(saves / name / "save", given=MASTERS) as checkpoint:
        assert {stored.dtype for stored in checkpoint.tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", IN_CLIENT_STATE)
def test_a_configuration_in_the_client_state_does_for_config_json(saves: Path, tmp_path: Path, name: str) -> None:
    save = shutil.copytree(saves / name / "save", tmp_path / "save")
    (save / "config.json").unlink()
    with open_checkpoint(saves / name / "save") as expected, open_checkpoint(save) as checkpoint:
        assert checkpoint.config.items() >= expected.config.items()
        assert checkpoint.tensors == expected.tensors


@NEEDS_LIBAIO
def test_groups_on_disk_and_in_the_ranks_files_are_read_from_where_they_are(saves: Path, tmp_path: Path) -> None:
    save = saves / ON_DISK / "save"
    with open_checkpoint(save) as checkpoint:
        assert checkpoint.tensors["gpt_neox.embed_in.weight"].dtype == torch.float32
        assert checkpoint.tensors["lm_head.weight"].dtype == torch.bfloat16
    swapped = [path.name for path in save.rglob("rank00/*.tensor.swp") if path.name[0].isdigit()]
    assert len(swapped) == 1, "the other group is too small to be moved"
    moved = shutil.copytree(save, tmp_path / "save")
    shutil.rmtree(moved / "global_step2" / "offloaded_tensors")
    with pytest.raises(CheckpointError, match=r"offloaded_tensors: is missing: .* on NVMe, which a save copies there; copy it"):
        open_checkpoint(moved)


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_in_a_save_is_joined_with_the_base_beside_it(saves: Path, name: str) -> None:
    expected = torch.load(saves / name / "expected.pt")
    with open_checkpoint(saves / name / "save", given=MASTERS) as checkpoint:
        assert (checkpoint.layout, checkpoint.step) == CASES[name]
        assert checkpoint.tensors.keys() == expected.keys()
        for stored, tensor in expected.items():
            assert torch.allclose(checkpoint.read(stored), tensor, rtol=0, atol=1e-6), stored
            for dim, size in enumerate(tensor.shape):
                index = (slice(None),) * dim + (slice(size // 3, size - size // 4),)
                assert torch.allclose(checkpoint.read(stored, index), tensor[index], rtol=0, atol=1e-6), stored


def test_what_was_frozen_is_told_of_every_stage(saves: Path) -> None:
    for name in ("zero3-lora", "zero2-lora"):
        file = next((saves / name / "save").rglob("*model_states.pt"))
        listed = torch.load(file, weights_only=False)["frozen_param_shapes"]
        with open_structure(saves / name / "save") as structure:
            assert structure.weights.facts["frozen tensors"] == len(listed) > 20


def test_without_its_description_an_adapter_s_scale_is_asked_for(saves: Path, tmp_path: Path) -> None:
    save = shutil.copytree(saves / "zero3-lora" / "save", tmp_path / "save")
    described = tmp_path / "adapter_config.json"
    shutil.move(save / "adapter_config.json", described)
    with pytest.raises(CheckpointError, match=r"how the adapter is scaled .*adapter_config.json.*--adapter-config"):
        open_checkpoint(save)
    expected = torch.load(saves / "zero3-lora" / "expected.pt")
    for given in (described, shutil.copy(described, tmp_path / "mine.json"), tmp_path):
        with open_checkpoint(save, given=Given(adapter_config=str(given))) as checkpoint:
            name = "model.layers.1.mlp.down_proj.weight"
            assert torch.allclose(checkpoint.read(name), expected[name], rtol=0, atol=1e-6)
    described.write_text(json.dumps(json.loads(described.read_text()) | {"peft_type": "IA3"}))
    with pytest.raises(CheckpointError, match="peft_type is 'IA3'"):
        open_checkpoint(save, given=Given(adapter_config=str(described)))


@pytest.mark.parametrize("named", [True, False])
def test_an_adapter_that_was_saved_without_its_base_is_joined_with_it(saves: Path, tmp_path: Path, named: bool) -> None:
    case = shutil.copytree(saves / "zero2-lora-alone", tmp_path / "case")
    base, file = case / "base", case / "save" / "adapter_config.json"
    described = json.loads(file.read_text())
    file.write_text(json.dumps(described | {"base_model_name_or_path": str(base) if named else None}))
    given = Given() if named else Given(base=str(base))
    expected = torch.load(case / "expected.pt")
    with open_checkpoint(case / "save", given=given) as checkpoint:
        assert checkpoint.layout == "DeepSpeed ZeRO-0, 1 or 2 on Hugging Face"
        assert checkpoint.config["model_type"] == "llama"
        assert checkpoint.tensors.keys() >= expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(checkpoint.read(name), tensor, rtol=0, atol=1e-6), name
    assert pinned(case / "save", given).base == str(base.resolve())
    if not named:
        with pytest.raises(CheckpointError, match="names no base_model_name_or_path; name the base model's folder"):
            open_checkpoint(case / "save")


def test_masters_under_round_robin_are_those_of_the_weights_that_are_computed_with(saves: Path) -> None:
    save = saves / "zero1-robin" / "save"
    with open_checkpoint(save) as module, open_checkpoint(save, given=MASTERS) as masters:
        assert module.tensors.keys() == masters.tensors.keys()
        for name in module.tensors:
            master = masters.read(name)
            assert master.dtype == torch.float32
            assert torch.equal(master.bfloat16(), module.read(name)), name


@pytest.mark.parametrize("name", IN_FLOAT)
def test_logits_are_the_trainer_s(saves: Path, name: str) -> None:
    with open_checkpoint(saves / name / "save") as checkpoint:
        options = dict(checkpoint.config)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(options.pop("model_type"), **options), attn_implementation="eager"
        )
        tensors = {stored: checkpoint.read(stored) for stored in checkpoint.tensors}
        if name == "pipeline-gpt2":  # one matrix for embedding and head
            tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
        model.load_state_dict(tensors)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    assert torch.allclose(logits, torch.load(saves / name / "logits.pt"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_reads_its_own_bytes_of_four_ranks_files_and_holds_its_own_slices(tmp_path: Path, ranks: int) -> None:
    shapes = {f"layers.{number}.weight": (2048, 2048) for number in range(4)}
    zero3_of(tmp_path, {name: torch.full(shape, 0.01) for name, shape in shapes.items()}, 4)
    script = Path(__file__).with_name("zero3_memory.py")
    root = Path(__file__).parents[3]
    command = [sys.executable, str(script), str(tmp_path), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(root)}, check=True)
    shard, stored, num_bytes, grown = (int(word) for word in done.stdout.split())
    assert num_bytes == stored
    assert grown <= shard + (128 << 20), f"{grown >> 20} MiB for a shard of {shard >> 20} MiB"

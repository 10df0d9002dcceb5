"""DeepSpeed's saves: what is read, and what is refused with the file and the rule."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint import CheckpointError, Given, open_checkpoint
from checkpoint.given import NOTHING_GIVEN
from tests.checkpoint.folders import assert_holds
from tests.checkpoint.readers.deepspeed_folders import (
    ALIASES,
    CONFIG,
    TAG,
    change,
    model_file,
    optimizer_file,
    part,
    save_optimizer,
    tensors,
    zero1,
    zero3,
    zero3_of,
)
from tests.checkpoint.readers.test_pickles import Calls

MASTERS = Given(master_weights=True)


def all_tensors() -> dict[str, torch.Tensor]:
    values = tensors()
    return values | {alias: values[owner] for alias, owner in ALIASES.items()} | {"mask": torch.ones(2, 2)}


def refusal(path: Path, given: Given = MASTERS) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, given=given)
    return caught.value


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 40])
def test_the_parts_of_any_number_of_ranks_are_one_model(tmp_path: Path, world: int) -> None:
    zero3(tmp_path, world)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, all_tensors())
        assert (checkpoint.layout, checkpoint.step, checkpoint.config) == ("DeepSpeed ZeRO-3", 7, CONFIG)


def test_a_slice_of_zero3_takes_its_own_bytes_and_no_others(tmp_path: Path) -> None:
    zero3(tmp_path, 4)
    with open_checkpoint(tmp_path) as checkpoint:
        for index in [(slice(2, 9),), (slice(None), slice(1, 4)), (slice(3, 4), slice(5, 6))]:
            before = checkpoint.bytes_read
            read = checkpoint.read("wte.weight", index)
            assert torch.equal(read, tensors()["wte.weight"][index])
            assert checkpoint.bytes_read - before == read.numel() * 4


def test_sub_groups_that_were_swapped_to_nvme_are_read_from_the_copied_files(tmp_path: Path) -> None:
    folder, values, world = zero3(tmp_path, 2), tensors(), 2
    order = list(values)
    for rank in range(world):
        swap = folder / "offloaded_tensors" / f"rank{rank:02d}"
        swap.mkdir(parents=True)
        names = ("wte.weight", "mlp.weight")
        flat = torch.cat([part(values[name], rank, world) for name in names])
        data = flat.numpy().tobytes()
        (swap / f"{order.index(names[0])}_{order.index(names[-1])}.tensor.swp").write_bytes(data + b"\0" * 100)
        (swap / "exp_avg-0_1.tensor.swp").write_bytes(data)
        rest = torch.cat([part(values[name], rank, world) for name in ("ln.bias", "scale", "attn.weight")])
        change(optimizer_file(folder, rank), fp32_flat_groups=[torch.empty(0), rest])
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, all_tensors())
    (folder / "offloaded_tensors/rank01/0_1.tensor.swp").write_bytes(data[:-4])
    error = refusal(tmp_path)
    assert (error.file, "cut short" in error.rule) == ("offloaded_tensors/rank01/0_1.tensor.swp", True)
    shutil.rmtree(folder / "offloaded_tensors")
    assert "on NVMe" in refusal(tmp_path).rule


def test_a_lost_rank_is_told(tmp_path: Path) -> None:
    folder = zero3(tmp_path, 3)
    optimizer_file(folder, 1).rename(tmp_path / "elsewhere")
    assert "of rank 1 of 3; was the save interrupted" in str(refusal(tmp_path))
    (tmp_path / "elsewhere").rename(optimizer_file(folder, 1))
    optimizer_file(folder, 2).unlink()
    assert "is of 3 ranks' model files; 2 ranks have an optimizer file" in str(refusal(tmp_path))
    model_file(folder, 2).unlink()
    assert "says that 3 ranks hold parts of it; the folder has the files of 2" in str(refusal(tmp_path))


def test_many_files_raise_the_limit_of_open_ones_or_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zero3(tmp_path, 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = os.dup(0) + 20  # the next free one, and 20 more
    os.close(few - 20)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        with monkeypatch.context() as patch:
            patch.setattr("checkpoint.readers.weights.resource.getrlimit", lambda _: (few, few))  # as if the system had no more
            assert "Too many open files; raise the limit" in refusal(tmp_path).rule
        with open_checkpoint(tmp_path) as checkpoint:
            assert len(checkpoint.files) == 80
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_saves_in_one_folder_are_told(tmp_path: Path) -> None:
    folder = zero3(tmp_path, 2)
    shutil.copy(optimizer_file(folder, 0), optimizer_file(folder, 0, prefix=""))
    assert "two saves lie in one folder" in refusal(tmp_path).rule


@pytest.mark.parametrize(("make", "given"), [(zero3, NOTHING_GIVEN), (zero1, MASTERS)])
@pytest.mark.parametrize("where", ["state", "group"])
def test_optimizers_of_two_steps_are_two_saves(tmp_path: Path, make: Callable[..., Path], given: Given, where: str) -> None:
    """A save over an earlier one of the same name, interrupted: the same files, of the same sizes."""
    folder = make(tmp_path, 3)
    key = "optimizer_state_dict" if make is zero3 else "base_optimizer_state"
    for rank in range(3):
        step = 7 if rank < 2 else 6
        taken = {"state": {0: {"step": torch.tensor(float(step))}}} if where == "state" else {"param_groups": [{"step": step}]}
        change(optimizer_file(folder, rank), **{key: taken})
    assert "is of step 6, bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt of step 7" in refusal(tmp_path, given).rule
    for rank in range(3):  # kept in a type that is none of a count's, a step says nothing
        taken = {"state": {0: {"step": torch.tensor(float(rank), dtype=torch.bfloat16)}}}
        change(optimizer_file(folder, rank), **{key: taken})
    with open_checkpoint(tmp_path, given=given) as checkpoint:
        assert checkpoint.step == 7


def test_model_files_of_two_steps_are_two_saves(tmp_path: Path) -> None:
    folder = zero3(tmp_path)
    change(model_file(folder, 2), global_steps=6)
    assert "two saves lie in one folder" in refusal(tmp_path).rule


def test_a_universal_checkpoint_whose_conversion_exchanged_parameters_is_refused(tmp_path: Path) -> None:
    """``ds_to_universal`` goes by DeepSpeed's ``param_slice_mappings``, which are wrong under ``round_robin_gradients``."""
    folder = zero1(tmp_path)
    for name, tensor in tensors().items():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor}, folder / "zero" / name / "fp32.pt")
    for robin, world, refused in [(False, 3, False), (True, 1, False), (True, 3, True)]:
        settings = {"zero_optimization": {"stage": 2, "round_robin_gradients": robin}}
        change(folder / "mp_rank_00_model_states.pt", ds_config=settings, dp_world_size=world)
        if refused:
            assert "open the save that was converted" in refusal(tmp_path).rule
        else:
            with open_checkpoint(tmp_path) as checkpoint:
                assert torch.equal(checkpoint.read("wte.weight"), tensors()["wte.weight"])


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        ({"param_shapes": None}, "has no param_shapes"),
        ({"param_shapes": [{"wte.weight": torch.Size([11, 6])}]}, "calls for 17 on each of 4 ranks"),
        ({"param_shapes": [{"wte.weight": torch.Size([0, 6])}]}, r"gives the tensor 'wte.weight' the shape \(0, 6\)"),
        ({"param_shapes": [{"wte.weight": torch.Size([1 << 62, 1 << 40])}]}, "calls for"),
        ({"frozen_param_shapes": None}, "an empty placeholder for 'frozen.weight'"),
        ({"frozen_param_fragments": {"frozen.weight": torch.ones(12, dtype=torch.int8)}}, "its values are lost"),
        ({"frozen_param_fragments": {"frozen.weight": torch.ones(11)}}, "holds 11 elements of the frozen"),
        ({"frozen_param_fragments": None}, "holds no part of 'frozen.weight'"),
        ({"shared_params": {"head.weight": "nothing"}}, "is one with 'nothing', which it does not have"),
        ({"module": 3}, "has int at module, where a table must stand"),
    ],
)
def test_what_zero3_files_cannot_be_is_refused(tmp_path: Path, model: dict[str, object], rule: str) -> None:
    zero3(tmp_path, 4, **model)
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(tmp_path)


def adapted(root: Path, *names: str, alpha: float = 6) -> dict[str, torch.Tensor]:
    """A save of ZeRO-3 with a layer and its factors below peft's names, and these tensors beside."""
    layer, draw = "base_model.model.h.0.up", torch.Generator().manual_seed(1)
    shapes = {
        f"{layer}.base_layer.weight": (5, 7),
        f"{layer}.lora_A.mine.weight": (2, 7),
        f"{layer}.lora_B.mine.weight": (5, 2),
    }
    shapes |= dict.fromkeys(names, (3, 3))
    values = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    zero3_of(root, values, 3)
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha}
    (root / "adapter_config.json").write_text(json.dumps(described))
    base, down, up = list(values.values())[:3]
    return {"h.0.up.weight": base + alpha / 2 * up @ down}


def test_an_adapter_in_a_save_is_joined_by_its_description_above(tmp_path: Path) -> None:
    expected = adapted(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.layout == "DeepSpeed ZeRO-3"
        assert checkpoint.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(checkpoint.read(name), tensor, rtol=0, atol=1e-6)
            assert torch.allclose(checkpoint.read(name, (slice(1, 4), slice(2, 6))), tensor[1:4, 2:6], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("base_model.model.h.0.up.lora_A.other.weight", "holds the adapters mine, other"),
        ("base_model.model.h.1.up.base_layer.weight", "adapts 'h.1.up' by other means than LoRA"),
        ("base_model.model.h.1.up.lora_A.mine.weight", "not the base model's weight of it, and those of other layers"),
        (
            "base_model.model.h.0.up.lora_C.mine.weight",
            "'h.0.up.lora_C.mine.weight', which no adapter of LoRA has that is read",
        ),
    ],
)
def test_what_an_adapter_in_a_save_cannot_be_is_refused(tmp_path: Path, name: str, rule: str) -> None:
    adapted(tmp_path, name)
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(tmp_path)


def test_experts_are_refused_by_the_name_of_their_files(tmp_path: Path) -> None:
    folder = zero3(tmp_path, 1)
    (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").touch()
    assert "experts of a mixture" in refusal(tmp_path).rule


def test_the_module_is_read_below_zero3_and_the_masters_where_they_are_asked_for(tmp_path: Path) -> None:
    zero1(tmp_path)
    values = tensors()
    module = {name: tensor.bfloat16() for name, tensor in values.items()}
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, module | {"head.weight": module["wte.weight"]})
    with open_checkpoint(tmp_path, given=MASTERS) as checkpoint:
        assert_holds(checkpoint, values | {"head.weight": values["wte.weight"]})


def test_masters_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    folder = zero1(tmp_path, 3)
    save_optimizer(
        optimizer_file(folder, 1), {"single_partition_of_fp32_groups": [torch.ones(3)] * 2, "partition_count": [3, 3]}
    )
    assert "has groups whose master weights hold" in refusal(tmp_path).rule
    optimizer_file(folder, 2).unlink()
    assert "says that 3 ranks" in refusal(tmp_path).rule
    for path in folder.glob("*optim*"):
        path.unlink()
    assert "in no optimizer file of ZeRO" in refusal(tmp_path).rule
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensors["wte.weight"].dtype == torch.bfloat16


def test_a_root_is_opened_at_what_latest_names_and_a_missing_or_empty_save_is_told(tmp_path: Path) -> None:
    zero3(tmp_path, 2)
    shutil.copytree(tmp_path / TAG, tmp_path / "global_step10")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path.name == TAG
    (tmp_path / "latest").write_text("global_step99\n")
    error = refusal(tmp_path)
    assert str(error).startswith("latest: names 'global_step99', which is not here; there are global_step10, global_step7")
    (tmp_path / "global_step99").mkdir()
    assert "in which there is no file of a save" in refusal(tmp_path).rule
    (tmp_path / "latest").unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path.name == "global_step10"


def test_the_save_inside_a_folder_of_the_trainer_is_found_with_its_configuration(tmp_path: Path) -> None:
    for step in (5, 30):
        zero3(tmp_path / f"checkpoint-{step}", 2)
    for path in (tmp_path, tmp_path / "checkpoint-30", tmp_path / "checkpoint-30" / TAG):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.path == (tmp_path / "checkpoint-30" / TAG).resolve()
            assert checkpoint.config == CONFIG


@pytest.mark.parametrize("which", ["model", "optimizer", "latest"])
def test_links_and_names_that_leave_the_folder_are_refused(tmp_path: Path, which: str) -> None:
    folder = zero3(tmp_path / "save", 2)
    if which == "latest":
        (tmp_path / "save" / "latest").write_text("../elsewhere")
        assert refusal(tmp_path / "save").file == "latest"
        return
    path = model_file(folder, 1) if which == "model" else optimizer_file(folder, 1)
    path.rename(tmp_path / "outside.pt")
    path.symlink_to(tmp_path / "outside.pt")
    assert "leaves the checkpoint's folder" in refusal(tmp_path / "save").rule


def test_states_and_numbers_of_numpy_beside_the_weights_are_passed_over(tmp_path: Path) -> None:
    save = zero3(tmp_path, best=np.float64(0.5), states=np.random.default_rng(0).integers(9, size=4))
    with open_checkpoint(save) as opened:
        assert_holds(opened, all_tensors())


def test_nothing_in_an_engine_s_pickle_runs(tmp_path: Path) -> None:
    folder, canary = zero3(tmp_path, 1), tmp_path / "canary"
    change(model_file(folder, 0), client=Calls(open, str(canary), "w"))
    assert "names _io.open" in refusal(tmp_path).rule or "names io.open" in refusal(tmp_path).rule
    assert not canary.exists()

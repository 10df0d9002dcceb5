"""The JSON that DeepSpeed is given: for every combination the keys it needs, and none that belongs to another."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from finetune.config import (
    BatchConfig,
    DiskSettings,
    OffloadConfig,
    OptimizerConfig,
    SaveConfig,
    TuneConfig,
    ZenFlowConfig,
    ZeroConfig,
    to_deepspeed,
)
from finetune.config.deepspeed import SUB_GROUPS, fit_bucket, updates_early
from tests.finetune.config.test_rules import tune

DISK = DiskSettings(
    folder="/disk/tessera-run-1", block_bytes=1 << 20, queue_depth=32, threads=2, buffer_elements=1000, buffers=7,
    sub_group_elements=5000,
)  # fmt: skip


def made(config: TuneConfig, **how: Any) -> dict[str, Any]:
    return to_deepspeed(config, **{"device": "cuda", "precision": "bf16", "cpu_adam": True, **how})


def zero_of(config: TuneConfig, **how: Any) -> dict[str, Any]:
    zero: dict[str, Any] = made(config, **how)["zero_optimization"]
    return zero


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("pipeline", [False, True])
def test_one_precision_is_on_and_a_pipeline_clips_and_reduces_by_itself(precision: str, stage: Any, pipeline: bool) -> None:
    config = tune(zero=ZeroConfig(stage=stage), optimizer=OptimizerConfig(clip=0.5))
    json_ = made(config, precision=precision, pipeline=pipeline)
    assert [json_[name]["enabled"] for name in ("bf16", "fp16")] == [precision == "bf16", precision == "fp16"]
    assert json_["fp16"]["loss_scale"] == 1.0, "a fixed one: the engine changes and keeps the scale"
    assert json_["gradient_clipping"] == (0.0 if pipeline else 0.5)
    assert json_["zero_optimization"]["overlap_comm"] is not pipeline
    assert ("data_types" in json_) is (pipeline and precision != "fp32")
    assert ("communication_data_type" in json_) is (pipeline and precision == "fp16")
    norm_left_out = json_["zero_optimization"].get("compute_grad_norm") is False
    assert norm_left_out is (pipeline and precision == "fp32" and stage == 1)
    assert json_["zero_optimization"]["stage"] == (1 if pipeline and precision != "fp32" else stage)
    assert json.loads(json.dumps(json_)) == json_, "DeepSpeed reads it as a file too"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bucket_has_its_elements_in_every_collective_of_its_stage(stage: Any) -> None:
    zero = zero_of(tune(zero=ZeroConfig(stage=stage, bucket_elements=1234)))
    sizes = {key: value for key, value in zero.items() if key.endswith("bucket_size")}
    assert set(sizes.values()) == {1234}
    assert ("stage3_prefetch_bucket_size" in sizes) is (stage == 3)
    assert "aio" not in made(tune()), "nothing is set for a disk that is not used"
    assert zero_of(tune(), device="cpu")["overlap_comm"] is False


@pytest.mark.parametrize(("trained", "size"), [(5000, 1234), (1234, 1234), (1000, 1000), (0, 1)])
def test_a_bucket_of_gradients_is_no_larger_than_they_are(trained: int, size: int) -> None:
    json_ = made(tune(zero=ZeroConfig(stage=2, bucket_elements=1234)))
    fit_bucket(json_, trained)
    zero = json_["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (size, 1234)


def test_what_the_disk_can_do_decides_buffers_of_what_lies_there_and_of_nothing_else() -> None:
    on_disk = {"path": "/disk"}
    for optimizer, parameters in (("nvme", "none"), ("cpu", "nvme"), ("nvme", "nvme"), ("nvme", "cpu")):
        config = tune(offload=OffloadConfig(optimizer=optimizer, parameters=parameters, **on_disk))  # type: ignore[arg-type]
        json_ = made(config, disk=DISK)
        aio = json_["aio"]
        assert (aio["block_size"], aio["queue_depth"], aio["intra_op_parallelism"]) == (1 << 20, 32, 2)
        zero = json_["zero_optimization"]
        assert zero["sub_group_size"] == 5000
        assert zero["offload_optimizer"].get("nvme_path") == (DISK.folder if optimizer == "nvme" else None)
        if parameters == "none":
            assert "offload_param" not in zero
            continue
        there = zero["offload_param"]
        found = (there.get("nvme_path"), there.get("buffer_size"), there.get("buffer_count"))
        assert found == ((DISK.folder, 1000, 7) if parameters == "nvme" else (None, None, None))
        assert zero["stage3_prefetch_bucket_size"] == (1000 if parameters == "nvme" else 50_000_000)
    small = tune(zero=ZeroConfig(bucket_elements=10), offload=OffloadConfig(optimizer="cpu", parameters="nvme", **on_disk))
    assert zero_of(small, disk=DISK)["stage3_prefetch_bucket_size"] == 10, "no more ahead than a bucket, whatever has room"


def test_a_disk_that_was_not_measured_is_a_mistake_of_ours() -> None:
    config = tune(offload=OffloadConfig(optimizer="nvme", path="/disk"))
    with pytest.raises(AssertionError, match="before the disk was measured"):
        made(config)


@pytest.mark.parametrize(("elements", "size"), [(4 * SUB_GROUPS * 1000, 1000), (4 * SUB_GROUPS - 1, 1), (1, 1)])
def test_a_ratio_is_shared_out_in_whole_pieces_of_a_ranks_part(elements: int, size: int) -> None:
    shared = tune(offload=OffloadConfig(optimizer="cpu", ratio=0.3))
    zero = zero_of(shared, elements=elements)
    assert (zero["offload_optimizer"]["ratio"], zero["sub_group_size"]) == (0.3, size)
    whole = zero_of(replace(shared, offload=OffloadConfig(optimizer="cpu")), elements=elements)
    assert "ratio" not in whole["offload_optimizer"]
    assert "sub_group_size" not in whole


def test_a_method_is_named_only_where_it_is_deepspeeds() -> None:
    for method in ("plain", "zenflow", "superoffload"):
        save = SaveConfig(resume_state=method != "superoffload")
        zero = zero_of(tune(offload=OffloadConfig(optimizer="cpu", method=method), save=save))
        assert ("super_offload" in zero["offload_optimizer"]) is (method == "superoffload")
        assert "zenflow" not in zero, "ours works over the flat pieces, and DeepSpeed knows nothing of it"
    paces = OffloadConfig(optimizer="cpu", method="zenflow", zenflow=ZenFlowConfig(share=0.5))
    assert zero_of(tune(offload=paces)) == zero_of(tune(offload=OffloadConfig(optimizer="cpu")))


@pytest.mark.parametrize(
    ("method", "clip", "early"),
    [("superoffload", 0.0, True), ("superoffload", 1.0, False), ("plain", 0.0, False), ("zenflow", 0.0, False)],
)
def test_weights_are_updated_early_where_superoffload_waits_for_no_norm(method: Any, clip: float, early: bool) -> None:
    save = SaveConfig(resume_state=method != "superoffload")
    config = tune(offload=OffloadConfig(optimizer="cpu", method=method), save=save)
    assert updates_early(replace(config, optimizer=replace(config.optimizer, clip=clip))) is early


def test_a_step_is_cut_as_the_configuration_says() -> None:
    json_ = made(tune(batch=BatchConfig(micro=3, total=24)))
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [json_[size] for size in sizes] == [3, 2, 24]

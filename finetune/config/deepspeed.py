"""The one place where DeepSpeed's JSON is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from finetune.config.whole import TuneConfig

SUB_GROUPS: Final = 32
"""Pieces that ``offload.ratio`` shares out, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSettings:
    """How NVMe offload moves tensors: found by a measurement of the disk and by the model's own sizes."""

    folder: str
    """This run's own, below ``offload.path``."""
    block_bytes: int
    """Bytes of one request."""
    queue_depth: int
    """Requests in flight."""
    threads: int
    """Threads that share one tensor's requests."""
    buffer_elements: int
    """Elements of one parameter buffer: this rank's part of the largest tensor."""
    buffers: int
    """Parameter buffers."""
    sub_group_elements: int
    """Elements the optimizer reads, updates and writes at once."""


def updates_early(config: TuneConfig) -> bool:
    """Whether DeepSpeed updates weights while gradients are still computed: SuperOffload, where nothing waits for their norm.

    By DeepSpeed 0.19.8, ``runtime/superoffload/superoffload_stage3.py``: what turns out not to be finite is in them by then.
    """
    return config.offload.method == "superoffload" and config.optimizer.clip == 0


def to_deepspeed(
    config: TuneConfig,
    *,
    device: str,
    precision: str,
    cpu_adam: bool,
    disk: DiskSettings | None = None,
    elements: int | None = None,
    pipeline: bool = False,
) -> dict[str, Any]:
    """Make DeepSpeed's configuration: the only place that knows its keys.

    Args:
        device: ``cpu`` or ``cuda``, already decided.
        precision: ``bf16``, ``fp16`` or ``fp32``, already decided.
        cpu_adam: whether DeepSpeed's CPU Adam was built; without it an offloaded optimizer is torch's.
        disk: needed when anything is offloaded to NVMe.
        elements: of the model, on all ranks together; needed for ``offload.ratio``.
        pipeline: for ``finetune.engines.pipeline.engine``, which clips by itself.
    """
    json: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch.micro,
        "gradient_accumulation_steps": config.accumulation,
        "train_batch_size": config.step_samples,
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": precision == "bf16"},
        # A fixed scale as far as DeepSpeed knows: the engine sets it before each step, so that it can be saved and explained.
        "fp16": {"enabled": precision == "fp16", "loss_scale": 1.0},
        "zero_optimization": _zero(config, device, disk, elements),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": config.offload.optimizer != "none" and cpu_adam,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if disk is not None:
        json["aio"] = {
            "block_size": disk.block_bytes,
            "queue_depth": disk.queue_depth,
            "intra_op_parallelism": disk.threads,
            "single_submit": False,
            "overlap_events": True,
        }
    if pipeline:
        json["zero_optimization"]["overlap_comm"] = False
        json["gradient_clipping"] = 0.0
        if precision != "fp32":
            # Gradients are added up in fp32. The optimizer's state is spread over the ranks of a stage in stage 0 too.
            json["zero_optimization"]["stage"] = 1
            json["data_types"] = {"grad_accum_dtype": "fp32"}
            if precision == "fp16":
                # Over ranks as well: a sum can lie beyond fp16's largest number where none of its parts does.
                json["communication_data_type"] = "fp32"
        elif config.zero.stage == 1:
            json["zero_optimization"]["compute_grad_norm"] = False
    return json


def fit_bucket(json: dict[str, Any], trained: int) -> None:
    """Make the bucket of gradients no larger than all of them.

    DeepSpeed takes memory for a whole bucket in every backward pass, or once, and never writes more than the gradients there.

    Args:
        json: as ``to_deepspeed`` makes it; it is changed.
        trained: elements of the weights with a gradient, whole ones.
    """
    zero = json["zero_optimization"]
    zero["reduce_bucket_size"] = max(1, min(zero["reduce_bucket_size"], trained))


def _zero(config: TuneConfig, device: str, disk: DiskSettings | None, elements: int | None) -> dict[str, Any]:
    offload, buckets = config.offload, config.zero.bucket_elements
    assert disk is not None or not offload.on_disk, "NVMe offload was configured before the disk was measured"
    zero: dict[str, Any] = {
        "stage": config.zero.stage,
        "reduce_bucket_size": buckets,
        "allgather_bucket_size": buckets,
        "contiguous_gradients": True,
        # On CPU nothing overlaps: the same cores compute and communicate. On a GPU it is also what has DeepSpeed wait for its
        # copies of offloaded gradients before it is asked whether they are finite.
        "overlap_comm": device == "cuda",
    }
    if config.zero.stage == 3:
        zero["stage3_prefetch_bucket_size"] = buckets
    # Pinned memory speeds up copies to a GPU; without one it only costs memory that cannot be swapped.
    pinned = {"pin_memory": device == "cuda"}
    if offload.parameters != "none":
        zero["offload_param"] = {"device": offload.parameters, **pinned}
    if offload.optimizer != "none":
        zero["offload_optimizer"] = {"device": offload.optimizer, **pinned}
        if offload.ratio < 1.0:
            assert elements is not None, "a ratio of what?"
            zero["offload_optimizer"]["ratio"] = offload.ratio
            # Whole sub-groups go to one side or the other: enough of them to come near any ratio.
            zero["sub_group_size"] = max(1, elements // config.run.ranks // SUB_GROUPS)
        if offload.method == "superoffload":
            zero["offload_optimizer"]["super_offload"] = True
    if disk is not None:
        zero["sub_group_size"] = disk.sub_group_elements
        if offload.parameters == "nvme":
            zero["offload_param"] |= {
                "nvme_path": disk.folder, "buffer_size": disk.buffer_elements, "buffer_count": disk.buffers
            }  # fmt: skip
            # What is fetched ahead must find a buffer.
            zero["stage3_prefetch_bucket_size"] = min(buckets, disk.buffer_elements)
        if offload.optimizer == "nvme":
            zero["offload_optimizer"] |= {"nvme_path": disk.folder, "buffer_count": 5}
    return zero

"""The one place where DeepSpeed's JSON is made."""

from __future__ import annotations

from typing import Any

from finetune.config.whole import TuneConfig


def to_deepspeed(config: TuneConfig, *, device: str, precision: str, cpu_adam: bool, pipeline: bool = False) -> dict[str, Any]:
    """Make DeepSpeed's configuration: the only place that knows its keys.

    Args:
        device: ``cpu`` or ``cuda``, already decided.
        precision: ``bf16`` or ``fp32``, already decided.
        cpu_adam: whether DeepSpeed's CPU Adam was built; without it an offloaded optimizer is torch's.
        pipeline: for ``finetune.pipeline``, which clips by itself.
    """
    # Pinned memory speeds up copies to a GPU; without one it only costs memory that cannot be swapped.
    offload = {"device": "cpu", "pin_memory": device == "cuda"}
    zero: dict[str, Any] = {
        "stage": config.zero.stage,
        "reduce_bucket_size": config.zero.bucket_elements,
        "allgather_bucket_size": config.zero.bucket_elements,
        "contiguous_gradients": True,
        # On CPU nothing overlaps: the same cores compute and communicate.
        "overlap_comm": device == "cuda",
    }
    if config.zero.stage == 3:
        zero["stage3_prefetch_bucket_size"] = config.zero.bucket_elements
        if config.offload.parameters == "cpu":
            zero["offload_param"] = offload
    if config.offload.optimizer == "cpu":
        zero["offload_optimizer"] = offload
    json = {
        "train_micro_batch_size_per_gpu": config.batch.micro,
        "gradient_accumulation_steps": config.accumulation,
        "train_batch_size": config.step_samples,
        "gradient_clipping": config.optimizer.clip,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": config.offload.optimizer == "cpu" and cpu_adam,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if pipeline:
        zero["overlap_comm"] = False
        json["gradient_clipping"] = 0.0
        if precision == "bf16":
            # Gradients are added up in fp32. The optimizer's state is spread over the ranks of a stage in stage 0 too.
            zero["stage"] = 1
            json["data_types"] = {"grad_accum_dtype": "fp32"}
        elif config.zero.stage == 1:
            zero["compute_grad_norm"] = False
    return json

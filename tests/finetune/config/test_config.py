"""DeepSpeed's JSON and the schedule follow from the configuration."""

from __future__ import annotations

import pytest

from finetune.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TokenizerConfig,
    TuneConfig,
    ZeroConfig,
    to_deepspeed,
)
from finetune.errors import ConfigError
from finetune.launch.rank import choose_precision
from finetune.train.schedule import make_schedule


def config(**changes: object) -> TuneConfig:
    parts: dict[str, object] = {
        "run": RunConfig(output="out", ranks=2),
        "data": DataConfig(train=("text",)),
        "model": ModelConfig(new={"model_type": "gpt_neox"}),
        "tokenizer": TokenizerConfig(path="somewhere"),
        **changes,
    }
    return TuneConfig(**parts)  # type: ignore[arg-type]


def test_batch_sizes_agree() -> None:
    made = to_deepspeed(config(batch=BatchConfig(micro=4, total=24)), device="cpu", precision="fp32", cpu_adam=False)
    assert made["train_micro_batch_size_per_gpu"] == 4
    assert made["gradient_accumulation_steps"] == 3
    assert made["train_batch_size"] == 24


def test_offload_is_pinned_only_for_a_gpu() -> None:
    both = config(offload=OffloadConfig(optimizer="cpu", parameters="cpu"))
    for device, pinned in (("cpu", False), ("cuda", True)):
        zero = to_deepspeed(both, device=device, precision="bf16", cpu_adam=True)["zero_optimization"]
        assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": pinned}
        assert zero["offload_param"] == {"device": "cpu", "pin_memory": pinned}


@pytest.mark.parametrize("stage", [1, 2])
def test_lower_stages_keep_parameters_whole(stage: int) -> None:
    zero = to_deepspeed(config(zero=ZeroConfig(stage=stage)), device="cpu", precision="fp32", cpu_adam=True)  # type: ignore[arg-type]
    assert zero["zero_optimization"]["stage"] == stage
    assert "offload_param" not in zero["zero_optimization"]
    assert zero["zero_force_ds_cpu_optimizer"] is False


def test_without_cpu_adam_deepspeed_takes_the_torch_optimizer() -> None:
    offloaded = config(offload=OffloadConfig(optimizer="cpu"))
    assert to_deepspeed(offloaded, device="cpu", precision="fp32", cpu_adam=True)["zero_force_ds_cpu_optimizer"] is True
    assert to_deepspeed(offloaded, device="cpu", precision="fp32", cpu_adam=False)["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_in_16_bits_adds_up_gradients_in_fp32_and_spreads_its_state(stage: int) -> None:
    given = config(zero=ZeroConfig(stage=stage))  # type: ignore[arg-type]
    for precision, sent in (("bf16", None), ("fp16", "fp32")):
        made = to_deepspeed(given, device="cuda", precision=precision, cpu_adam=False, pipeline=True)
        assert made["zero_optimization"]["stage"] == 1
        assert made["data_types"] == {"grad_accum_dtype": "fp32"}
        assert made.get("communication_data_type") == sent


@pytest.mark.parametrize(("has_bf16", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_without_bf16_computes_in_fp16(has_bf16: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: has_bf16)
    assert choose_precision(config(), "cuda") == chosen
    assert choose_precision(config(), "cpu") == "fp32"


def test_steps_follow_from_epochs() -> None:
    epochs = config(
        batch=BatchConfig(micro=5), schedule=ScheduleConfig(epochs=2.5, warmup=0.1), optimizer=OptimizerConfig(lr=1.0)
    )
    made = make_schedule(epochs, 100)
    assert (made.steps, made.warmup_steps) == (25, 2)


@pytest.mark.parametrize("eps", [0.0, -1e-8, 1e-46, float("nan")])
def test_an_epsilon_keeps_zero_from_being_divided_by_zero(eps: float) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.eps is .*; it must be at least 1e-30"):
        OptimizerConfig(eps=eps)

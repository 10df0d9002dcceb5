"""Bytes of each kind, by phase and place. Real runs are compared in ``benchmarks/forecast.py``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune.config import ActivationConfig, BatchConfig, OffloadConfig, OptimizerConfig, PipelineConfig, ZeroConfig
from finetune.forecast.estimate import forecast, model_config_of
from finetune.forecast.facts import facts_of
from finetune.forecast.layout import layout_of
from finetune.forecast.memory import _phases, _state, _step, need_of
from finetune.optimizers.algorithms.muon import BUFFERS
from tests.finetune.forecast.support import GIB, NEW, config_of, forecast_of, hardware


def device_bytes(stage: int, ranks: int, **offload: str) -> int:
    """State on a described GPU, by need's items."""
    config = config_of(run={"ranks": ranks, "device": "auto"}, zero=ZeroConfig(stage=stage), offload=OffloadConfig(**offload))
    facts = facts_of(config, model_config_of(config), "bf16", on_gpu=False)
    need = need_of(facts, layout_of(config, device="cuda", precision="bf16"))
    return sum(need.device.get(name, 0) for name in ("weights", "fp32 weights", "moments", "gradients")) / facts.total


def test_states_on_a_gpu_follow_the_stages() -> None:
    """Bytes a parameter: 2 for bf16, 4 + 8 for the optimizer, 2 for gradients, each divided where the stage divides it."""
    assert device_bytes(1, 1) == pytest.approx(16, rel=0.01)
    assert device_bytes(2, 4) == pytest.approx(2 + 14 / 4, rel=0.01)
    assert device_bytes(3, 4) == pytest.approx(16 / 4, rel=0.01)
    assert device_bytes(3, 4, optimizer="cpu", parameters="cpu") == 0
    assert device_bytes(2, 4, optimizer="cpu") == pytest.approx(2, rel=0.01)


def test_inputs_of_blocks_that_wait_on_the_host_are_counted_there_to_the_byte_and_not_on_the_gpu() -> None:
    """They are pinned in buffers of their size, which all steps share: of each token and layer a row of 16-bit features."""
    told = {}
    for where in ("device", "cpu"):
        config = config_of(
            run={"ranks": 1, "device": "auto"}, activations=ActivationConfig(checkpoint=where), batch=BatchConfig(micro=2)
        )
        facts = facts_of(config, model_config_of(config), "bf16", on_gpu=False)
        told[where] = _phases(facts, layout_of(config, device="cuda", precision="bf16"))["backward pass"]
    inputs = 2 * config.data.seq_len * NEW["hidden_size"] * NEW["num_hidden_layers"] * 2
    assert told["cpu"][1]["block inputs"] == inputs
    assert "block inputs" not in told["device"][1]
    assert told["device"][0]["activations"] - told["cpu"][0]["activations"] == inputs


@pytest.mark.parametrize(("precision", "sent"), [("bf16", 2), ("fp16", 0)])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_in_16_bits_adds_up_gradients_in_fp32(stage: int, precision: str, sent: int) -> None:
    """Two stages of two ranks: bytes a parameter of a stage. bf16 gradients are copied once more, in bf16, to be sent."""
    config = config_of(
        run={"ranks": 4, "device": "auto"},
        pipeline=PipelineConfig(stages=2),
        zero=ZeroConfig(stage=stage),  # type: ignore[arg-type]
    )
    facts = facts_of(config, model_config_of(config), precision, on_gpu=False)
    phases = _phases(facts, layout_of(config, device="cuda", precision=precision, command="pretrain"))
    trained = facts.trained / 2
    for name in ("backward pass", "reduction", "optimizer step"):
        device, _ = phases[name]
        state = {"weights": 2, "fp32 weights": 4 / 2, "moments": 8 / 2, "gradients in fp32": 4, "gradients": 2}
        assert {item: device[item] / trained for item in state} == pytest.approx(state, rel=0.01)
    assert phases["reduction"][0]["reduced copy"] / trained == pytest.approx(4 + sent, rel=0.01)
    alone = dataclasses.replace(config, run=dataclasses.replace(config.run, ranks=2))
    reduction, _ = _phases(facts, layout_of(alone, device="cuda", precision=precision, command="pretrain"))["reduction"]
    assert "reduced copy" not in reduction, "nobody to send to"


@pytest.mark.parametrize(
    ("name", "of_matrices", "of_others"), [("adamw", 8, 8), ("lion", 4, 4), ("muon", 4, 8), ("adafactor", 0, 4)]
)
def test_moments_follow_the_optimizer(name: str, of_matrices: int, of_others: int) -> None:
    """Bytes an element of the blocks' matrices, and of all else but the two tables, which are Muon's others."""
    found = forecast_of(config_of(optimizer=OptimizerConfig(name=name), run={"ranks": 1}))  # type: ignore[arg-type]
    matrices, tables = 3 * (64 * 192 + 64 * 64 + 2 * 64 * 160), 2 * 512 * 64
    vectors = found.facts.total - matrices - tables
    of_tables = of_matrices if name == "adafactor" else of_others
    factors = 4 * (3 * (64 + 192 + 64 + 64 + 2 * (64 + 160)) + 2 * (512 + 64)) if name == "adafactor" else 0
    expected = of_matrices * matrices + of_tables * tables + of_others * vectors + factors
    assert found.need.host["moments"] == expected
    assert found.resume_bytes == 4 * found.facts.total + expected + (2 << 20)


def test_factors_are_on_every_rank_and_whole_matrices_on_the_device() -> None:
    def needs(name: str, ranks: int) -> tuple[dict[str, int], dict[str, int]]:
        config = config_of(
            run={"ranks": ranks, "device": "auto"},
            optimizer=OptimizerConfig(name=name),  # type: ignore[arg-type]
            zero=ZeroConfig(stage=2),
            offload=OffloadConfig(optimizer="cpu"),
        )
        facts = facts_of(config, model_config_of(config), "bf16", on_gpu=False)
        device, host = _step(facts, layout_of(config, device="cuda", precision="bf16"))
        _, state = _state(facts, layout_of(config, device="cuda", precision="bf16"))
        return device, {**host, **state}

    device, host = needs("adafactor", 4)
    _, alone = needs("adafactor", 1)
    factors = 4 * (3 * (64 + 192 + 64 + 64 + 2 * (64 + 160)) + 2 * (512 + 64))
    assert host["moments"] - factors == pytest.approx((alone["moments"] - factors) / 4, abs=4)
    assert not device.get("whole matrices")
    device, host = needs("muon", 4)
    assert device["whole matrices"] == 4 * BUFFERS * 64 * 192
    assert "whole matrices" not in host


def test_pretrain_with_one_stage_adds_up_gradients_in_fp32_too() -> None:
    config = config_of(run={"precision": "bf16"}, zero=ZeroConfig(stage=1))
    room = hardware()
    staged = forecast(config, model_config_of(config), room, precision="bf16", command="pretrain")
    assert staged.layout.sums_in_fp32
    assert staged.need.host["gradients in fp32"] == 4 * staged.facts.trained
    assert "gradients in fp32" not in forecast_of(config).need.host or forecast_of(config).need.host_phase == "optimizer step"


def test_a_pipeline_that_times_its_layers_holds_whole_logits_on_every_rank() -> None:
    """Before it is cut into stages each rank computes the head once, forward and backward."""

    def timed(**sections: Any) -> dict[str, int]:
        config = config_of(zero=ZeroConfig(stage=1), **sections)
        facts = facts_of(config, model_config_of(config), "fp32", on_gpu=False)
        return dict(
            _phases(facts, layout_of(config, device="cpu", precision="fp32", command="pretrain"))["timing of layers"][0]
        )

    whole = ActivationConfig(loss_rows=0)
    assert timed(activations=whole, pipeline=PipelineConfig(stages=2)) == {
        "logits of the timed head": 3 * 4 * 2 * 48 * 512,
        "weights": 2 * 4 * 512 * 64,
    }
    assert timed(activations=whole, pipeline=PipelineConfig(stages=2, partition="uniform")) == {}
    assert timed(pipeline=PipelineConfig(stages=2)) == {}


def test_one_rank_of_zero_three_gathers_nothing_on_a_cpu() -> None:
    """Its part of every weight is the whole weight, which it computes with where it lies."""

    def gathered(ranks: int) -> int:
        config = config_of(run={"ranks": ranks}, zero=ZeroConfig(stage=3), batch=BatchConfig(micro=16))
        facts = facts_of(config, model_config_of(config), "fp32", on_gpu=False)
        phases = _phases(facts, layout_of(config, device="cpu", precision="fp32"))
        return phases["backward pass"][0].get("gathered weights", 0)

    assert gathered(1) == 0
    assert gathered(2) > 0


def test_one_rank_of_zero_three_copies_weights_on_a_gpu_only_from_where_they_wait() -> None:
    def backward(ranks: int, parameters: str) -> dict[str, int]:
        offload = OffloadConfig(optimizer="cpu", parameters=parameters)  # type: ignore[arg-type]  # one of its places
        config = config_of(run={"ranks": ranks, "device": "cuda"}, zero=ZeroConfig(stage=3), offload=offload)
        facts = facts_of(config, model_config_of(config), "bf16", on_gpu=True)
        return dict(_phases(facts, layout_of(config, device="cuda", precision="bf16"))["backward pass"][0])

    alone, waiting, two = backward(1, "none"), backward(1, "cpu"), backward(2, "none")
    assert "gathered weights" not in alone
    assert waiting["gathered weights"] == two["gathered weights"] > 0
    assert alone["reduced copy"] == waiting["reduced copy"] == two["reduced copy"] // 2 > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_zero_three_takes_the_norm_of_an_offloaded_gradient_in_fp64_on_the_gpu(ranks: int) -> None:
    """Of the copy that it takes back to the device, a part of the largest weight at a time."""

    def norm(optimizer: str, *, stage: int = 3, elements: int | None = None) -> int:
        offload = OffloadConfig(optimizer=optimizer)  # type: ignore[arg-type]  # one of its places
        config = config_of(run={"ranks": ranks, "device": "cuda"}, zero=ZeroConfig(stage=stage), offload=offload)
        facts = facts_of(config, model_config_of(config), "bf16", on_gpu=True)
        facts = facts if elements is None else dataclasses.replace(facts, largest=elements)
        layout = layout_of(config, device="cuda", precision="bf16")
        return _phases(facts, layout)["backward pass"][0].get("norm of a gradient", 0)

    assert norm("cpu", elements=1_000_000 * ranks) == (2 + 8) * 1_000_000
    assert norm("cpu", elements=400_000_000 * ranks) == 2 * 400_000_000 + 8 * 250_000_000
    assert norm("none") == 0, "what stays on the device is added up where it lies"
    assert norm("cpu", stage=2) == 0


def test_offload_moves_the_state_to_the_host() -> None:
    room = hardware(device="cuda", gpus=4, gpu_bytes=80 * GIB)
    big = {**NEW, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 4}
    run = {"ranks": 4, "device": "auto"}
    stays = forecast_of(config_of(new=big, run=run, zero=ZeroConfig(stage=3)), room)
    moved = forecast_of(
        config_of(new=big, run=run, zero=ZeroConfig(stage=3), offload=OffloadConfig(optimizer="cpu", parameters="cpu")), room
    )
    assert moved.device_bytes < stays.device_bytes
    assert moved.host_bytes - stays.host_bytes > 14 * moved.facts.total


@pytest.mark.parametrize(("stage", "command"), [(0, "pretrain"), (1, "pretrain"), (1, "tune")])
def test_zero_one_makes_a_bucket_beside_whole_gradients_and_reduces_it_where_it_lies(stage: int, command: str) -> None:
    """Without ZeRO a copy of the gradients is sent to the other ranks."""
    config = config_of(zero=ZeroConfig(stage=stage))  # type: ignore[arg-type]
    facts = facts_of(config, model_config_of(config), "fp32", on_gpu=False)
    reduction, _ = _phases(facts, layout_of(config, device="cpu", precision="fp32", command=command))["reduction"]
    assert reduction["gradients"] == 4 * facts.trained
    assert reduction.get("reduce bucket", 0) == (4 * facts.trained if stage else 0)
    assert reduction.get("reduced copy", 0) == (0 if stage else 4 * facts.trained)


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_zero_three_has_an_fp32_copy_of_its_weights_and_lays_gradients_of_16_bits_end_to_end(
    precision: str, width: int
) -> None:
    config = config_of(zero=ZeroConfig(stage=3))
    facts = facts_of(config, model_config_of(config), precision, on_gpu=False)
    layout = layout_of(config, device="cpu", precision=precision)
    share = -(-facts.trained // layout.ranks)
    state, _ = _state(facts, layout)
    assert (state["weights"], state["fp32 weights"]) == (width * share, 4 * share)
    step, _ = _step(facts, layout)
    assert step["gradients in fp32"] == (4 if width == 4 else 4 + width) * share

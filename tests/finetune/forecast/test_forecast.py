"""The forecast: what it counts, what it compares, what it says to change. Real runs are compared in ``test_observed.py``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config import (
    ActivationConfig,
    BatchConfig,
    DataConfig,
    LoraConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    SaveConfig,
    TokenizerConfig,
    TuneConfig,
    ZeroConfig,
)
from finetune.config.model import ModelConfig, TrainTokenizerConfig
from finetune.errors import ConfigError
from finetune.forecast.estimate import Forecast, forecast, model_config_of, precision_of
from finetune.forecast.facts import facts_of
from finetune.forecast.hardware import Hardware
from finetune.forecast.heap import Heap
from finetune.forecast.layout import layout_of
from finetune.forecast.memory import MATRIX_BUFFERS, _phases, _state, _step, need_of
from finetune.forecast.pace import keep_pace, kept_pace
from finetune.machine.memory import MemoryWatch, pages_of
from finetune.model.build import build_empty
from finetune.model.loss import token_losses

GIB = 1 << 30
NEW = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 512,
}


def config_of(output: Path | str = "x", new: dict[str, Any] | None = None, **sections: Any) -> TuneConfig:
    run = {"output": str(output), "ranks": 2, "device": "cpu", **sections.pop("run", {})}
    return TuneConfig(
        run=RunConfig(**run),
        data=DataConfig(train=("x",), seq_len=48),
        model=ModelConfig(new=new or NEW),
        tokenizer=TokenizerConfig(train=TrainTokenizerConfig(vocab_size=300)),
        **{"batch": BatchConfig(micro=2), **sections},
    )


def hardware(**changes: Any) -> Hardware:
    usual: dict[str, Any] = {"device": "cpu", "gpus": 0, "gpu_bytes": None, "ram_bytes": 64 * GIB}
    return Hardware(**{**usual, "disk_bytes": 1000 * GIB, "nvme_bytes": None, **changes})


def forecast_of(config: TuneConfig, room: Hardware | None = None) -> Forecast:
    room = room or hardware()
    return forecast(config, model_config_of(config), room, precision=precision_of(config, room.device))


# -- what the model's facts are


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2", "llama", "gpt_neo", "opt"])
def test_parameters_are_counted_as_transformers_builds_them(model_type: str) -> None:
    new: dict[str, Any] = {"model_type": model_type, "vocab_size": 512}
    config = config_of(new=new | ({} if model_type != "gpt_neox" else NEW))
    hf_config = model_config_of(config)
    for key, value in (("num_hidden_layers", 2), ("hidden_size", 64), ("num_attention_heads", 4)):
        if model_type not in ("gpt_neo",):
            setattr(hf_config, key, value)
    if model_type == "opt":
        hf_config.word_embed_proj_dim, hf_config.ffn_dim = 64, 96
    if model_type == "llama":
        hf_config.num_key_value_heads, hf_config.head_dim = 4, 16
    facts = facts_of(config, hf_config, "fp32", on_gpu=False)
    with torch.device("meta"):
        model = build_empty(hf_config, torch.float32, nullcontext())
    assert facts.total == facts.trained == sum(p.numel() for p in model.parameters())
    assert facts.largest == max(p.numel() for p in model.parameters())


def test_activations_are_what_autograd_really_saves() -> None:
    config = config_of()
    hf_config = model_config_of(config)
    facts = facts_of(config, hf_config, "fp32", on_gpu=False)
    model = build_empty(hf_config, torch.float32, nullcontext()).train()
    owned = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(2, 48, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = token_losses(model(input_ids=ids, use_cache=False).logits, ids)
    assert loss.requires_grad
    total = sum(saved.values())
    logits = 2 * 48 * 512 * 4
    assert total <= facts.activation_bytes <= total + 2.5 * logits, "what is saved, and the temporaries of the loss beside it"


def test_activations_grow_with_the_batch_and_shrink_in_bf16() -> None:
    def activations(micro: int, precision: str) -> int:
        config = config_of(batch=BatchConfig(micro=micro))
        return facts_of(config, model_config_of(config), precision, on_gpu=False).activation_bytes

    assert activations(4, "fp32") == pytest.approx(2 * activations(2, "fp32"), rel=0.1)
    assert activations(4, "bf16") < 0.8 * activations(4, "fp32")


def test_adapters_and_recomputed_blocks_are_followed_as_they_are() -> None:
    plain = config_of()
    hf_config = model_config_of(plain)
    whole = facts_of(plain, hf_config, "fp32", on_gpu=False)
    adapted = dataclasses.replace(plain, model=ModelConfig(path="x"), lora=LoraConfig(rank=4, method="dora"))
    facts = facts_of(adapted, hf_config, "fp32", on_gpu=False)
    ranks = 3 * 4 * ((64 + 192) + (64 + 64) + 2 * (64 + 160))
    assert facts.frozen == whole.total
    assert facts.trained == ranks + 3 * (192 + 64 + 160 + 64), "two factors and a magnitude for each linear layer"
    recomputed = dataclasses.replace(plain, activations=ActivationConfig(checkpoint="device"))
    facts = facts_of(recomputed, hf_config, "fp32", on_gpu=False)
    assert facts.total == whole.total
    assert facts.activation_bytes < 0.6 * whole.activation_bytes
    assert facts.saved_inputs_bytes == 3 * 2 * 48 * 64 * 4


def test_a_chunked_loss_takes_less_than_whole_logits() -> None:
    def activations(rows: int | None) -> int:
        config = dataclasses.replace(config_of(new={**NEW, "vocab_size": 8192}), activations=ActivationConfig(loss_rows=rows))
        return facts_of(config, model_config_of(config), "fp32", on_gpu=False).activation_bytes

    assert activations(None) < 0.7 * activations(0)


@pytest.mark.parametrize("packing", ["join", "isolate"])
def test_masks_are_counted_where_samples_are_packed_alone(packing: Any) -> None:
    """A mask is a square for every row and layer; rows of one sample need none, whatever their length."""
    config = config_of()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=640, packing=packing))
    hf_config = model_config_of(config)
    made = facts_of(config, hf_config, "fp32", on_gpu=False).trace
    square = 2 * 640 * 640 * 4
    assert (sum(event.size == square for event in made) > 0) is (packing == "isolate")


def test_model_flops_are_six_a_weight_and_the_attention() -> None:
    config = config_of()
    facts = facts_of(config, model_config_of(config), "fp32", on_gpu=False)
    blocks = 3 * (64 * 192 + 64 * 64 + 2 * 64 * 160)
    assert facts.multiplied == blocks + 64 * 512, "the output layer multiplies, the embedding is looked up"
    assert facts.flops_per_token(48) == 6 * facts.multiplied + 12 * 3 * 64 * 48


# -- what is done with them


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
    assert device["whole matrices"] == 4 * MATRIX_BUFFERS * 64 * 192
    assert "whole matrices" not in host


def test_pretrain_with_one_stage_adds_up_gradients_in_fp32_too() -> None:
    config = config_of(run={"precision": "bf16"}, zero=ZeroConfig(stage=1))
    room = hardware()
    staged = forecast(config, model_config_of(config), room, precision="bf16", command="pretrain")
    assert staged.layout.sums_in_fp32
    assert staged.need.host["gradients in fp32"] == 4 * staged.facts.trained
    assert "gradients in fp32" not in forecast_of(config).need.host or forecast_of(config).need.host_phase == "optimizer step"


def test_one_rank_of_zero_three_gathers_nothing_on_a_cpu() -> None:
    """Its part of every weight is the whole weight, which it computes with where it lies."""

    def gathered(ranks: int) -> int:
        config = config_of(run={"ranks": ranks}, zero=ZeroConfig(stage=3), batch=BatchConfig(micro=16))
        facts = facts_of(config, model_config_of(config), "fp32", on_gpu=False)
        phases = _phases(facts, layout_of(config, device="cpu", precision="fp32"))
        return phases["backward pass"][0].get("gathered weights", 0)

    assert gathered(1) == 0
    assert gathered(2) > 0


# -- the heap of the C library


def test_large_tensors_give_their_memory_back_and_small_ones_leave_gaps() -> None:
    heap = Heap()
    mib = 1 << 20
    heap.take(1, 40 * mib)
    heap.take(2, mib)
    heap.take(3, mib)
    heap.give(1)
    assert heap.mapped_bytes == 0
    heap.give(2)
    assert heap.resident_bytes > 2 * mib, "what is freed below another piece stays"
    assert heap.gap_bytes >= mib
    heap.take(4, mib // 2)
    assert heap.resident_bytes < 2.1 * mib, "and is used again"


def test_the_heap_takes_larger_tensors_once_such_were_freed() -> None:
    heap = Heap()
    for number in range(2):
        heap.take(number, 20 << 20)
        assert heap.mapped_bytes == (0 if number else heap.resident_bytes)
        heap.give(number)


def test_a_gap_is_too_small_for_a_tensor_of_its_own_size() -> None:
    heap = Heap()
    for number in range(3):
        heap.take(number, 1 << 20, followed=True)
    heap.give(1)
    before = heap.resident_bytes
    heap.take(3, 1 << 20)
    assert heap.resident_bytes > before + (1 << 19), "alignment asks for more than the gap has"


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


def test_disk_counts_what_is_kept_and_the_save_being_written(tmp_path: Path) -> None:
    found = forecast_of(config_of(tmp_path / "run", save=SaveConfig(keep=2)))
    weights = 4 * found.facts.total
    assert found.checkpoint_bytes == pytest.approx(weights, abs=4 << 20)
    assert found.resume_bytes == pytest.approx(3 * weights, abs=4 << 20)
    assert found.saves == 3
    assert found.disk_bytes == 3 * (found.checkpoint_bytes + found.resume_bytes)
    without = forecast_of(config_of(tmp_path / "run", save=SaveConfig(keep=1, resume_state=False)))
    assert without.disk_bytes == 2 * without.checkpoint_bytes


def test_every_shortage_is_named() -> None:
    room = hardware(device="cuda", gpus=1, gpu_bytes=1 << 20, ram_bytes=1 << 20, disk_bytes=1 << 20)
    found = forecast_of(config_of(run={"device": "auto"}), room).shortages()
    assert [sentence.split(":")[0].split(" is")[0] for sentence in found] == [
        "run.ranks",
        "device memory of one rank",
        "host memory",
        "disk space",
    ]


def test_what_cannot_be_is_refused_as_a_run_would() -> None:
    with pytest.raises(ConfigError, match="hiden_size"):
        model_config_of(config_of(new={**NEW, "hiden_size": 3}))
    missing = dataclasses.replace(config_of(), model=ModelConfig(path="nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        model_config_of(missing)


# -- time and measurement


def test_a_pace_is_kept_for_the_same_shape_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert kept_pace(config) is None
    keep_pace(tmp_path, config, step_seconds=0.5, tokens_per_second=100.0)
    kept = kept_pace(config)
    assert kept is not None
    assert kept.step_seconds == 0.5
    changed = dataclasses.replace(config, batch=BatchConfig(micro=4))
    assert kept_pace(changed) is None
    assert kept_pace(dataclasses.replace(config, optimizer=OptimizerConfig(lr=1.0))) == kept
    assert kept_pace(dataclasses.replace(config, optimizer=OptimizerConfig(name="muon"))) is None


def test_a_watch_sees_a_peak_that_is_gone_again() -> None:
    program = (
        "import sys; x = bytearray(200 << 20); x[::4096] = b'1' * len(x[::4096]); del x; print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with MemoryWatch([child.pid]) as watch:
            pass
        pages = pages_of(child.pid)
        child.communicate(b"")
    assert pages is not None
    assert pages.own < 100 << 20
    assert 200 << 20 <= watch.peaks[0] < 260 << 20
    assert watch.peak_bytes >= watch.peaks[0]
    assert pages_of(child.pid) is None

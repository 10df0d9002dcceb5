"""Every rule of a key holds at its border: the last good value is taken, the first bad one is told by key, value and rule."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config import (
    ActivationConfig,
    BatchConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    SaveConfig,
    ScheduleConfig,
    SourceConfig,
    SpikeConfig,
    TokenizerConfig,
    TrainTokenizerConfig,
    TuneConfig,
    ZenFlowConfig,
    ZeroConfig,
)
from finetune.errors import ConfigError
from tests.checkpoint.readers.deepspeed_folders import TAG, zero3_of

NAN, INF = math.nan, math.inf
NEEDED: dict[type, dict[str, Any]] = {
    RunConfig: {"output": "out"},
    DataConfig: {"train": ("text",)},
    SourceConfig: {"path": "text"},
    ModelConfig: {"path": "model"},
    TrainTokenizerConfig: {"vocab_size": 300},
}
BORDERS: list[tuple[type, str, str, list[Any], list[Any], str]] = [
    # section, prefix of its keys, key, good values, bad ones, rule
    (TokenizerConfig, "tokenizer.", "path", [None, "x"], [""], "name a folder or file"),
    *(
        (ModelConfig, "model.", key, ["x"], [""], "name a folder or file")
        for key in ("path", "base", "adapter", "config", "layer_map", "adapter_config")
    ),
    (RunConfig, "run.", "output", ["x"], [""], "name a folder"),
    (RunConfig, "run.", "ranks", [1], [0, -1], "be at least 1"),
    (RunConfig, "run.", "seed", [0], [-1], "be 0 or more"),
    (RunConfig, "run.", "threads", [None, 1], [0], "be at least 1"),
    (RunConfig, "run.", "max_minutes", [None, 0.01], [0.0, -1.0, NAN, INF], "be greater than 0"),
    (DataConfig, "data.", "train", [("a",)], [(), ("a", "")], "name at least one file, folder or glob"),
    (DataConfig, "data.", "seq_len", [2], [1, 0, -5], "be at least 2"),
    (DataConfig, "data.", "eval_fraction", [0.0, 0.999], [1.0, -0.1, NAN], "lie between 0 and 1, 1 excluded"),
    (DataConfig, "data.", "seed", [0], [-1], "be 0 or more"),
    (
        DataConfig,
        "data.",
        "train_roles",
        [("tool", "user")],
        [(), ("bot",), ("assistant", "bot")],
        "name at least one of system",
    ),
    (SourceConfig, "", "path", ["a"], [""], "name a file, folder, glob or data set"),
    (SourceConfig, "", "weight", [1e-3, 40.0], [0.0, -1.0, NAN, INF], "be greater than 0"),
    (TrainTokenizerConfig, "tokenizer.train.", "vocab_size", [257], [256, 0], "be at least 257"),
    (TrainTokenizerConfig, "tokenizer.train.", "max_bytes", [1], [0], "be at least 1"),
    (BatchConfig, "batch.", "micro", [1], [0], "be at least 1"),
    (BatchConfig, "batch.", "accumulation", [None, 1], [0], "be at least 1"),
    (BatchConfig, "batch.", "total", [None, 1], [-8, 0], "be at least 1"),
    (OptimizerConfig, "optimizer.", "lr", [None, 1e-9], [0.0, -1e-3, NAN, INF], "be greater than 0"),
    (
        OptimizerConfig,
        "optimizer.",
        "betas",
        [(0.0, 0.999)],
        [(0.9,), (0.9, 0.9, 0.9), (0.9, 1.0), (-0.1, 0.9), (NAN, 0.9)],
        "be two numbers from 0 to 1, 1 excluded",
    ),
    (OptimizerConfig, "optimizer.", "momentum", [0.0, 0.99], [1.0, -0.5, NAN], "lie between 0 and 1, 1 excluded"),
    (OptimizerConfig, "optimizer.", "weight_decay", [0.0], [-0.1, NAN, INF], "be 0 or more"),
    (OptimizerConfig, "optimizer.", "clip", [0.0], [-1.0, NAN, INF], "be 0 or more"),
    (ScheduleConfig, "schedule.", "steps", [None, 1], [0], "be at least 1"),
    (ScheduleConfig, "schedule.", "epochs", [0.1], [0.0, NAN, INF], "be greater than 0"),
    (ScheduleConfig, "schedule.", "warmup", [0.0, 500.0], [-0.1, NAN, INF], "be 0 or more"),
    (ScheduleConfig, "schedule.", "decay", [0.0], [-1.0, NAN], "be 0 or more"),
    (ScheduleConfig, "schedule.", "floor", [0.0, 1.0], [-0.1, 1.1, NAN], "lie between 0 and 1"),
    (ZeroConfig, "zero.", "bucket_elements", [1], [0], "be at least 1"),
    (ZenFlowConfig, "offload.zenflow.", "share", [1e-3, 1.0], [0.0, 1.1, NAN], "be above 0 and at most 1"),
    (ZenFlowConfig, "offload.zenflow.", "update_every", [2], [1, 0], "be at least 2: an update in every step is"),
    (ZenFlowConfig, "offload.zenflow.", "select_every", [4, 8], [6, 0, -4], "be a multiple of offload.zenflow.update_every"),
    (ActivationConfig, "activations.", "loss_rows", [None, 0, 1], [-1], "be 0 or more"),
    (LoraConfig, "lora.", "rank", [1], [0], "be at least 1"),
    (LoraConfig, "lora.", "alpha", [0.5], [0.0, -1.0, NAN, INF], "be greater than 0"),
    (LoraConfig, "lora.", "dropout", [0.0, 0.9], [1.0, -0.1, NAN], "lie between 0 and 1, 1 excluded"),
    (PipelineConfig, "pipeline.", "stages", [1], [0], "be at least 1"),
    (
        PipelineConfig,
        "pipeline.",
        "partition",
        ["profile", "uniform", "parameters", "type:Block|Layer"],
        ["type:", "type", "Profile", "type:("],
        "",
    ),
    (EvalConfig, "eval.", "every", [0], [-1], "be 0 or more"),
    (EvalConfig, "eval.", "samples", [0], [-1], "be 0 or more"),
    (SaveConfig, "save.", "every", [0], [-1], "be 0 or more"),
    (SaveConfig, "save.", "keep", [0], [-1], "be 0 or more"),
    (SaveConfig, "save.", "snapshot_every", [0], [-1], "be 0 or more"),
    (SaveConfig, "save.", "max_shard_mib", [1], [0], "be at least 1"),
    (LogConfig, "log.", "every", [1], [0], "be at least 1"),
    (LogConfig, "log.", "wandb", [None, "mine"], ["", "  "], "name a project"),
    (LogConfig, "log.", "metrics_port", [None, 0, 65535], [-1, 65536], "lie between 0 and 65535"),
    (SpikeConfig, "spike.", "window", [4], [3], "be at least 4"),
    (SpikeConfig, "spike.", "steps", [1], [0], "be at least 1"),
]


@pytest.mark.parametrize(
    ("section", "prefix", "key", "good", "bad", "rule"), BORDERS, ids=[f"{prefix}{key}" for _, prefix, key, *_ in BORDERS]
)
def test_a_value_is_good_up_to_the_border_of_its_rule(
    section: type, prefix: str, key: str, good: list[Any], bad: list[Any], rule: str
) -> None:
    usual = NEEDED.get(section, {})
    for value in good:
        assert getattr(section(**{**usual, key: value}), key) == value
    for value in bad:
        with pytest.raises(ConfigError) as refused:
            section(**{**usual, key: value})
        shown = list(value) if isinstance(value, tuple) else value
        assert str(refused.value).startswith(f"{prefix}{key} is {shown!r}; it must {rule}")
        assert isinstance(refused.value, ValueError), "so that the entry of a list is told"


def tune(**sections: Any) -> TuneConfig:
    usual = {
        "run": RunConfig(output="out", device="cuda", ranks=4),
        "data": DataConfig(train=("text",)),
        "model": ModelConfig(path="base"),
    }
    return TuneConfig(**{**usual, **sections})


def offload(**values: Any) -> OffloadConfig:
    return OffloadConfig(**values)


CPU, DISK = {"optimizer": "cpu"}, {"optimizer": "nvme", "path": "/disk"}
TOGETHER: dict[str, tuple[Any, str]] = {
    "parameters below stage 3": (
        lambda: tune(zero=ZeroConfig(stage=2), offload=offload(parameters="cpu")),
        "offload.parameters is 'cpu'; it must be none unless zero.stage is 3 (it is 2)",
    ),
    "a disk below stage 3": (
        lambda: tune(zero=ZeroConfig(stage=1), offload=offload(**DISK)),
        "offload.optimizer is 'nvme'; it must be none or cpu unless zero.stage is 3 (it is 1)",
    ),
    "a ratio below stage 3": (
        lambda: tune(zero=ZeroConfig(stage=2), offload=offload(**CPU, ratio=0.5)),
        "offload.ratio is 0.5; it must be 1 unless zero.stage is 3 (it is 2)",
    ),
    "superoffload below stage 3": (
        lambda: tune(zero=ZeroConfig(stage=2), offload=offload(**CPU, method="superoffload")),
        "offload.method is 'superoffload'; it must be plain or zenflow unless zero.stage is 3 (it is 2)",
    ),
    "superoffload on a CPU": (
        lambda: tune(run=RunConfig(output="x", device="cpu"), offload=offload(**CPU, method="superoffload")),
        "offload.method is 'superoffload'; it must be plain on the CPU: it needs CUDA",
    ),
    "superoffload with a state to resume from": (
        lambda: tune(zero=ZeroConfig(stage=3), offload=offload(**CPU, method="superoffload")),
        "save.resume_state is True; it must be false with offload.method superoffload",
    ),
    "a ratio with adapters": (
        lambda: tune(lora=LoraConfig(), offload=offload(**CPU, ratio=0.5)),
        "offload.ratio is 0.5; it must be 1 with lora",
    ),
    "adapters without trained weights": (
        lambda: tune(model=ModelConfig(new={"model_type": "gpt2"}), tokenizer=TokenizerConfig(path="t"), lora=LoraConfig()),
        "lora is 'set'; it must be absent when model.new is set",
    ),
    "zenflow with another optimizer": (
        lambda: tune(optimizer=OptimizerConfig(name="lion"), offload=offload(**CPU, method="zenflow")),
        "offload.method is 'zenflow'; it must be plain unless optimizer.name is adamw (it is lion)",
    ),
    "a ratio with another optimizer": (
        lambda: tune(optimizer=OptimizerConfig(name="muon"), offload=offload(**CPU, ratio=0.5)),
        "offload.ratio is 0.5; it must be 1 unless optimizer.name is adamw (it is muon)",
    ),
    "matrices on a disk": (
        lambda: tune(optimizer=OptimizerConfig(name="adafactor"), offload=offload(**DISK)),
        "offload.optimizer is 'nvme'; it must be none or cpu with optimizer.name adafactor",
    ),
    "rows that would never be updated": (
        lambda: tune(schedule=ScheduleConfig(steps=3), offload=offload(**CPU, method="zenflow")),
        "offload.zenflow.update_every is 4; it must be at most schedule.steps, which is 3",
    ),
    "stages that do not divide": (
        lambda: tune(pipeline=PipelineConfig(stages=3)),
        "pipeline.stages is 3; it must divide run.ranks, which is 4",
    ),
    "a step of no whole rounds": (
        lambda: tune(batch=BatchConfig(micro=3, total=16)),
        "batch.total is 16; it must be a multiple of batch.micro x the ranks that share the data = 3 x 4",
    ),
    "stages share the data of a step": (
        lambda: tune(batch=BatchConfig(micro=4, total=12), pipeline=PipelineConfig(stages=2)),
        "batch.total is 12; it must be a multiple of batch.micro x the ranks that share the data = 4 x 2",
    ),
    "two sizes of a step": (
        lambda: tune(batch=BatchConfig(micro=2, accumulation=3, total=16)),
        "batch.accumulation is 3; it must be 2 (or unset) to make batch.total = 16 of batch.micro = 2 on 4 ranks",
    ),
    "a disk without a folder": (
        lambda: offload(parameters="nvme"),
        "offload.path is None; it must name a folder, since offload.parameters is nvme",
    ),
    "a share without offload": (
        lambda: offload(ratio=0.9),
        "offload.ratio is 0.9; it must be left alone unless offload.optimizer is cpu (it is none)",
    ),
    "a method on the disk": (
        lambda: offload(**DISK, method="zenflow"),
        "offload.method is 'zenflow'; it must be left alone unless offload.optimizer is cpu (it is nvme)",
    ),
    "two ways of sharing": (
        lambda: offload(**CPU, ratio=0.5, method="zenflow"),
        "offload.ratio is 0.5; it must be 1 with zenflow: Twin-Flow is for the plain method",
    ),
    "paces of a method that is not used": (
        lambda: offload(**CPU, zenflow=ZenFlowConfig(share=0.2)),
        "offload.zenflow is ZenFlowConfig(share=0.2, update_every=4, select_every=64); it must be absent unless offload.method",
    ),
    "rows of a loss that chooses its own": (
        lambda: ActivationConfig(loss="fused", loss_rows=8),
        "activations.loss_rows is 8; it must be unset with activations.loss fused",
    ),
    "two tokenizers": (
        lambda: TokenizerConfig(path="t", train=TrainTokenizerConfig(vocab_size=300)),
        "tokenizer.path is 't'; it must be absent when tokenizer.train is set",
    ),
    "two models": (
        lambda: ModelConfig(path="a", new={"model_type": "gpt2"}),
        "model is 'both or neither'; it must set exactly one of path and new",
    ),
    "code of a model's folder": (
        lambda: ModelConfig(new={"model_type": "x", "auto_map": {}}),
        "model.new.auto_map is 'set'; it must be absent: code from model folders is never run",
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_keys_that_cannot_be_together_are_told_by_the_one_to_change(case: str) -> None:
    make, said = TOGETHER[case]
    with pytest.raises(ConfigError) as refused:
        make()
    assert str(refused.value).startswith(said)


def test_what_is_allowed_together_is() -> None:
    zenflow = tune(zero=ZeroConfig(stage=2), schedule=ScheduleConfig(steps=4), offload=offload(**CPU, method="zenflow"))
    assert zenflow.algorithm == "zenflow"
    assert tune(optimizer=OptimizerConfig(name="muon"), offload=offload(**CPU)).algorithm == "muon"
    assert tune(optimizer=OptimizerConfig(name="lion"), offload=offload(**DISK)).offload.on_disk
    assert tune(offload=offload(parameters="nvme", path="/disk")).offload.on_disk
    assert not tune(offload=offload(**CPU, ratio=0.0)).offload.on_disk


@pytest.mark.parametrize("seed", range(20))
def test_a_step_has_the_samples_that_were_asked_for_however_they_are_shared(seed: int) -> None:
    draw = random.Random(seed)
    stages, groups, micro, rounds = (draw.randint(1, 4) for _ in range(4))
    run = RunConfig(output="x", ranks=stages * groups)
    pipeline = PipelineConfig(stages=stages)
    by_total = tune(run=run, pipeline=pipeline, batch=BatchConfig(micro=micro, total=micro * groups * rounds))
    by_rounds = tune(run=run, pipeline=pipeline, batch=BatchConfig(micro=micro, accumulation=rounds))
    for config in (by_total, by_rounds):
        assert (config.data_ranks, config.accumulation) == (groups, rounds)
        assert config.step_samples == micro * rounds * groups
    assert tune(run=run, pipeline=pipeline, batch=BatchConfig(micro=micro)).accumulation == 1


@pytest.mark.parametrize(
    ("command", "sections", "said"),
    [
        (
            "tune",
            {"pipeline": PipelineConfig(stages=2)},
            "pipeline.stages is 2; it must be 1 for tune; `tessera-finetune pretrain`",
        ),
        ("tune", {"zero": ZeroConfig(stage=0)}, "zero.stage is 0; it must be 1, 2 or 3 for tune; 0 is for pretrain"),
        ("pretrain", {}, "zero.stage is 3; it must be 0 or 1 for pretrain"),
        ("pretrain", {"offload": offload(**CPU)}, "offload.optimizer is 'cpu'; it must be none for pretrain"),
        ("pretrain", {"lora": LoraConfig()}, "lora is 'set'; it must be absent for pretrain; `tessera-finetune tune`"),
        (
            "pretrain",
            {"activations": ActivationConfig(packed_attention="varlen")},
            "activations.packed_attention is 'varlen'; it must be auto or mask for pretrain",
        ),
        (
            "pretrain",
            {"activations": ActivationConfig(loss="fused")},
            "activations.loss is 'fused'; it must be rows for pretrain",
        ),
    ],
)
def test_what_one_command_cannot_do_is_told_with_the_one_that_can(command: str, sections: dict[str, Any], said: str) -> None:
    one = {} if command == "tune" or not sections else {"zero": ZeroConfig(stage=1)}
    with pytest.raises(ConfigError) as refused:
        tune(**{**one, **sections}).check_command(command)
    assert str(refused.value).startswith(said)
    tune().check_command("tune")


def test_a_model_is_split_into_stages_by_the_type_its_folder_names(tmp_path: Path) -> None:
    config = tune(model=ModelConfig(path=str(tmp_path)), zero=ZeroConfig(stage=1))
    config.check_command("pretrain")  # nothing there yet: told better by who opens it
    for text in ("{", "[]", "{}", json.dumps({"model_type": "llama"})):
        (tmp_path / "config.json").write_text(text)
        config.check_command("pretrain")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    rule = "model_type is 'opt'; it must be one of gpt_neox, gpt2"
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=rf"^model\.path: {file}: {rule}"):
        config.check_command("pretrain")
    given = file.rename(tmp_path / "of_opt.json")
    elsewhere = tune(model=ModelConfig(path=str(tmp_path), config=str(given)), zero=ZeroConfig(stage=1))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"^model\.config: {given}: {rule}"):
        elsewhere.check_command("pretrain")


def test_the_type_of_a_model_is_told_with_the_place_that_names_it(tmp_path: Path) -> None:
    zero3_of(tmp_path, {"x": torch.ones(4, 4)}, 1)
    above = tmp_path / "config.json"
    above.write_text(json.dumps({"model_type": "opt"}))
    config = tune(model=ModelConfig(path=str(tmp_path / TAG)), zero=ZeroConfig(stage=1))
    with pytest.raises(ConfigError, match=rf"^model\.path: {above}: model_type is 'opt'"):
        config.check_command("pretrain")

"""What a resumed run may change is told, line by line; what belongs to the saved tensors is refused by key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPTNeoXConfig

from finetune.config import (
    BatchConfig,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TokenizerConfig,
    TuneConfig,
)
from finetune.data.prepared import Prepared
from finetune.errors import ConfigError
from finetune.train.changes import changes_in_words, check_settings, course_of, settings_of
from finetune.train.position import RunPosition
from finetune.train.schedule import make_schedule

SAVE = Path("run/resume/step-00000004")
CONFIG = TuneConfig(
    run=RunConfig(output="run"),
    data=DataConfig(train=("text",)),
    model=ModelConfig(new={"model_type": "gpt_neox"}),
    tokenizer=TokenizerConfig(path="somewhere"),
    optimizer=OptimizerConfig(lr=3e-4),
    schedule=ScheduleConfig(steps=100),
)
PREPARED = Prepared(
    **dict.fromkeys(Prepared.__dataclass_fields__, 0) | {"fingerprint": "now", "known_as": ()},  # type: ignore[arg-type]
)


def model(**changes: Any) -> Any:
    return GPTNeoXConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **changes)


def lines(now: TuneConfig, hf_config: Any = None, precision: str = "fp32") -> list[str]:
    before = course_of(CONFIG, model(), make_schedule(CONFIG, 1000), "fp32")
    return changes_in_words(before, course_of(now, hf_config or model(), make_schedule(now, 1000), precision))


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (replace(CONFIG, optimizer=OptimizerConfig(lr=1e-4)), ["optimizer.lr 0.0003 -> 0.0001"]),
        (replace(CONFIG, optimizer=replace(CONFIG.optimizer, weight_decay=0.0)), ["optimizer.weight_decay 0.1 -> 0.0"]),
        (replace(CONFIG, optimizer=replace(CONFIG.optimizer, clip=0.5)), ["optimizer.clip 1.0 -> 0.5"]),
        (replace(CONFIG, optimizer=replace(CONFIG.optimizer, betas=(0.8, 0.9))), ["optimizer.betas [0.9, 0.95] -> [0.8, 0.9]"]),
        (
            replace(CONFIG, schedule=ScheduleConfig(steps=200, shape="linear")),
            ["steps in all 100 -> 200", "schedule.shape cosine -> linear", "schedule.steps 100 -> 200"],
        ),
        (replace(CONFIG, batch=BatchConfig(micro=4)), ["samples of a step 8 -> 4", "batch.micro 8 -> 4"]),
        (replace(CONFIG, run=RunConfig(output="moved", seed=7)), ["run.seed 0 -> 7"]),
        (CONFIG, []),
    ],
)
def test_each_change_is_one_line(now: TuneConfig, told: list[str]) -> None:
    assert lines(now) == [f"changed: {line}" for line in told]


def test_precision_and_dropout_are_told_and_what_a_state_does_not_know_is_not() -> None:
    assert lines(CONFIG, precision="bf16") == ["changed: run.precision fp32 -> bf16"]
    assert lines(CONFIG, model(hidden_dropout=0.5)) == ["changed: model.hidden_dropout 0.0 -> 0.5"]
    assert changes_in_words({"samples of a step": 8}, {"samples of a step": 4, "optimizer.lr": 1}) == [
        "changed: samples of a step 8 -> 4"
    ]


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"hf_config": model(hidden_dropout=0.5)}, ""),
        ({"hf_config": model(layer_norm_eps=1e-3)}, r"model\.layer_norm_eps \(was 1e-05, is 0\.001\)"),
        ({"hf_config": model(tie_word_embeddings=True)}, r"model\.tie_word_embeddings \(was False, is True\)"),
        (
            {"config": replace(CONFIG, optimizer=replace(CONFIG.optimizer, name="lion"))},
            r"optimizer \(was 'adamw', is 'lion'\)",
        ),
        ({"config": replace(CONFIG, optimizer=OptimizerConfig(lr=1.0))}, ""),
        ({"config": replace(CONFIG, batch=BatchConfig(micro=4))}, ""),
        ({"prepared": replace(PREPARED, fingerprint="then")}, r"data \(was 'now', is 'then'\).*--data\.changed accept"),
        ({"prepared": replace(PREPARED, fingerprint="then", known_as=("now",))}, ""),
    ],
)
def test_only_what_belongs_to_the_saved_tensors_is_refused(now: dict[str, Any], told: str) -> None:
    was = settings_of(CONFIG, PREPARED, model())
    prepared = now.get("prepared", PREPARED)
    settings = settings_of(now.get("config", CONFIG), prepared, now.get("hf_config", model()))
    if told == "":
        check_settings(SAVE, was, settings, prepared.known_as)
        return
    with pytest.raises(ConfigError, match=rf"^run\.resume: {SAVE} cannot be continued, since these differ: {told}"):
        check_settings(SAVE, was, settings, prepared.known_as)


def test_adapters_keep_their_shape_and_may_change_their_dropout() -> None:
    path = ModelConfig(path="base")

    def settings(**lora: Any) -> dict[str, Any]:
        config = replace(CONFIG, model=path, tokenizer=TokenizerConfig(), lora=LoraConfig(**lora))
        return settings_of(config, PREPARED, model())

    was = settings(rank=4)
    check_settings(SAVE, was, settings(rank=4, dropout=0.5))
    with pytest.raises(ConfigError, match=r"lora\.alpha \(was 32\.0, is 8\.0\), lora\.rank \(was 4, is 8\)"):
        check_settings(SAVE, was, settings(rank=8, alpha=8.0))
    with pytest.raises(ConfigError, match=r"lora \(was None, is"):
        check_settings(SAVE, settings_of(CONFIG, PREPARED, model()), was)


def test_epochs_count_samples_also_when_the_size_of_a_step_changes() -> None:
    def steps(micro: int, done: tuple[int, int] | None) -> int:
        config = replace(CONFIG, batch=BatchConfig(micro=micro), schedule=ScheduleConfig(epochs=2.0))
        taken = {} if done is None else dict(zip(("step", "samples"), done, strict=True))
        position = RunPosition(**taken, tokens=0, optimizer_steps=0, skipped_in_a_row=0) if taken else None
        return make_schedule(config, 100, position).steps

    assert steps(8, None) == steps(8, (10, 80)) == 25
    assert steps(4, (10, 80)) == 10 + 30, "120 samples of 200 are left"
    assert steps(4, (20, 120)) == 40, "and again from a later save"
    assert steps(16, (10, 80)) == 10 + 8
    assert steps(8, (30, 240)) == 30, "more than enough is done"


def test_tables_of_a_model_s_settings_are_compared_where_the_save_has_them() -> None:
    was, now = (
        settings_of(CONFIG, PREPARED, model(rope_parameters={"rope_type": "default", "rope_theta": theta}))
        for theta in (1e4, 20.0)
    )
    check_settings(SAVE, was, {**now, "model": was["model"]})
    with pytest.raises(ConfigError, match=r"model\.rope_parameters \(was \{.*10000\.0.*\}, is \{.*20\.0.*\}\)"):
        check_settings(SAVE, was, now)
    check_settings(SAVE, {**was, "model": {k: v for k, v in was["model"].items() if k != "rope_parameters"}}, now)

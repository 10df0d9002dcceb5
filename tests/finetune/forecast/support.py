"""Runs and machines that forecasts are made of in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.config import BatchConfig, DataConfig, ModelConfig, RunConfig, TokenizerConfig, TrainTokenizerConfig, TuneConfig
from finetune.forecast.estimate import Forecast, forecast, model_config_of, precision_of
from finetune.forecast.hardware import Hardware

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

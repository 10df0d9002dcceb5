"""Every knob of training: read once, checked once, never changed; and the one place DeepSpeed's JSON is made."""

from finetune.config.activations import ActivationConfig
from finetune.config.data import DataConfig, SourceConfig
from finetune.config.deepspeed import DiskSettings, fit_bucket, to_deepspeed, updates_early
from finetune.config.lora import LoraConfig
from finetune.config.memory import OffloadConfig, ZenFlowConfig, ZeroConfig
from finetune.config.model import ModelConfig, TokenizerConfig, TrainTokenizerConfig
from finetune.config.optimization import ALGORITHMS, BatchConfig, OptimizerConfig, ScheduleConfig
from finetune.config.pipeline import PipelineConfig
from finetune.config.run import EvalConfig, LogConfig, RunConfig, SaveConfig, SpikeConfig
from finetune.config.whole import TuneConfig

__all__ = [
    "ALGORITHMS",
    "ActivationConfig",
    "BatchConfig",
    "DataConfig",
    "DiskSettings",
    "EvalConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "RunConfig",
    "SaveConfig",
    "ScheduleConfig",
    "SourceConfig",
    "SpikeConfig",
    "TokenizerConfig",
    "TrainTokenizerConfig",
    "TuneConfig",
    "ZenFlowConfig",
    "ZeroConfig",
    "fit_bucket",
    "to_deepspeed",
    "updates_early",
]

"""Every knob of training: read once, checked once, never changed; and the one place DeepSpeed's JSON is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.errors import ConfigError


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; it must {rule}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What is trained: an existing model, or a new one. Exactly one of the two is set."""

    path: str | None = None
    """Folder of a Hugging Face or Tessera checkpoint to start from."""

    new: Mapping[str, Any] | None = None
    """A new model: ``model_type`` and any keys of its transformers configuration. ``vocab_size`` and the longest
    position default to the tokenizer's size and ``data.seq_len``."""

    def __post_init__(self) -> None:
        _require((self.path is None) != (self.new is None), "model", "both or neither", "set exactly one of path and new")
        if self.new is not None:
            _require("model_type" in self.new, "model.new", dict(self.new), "name a model_type, for example gpt_neox")
            _require("auto_map" not in self.new, "model.new.auto_map", "set", "be absent: code from model folders is never run")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTokenizerConfig:
    """A new byte-level BPE tokenizer, learned from the training text."""

    vocab_size: int
    """Ids in all: 256 bytes, the end-of-text token and the learned merges."""

    max_bytes: int = 64 * 1024 * 1024
    """Text the merges are learned from, at most; the rest of the data is only tokenised."""

    def __post_init__(self) -> None:
        _require(self.vocab_size >= 257, "tokenizer.train.vocab_size", self.vocab_size, "be at least 257")
        _require(self.max_bytes >= 1, "tokenizer.train.max_bytes", self.max_bytes, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """How text becomes ids. Neither key set: the tokenizer of ``model.path``."""

    path: str | None = None
    """Folder with ``tokenizer.json``."""

    train: TrainTokenizerConfig | None = None
    """Learn a new one from the data."""

    def __post_init__(self) -> None:
        _require(self.path is None or self.train is None, "tokenizer.path", self.path, "be absent when tokenizer.train is set")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What the model learns from. Documents are joined by the end-of-text token and cut to ``seq_len``; nothing is padded."""

    train: tuple[str, ...]
    """Files, folders or globs: text (one document each) or JSONL (one ``{"text": …}`` a line, names ending in .jsonl)."""

    pattern: str = "*"
    """Names of the files taken from folders, at any depth, for example ``*.py``."""

    text_key: str = "text"
    """Key of the text in a JSONL line."""

    seq_len: int = 512
    """Tokens of one sample."""

    eval: tuple[str, ...] = ()
    """Files for evaluation; empty: ``eval_fraction`` of the data is held out."""

    eval_fraction: float = 0.01
    """Share of the tokens held out for evaluation, whole documents chosen by ``seed``; 0 evaluates nothing."""

    seed: int = 0
    """Order of the samples and choice of the held-out documents."""

    invalid_text: Literal["refuse", "skip"] = "refuse"
    """What happens to a file that is not UTF-8."""

    def __post_init__(self) -> None:
        _require(bool(self.train) and all(self.train), "data.train", list(self.train), "name at least one file, folder or glob")
        _require(self.seq_len >= 2, "data.seq_len", self.seq_len, "be at least 2")
        _require(0.0 <= self.eval_fraction < 1.0, "data.eval_fraction", self.eval_fraction, "lie between 0 and 1, 1 excluded")
        _require(self.seed >= 0, "data.seed", self.seed, "be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Samples of one optimizer step: ``micro`` x ``accumulation`` x ranks."""

    micro: int = 8
    """Samples one rank computes at once."""

    accumulation: int | None = None
    """Micro-batches whose gradients are added before a step; unset: 1, or what ``total`` asks for."""

    total: int | None = None
    """Samples of one step, all ranks together; unset: micro x accumulation x ranks."""

    def __post_init__(self) -> None:
        for name in ("micro", "accumulation", "total"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"batch.{name}", value, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW. Biases and norms are not decayed."""

    lr: float = 3e-4
    """Learning rate after warm-up."""

    betas: tuple[float, ...] = (0.9, 0.95)
    """Decay of the first and second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings."""

    clip: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        _require(math.isfinite(self.lr) and self.lr > 0, "optimizer.lr", self.lr, "be greater than 0")
        _require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "optimizer.betas",
            list(self.betas),
            "be two numbers from 0 to 1, 1 excluded",
        )
        for name in ("eps", "weight_decay", "clip"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"optimizer.{name}", value, "be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Linear warm-up, then a cosine down to a floor at the last step."""

    steps: int | None = None
    """Optimizer steps; unset: ``epochs`` passes over the data."""

    epochs: float = 1.0
    """Passes over the training data when ``steps`` is unset."""

    warmup: float = 0.05
    """Warm-up: below 1 a share of all steps, from 1 on a number of steps."""

    floor: float = 0.1
    """Learning rate at the end, as a share of ``optimizer.lr``."""

    def __post_init__(self) -> None:
        _require(self.steps is None or self.steps >= 1, "schedule.steps", self.steps, "be at least 1")
        _require(math.isfinite(self.epochs) and self.epochs > 0, "schedule.epochs", self.epochs, "be greater than 0")
        _require(math.isfinite(self.warmup) and self.warmup >= 0, "schedule.warmup", self.warmup, "be 0 or more")
        _require(0.0 <= self.floor <= 1.0, "schedule.floor", self.floor, "lie between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How the model's state is spread over the ranks."""

    stage: Literal[1, 2, 3] = 3
    """1 spreads the optimizer's state, 2 also the gradients, 3 also the parameters."""

    bucket_elements: int = 50_000_000
    """Gradient elements reduced, and parameter elements gathered, in one piece."""

    def __post_init__(self) -> None:
        _require(self.bucket_elements >= 1, "zero.bucket_elements", self.bucket_elements, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """What lies in the host's memory instead of the device's."""

    optimizer: Literal["none", "cpu"] = "none"
    """Where the fp32 weights and the moments lie and are updated."""

    parameters: Literal["none", "cpu"] = "none"
    """Where parameters wait for their turn; needs ZeRO stage 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Loss on held-out text, without gradients."""

    every: int = 100
    """Steps between evaluations; 0 evaluates at the end only."""

    samples: int = 256
    """Samples of one evaluation, at most; 0 takes all of them."""

    def __post_init__(self) -> None:
        for name in ("every", "samples"):
            _require(getattr(self, name) >= 0, f"eval.{name}", getattr(self, name), "be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """What is written while training. Each save is whole or absent."""

    every: int = 500
    """Steps between saves; 0 saves at the end only. The last step is always saved."""

    keep: int = 2
    """Checkpoints and resume states kept, newest first; 0 keeps all."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the saved weights: ``auto`` is the training type, ``float32`` the optimizer's own exact weights."""

    max_shard_mib: int = 2048
    """Largest file of weights."""

    resume_state: bool = True
    """Whether moments, position and random states are kept too, so that training can go on exactly."""

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            _require(getattr(self, name) >= 0, f"save.{name}", getattr(self, name), "be 0 or more")
        _require(self.max_shard_mib >= 1, "save.max_shard_mib", self.max_shard_mib, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is seen of a run: the terminal, ``log.jsonl``, TensorBoard events, ``loss.png``."""

    every: int = 10
    """Steps between lines of the log (and of the terminal, when it is not interactive)."""

    tensorboard: bool = True
    """Whether TensorBoard events are written to ``<output>/tensorboard``."""

    plot: bool = True
    """Whether ``loss.png`` is drawn at the end."""

    def __post_init__(self) -> None:
        _require(self.every >= 1, "log.every", self.every, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where a run is kept, and its processes."""

    output: str
    """Folder of the run: checkpoints, resume states, logs."""

    ranks: int = 1
    """Processes that train together on this machine; one per GPU, or any number on CPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is cuda where there is one, else cpu."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of weights, activations and gradients; the optimizer always keeps fp32. ``auto``: bf16 on a GPU, fp32 on CPU."""

    seed: int = 0
    """New weights and dropout."""

    resume: Literal["never", "auto"] = "never"
    """``auto`` goes on from the newest save of ``run.output``, or starts when there is none. ``--resume`` is short for it."""

    max_minutes: float | None = None
    """Stop after this time with a save, wherever the schedule is."""

    threads: int | None = None
    """CPU threads per rank; unset: the rank's fair share of the cores this process may use."""

    def __post_init__(self) -> None:
        _require(bool(self.output), "run.output", self.output, "name a folder")
        _require(self.ranks >= 1, "run.ranks", self.ranks, "be at least 1")
        _require(self.seed >= 0, "run.seed", self.seed, "be 0 or more")
        _require(self.threads is None or self.threads >= 1, "run.threads", self.threads, "be at least 1")
        _require(
            self.max_minutes is None or (math.isfinite(self.max_minutes) and self.max_minutes > 0),
            "run.max_minutes",
            self.max_minutes,
            "be greater than 0",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """A whole run of ``tessera-finetune tune``."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _require(
            self.offload.parameters == "none" or self.zero.stage == 3,
            "offload.parameters",
            self.offload.parameters,
            f"be none unless zero.stage is 3 (it is {self.zero.stage})",
        )
        _require(
            self.model.path is not None or self.tokenizer.path is not None or self.tokenizer.train is not None,
            "tokenizer",
            "not set",
            "name a path or be trained (tokenizer.train.vocab_size), because a new model brings none",
        )
        self._check_batch()

    def _check_batch(self) -> None:
        batch, ranks = self.batch, self.run.ranks
        if batch.total is None:
            return
        per_round = batch.micro * ranks
        rule = f"be a multiple of batch.micro x run.ranks = {batch.micro} x {ranks}"
        _require(batch.total % per_round == 0, "batch.total", batch.total, rule)
        wanted = batch.total // per_round
        _require(
            batch.accumulation in (None, wanted),
            "batch.accumulation",
            batch.accumulation,
            f"be {wanted} (or unset) to make batch.total = {batch.total} of batch.micro = {batch.micro} on {ranks} ranks",
        )

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step on one rank."""
        if self.batch.total is not None:
            return self.batch.total // (self.batch.micro * self.run.ranks)
        return self.batch.accumulation or 1

    @property
    def step_samples(self) -> int:
        """Samples of one optimizer step, all ranks together."""
        return self.batch.micro * self.accumulation * self.run.ranks


def to_deepspeed(config: TuneConfig, *, device: str, precision: str, cpu_adam: bool) -> dict[str, Any]:
    """Make DeepSpeed's configuration: the only place that knows its keys.

    Args:
        device: ``cpu`` or ``cuda``, already decided.
        precision: ``bf16`` or ``fp32``, already decided.
        cpu_adam: whether DeepSpeed's CPU Adam was built; without it an offloaded optimizer is torch's.
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
    return {
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

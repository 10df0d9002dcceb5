"""A whole run: all sections together, and the rules between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.config.checks import require
from finetune.config.data import DataConfig
from finetune.config.memory import OffloadConfig, ZeroConfig
from finetune.config.model import ModelConfig, TokenizerConfig
from finetune.config.optimization import BatchConfig, OptimizerConfig, ScheduleConfig
from finetune.config.pipeline import PipelineConfig
from finetune.config.run import EvalConfig, LogConfig, RunConfig, SaveConfig, SpikeConfig


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
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    spike: SpikeConfig = field(default_factory=SpikeConfig)

    def __post_init__(self) -> None:
        require(
            self.offload.parameters == "none" or self.zero.stage == 3,
            "offload.parameters",
            self.offload.parameters,
            f"be none unless zero.stage is 3 (it is {self.zero.stage})",
        )
        require(
            self.model.path is not None or self.tokenizer.path is not None or self.tokenizer.train is not None,
            "tokenizer",
            "not set",
            "name a path or be trained (tokenizer.train.vocab_size), because a new model brings none",
        )
        stages = self.pipeline.stages
        require(self.run.ranks % stages == 0, "pipeline.stages", stages, f"divide run.ranks, which is {self.run.ranks}")
        self._check_batch()

    def _check_batch(self) -> None:
        batch, ranks = self.batch, self.data_ranks
        if batch.total is None:
            return
        per_round = batch.micro * ranks
        rule = f"be a multiple of batch.micro x the ranks that share the data = {batch.micro} x {ranks}"
        require(batch.total % per_round == 0, "batch.total", batch.total, rule)
        wanted = batch.total // per_round
        require(
            batch.accumulation in (None, wanted),
            "batch.accumulation",
            batch.accumulation,
            f"be {wanted} (or unset) to make batch.total = {batch.total} of batch.micro = {batch.micro} on {ranks} ranks",
        )

    @property
    def data_ranks(self) -> int:
        """Ranks (or, with a pipeline, groups of ranks) that each compute different samples of a step."""
        return self.run.ranks // self.pipeline.stages

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step on one rank."""
        if self.batch.total is not None:
            return self.batch.total // (self.batch.micro * self.data_ranks)
        return self.batch.accumulation or 1

    @property
    def step_samples(self) -> int:
        """Samples of one optimizer step, all ranks together."""
        return self.batch.micro * self.accumulation * self.data_ranks

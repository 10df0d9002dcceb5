"""A whole run: all sections together, and the rules between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.config.activations import ActivationConfig
from finetune.config.checks import require
from finetune.config.data import DataConfig
from finetune.config.lora import LoraConfig
from finetune.config.memory import OffloadConfig, ZeroConfig
from finetune.config.model import ModelConfig, TokenizerConfig
from finetune.config.optimization import BatchConfig, OptimizerConfig, ScheduleConfig
from finetune.config.pipeline import PipelineConfig, check_splittable
from finetune.config.run import EvalConfig, LogConfig, RunConfig, SaveConfig, SpikeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """A whole run of ``tessera-finetune tune``."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    spike: SpikeConfig = field(default_factory=SpikeConfig)

    def __post_init__(self) -> None:
        self._check_offload()
        self._check_optimizer()
        require(
            self.model.path is not None or self.tokenizer.path is not None or self.tokenizer.train is not None,
            "tokenizer",
            "not set",
            "name a path or be trained (tokenizer.train.vocab_size), because a new model brings none",
        )
        require(
            self.lora is None or self.model.path is not None,
            "lora",
            "set",
            "be absent when model.new is set: an adapter needs trained weights beside it",
        )
        stages = self.pipeline.stages
        require(self.run.ranks % stages == 0, "pipeline.stages", stages, f"divide run.ranks, which is {self.run.ranks}")
        self._check_batch()

    def _check_offload(self) -> None:
        offload, stage = self.offload, self.zero.stage
        needs_three = {
            "parameters": offload.parameters != "none",
            "optimizer": offload.optimizer == "nvme",
            "ratio": offload.ratio < 1.0,
            "method": offload.method == "superoffload",
        }
        for name, used in needs_three.items():
            allowed = {"parameters": "none", "optimizer": "none or cpu", "ratio": "1", "method": "plain or zenflow"}[name]
            rule = f"be {allowed} unless zero.stage is 3 (it is {stage})"
            require(not used or stage == 3, f"offload.{name}", getattr(offload, name), rule)
        require(self.run.precision != "fp16" or self.run.device != "cpu", "run.precision", "fp16", "be bf16 or fp32 on the CPU")
        rule = "be 1 with lora: what adapters need of the optimizer is too little to be shared out"
        require(self.lora is None or offload.ratio == 1.0, "offload.ratio", offload.ratio, rule)
        if offload.method == "superoffload":
            require(self.run.device != "cpu", "offload.method", "superoffload", "be plain on the CPU: it needs CUDA")
            rule = "be false with offload.method superoffload: DeepSpeed keeps moments where no save reaches them, in a process"
            require(not self.save.resume_state, "save.resume_state", True, rule)

    def _check_optimizer(self) -> None:
        """Some ways of offloading are made for one optimizer."""
        offload, name = self.offload, self.optimizer.name
        for key, used, allowed in (("method", offload.method != "plain", "plain"), ("ratio", offload.ratio < 1.0, "1")):
            rule = f"be {allowed} unless optimizer.name is adamw (it is {name}): this is AdamW's alone"
            require(not used or name == "adamw", f"offload.{key}", getattr(offload, key), rule)
        steps, every = self.schedule.steps, offload.zenflow.update_every
        rule = f"be at most schedule.steps, which is {steps}: most rows would never be updated"
        late = offload.method == "zenflow" and steps is not None and steps < every
        require(not late, "offload.zenflow.update_every", every, rule)
        # As their kinds declare it, which import torch and so cannot be asked here; a test holds this to them.
        self.check_disks(by_matrix=name in ("muon", "adafactor"))

    def check_disks(self, *, by_matrix: bool) -> None:
        """Refuse an optimizer on disks that treats matrices in its own way.

        Raises:
            ConfigError: names ``offload.optimizer`` and the rule.
        """
        name, place = self.optimizer.name, self.offload.optimizer
        rule = f"be none or cpu with optimizer.name {name}, which passes parts of matrices between ranks while it updates them"
        require(place != "nvme" or not by_matrix, "offload.optimizer", place, rule)

    def check_command(self, command: str) -> None:
        """Rules that hold for ``tune`` or for ``pretrain`` alone.

        Raises:
            ConfigError: names the key, the rule and the other command.
        """
        stage, stages = self.zero.stage, self.pipeline.stages
        if command != "pretrain":
            require(stages == 1, "pipeline.stages", stages, "be 1 for tune; `tessera-finetune pretrain` trains through stages")
            require(stage > 0, "zero.stage", stage, "be 1, 2 or 3 for tune; 0 is for pretrain")
            return
        rule = "be 0 or 1 for pretrain: stages pass gradients on whole, so only the optimizer's state can be spread"
        require(stage <= 1, "zero.stage", stage, rule)
        for name in ("optimizer", "parameters"):
            rule = "be none for pretrain: every stage keeps its own part on its device; add stages, or offload with `tune`"
            require(getattr(self.offload, name) == "none", f"offload.{name}", getattr(self.offload, name), rule)
        require(self.lora is None, "lora", "set", "be absent for pretrain; `tessera-finetune tune` trains adapters")
        activations = self.activations
        rule = "be auto or mask for pretrain, whose stages make a mask"
        require(activations.packed_attention != "varlen", "activations.packed_attention", "varlen", rule)
        rule = "be rows for pretrain, whose head is cut into pieces"
        require(activations.loss == "rows", "activations.loss", activations.loss, rule)
        check_splittable(self.model)

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
    def algorithm(self) -> str:
        """How weights are updated: the optimizer's name, or ``zenflow``, which is AdamW at two paces."""
        return "zenflow" if self.offload.method == "zenflow" else self.optimizer.name

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

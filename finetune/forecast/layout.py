"""The part of a configuration that decides where bytes lie."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config import TuneConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The part of a configuration that decides where bytes lie."""

    stage: int
    ranks: int
    """All of them."""
    pipeline: int
    """Pipeline stages; 1 is none."""
    staged: bool = False
    """Whether it is trained by ``finetune.engines.pipeline.engine``: by ``pretrain``, one stage or several."""
    device: str
    weight_bytes: int
    algorithm: str
    """``TuneConfig.algorithm``."""
    optimizer: str
    """Where the optimizer's state lies: ``none`` (the device), ``cpu``, ``nvme``."""
    parameters: str
    accumulation: int
    bucket: int
    """Elements."""
    checkpoint_on_cpu: bool
    on_host: float = 1.0
    """Share of an offloaded optimizer's state that lies on the host (Twin-Flow)."""
    chosen: float = 0.0
    """Share of a matrix's rows whose weights and moments are held once more (ZenFlow)."""
    times_layers: bool = False
    """Whether a pipeline's layers are timed before it is cut into stages, each by itself on every rank."""
    tokens: int = 0
    """Tokens of a micro-batch."""
    whole_logits: bool = False
    """Whether the loss is taken from the logits of a whole micro-batch."""
    sent_bytes: int = 4
    """Bytes of an element of a gradient on its way to other ranks of a pipeline stage."""

    @property
    def sums_in_fp32(self) -> bool:
        """Whether a rank adds up the gradients of all it has in fp32: ``pretrain`` in 16 bits."""
        return self.staged and self.weight_bytes == 2

    @property
    def flattens(self) -> bool:
        """Whether the model's weights are copied to flat memory before training."""
        return self.stage > 0 or self.sums_in_fp32

    @property
    def adds_whole(self) -> bool:
        """Whether, on a CPU, whole gradients wait for the last micro-batch's end; others go into a bucket as they come."""
        return self.staged or self.stage == 1

    @property
    def shares(self) -> int:
        """Ranks that share one copy of the state."""
        return self.ranks // self.pipeline


def layout_of(config: TuneConfig, *, device: str, precision: str, command: str = "tune") -> Layout:
    """Where a run of ``command`` (``tune`` or ``pretrain``) has its bytes."""
    offload = config.offload
    staged = command == "pretrain"
    return Layout(
        # In 16 bits `pretrain` spreads the optimizer's state in stage 0 too.
        stage=max(1, config.zero.stage) if staged and precision != "fp32" else config.zero.stage,
        ranks=config.run.ranks,
        pipeline=config.pipeline.stages,
        staged=staged,
        device=device,
        weight_bytes=4 if precision == "fp32" else 2,
        algorithm=config.algorithm,
        optimizer=offload.optimizer,
        parameters=offload.parameters,
        accumulation=config.accumulation,
        bucket=config.zero.bucket_elements,
        checkpoint_on_cpu=config.activations.checkpoint == "cpu",
        on_host=offload.ratio,
        chosen=offload.zenflow.share if offload.method == "zenflow" else 0.0,
        times_layers=staged and config.pipeline.partition == "profile",
        tokens=config.batch.micro * config.data.seq_len,
        whole_logits=config.activations.loss_rows == 0,
        sent_bytes=2 if precision == "bf16" else 4,
    )

"""The seam below the engine: something that carries out a step plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from serve.engine.plan import StepPlan, StepResult
from serve.types import LengthRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the ranks say once the model is loaded: facts the machine and the checkpoint decide, not the configuration."""

    family: str
    """transformers' ``model_type``, for example ``gpt_neox``."""
    vocab_size: int
    max_model_len: int
    """Positions a sequence may have: the smaller of the model's limit and the configured one."""
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    num_blocks: int
    """KV blocks in the pool; the same on every rank."""
    block_tokens: int
    num_parameters: int
    checkpoint_step: int | None
    attention: str = ""
    """What computes attention: ``kernel`` is Tessera's own for CPUs, ``triton`` for CUDA devices, ``torch`` plain torch."""
    linear: str = ""
    """What computes linear layers: ``kernel``, ``onednn`` or ``torch``."""
    kernels: str = ""
    """What processors the CPU kernels were built for: a level such as ``x86-64-v4``, ``native``, or ``none`` without them."""
    load_seconds: tuple[tuple[str, float], ...] = ()
    """(phase, seconds), for the ``model_load_seconds`` metric: ``import``, ``build``, ``weights``, ``cache``."""
    length_rule: LengthRule | None = None
    """How keys depend on the length of their sequence; ``None`` in most models, where they do not."""
    cache_memory: str = ""
    """What the blocks take of which memory, and why that, in words, for the log."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the ranks' GPUs, rank 0's first; of each rank alone before they are put together."""

    def called(self, rank: int) -> str:
        """What a rank is called where it is to blame: with its GPU, if it has one, by the name that the system's log knows."""
        return f"rank {rank} ({self.gpus[rank]})" if rank < len(self.gpus) else f"rank {rank}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The ranks can exchange their weights for those of another checkpoint between two steps."""

    checkpoint_step: int | None
    """Training step of that checkpoint, where it is recorded."""
    beside: bool
    """Whether the new weights are in memory already, beside the old; else they are read while no step can be computed."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """The ranks cannot: the checkpoint is of another model than the one they were made for."""

    reason: str


@dataclass(frozen=True, slots=True)
class Profiled:
    """How far a rank is with the steps that it was told to record."""

    num_steps: int
    is_over: bool
    num_bytes: int = 0
    """How long its trace is, once it is over; 0 where there is none."""
    failure: str = ""
    """Why there is none, where something failed."""


LossReason = Literal["died", "memory", "frozen", "hangs", "start", "broke"]


class Loss(str):
    """A sentence about why the ranks cannot go on, which knows what kind of reason it gives."""

    __slots__ = ("reason",)

    reason: LossReason

    def __new__(cls, sentence: str, reason: LossReason) -> Loss:
        made = super().__new__(cls, sentence)
        made.reason = reason
        return made


def loss_reason(sentence: str | None) -> LossReason:
    """The kind of a reason: ranks that were never ready have no sentence, and one that knows none tells of a defect."""
    if sentence is None:
        return "start"
    return sentence.reason if isinstance(sentence, Loss) else "broke"


class ExecutorDied(Exception):
    """The ranks cannot go on: one died, froze or broke the protocol. Not recoverable on this executor."""

    @property
    def sentence(self) -> str:
        """Why, as whoever found out said it: a ``Loss`` where it was one."""
        first = self.args[0] if self.args else ""
        return first if isinstance(first, str) else str(self)


class Executor(Protocol):
    """Carries out plans, one after the other, in the order in which they came, or with one before another where it may
    overtake. Called by the engine thread alone."""

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        """Let one step be computed once all before it are; does not wait for that.

        Args:
            overtakes: whether it may be computed before the one that is under way, whose blocks and sequences it has none of.

        Raises:
            ExecutorDied: the results of all that is under way are lost and no further call can succeed.
        """
        ...

    def wait(self, seconds: float, bell: int | None = None) -> bool:
        """Wait until the result that ``collect`` would give is there, or the ranks are lost; at most so many seconds.

        Args:
            bell: a descriptor that ends the wait as well when there is something to read from it.

        Returns:
            Whether ``collect`` would answer at once.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the result of the oldest step that was launched and not collected, or of one that has overtaken it.

        Raises:
            ExecutorDied: as above.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch one step while nothing is under way, and collect it.

        Raises:
            ExecutorDied: as above.
        """
        ...

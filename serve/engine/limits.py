"""What the engine accepts, and how it refuses the rest."""

from __future__ import annotations

from dataclasses import dataclass

from serve.engine.executor import ModelFacts
from serve.errors import InvalidRequest
from serve.types import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The engine's part of the configuration."""

    max_num_seqs: int
    """Sequences running at once."""
    max_step_tokens: int
    """Positions computed in one step."""
    max_queued_requests: int
    """Requests waiting for their first step."""
    max_queued_tokens: int
    """Prompt tokens of those together. A larger prompt is still taken when nothing else waits."""
    prefix_caching: bool
    """False: blocks are shared only between the sequences of one request."""
    async_scheduling: bool = True
    """Whether a step is planned and sent while the ranks compute the one before it."""
    speculative_tokens: int = 0
    """Tokens proposed at most in one step, for all sequences together; 0 proposes none."""
    drafts: bool = False
    """Whether the ranks have a draft model, which says what is proposed; else it is what texts have said before."""

    @property
    def num_places(self) -> int:
        """Sequences that one step can compute a position of."""
        return min(self.max_num_seqs, self.max_step_tokens)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_step_tokens", "max_queued_requests", "max_queued_tokens"):
            assert getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1"
        assert self.speculative_tokens >= 0, f"speculative_tokens is {self.speculative_tokens}; it must be 0 or more"


def check_fits(generation: Generation, facts: ModelFacts) -> None:
    """Refuse what could not be computed even with the machine to itself.

    Raises:
        InvalidRequest: the field that breaks a rule, with the rule.
    """
    num_prompt, max_new = len(generation.prompt_ids), generation.stopping.max_new_tokens
    if num_prompt == 0:
        raise InvalidRequest.of("prompt", "the prompt has no tokens; it must have at least one")
    if max_new < 0:
        raise InvalidRequest.of("stopping.max_new_tokens", f"{max_new} is negative; it must be 0 or more")
    if generation.num_sequences < 1:
        raise InvalidRequest.of("sampling.num_sequences", f"{generation.num_sequences} is too few; it must be at least 1")
    # The last token generated is never computed, so the cache has room for one more than it has positions.
    _check_room(num_prompt, max_new, facts.max_model_len, f"the model has {facts.max_model_len} positions")
    pool_positions = facts.num_blocks * facts.block_tokens
    _check_room(num_prompt, max_new, pool_positions + (max_new > 0), f"the KV cache holds {pool_positions} positions")


def _check_room(num_prompt: int, max_new: int, room: int, rule: str) -> None:
    if num_prompt > room or (num_prompt == room and max_new > 0):
        raise InvalidRequest.of("prompt", f"{num_prompt} tokens leave no room to generate; {rule}")
    if num_prompt + max_new > room:
        raise InvalidRequest.of(
            "stopping.max_new_tokens", f"{num_prompt} prompt tokens and {max_new} new ones are too many; {rule}"
        )

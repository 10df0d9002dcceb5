"""How a request becomes sequences."""

from __future__ import annotations

from serve.engine.executor import ModelFacts
from serve.engine.limits import EngineLimits
from serve.engine.prefix_cache import DigestChain, PrefixCache
from serve.engine.sequence import LiveRequest, Sequence
from serve.engine.sharing import chain_of
from serve.engine.speculation import Speculation
from serve.engine.stopping import StopRule
from serve.engine.text import TextFactory
from serve.types import Generation, LengthRule, SequenceId


class Opening:
    """Makes live requests of what was asked for, and numbers them and their sequences."""

    def __init__(self, open_text: TextFactory, limits: EngineLimits) -> None:
        """Nothing is numbered yet.

        Args:
            open_text: makes a sequence's text stream.
            limits: of the engine: who may share blocks, and how many tokens are proposed.
        """
        self._open_text = open_text
        self._limits = limits
        self._num_requests = 0
        self._num_sequences = 0

    def open(self, generation: Generation, facts: ModelFacts, cache: PrefixCache) -> LiveRequest:
        """A new request with all its sequences, none of them enqueued."""
        request = LiveRequest(
            generation=generation,
            num_prompt_tokens=len(generation.prompt_ids),
            arrival=self._num_requests,
            rule=StopRule(generation.stopping, facts.eos_ids),
        )
        self._num_requests += 1
        if generation.response.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(generation.prompt_ids)
        asked, most = generation.speculative_tokens, self._limits.speculative_tokens
        proposes = most if asked is None else min(asked, most)
        wants_text = generation.response.text or bool(generation.stopping.stop_strings)
        for index in range(generation.num_sequences):
            token_ids = list(generation.prompt_ids)
            request.sequences.append(
                Sequence(
                    id=SequenceId(self._num_sequences),
                    index=index,
                    request=request,
                    token_ids=token_ids,
                    text=self._open_text(generation, index) if wants_text else None,
                    chain=self.chain_of(request, token_ids, cache, facts.length_rule),
                    tells_text=generation.response.text,
                    samples=request.rule.max_new_tokens > 0,
                    restart_after=_restart_after(len(token_ids), facts.length_rule),
                    speculation=Speculation(proposes, drafts=self._limits.drafts) if proposes else None,
                )
            )
            self._num_sequences += 1
        return request

    def chain_of(
        self, request: LiveRequest, token_ids: list[int], cache: PrefixCache, rule: LengthRule | None
    ) -> DigestChain | None:
        """Under what digests a sequence of the request, which has these tokens by now, shares blocks; ``None`` for nobody."""
        return chain_of(request, token_ids, cache, rule, with_all=self._limits.prefix_caching)


def _restart_after(num_tokens: int, rule: LengthRule | None) -> int | None:
    """With how many positions a sequence that begins with so many tokens must be computed again; ``None`` for never."""
    return rule.plain_tokens if rule is not None and rule.recomputes and num_tokens <= rule.plain_tokens else None

"""Which positions of which sequences the next step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from serve.engine.ahead import can_run_ahead
from serve.engine.checking import check_batch
from serve.engine.draft import Draft
from serve.engine.first_tokens import FirstTokens
from serve.engine.limits import EngineLimits
from serve.engine.places import Claim, Places
from serve.engine.plan import StepPlan
from serve.engine.prefix_cache import PrefixCache
from serve.engine.proposing import proposal
from serve.engine.sequence import Sequence, SequenceState
from serve.engine.shares import Shares
from serve.engine.sharing import is_being_made, prefix_of
from serve.engine.speculation import Speculation
from serve.engine.starting import start_of
from serve.engine.stats import Loss, Recomputed
from serve.engine.waiting_line import WaitingLine
from serve.types import SequenceId

_HEADROOM_FRACTION = 100
"""One block in so many stays free at admission, so that the sequences already running can grow a little before one of
them must be preempted."""


class Scheduler:
    """Owns the waiting queue, the running batch and, through the prefix cache, every KV block.

    There is no prefill and no decode here. A sequence owes ``debt`` positions, and a step pays as much of that as the
    token budget and the free blocks allow: running sequences first, oldest first, then waiting ones. Something new starts
    only when all that run were paid in full, or are left out for it and owe one position (see ``FirstTokens``): so only the
    youngest can owe more. A long prompt takes what the decodes leave of each step, and never delays them. When blocks run
    out, the youngest running sequence gives way: its blocks are freed and it is computed again later.

    Tenants share the places, so a running sequence may also give way to another tenant's (see ``Places``).

    Why it cannot come to a halt: no sequence is accepted that could not run alone in the pool; the oldest running
    sequence is never preempted for a younger one's blocks, and for another tenant's place a few times at most, so it always
    reaches its end; and the head of the queue is never passed by a smaller sequence behind it, but by those of tenants that
    have less than their due while its own has not, so it always becomes the oldest. It waits for no more than the step in
    which another computes what it shares. One that must be computed again, having grown beyond a ``LengthRule``, goes back to
    the head of the queue once.

    Always true (see ``check``): a sequence is in the queue, in the running batch or in neither; only running ones hold
    blocks, each block as often as tables name it; all running sequences but the youngest owe exactly one position, and
    there are never more of them than the token budget can serve.
    """

    def __init__(self, cache: PrefixCache, limits: EngineLimits, *, rows_take_time: bool = False) -> None:
        """``rows_take_time``: whether a step takes the longer the more rows it has, as on a CPU."""
        self._cache = cache
        self._limits = limits
        self._headroom = cache.pool.num_blocks // _HEADROOM_FRACTION
        self._waiting = WaitingLine()
        self._shares = Shares()
        self.running: dict[SequenceId, Sequence] = {}
        """The running batch in order of admission, the oldest first. For others to read."""
        self.places = Places(limits, self._waiting, self.running)
        self._first_tokens = FirstTokens(self.places, limits, rows_take_time=rows_take_time)
        self._dropped: list[SequenceId] = []
        self._aside: dict[Sequence, None] | None = None
        """Sequences that wait for an exchange of weights, in their order; ``None`` while nothing waits for one."""
        self._making: dict[int, set[bytes]] = {}
        """What each step under way fills, by its number; as ``Draft.making``."""
        self._num_plans = 0
        self._num_admissions = 0
        self.num_running_requests = 0
        self.preemptions = 0
        self.gave_way = 0
        """Preemptions that another tenant's share of the places asked for."""
        self.recomputed = Recomputed()
        self.cache_queries = 0
        self.cache_hits = 0
        self.proposed_tokens = 0
        self.accepted_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether the next ``schedule`` has anything to say."""
        return bool(self.running or self._waiting or self._dropped or self._aside)

    def enqueue(self, seq: Sequence) -> None:
        """Let a new sequence wait: larger priority first, then tenants in turn, then earlier arrival, then index."""
        assert seq.state is SequenceState.HELD, f"sequence {seq.id} is {seq.state.value}; it cannot be enqueued"
        seq.state = SequenceState.WAITING
        seq.request.turn = self._shares.enter(seq.request.generation, seq.request.turn)
        self._push_new(seq)

    def _push_new(self, seq: Sequence) -> None:
        request = seq.request
        self._waiting.push(seq, (1, -request.generation.priority, request.turn or 0, request.arrival, seq.index))

    def remove(self, seq: Sequence) -> None:
        """End a sequence, wherever it is: its blocks are free at once, and the ranks hear of it in the next plan."""
        if seq.state is SequenceState.RUNNING:
            self._leave_running(seq)
        elif seq.state is SequenceState.WAITING and not self._waiting.discard(seq) and self._aside is not None:
            self._aside.pop(seq, None)
        if seq.state is not SequenceState.HELD:
            self._shares.leave(seq.request.generation.priority)
        seq.state = SequenceState.ENDED

    def restart(self, seq: Sequence) -> None:
        """Nothing that is computed of a running sequence counts any longer; it waits before all that never ran."""
        seq.num_lost, seq.lost_by = min(seq.num_computed, len(seq.token_ids)), "restarted"
        self._leave_running(seq)
        seq.state = SequenceState.WAITING
        self._waiting.push(seq, (0, seq.admitted))

    def set_pinned_aside(self) -> None:
        """From now on no request begins whose tokens must all be made by the same weights; others may pass it."""
        if self._aside is None:
            self._aside = {}

    def let_pinned_begin(self) -> None:
        """What was set aside waits again, where it was."""
        aside, self._aside = self._aside, None
        for seq in aside or ():
            self._push_new(seq)

    def swap(self, number: int) -> StepPlan:
        """The plan that exchanges the weights: nothing stays computed, on the ranks or in the cache, and what ran waits at the
        front of the queue in its order. As a plan of ``schedule``, it counts as given to the ranks."""
        for seq in tuple(self.running.values()):
            self.restart(seq)
        self._cache.flush()
        plan = StepPlan(step=self._num_plans, dropped=tuple(self._dropped), swap=number)
        self._num_plans += 1
        self._dropped = []
        return plan

    def lose_ranks(self) -> None:
        """Nothing is computed any longer, and nobody is left who would have to forget: what ran waits at the front of the
        queue in its order. ``revive`` comes before the next plan."""
        for seq in tuple(self.running.values()):
            self.restart(seq)
        self._dropped = []
        self._making.clear()
        self.let_pinned_begin()

    def revive(self, cache: PrefixCache) -> None:
        """New ranks compute from now on, with these blocks; nothing runs."""
        assert not self.running, "what ran on the ranks that were lost was not taken back"
        self._cache = cache
        self._headroom = cache.pool.num_blocks // _HEADROOM_FRACTION
        self._dropped = []
        self._num_plans = 0

    def schedule(self) -> StepPlan | None:
        """Draw up the next step; ``None`` when there is nothing to compute and nothing the ranks should forget.

        The plan counts as given to the ranks: it must be executed, and then committed. What it computes counts as computed at
        once; only the prefix cache waits for ``commit``. While another step is under way, each sequence in it is taken to go
        on, and the answer is ``None`` as well where that is not enough to go by: where blocks run out, and somebody must give
        way whose token is not known yet; where tokens may be proposed; and where there is only something to forget.

        A block that a sequence gives back may still be written by a step under way. That does no harm: whoever gets it is
        computed in a later step, and the ranks take one after the other.
        """
        ahead = bool(self._making)
        if ahead and not can_run_ahead(self.running, self._cache, self._limits):
            return None
        if (crowded := self._first_tokens.crowded(self.running)) and ahead:
            return None
        self._let_give_way(crowded)
        claims = self.places.claims(self._cache, self._headroom) if self._aside is None else []
        giving_way = [seq for claim in claims for seq in claim.giving_way]
        if ahead and giving_way:
            return None
        self._first_tokens.settle()
        self.places.note_step()
        draft = Draft(budget=self._limits.max_step_tokens)
        self._let_give_way(giving_way)
        left_out = self._left_out(claims)
        self._continue_running(draft, left_out)
        if not draft.has_preempted:
            self._admit_waiting(draft, claims, only_claims=bool(left_out))
        if not draft.spans and (ahead or not self._dropped):
            return None
        return self._planned(draft)

    def overtake(self, under: StepPlan) -> StepPlan | None:
        """Draw up a step of one prompt that may be computed before the one under way; ``None`` where there is no reason.

        See ``FirstTokens``. There may be a few more running than there are places until that has ended.
        """
        if self._aside is not None or [*self._making] != [under.step]:
            return None
        at = {"step": self._num_plans, "headroom": self._headroom}
        claim = self._first_tokens.overtaking(under, self.running, self._cache, **at)
        if claim is None or self._is_being_made(claim.sequence) or not self._take_prefix(claim.sequence):
            return None
        self._first_tokens.overtakes(claim, step=self._num_plans)
        self._admit(claim.sequence, draft := Draft(budget=self._limits.max_step_tokens))
        return self._planned(draft, still_computed={span.sequence for span in under.spans})

    def _planned(self, draft: Draft, still_computed: Container[SequenceId] = ()) -> StepPlan:
        self._making[self._num_plans] = draft.making
        dropped = tuple(sequence for sequence in self._dropped if sequence not in still_computed)
        plan = StepPlan(step=self._num_plans, starts=tuple(draft.starts), spans=tuple(draft.spans), dropped=dropped)
        self._num_plans += 1
        self._dropped = [sequence for sequence in self._dropped if sequence in still_computed]
        return plan

    def commit(self, plan: StepPlan) -> None:
        """The plan was computed: let the prefix cache find the blocks that are full now, of the sequences that still run.

        What was proposed counts as computed once it is known to come; see ``advance``.
        """
        del self._making[plan.step]
        running, size = self.running, self._cache.block_tokens
        for span in plan.spans:
            seq = running.get(span.sequence)
            if seq is not None and (seq.num_registered + 1) * size <= (end := span.start + span.count - len(span.proposed)):
                self._register(seq, end)

    def accept(self, seq: Sequence) -> None:
        """A token that was proposed for a sequence was sampled too."""
        assert seq.speculation is not None, f"nothing was proposed for sequence {seq.id}"
        seq.speculation.accepted += 1
        self.accepted_tokens += 1

    def advance(self, seq: Sequence) -> None:
        """The last token of a running sequence was appended and, having been proposed, is computed already."""
        seq.num_computed += 1
        self._register(seq, seq.num_computed)

    def _register(self, seq: Sequence, end: int) -> None:
        """So many positions of a running sequence are in the cache."""
        if seq.chain is not None:
            while (seq.num_registered + 1) * self._cache.block_tokens <= end:
                self._cache.register(seq.chain.digest(seq.num_registered), seq.table[seq.num_registered])
                seq.num_registered += 1

    def _left_out(self, claims: list[Claim]) -> frozenset[SequenceId]:
        """Running sequences that the next step passes over."""
        if len(claims) != 1 or self._is_being_made(claims[0].sequence):
            return frozenset()
        return self._first_tokens.leave_out(claims[0], self.running, self._cache, step=self._num_plans, headroom=self._headroom)

    def _is_being_made(self, seq: Sequence, *making: set[bytes]) -> bool:
        """Whether steps under way, or what else fills blocks, compute what a sequence shares."""
        return is_being_made(seq, self._cache, (*making, *self._making.values()))

    def _continue_running(self, draft: Draft, left_out: frozenset[SequenceId]) -> None:
        """Pay the debts of the running sequences, oldest first, preempting the youngest where blocks run out; compute some of
        what they propose in the budget that no debt takes."""
        if self.running and self._limits.speculative_tokens:
            youngest = self.running[next(reversed(self.running))]
            draft.spare = min(draft.budget - (len(self.running) - 1) - youngest.debt, self._limits.speculative_tokens)
        size = self._cache.block_tokens
        for seq in tuple(self.running.values()):
            if draft.has_preempted and seq.id not in self.running:  # preempted a moment ago, and so was every younger one
                return
            count = min(seq.debt, draft.budget)
            if count == 0:
                draft.num_last += 1
                continue
            if seq.id in left_out:
                continue
            if seq.num_computed + count > len(seq.table) * size and not self._grow(seq, count, draft):
                return
            draft.add_span(seq, count, size, () if seq.speculation is None else self._propose(seq, seq.speculation, draft))

    def _admit_waiting(self, draft: Draft, claims: list[Claim], *, only_claims: bool) -> None:
        """Start waiting sequences while budget, places and blocks last: those with a claim first, then strictly in their order.

        While there is budget left here, each running sequence has been paid in full and holds the blocks for all it
        knows; so whatever is free is free indeed. Where some were left out, the one claim leaves the blocks that they want.
        """
        first = deque(claim.sequence for claim in claims)
        while draft.budget and len(self.running) - draft.num_last < self._limits.max_num_seqs:
            if first:
                claiming = first.popleft()
                if not self._is_being_made(claiming, draft.making) and self._take_prefix(claiming):
                    self._admit(claiming, draft)
                continue
            if only_claims:
                return
            seq = self._waiting.first()
            if seq is not None and self._aside is not None and seq.request.is_pinned and seq.request.started_seconds is None:
                self._waiting.discard(seq)
                self._aside[seq] = None
                continue
            if seq is None or self._is_being_made(seq, draft.making) or not self._take_prefix(seq):
                return
            self._admit(seq, draft)

    def _admit(self, seq: Sequence, draft: Draft) -> None:
        self._waiting.discard(seq)
        self._enter_running(seq)
        count = min(seq.debt, draft.budget)
        grown = self._grow(seq, count, draft)
        assert grown, f"sequence {seq.id} was admitted without the blocks it needs"
        draft.starts.append(start_of(seq))
        seq.num_known = len(seq.token_ids)
        draft.add_span(seq, count, self._cache.block_tokens)

    def _take_prefix(self, seq: Sequence) -> bool:
        """Give a waiting sequence its prefix-cache hits; False, and no change, if the rest of what it knows would not fit."""
        num_known, headroom = len(seq.token_ids), self._headroom if self.running else 0
        looks_up = seq.chain is not None and not seq.wants_prompt_logprobs
        if (hits := prefix_of(seq, self._cache, headroom=headroom)) is None:
            return False
        for block in hits:
            self._cache.pool.share(block)
        seq.table = hits
        seq.num_registered = len(hits)
        seq.num_computed = len(hits) * self._cache.block_tokens
        if seq.admitted < 0:
            seq.cached_tokens = min(seq.num_computed, seq.request.num_prompt_tokens)
            if looks_up:
                self.cache_queries += num_known
                self.cache_hits += seq.cached_tokens
        elif seq.num_lost:
            self.recomputed = self.recomputed.plus(max(0, seq.num_lost - seq.num_computed), seq.lost_by)
            seq.num_lost = 0
        return True

    def _grow(self, seq: Sequence, count: int, draft: Draft) -> bool:
        """Let the table cover ``count`` more positions, preempting the youngest while blocks are short. False if that was
        the sequence itself."""
        covered = len(seq.table) * self._cache.block_tokens
        if seq.num_computed + count <= covered:
            return True
        missing = self._cache.blocks_for(seq.num_computed + count - covered)
        while (blocks := self._cache.try_take(missing)) is None:
            youngest = self.running[next(reversed(self.running))]
            assert len(self.running) > 1, f"sequence {seq.id} has the pool to itself and does not fit"
            draft.has_preempted = True
            self._preempt(youngest, "preempted")
            if youngest is seq:
                return False
        seq.table += blocks
        return True

    def _propose(self, seq: Sequence, speculation: Speculation, draft: Draft) -> tuple[int, ...]:
        """Tokens that may follow what a sequence knows, with the blocks for them; nothing is preempted for those."""
        proposed = proposal(seq, speculation, draft.spare, self._cache, keep=self._headroom + len(self.running))
        self.proposed_tokens += len(proposed)
        draft.spare -= len(proposed)
        return proposed

    def _let_give_way(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            seq.gives_way_from = 2 * seq.num_computed
            self._preempt(seq, "fair_share")
        self.gave_way += len(sequences)

    def _preempt(self, seq: Sequence, loss: Loss) -> None:
        """Take a running sequence's blocks away and put it at the front of the queue, before all that never ran."""
        self.restart(seq)
        seq.lost_by = loss
        self.preemptions += 1

    def _enter_running(self, seq: Sequence) -> None:
        seq.state = SequenceState.RUNNING
        seq.admitted = self._num_admissions
        self._num_admissions += 1
        self._shares.began(seq.request.generation.priority, seq.request.turn or 0)
        self.running[seq.id] = seq
        self.places.take(seq.tenant)
        seq.request.num_running += 1
        if seq.request.num_running == 1:
            self.num_running_requests += 1

    def _leave_running(self, seq: Sequence) -> None:
        del self.running[seq.id]
        self.places.give_back(seq.tenant)
        seq.request.num_running -= 1
        if seq.request.num_running == 0:
            self.num_running_requests -= 1
        if seq.num_known:
            self._dropped.append(seq.id)
        self._cache.release(seq.table)
        seq.forget_computed()

    def check(self) -> None:
        """Assert what must always hold between two steps. Cost grows with everything: for tests."""
        self._cache.check()
        self._waiting.check()
        self.places.check()
        self._shares.check(len(self._waiting) + len(self.running) + len(self._aside or ()))
        for seq in self.running.values():
            assert seq not in self._waiting, f"sequence {seq.id} runs and waits"
            assert seq not in (self._aside or ()), f"sequence {seq.id} runs and was set aside"
        num_places = self._limits.num_places + len(self._first_tokens.crowded(self.running))
        check_batch(self.running, self._cache, num_under_way=len(self._making), num_places=num_places)
        num_requests = len({id(seq.request) for seq in self.running.values()})
        assert num_requests == self.num_running_requests, "the count of running requests is wrong"

"""The engine: requests in, events out, one step at a time."""

from __future__ import annotations

from collections.abc import Callable

from serve.engine.admission import Admission
from serve.engine.events import failed_event, finished_event, prompt_event, token_event
from serve.engine.executor import Executor, ModelFacts
from serve.engine.figures import figures
from serve.engine.limits import EngineLimits, check_fits
from serve.engine.opening import Opening
from serve.engine.plan import Sampled, Span, StepPlan, StepResult
from serve.engine.prefix_cache import PrefixCache
from serve.engine.queued import Queued
from serve.engine.registry import Registry
from serve.engine.scheduler import Scheduler
from serve.engine.sequence import LiveRequest, Sequence, SequenceState
from serve.engine.stats import EngineStats
from serve.engine.step_results import judge
from serve.engine.stopping import LENGTH, Stop
from serve.engine.swap import Swap, Swapped, Weights
from serve.engine.text import TextFactory
from serve.engine.under_way import UnderWay
from serve.errors import DeadlineExpired, DuplicateRequest, InvalidRequest, Loading, NotFinite, RequestBroke, RequestError
from serve.types import Event, Generation, RequestId, SequenceId

__all__ = ["Engine", "EngineLimits"]

MOST_DEATHS = 3
"""A request that was being computed when the ranks died so often, and got no token in between, ends."""


class Engine:
    """Decides what the ranks compute, and what that means for each request.

    The caller's duties: call ``step`` while ``has_work`` and hand its events on. When it raises ``ExecutorDied``, either
    ``lose_ranks`` and then ``revive`` on new ranks, or ``fail_all``; when it raises anything else, call ``fail_all`` and use
    this engine no more. All from one thread.

    Always true: each accepted request ends exactly once, either with one ``SequenceFinished`` per sequence, the last of
    them with ``request_done``, or with one ``RequestFailed``; nothing of it follows, and from then on it holds no block.
    """

    def __init__(
        self,
        *,
        facts: ModelFacts,
        limits: EngineLimits,
        executor: Executor,
        open_text: TextFactory,
        clock: Callable[[], float],
    ) -> None:
        """Make an engine without requests.

        Args:
            facts: what the executor's ranks have loaded.
            limits: how much is accepted, and how much one step does.
            executor: computes the steps.
            open_text: makes a sequence's text stream.
            clock: monotonic seconds, the same clock as arrivals and deadlines.
        """
        self._facts = facts
        self._limits = limits
        self._opening = Opening(open_text, limits)
        self._clock = clock
        self._under_way = UnderWay(executor, clock, may_run_ahead=limits.async_scheduling)
        self._cache = PrefixCache(facts.num_blocks, facts.block_tokens)
        self._scheduler = Scheduler(self._cache, limits, rows_take_time=facts.device == "cpu")
        self._registry = Registry(Queued(limits.max_queued_requests, limits.max_queued_tokens))
        self.admission = Admission(self._registry.queue, limits, self._under_way.totals)
        self._events: list[Event] = []
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._weights = Weights(0, facts.checkpoint_step)
        self._swap: Swap | None = None
        self._swapped: Swapped | None = None

    # What the caller asks.

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do: something to compute, to forget on the ranks, or to tell."""
        return bool(self._events or self._under_way) or self._swap is not None or self._scheduler.has_work

    @property
    def is_computing(self) -> bool:
        """Whether the ranks have a step that was not settled."""
        return bool(self._under_way)

    @property
    def next_deadline_seconds(self) -> float | None:
        """The earliest deadline of all live requests, on the engine's clock."""
        return self._registry.next_deadline_seconds

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """The live requests, in order of arrival."""
        return self._registry.ids

    def stats(self) -> EngineStats:
        """The figures of this moment. Costs the same however many requests the tenants have."""
        caches, tokens = self._limits.prefix_caching, (self._prompt_tokens, self._generation_tokens)
        return figures(self._scheduler, self._registry, self._cache, self._under_way.totals, caches=caches, tokens=tokens)

    # What the caller does.

    def add(self, generation: Generation) -> None:
        """Accept a request; it waits for its first step.

        Raises:
            InvalidRequest: it could not be computed even alone; names the field.
            DuplicateRequest: a live request has its id.
            QueueFull: too many requests or prompt tokens wait already.
        """
        check_fits(generation, self._facts)
        if generation.request_id in self._registry:
            raise DuplicateRequest(f"a request with the id {generation.request_id!r} is still alive")
        leaving, put_out = self.admission.make_room(generation)
        for request in leaving:
            assert put_out is not None, "who leaves the queue is told why"
            self._fail(request, put_out)
        request = self._opening.open(generation, self._facts, self._cache)
        self._registry.add(request)
        self._scheduler.enqueue(request.sequences[0])

    def abort(self, request_id: RequestId, error: RequestError) -> bool:
        """End a request with ``error``. Its blocks are free at once; the event comes with the next step or drain.

        Returns:
            False if no live request has this id.
        """
        request = self._registry.get(request_id)
        if request is None:
            return False
        self._fail(request, error)
        return True

    def expire(self) -> None:
        """End the requests whose deadline has passed; ``step`` does so by itself."""
        while (request := self._registry.overdue(self._clock())) is not None:
            where = "while it waited in the queue" if request.started_seconds is None else "while it ran"
            self._fail(request, DeadlineExpired(f"the request's deadline passed {where}"))

    def fail_all(self, error: RequestError) -> tuple[Event, ...]:
        """End every live request with ``error``; returns all events that were not handed out yet."""
        for request_id in self._registry.ids:
            self.abort(request_id, error)
        return self.drain_events()

    def drain_events(self) -> tuple[Event, ...]:
        """Hand out the events that wait for the next step."""
        events, self._events = tuple(self._events), []
        return events

    def flush_prefix_cache(self) -> int:
        """Forget what the KV blocks hold; returns how many blocks were known. Sequences keep the blocks they use."""
        return self._cache.flush()

    def swap(self, swap: Swap) -> None:
        """Exchange the weights before a coming step: at once, unless requests that began must end on the ones they have.

        Those go on meanwhile, as all others do; requests of their kind that come wait. ``take_swapped`` tells how it ended.
        """
        assert self._swap is None, "one exchange of weights at a time"
        self._swap = swap
        self._scheduler.set_pinned_aside()

    def take_swapped(self) -> Swapped | None:
        """How the last exchange ended, once; ``None`` while nothing is to tell."""
        swapped, self._swapped = self._swapped, None
        return swapped

    def lose_ranks(self, error: RequestError, *, resume: bool) -> None:
        """The ranks are gone, and others may come: what can go on with them waits, and the rest ends with ``error``.

        A request that was computed in so many deaths in a row, without a token in between, may be their cause: it ends.

        Args:
            resume: whether requests of which something was generated go on too; otherwise only those without.
        """
        running = {id(seq.request): seq.request for seq in self._scheduler.running.values()}
        self._scheduler.lose_ranks()
        self._under_way.lose()
        self._swap = None
        for request in running.values():
            request.num_deaths += 1
        for request in self._registry.requests:
            if request.num_deaths >= MOST_DEATHS or (request.has_output and not resume):
                self._fail(request, error)

    def revive(self, facts: ModelFacts, executor: Executor, *, same_weights: bool) -> None:
        """Go on with new ranks, after ``lose_ranks``: what ran is computed again from the tokens that it has.

        Args:
            facts: what they have loaded: the same model, with perhaps another number of blocks.
            executor: computes the steps from now on.
            same_weights: whether they have the weights of those that were lost; if not, requests end that were told
                something and asked for the same ones to the end.
        """
        self._facts = facts
        self._under_way.go_on_with(executor)
        self._cache = self._cache.like(facts.num_blocks)
        self._scheduler.revive(self._cache)
        if not same_weights:
            self._weights = Weights(0, facts.checkpoint_step)
            for request in (each for each in self._registry.started_and_pinned() if each.prompt_ready):
                self._fail(request, Loading("the model was loaded again with other weights, and this call asked for the same"))
        for request in self._registry.requests:
            try:
                check_fits(request.generation, facts)
            except InvalidRequest as error:  # by the new ranks, which found less memory
                self._fail(request, error)

    def await_planning(self, bell: int | None = None) -> bool:
        """Wait while it is too early to plan a step ahead: a request that is added after this can be part of it.

        Returns:
            Whether it is too early yet, the wait having ended since there is something to read from ``bell``, a descriptor.
        """
        return self._swap is None and self._under_way.await_planning(bell)

    def overtake(self) -> None:
        """Let a prompt be computed before the step under way, where that is of tenants who have more.

        Raises:
            ExecutorDied: as of ``step``.
        """
        under = self._under_way.only
        if under is not None and self._swap is None:
            self._launch(self._clock(), under)

    def step(self) -> tuple[Event, ...]:
        """Admit, schedule, launch, settle, emit.

        With ``async_scheduling`` the ranks have two steps, where they would wait otherwise, and the older one is settled: they
        compute while its events are told. Where it ends a sequence, what the other computes for that is passed over. Where they
        would hardly wait, one step is launched by one call and settled by the next: ``await_planning`` comes between.

        Returns:
            Everything there is to tell, in order; empty when nothing happened.

        Raises:
            ExecutorDied: the ranks are lost; call ``lose_ranks`` or ``fail_all`` next.
        """
        self.expire()
        if self._swap is not None:
            while self._under_way:
                self._settle()
            if self._is_due(self._swap, self._clock()):
                self._exchange_weights(self._swap)
        if begins := not self._under_way:
            self._launch(self._clock())
        if self._swap is None and self._under_way.pays_ahead:
            self._launch(self._clock())
        elif begins and self._swap is None and self._under_way.spare_seconds:
            return self.drain_events()  # and what comes while that is computed may overtake it
        if self._under_way:
            self._settle()
        return self.drain_events()

    def check(self) -> None:
        """Assert what must always hold between two calls. Cost grows with everything: for tests."""
        self._registry.check()
        self._scheduler.check()
        if not len(self._registry):
            assert self._cache.pool.num_used == 0, f"{self._cache.pool.num_used} blocks are held and no request is alive"

    # A step's parts.

    def _is_due(self, swap: Swap, now: float) -> bool:
        """Whether no request holds the exchange up; what has had its time ends."""
        pinned = self._registry.started_and_pinned()
        if pinned and now < swap.patience_seconds:
            return False
        late = Loading("newer weights were taken, and this call, which asked for the same ones, did not end in time")
        for request in pinned:
            self._fail(request, late)
        return True

    def _exchange_weights(self, swap: Swap) -> None:
        """Have the ranks compute with other weights; what ran is computed again, from the tokens that it has."""
        began, num_running = self._clock(), len(self._scheduler.running)
        plan = self._scheduler.swap(swap.weights.number)
        result = self._under_way.exchange(plan, self._facts.vocab_size)
        if not result.refused:
            self._weights = swap.weights
        self._scheduler.let_pinned_begin()
        self._swap = None
        self._swapped = Swapped(swap, result.refused, self._clock() - began, num_running)

    def _launch(self, began: float, under: StepPlan | None = None) -> None:
        """``under``: the step that is under way, and to be overtaken."""
        plan = self._scheduler.schedule() if under is None else self._scheduler.overtake(under)
        if plan is not None:
            for start in plan.starts:
                self._registry.start(self._scheduler.running[start.sequence].request, began)
            self._under_way.launch(plan, began, overtakes=under is not None)

    def _settle(self) -> None:
        """Wait for the oldest step under way, or one that has overtaken it, and apply its result."""
        plan, result, answers = self._under_way.collect(self._facts.vocab_size)
        self._apply(plan, result, answers, self._clock())
        self._under_way.end(goes_on=self._scheduler.has_work)

    def _apply(self, plan: StepPlan, result: StepResult, answers: dict[SequenceId, list[Sampled]], now: float) -> None:
        """Bring every sequence of the plan up to date. One may have left the running batch meanwhile, and a request that
        ends here takes its other sequences with it, so each is looked up again."""
        self._scheduler.commit(plan)
        for part in result.prompt_logprobs:
            if (seq := self._scheduler.running.get(part.sequence)) is not None:
                seq.keep_prompt_logprobs(part.first, part.logprobs)
        for fault in result.faults:
            if (seq := self._scheduler.running.get(fault.sequence)) is not None:  # a sibling's fault may have ended it
                self._fail(seq.request, (NotFinite if fault.not_finite else RequestBroke)(fault.message))
        for span in plan.spans:
            if (seq := self._scheduler.running.get(span.sequence)) is None:
                continue
            request, computed = seq.request, span.start + span.count - len(span.proposed)
            if not request.prompt_ready and computed >= request.num_prompt_tokens:
                self._announce_prompt(seq)
            if span.sample:
                self._apply_answers(seq, span, answers[span.sequence], now)
            elif not seq.samples and computed == len(seq.token_ids):
                for done in tuple(request.sequences):  # nothing was to be generated
                    self._end(done, LENGTH, now)

    def _announce_prompt(self, leader: Sequence) -> None:
        """The prompt is computed: say so, and let the other sequences in, which find its blocks in the prefix cache."""
        request = leader.request
        request.prompt_ready = True
        self._prompt_tokens += request.num_prompt_tokens
        self._events.append(prompt_event(leader))
        if request.rule.max_new_tokens > 0:
            for sibling in request.sequences[1:]:
                self._scheduler.enqueue(sibling)

    def _apply_answers(self, seq: Sequence, span: Span, answers: list[Sampled], now: float) -> None:
        """Take one token after the other, as if each had come by a step of its own, until the sequence ends or starts over."""
        proposed, accepted = span.proposed, 0
        seq.num_pending -= 1
        if not proposed and len(answers) == 1:
            self._apply_token(seq, answers[0], now)
            return
        for place, answer in enumerate(answers):
            if place and seq.state is not SequenceState.RUNNING:
                return
            if place:
                self._scheduler.advance(seq)
            if proposed[place : place + 1] == (answer.token_id,) or place + 1 < len(answers):
                self._scheduler.accept(seq)
                accepted += 1
            self._apply_token(seq, answer, now)
        if seq.speculation is not None and proposed:
            seq.speculation.adapt(len(proposed), accepted, len(seq.token_ids))

    def _apply_token(self, seq: Sequence, answer: Sampled, now: float) -> None:
        """Append a sampled token, tell of it, and end the sequence if it was the last."""
        request, token_id = seq.request, answer.token_id
        num_generated = seq.append(token_id, self._weights, now)
        request.num_deaths = 0
        self._generation_tokens += 1
        try:
            text, stop = judge(seq, token_id, num_generated)
        except Exception as error:
            broke = RequestBroke(f"the text of sequence {seq.index} could not be made ({type(error).__name__})")
            broke.__cause__ = error
            self._fail(request, broke)
            return
        text = text if seq.tells_text else ""
        is_told = stop is None or not stop.is_by_id or request.rule.include_stop
        if is_told or text:
            self._events.append(token_event(seq, text, token_id if is_told else None, answer.logprob))
        rule = self._facts.length_rule
        if stop is not None:
            self._end(seq, stop, now)
        elif rule is not None and rule.starts_again(len(seq.token_ids)):
            seq.chain = self._opening.chain_of(request, seq.token_ids, self._cache, rule)
            seq.restart_after = None
            self._scheduler.restart(seq)

    # How requests begin and end.

    def _end(self, seq: Sequence, stop: Stop, now: float) -> None:
        """One sequence ends by itself; with the last of them, the request."""
        request = seq.request
        self._scheduler.remove(seq)
        request.sequences.remove(seq)
        if not seq.made_by:
            seq.made_by.append((0, self._weights))
        if not request.sequences:
            self._registry.remove(request)
        self._events.append(finished_event(seq, stop, now))

    def _fail(self, request: LiveRequest, error: RequestError) -> None:
        """The request ends with ``error``, and all its sequences with it."""
        self._events.append(failed_event(request, error))
        for seq in request.sequences:
            self._scheduler.remove(seq)
        self._registry.remove(request)

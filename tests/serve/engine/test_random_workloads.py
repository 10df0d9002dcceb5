"""Random workloads: whatever is asked in whatever order, invariants hold after every operation and streams are exact."""

from __future__ import annotations

import random

import pytest

from serve.engine.engine import MOST_DEATHS, Engine, EngineLimits
from serve.engine.executor import ExecutorDied
from serve.engine.first_tokens import MOST_AT_ONCE, ONE_STEP_IN
from serve.engine.plan import StepPlan
from serve.engine.sequence import SequenceState
from serve.errors import DeadlineExpired, EngineDown, InvalidRequest, NotFinite, PutOut, QueueFull, RequestAborted
from serve.types import Generation, RequestId, ResponseOptions, SamplingParams, StoppingParams
from tests.serve.engine.witness import Witness
from tests.serve.fake_executor import FakeExecutor, fake_facts
from tests.serve.fake_text import open_letters

NUM_WORKLOADS = 40
OPERATIONS_EACH = 600
VOCABULARY = 40
FEW = 6
"""A vocabulary in which texts repeat themselves by chance, so that what is proposed sometimes comes."""
FAULT = VOCABULARY
"""An id no sampling can give."""


class Workload:
    """One engine of random shape, and random things done to it."""

    def __init__(
        self, seed: int, *, runs_ahead: bool, speculative_tokens: int = 0, drafts: bool = False, roomy: bool = False
    ) -> None:
        """``roomy``: blocks and places seldom run out, and nobody has priority."""
        self.random = random.Random(seed)
        self.vocabulary = FEW if speculative_tokens else VOCABULARY
        pick = self.random.randint
        facts = fake_facts(
            vocab_size=self.vocabulary,
            max_model_len=pick(20, 80),
            eos_ids=(3, 5),
            num_blocks=pick(100, 400) if roomy else pick(4, 40),
            block_tokens=self.random.choice((1, 2, 4, 8)),
        )
        self.limits = EngineLimits(
            max_num_seqs=pick(2 if roomy else 1, 12),
            max_step_tokens=pick(50, 90) if roomy else pick(1, 40),
            max_queued_requests=pick(3, 20),
            max_queued_tokens=pick(60, 300),
            prefix_caching=self.random.random() < 0.7,
            async_scheduling=runs_ahead,
            speculative_tokens=speculative_tokens,
            drafts=drafts,
        )
        self.facts = facts
        self.priorities = (0, 0) if roomy else (-1, 1)
        self.executor = self.ranks()
        self.num_deaths = self.num_left_out = self.num_overtaken = 0
        self.left_out_at: list[int] = []
        self.now = 0.0
        self.engine = Engine(
            facts=facts, limits=self.limits, executor=self.executor, open_text=open_letters, clock=lambda: self.now
        )
        self.witness = Witness(facts)
        self.prefixes = [tuple(pick(0, self.vocabulary - 1) for _ in range(40)) for _ in range(3)]
        self.generations: dict[RequestId, Generation] = {}
        self.aborted: set[RequestId] = set()
        self.tenants = ("flood", "flood", "other", "third") if seed % 3 else ("",)

    def ranks(self) -> FakeExecutor:
        limits = self.limits
        return FakeExecutor(
            self.facts, max_step_tokens=limits.max_step_tokens, max_num_seqs=limits.max_num_seqs, fault_token=FAULT
        )

    def operate(self) -> None:
        """Do one random thing, and look at everything."""
        operations = {self.add: 6, self.overtake: 6, self.step: 12, self.abort: 1, self.wait: 1, self.flush: 0.3, self.die: 0.2}
        operation = self.random.choices(tuple(operations), weights=tuple(operations.values()))[0]
        operation()
        self.engine.check()

    def add(self) -> None:
        generation = self.generation()
        try:
            self.engine.add(generation)
        except (QueueFull, InvalidRequest):
            return
        self.generations[generation.request_id] = generation
        self.witness.accepted(generation)

    def generation(self) -> Generation:
        pick, chance = self.random.randint, self.random.random
        shared = self.random.choice(self.prefixes)[: pick(0, 30)]
        own = tuple(pick(0, self.vocabulary - 1) for _ in range(pick(1, 12)))
        max_new = 0 if chance() < 0.05 else pick(1, 30)
        return Generation(
            request_id=RequestId(f"r{len(self.generations)}"),
            prompt_ids=(*shared, *own, FAULT) if chance() < 0.05 else (*shared, *own),
            sampling=SamplingParams(seed=pick(0, 2)),
            stopping=StoppingParams(
                max_new_tokens=max_new,
                min_new_tokens=pick(0, max_new) if chance() < 0.3 else 0,
                stop_strings=tuple("".join(self.random.choices("abcdefg", k=pick(1, 3))) for _ in range(pick(0, 2))),
                stop_ids=(7, 11) if chance() < 0.3 else (),
                include_stop=chance() < 0.3,
                ignore_eos=chance() < 0.5,
            ),
            response=ResponseOptions(
                text=chance() < 0.8,
                logprobs=pick(0, 2) if chance() < 0.3 else None,
                prompt_logprobs=pick(0, 2) if chance() < 0.2 else None,
            ),
            num_sequences=pick(2, 4) if chance() < 0.3 else 1,
            priority=pick(*self.priorities),
            tenant=self.random.choice(self.tenants),
            cache_salt=self.random.choice(("", "", "salt")),
            arrival_seconds=self.now,
            deadline_seconds=self.now + pick(0, 40) if chance() < 0.2 else None,
        )

    def step(self) -> None:
        running = self.engine._scheduler.running
        oldest = next(iter(running.values()), None)
        has_work, num_given, at_start = self.engine.has_work, len(self.executor.given), self.executor.num_tokens
        decodes = {seq.id for seq in running.values() if seq.debt == 1}
        preemptions, gave_way = self.engine.stats().preemptions, self.gave_way()
        events = self.engine.step()
        self.witness.saw(events)
        of_others = self.gave_way() - gave_way
        assert not of_others or len(self.tenants) > 1, "a tenant gave way to itself"
        if oldest is not None and not of_others:
            assert oldest.state in (SequenceState.RUNNING, SequenceState.ENDED), "the oldest sequence was preempted"
        given = self.executor.given[num_given:]
        if given:
            planned = {span.sequence for plan in given for span in plan.spans}
            if left_out := decodes & set(running) - planned:
                self.leave_out(given[0], {running[sequence].tenant for sequence in left_out})
            if self.engine.stats().preemptions > preemptions + of_others:
                assert not given[0].starts, "something was admitted in a step that had to preempt"
        computed = self.executor.num_tokens > at_start
        assert computed or events or not has_work or not self.engine.has_work, "a step with work to do did nothing"
        self.now += 0.25

    def overtake(self) -> None:
        """Something may begin in the middle of a step, if the ranks are not through with it yet."""
        self.executor.lets_pass = self.random.random() < 0.7
        num_given, running, under = len(self.executor.given), dict(self.engine._scheduler.running), self.engine._under_way.only
        self.engine.overtake()
        for plan in self.executor.given[num_given:]:
            assert self.limits.async_scheduling, "a step was to be overtaken where none is planned ahead"
            assert len(plan.starts) == len(plan.spans) == 1, "more than one prompt overtook a step"
            assert under is not None, "a step was to be overtaken, and none or two were under way"
            tenant = self.engine._scheduler.running[plan.starts[0].sequence].tenant
            assert any(running[span.sequence].tenant != tenant for span in under.spans), "only its own tenant's were overtaken"
            self.num_overtaken += 1

    def leave_out(self, plan: StepPlan, tenants: set[str]) -> None:
        """A running decode was left out of a step: now and then, for another tenant that begins in it."""
        running = self.engine._scheduler.running
        assert plan.starts, "a running decode was left out of a step in which nothing begins"
        begin = {running[start.sequence].tenant for start in plan.starts if start.sequence in running}
        assert not begin & tenants, "a tenant's own were left out for it"
        self.left_out_at.append(plan.step)
        for number, step in enumerate(reversed(self.left_out_at), start=1):
            assert number <= MOST_AT_ONCE + (plan.step - step) / ONE_STEP_IN, "decodes were left out too often"
        self.num_left_out += 1

    def gave_way(self) -> int:
        """How often a sequence gave way to another tenant."""
        return self.engine._scheduler.gave_way

    def abort(self) -> None:
        alive = self.engine.request_ids
        if alive:
            victim = self.random.choice(alive)
            self.aborted.add(victim)
            assert self.engine.abort(victim, RequestAborted("aborted"))
        assert not self.engine.abort(RequestId("nobody"), RequestAborted("aborted"))

    def wait(self) -> None:
        self.now += self.random.randint(1, 10)
        self.engine.expire()

    def flush(self) -> None:
        self.engine.flush_prefix_cache()
        assert self.engine.stats().kv_blocks_cached == 0

    def die(self) -> None:
        """The ranks die in a step, or between two; others come, and things happen meanwhile."""
        self.executor.dies_at_step = 0
        try:
            self.witness.saw(self.engine.step())
        except ExecutorDied:
            self.num_deaths += 1
        self.engine.lose_ranks(EngineDown("the ranks died"), resume=True)
        for operation in self.random.sample((self.add, self.abort, self.wait, self.flush), 2):
            self.engine.check()
            operation()
        self.engine.check()
        self.executor = self.ranks()
        self.engine.revive(self.facts, self.executor, same_weights=True)
        self.left_out_at = []  # steps are counted anew
        self.witness.saw(self.engine.drain_events())

    def finish(self) -> None:
        """Let everything come to its end, and see that nothing is left."""
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.step()
            self.engine.check()
        assert not self.engine.has_work, "the engine came to no end"
        assert self.engine.step() == ()
        assert self.witness.alive == ()
        assert self.executor.live_sequences == frozenset(), "the ranks still keep sequences that ended"
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.queued_requests, stats.queued_tokens) == (0, 0, 0, 0)
        assert stats.kv_blocks_used == 0
        assert stats.generation_tokens >= self.witness.num_generated
        assert stats.proposed_tokens >= stats.accepted_tokens >= self.witness.num_accepted
        self.check_failures()

    def check_failures(self) -> None:
        """Nobody failed without a reason of its own."""
        for request_id, error in self.witness.failures.items():
            generation = self.generations[request_id]
            if isinstance(error, RequestAborted):
                assert request_id in self.aborted
            elif isinstance(error, DeadlineExpired):
                assert generation.deadline_seconds is not None
                assert generation.deadline_seconds <= self.now
            elif isinstance(error, EngineDown):
                assert self.num_deaths >= MOST_DEATHS
            elif isinstance(error, PutOut):
                assert len(self.tenants) > 1
            else:
                assert isinstance(error, NotFinite)
                assert FAULT in generation.prompt_ids


@pytest.mark.parametrize("seed", range(NUM_WORKLOADS))
def test_a_random_workload_is_served_exactly(seed: int) -> None:
    workload = Workload(seed, runs_ahead=seed % 2 == 0)
    for _ in range(OPERATIONS_EACH):
        workload.operate()
    workload.finish()


def test_random_workloads_that_speculate_are_served_exactly() -> None:
    proposed = accepted = preemptions = hits = 0
    for seed in range(NUM_WORKLOADS // 4):
        workload = Workload(seed, runs_ahead=seed % 2 == 0, speculative_tokens=1 + seed % 6, drafts=seed % 4 > 1)
        for _ in range(OPERATIONS_EACH):
            workload.operate()
        workload.finish()
        stats = workload.engine.stats()
        proposed += stats.proposed_tokens
        accepted += stats.accepted_tokens
        preemptions += stats.preemptions
        hits += stats.prefix_cache_hits
    assert proposed - accepted > 500
    assert accepted > 100
    assert preemptions > 50
    assert hits > 1000


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_where_there_is_room_prompts_of_others_begin_without_a_flood_and_in_the_middle_of_steps(*, runs_ahead: bool) -> None:
    left_out = overtaken = 0
    for seed in range(1, NUM_WORKLOADS // 2):
        workload = Workload(seed, runs_ahead=runs_ahead, roomy=True)
        for _ in range(OPERATIONS_EACH):
            workload.operate()
        workload.finish()
        left_out += workload.num_left_out
        overtaken += workload.num_overtaken
    assert left_out > 20
    assert (overtaken > 20) == runs_ahead, f"{overtaken} steps were overtaken"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_workloads_meet_everything_they_are_meant_to(*, runs_ahead: bool) -> None:
    finished = preemptions = hits = deaths = gave_way = 0
    errors: set[type[Exception]] = set()
    for seed in range(NUM_WORKLOADS // 4):
        workload = Workload(seed, runs_ahead=runs_ahead)
        for _ in range(OPERATIONS_EACH):
            workload.operate()
        workload.finish()
        stats = workload.engine.stats()
        finished += workload.witness.num_finished
        preemptions += stats.preemptions
        hits += stats.prefix_cache_hits
        deaths += workload.num_deaths
        gave_way += workload.gave_way()
        errors |= {type(error) for error in workload.witness.failures.values()}
    assert finished > 200
    assert preemptions > 50
    assert hits > 1000
    assert deaths > 30
    assert gave_way > 10
    assert errors - {EngineDown, PutOut} == {RequestAborted, DeadlineExpired, NotFinite}

"""Runs a scheduler script: commands, a line `----`, and what the engine did; sections are set apart by blank lines.

    pool blocks=4 block_tokens=4              the KV cache; first line of the script that is not a comment. vocabulary=2 makes
                                              texts that repeat themselves
    limits step_tokens=16 running=4           also: queued=, queued_tokens=, caching=off, speculative=, ahead=on
                                              (async_scheduling)
    add a prompt=8 max_new=8                  also: n=, priority=, deadline=, salt=, logprobs=, shared=K: the first K
                                              prompt tokens are the same for all requests that say so,
                                              ends=K: the K-th token it generates is a stop id
    step        or    steps 3                 one line of output for each
    clock 5                                   the clock stands at 5 seconds from here on
    abort a     flush     stats NAME NAME

A step prints the spans it computed (+2: and two proposed tokens after it, of which so many were accepted), the tables of
their sequences, the free blocks, and then what became of whom. The executor behind it checks every plan.
`python -m tests.serve.engine.golden_script FILE` prints what a script gives now.
"""

from __future__ import annotations

import sys
from pathlib import Path

from serve.engine.engine import Engine, EngineLimits
from serve.engine.plan import Span, StepPlan
from serve.errors import RequestAborted, RequestError
from serve.types import (
    Event,
    Generation,
    PromptReady,
    RequestFailed,
    RequestId,
    ResponseOptions,
    SamplingParams,
    SequenceFinished,
    SequenceId,
    StoppingParams,
)
from tests.serve.fake_executor import FakeExecutor, expected_tokens, fake_facts
from tests.serve.fake_text import open_letters


def run_script(text: str) -> str:
    """The script with its outputs replaced by what the engine does now."""
    sections = []
    runner: _Runner | None = None
    for section in text.strip().split("\n\n"):
        commands = section.split("\n----")[0].split("\n")
        lines = [line for line in commands if line and not line.startswith("#")]
        if runner is None:
            runner = _Runner(_options(lines[0].split()[1:]), _options(lines[1].split()[1:]))
            lines = lines[2:]
        outputs = [output for line in lines for output in runner.obey(line)]
        sections.append("\n".join([*commands, "----", *outputs]))
    return "\n\n".join(sections) + "\n"


def _options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


class _Runner:
    """One script's engine."""

    def __init__(self, pool: dict[str, str], limits: dict[str, str]) -> None:
        self._vocabulary = int(pool.get("vocabulary", 100_000))
        facts = fake_facts(num_blocks=int(pool["blocks"]), block_tokens=int(pool["block_tokens"]), vocab_size=self._vocabulary)
        self._limits = EngineLimits(
            max_num_seqs=int(limits.get("running", 64)),
            max_step_tokens=int(limits["step_tokens"]),
            max_queued_requests=int(limits.get("queued", 100)),
            max_queued_tokens=int(limits.get("queued_tokens", 10_000)),
            prefix_caching=limits.get("caching") != "off",
            async_scheduling=limits.get("ahead") == "on",
            speculative_tokens=int(limits.get("speculative", 0)),
        )
        self._now = 0.0
        self._plans: list[StepPlan] = []
        self._executor = FakeExecutor(
            facts,
            max_step_tokens=self._limits.max_step_tokens,
            max_num_seqs=self._limits.max_num_seqs,
            on_execute=self._plans.append,
        )
        self._engine = Engine(
            facts=facts, limits=self._limits, executor=self._executor, open_text=open_letters, clock=lambda: self._now
        )
        self._names: dict[SequenceId, str] = {}
        self._num_added = 0

    def obey(self, line: str) -> list[str]:
        """Carry out one command; returns its lines of output."""
        verb, *words = line.split()
        if verb == "add":
            return self._add(words[0], _options(words[1:]))
        if verb == "step":
            return [self._step()]
        if verb == "steps":
            return [self._step() for _ in range(int(words[0]))]
        if verb == "clock":
            self._now = float(words[0])
            return []
        if verb == "abort":
            found = self._engine.abort(RequestId(words[0]), RequestAborted("aborted by the script"))
            return [] if found else [f"no request {words[0]}"]
        if verb == "flush":
            return [f"flushed {self._engine.flush_prefix_cache()}"]
        assert verb == "stats", f"unknown command {line!r}"
        return [" ".join(f"{name}={getattr(self._engine.stats(), name)}" for name in words)]

    def _add(self, name: str, options: dict[str, str]) -> list[str]:
        self._num_added += 1
        shared = int(options.get("shared", 0))
        own = range(1000 * self._num_added, 1000 * self._num_added + int(options["prompt"]) - shared)
        prompt = (*range(shared), *own)
        ends = expected_tokens(prompt, int(options["ends"]), vocab_size=self._vocabulary)[-1:] if "ends" in options else ()
        num_sequences = int(options.get("n", 1))
        first_id = SequenceId(len(self._names))
        logprobs = int(options["logprobs"]) if "logprobs" in options else None
        generation = Generation(
            request_id=RequestId(name),
            prompt_ids=prompt,
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=int(options["max_new"]), stop_ids=(*ends,)),
            response=ResponseOptions(prompt_logprobs=logprobs),
            num_sequences=num_sequences,
            priority=int(options.get("priority", 0)),
            cache_salt=options.get("salt", ""),
            deadline_seconds=float(options["deadline"]) if "deadline" in options else None,
        )
        try:
            self._engine.add(generation)
        except RequestError as error:
            return [f"refused {name} {type(error).__name__}: {error}"]
        for index in range(num_sequences):
            self._names[SequenceId(first_id + index)] = name if num_sequences == 1 else f"{name}.{index}"
        return []

    def _step(self) -> str:
        num_plans, before = len(self._plans), self._engine.stats()
        events = self._engine.step()
        self._engine.check()
        parts = []
        if len(self._plans) > num_plans:
            parts = self._describe(self._plans[-1], self._engine.stats().preemptions - before.preemptions)
            if any(span.proposed for span in self._plans[-1].spans):
                parts.append(f"accepted {self._engine.stats().accepted_tokens - before.accepted_tokens}")
        parts += [outcome for event in events for outcome in _describe_event(event)]
        return "    ".join(parts) if parts else "idle"

    def _describe(self, plan: StepPlan, num_preempted: int) -> list[str]:
        names = self._names
        spans = [f"{names[s.sequence]}[{s.start}:{s.start + s.count - len(s.proposed)}]{_more(s)}" for s in plan.spans]
        tables = [f"{names[s.sequence]}={','.join(map(str, self._executor.table(s.sequence)))}" for s in plan.spans]
        used = {block for sequence in self._executor.live_sequences for block in self._executor.table(sequence)}
        parts = []
        if plan.spans:
            parts = ["spans " + " ".join(spans), "blocks " + " ".join(tables)]
        parts.append(f"free={self._executor.facts.num_blocks - len(used)}")
        if plan.dropped:
            # What a step preempts is dropped after what ended since the step before.
            ended, preempted = (
                plan.dropped[: len(plan.dropped) - num_preempted],
                plan.dropped[len(plan.dropped) - num_preempted :],
            )
            parts += ["dropped " + " ".join(names[s] for s in ended)] if ended else []
            parts += ["preempted " + " ".join(names[s] for s in preempted)] if preempted else []
        return parts


def _more(span: Span) -> str:
    return f"+{len(span.proposed)}" if span.proposed else ""


def _describe_event(event: Event) -> list[str]:
    if isinstance(event, PromptReady):
        return [f"ready {event.request_id} cached={event.cached_tokens}"]
    if isinstance(event, SequenceFinished):
        index = "" if event.index == 0 and event.request_done else f".{event.index}"
        return [f"finished {event.request_id}{index} {event.reason.value}"]
    if isinstance(event, RequestFailed):
        return [f"failed {event.request_id} {type(event.error).__name__}"]
    return []


if __name__ == "__main__":
    print(run_script(Path(sys.argv[1]).read_text(encoding="utf-8")), end="")

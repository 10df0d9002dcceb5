"""Load on a server, and what became of every call of it."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from serve.v1 import inference_pb2, inference_pb2_grpc
from tests.support import reference
from tests.support.decisive import is_answer_decisive
from tests.support.server import Server

NUM_STREAMS = 32
NUM_SCRIPTS = 40
"""Different requests: each is made many times, and says the same each time."""
CALL_SECONDS = 400.0
_PAUSE_SECONDS = 0.05
"""After a call that was refused."""


def script(number: int) -> inference_pb2.GenerateRequest:
    """One request: every other is sampled by a seed, with rules that look back at what was said."""
    draw = random.Random(number)
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(draw.randrange(1, 200) for _ in range(draw.randint(1, 60)))
    request.stopping.max_new_tokens = draw.randint(60, 240)
    request.stopping.ignore_eos = True
    request.sampling.temperature = 0.0
    if number % 2:
        request.sampling.temperature = 1.0
        request.sampling.seed = number
        request.sampling.top_p = 0.9
        request.sampling.repetition_penalty = 1.1
    return request


@dataclass
class Call:
    """One call and what it said."""

    script: int
    ids: list[int] = field(default_factory=list)
    code: str | None = None
    """``None`` while it goes on."""
    num_ends: int = 0
    last_seconds: float = 0.0
    """Monotonic time of its newest token."""


def run(stub: inference_pb2_grpc.InferenceStub, call: Call) -> None:
    """Make a call and write down all of it."""
    try:
        for event in stub.GenerateStream(script(call.script), timeout=CALL_SECONDS):
            if event.WhichOneof("event") == "finish":
                call.num_ends += 1
            call.ids.extend(event.delta.token_ids)
            call.last_seconds = time.monotonic()
    except grpc.RpcError as error:
        call.code = error.code().name
    else:
        call.code = "OK"


class Load:
    """Callers who make one call after another, and the history of it all."""

    def __init__(self, server: Server, seed: int, scripts: Collection[int], streams: int | None = None) -> None:
        """
        Args:
            scripts: what is asked for: those of which ``undisturbed`` tells what they say.
            streams: callers at once; ``NUM_STREAMS`` where nothing else is asked for.
        """
        self._stub: inference_pb2_grpc.InferenceStub = server.inference
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._draw = random.Random(seed)
        self._scripts = sorted(scripts)
        self.calls: list[Call] = []
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(streams or NUM_STREAMS)]

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                call = Call(self._draw.choice(self._scripts))
                self.calls.append(call)
            run(self._stub, call)
            if call.code != "OK":
                self._stop.wait(_PAUSE_SECONDS)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Within, calls are made; at the end all have ended."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Make no more calls, and wait for those that were made."""
        self._stop.set()
        for thread in self._threads:
            thread.join(CALL_SECONDS)

    def under_way(self) -> list[Call]:
        """Calls that have said something and have not ended."""
        with self._lock:
            return [call for call in self.calls if call.code is None and call.ids]

    @property
    def num_ended(self) -> int:
        """Calls that were answered to their end."""
        with self._lock:
            return sum(call.code == "OK" for call in self.calls)


def undisturbed(server: Server, folder: Path) -> dict[int, list[int]]:
    """What scripts say when nothing happens, without those whose tokens another order of summing could change.

    Args:
        folder: the model that is served, as transformers saves it.
    """
    calls = [Call(number) for number in range(NUM_SCRIPTS)]
    threads = [threading.Thread(target=run, args=(server.inference, call)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CALL_SECONDS)
    assert all(call.code == "OK" for call in calls), "without a fault every call is answered"
    model = reference.load(folder)
    return {call.script: call.ids for call in calls if is_answer_decisive(model, script(call.script), call.ids)}


@dataclass(frozen=True)
class Verdict:
    """What the history says."""

    calls: int
    lost: dict[str, int]
    """Calls that ended otherwise than well and than they may, by how."""
    wrong: int
    """Calls that said something else than they should, or ended well more than once or not at all."""
    excused: dict[str, int]
    """Calls that ended otherwise than well as they may, by how."""


def _never(call: Call) -> bool:
    return False


def was_refused(call: Call) -> bool:
    """Whether a call was turned away before it said anything: whoever made it can make it again."""
    return call.code == "UNAVAILABLE" and not call.ids


def was_unavailable(call: Call) -> bool:
    """Whether a call was turned away, or cut short by the end of its server."""
    return call.code == "UNAVAILABLE"


def judge(calls: list[Call], expected: dict[int, list[int]], may_end: Callable[[Call], bool] = _never) -> Verdict:
    """Compare every call with what it must have said; what another one said is printed.

    Args:
        may_end: whether a call that did not end well may end as it did. One that may, and has said all, may have said so: its
            server died between the last event and the status of the call.
    """
    lost, excused = Counter[str](), Counter[str]()
    wrong = 0
    for call in calls:
        whole = expected[call.script]
        if call.code == "OK":
            is_right = call.ids == whole and call.num_ends == 1
        else:
            is_excused = may_end(call)
            (excused if is_excused else lost)[call.code or "never ended"] += 1
            is_right = call.ids == whole[: len(call.ids)] and call.num_ends <= int(is_excused and call.ids == whole)
        if not is_right:
            wrong += 1
            print(f"wrong: {call}; expected: {whole}", file=sys.stderr, flush=True)
    return Verdict(len(calls), dict(lost), wrong, dict(excused))

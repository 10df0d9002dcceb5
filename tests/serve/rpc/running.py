"""A whole server in the test's process: real gRPC, real gateway and engine, and an executor whose tokens are known."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from checkpoint.text.tokenizer import Tokenizer
from serve.config import AdmissionConfig, ModelConfig, RpcConfig, SchedulerConfig, ServerConfig, SupervisorConfig
from serve.engine.engine import Engine, EngineLimits
from serve.engine.executor import Executor, ExecutorDied, ModelFacts, Prepared, Unlike
from serve.engine.plan import StepPlan, StepResult
from serve.engine.stats import EngineStats
from serve.metrics import Metrics
from serve.rpc.server import RpcServer
from serve.runtime.edition import Edition
from serve.runtime.gateway import Gateway
from serve.runtime.state import State
from serve.text.detokenizer import open_text
from serve.text.tokenizer import load_tokenizer
from serve.tracing.seam import Tracing
from serve.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc, models_pb2_grpc, tokenizer_pb2_grpc
from tests.serve.fake_executor import Deferred, FakeExecutor, fake_facts
from tests.serve.fake_profiling import FakeProfiling
from tests.serve.runtime.ranks import PATIENCE_SECONDS
from tests.support.tokenizers import make_folder

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
EOS = 0
"""The fake model's end-of-text id; ``<|endoftext|>`` in the tokenizer."""


@cache
def tokenizer(chat: bool = True) -> Tokenizer:
    """A byte-level tokenizer, with or without a chat template."""
    with tempfile.TemporaryDirectory() as root:
        folder = make_folder("gpt_neox", Path(root))
        if chat:
            (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


class FakeRanks(Deferred):
    """The fake executor as a group of ranks that can be held and killed."""

    def __init__(self, facts: ModelFacts, executor: FakeExecutor) -> None:
        self.executor = executor
        self.go = threading.Event()
        """Cleared: steps wait."""
        self.go.set()
        self.loaded = threading.Event()
        """Cleared: ``start`` waits."""
        self.loaded.set()
        self.num_steps = 0
        self.in_step = threading.Event()
        """Set while a step waits."""
        self.deaf: threading.Event | None = None
        """Steps wait for it, whatever becomes of the ranks: as a defect of the engine's own would have them."""
        self.last_step: int | None = None
        """Steps wait once this many were computed; ``None`` lets them go on."""
        self.recorded = FakeProfiling()
        self._facts = facts
        self._closed = threading.Event()
        self._dead = False

    def start(self) -> ModelFacts:
        while not self.loaded.wait(0.002):
            if self._closed.is_set():
                raise ExecutorDied("closed while it started")
        return self._facts

    def execute(self, plan: StepPlan) -> StepResult:
        if self.deaf is not None:
            self.deaf.wait()
        while not self.go.wait(0.002) or (self.last_step is not None and self.num_steps >= self.last_step):
            self.in_step.set()
            if self._closed.is_set() or self._dead:
                break
            time.sleep(0.001)
        self.in_step.clear()
        if self._closed.is_set() or self._dead:
            raise ExecutorDied("a rank is gone")
        self.num_steps += 1
        return self.executor.execute(plan)

    def prepare(self, config: ServerConfig, number: int) -> Prepared | Unlike:
        return Unlike("these ranks only begin anew")

    def forget_prepared(self) -> None:
        pass

    def profiling(self) -> FakeProfiling:
        return self.recorded

    def heartbeat_ages(self) -> tuple[float, ...]:
        return (0.0,)

    def memory(self) -> tuple[tuple[int, int], ...]:
        return ((1000, 0),)

    def dead_rank(self) -> str | None:
        return "rank 0 died: signal SIGKILL" if self._dead else None

    def hanging_rank(self) -> int | None:
        return None

    def dump_stacks(self) -> None:
        pass

    def close(self) -> None:
        self._closed.set()

    def kill(self) -> None:
        self._dead = True


class RunningServer:
    """The server, a channel to it, and a stub for every service."""

    def __init__(self, gateway: Gateway, metrics: Metrics, lives: list[FakeRanks], address: str, channel: Any) -> None:
        self.gateway = gateway
        self.metrics = metrics
        self.lives = lives
        self.address = address
        self.channel = channel
        self.inference: Any = inference_pb2_grpc.InferenceStub(channel)
        self.tokenizer: Any = tokenizer_pb2_grpc.TokenizerStub(channel)
        self.models: Any = models_pb2_grpc.ModelsStub(channel)
        self.admin: Any = admin_pb2_grpc.AdminStub(channel)

    @property
    def ranks(self) -> FakeRanks:
        return self.lives[-1]

    @property
    def vocab_size(self) -> int:
        assert self.gateway.facts is not None
        return self.gateway.facts.vocab_size

    def count(self, method: str, code: str) -> float:
        """Calls of ``method`` that ended with ``code``, as the metrics have it."""
        value = self.metrics.registry.get_sample_value("tessera_requests_total", {"method": method, "code": code})
        assert value is not None
        return value

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that other threads or the network bring about."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def until_held(self) -> None:
        """Wait until ``last_step`` steps were computed and another waits: what is sent then lies in the engine's queue.

        That so many were computed says less: the engine may look at its queue once more before the next.
        """
        await self.until(lambda: self.ranks.num_steps == self.ranks.last_step and self.ranks.in_step.is_set())

    async def until_told(self, commands: int) -> None:
        """Wait until so many commands lie in the engine's queue while its steps are held: it obeys them before the next."""
        await self.until(lambda: self.gateway._bridge.backlog >= commands)

    async def until_stats(self, condition: Callable[[EngineStats], bool]) -> None:
        """Wait for the engine's figures to be such."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(await self.gateway.load()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)


def config_of(**sections: dict[str, Any]) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(**{"path": "/models/fake", "name": "fake", **sections.get("model", {})}),
        scheduler=SchedulerConfig(**sections.get("scheduler", {})),
        admission=AdmissionConfig(**sections.get("admission", {})),
        rpc=RpcConfig(**{"port": 0, **sections.get("rpc", {})}),
        supervisor=SupervisorConfig(**sections.get("supervisor", {})),
    )


def engine_of(edition: Edition, facts: ModelFacts, executor: Executor) -> Engine:
    """The engine that ``edition`` asks for."""
    config = edition.config
    limits = EngineLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_step_tokens=config.scheduler.max_step_tokens,
        max_queued_requests=config.admission.max_queued_requests,
        max_queued_tokens=config.admission.max_queued_tokens,
        prefix_caching=True,
    )
    return Engine(facts=facts, limits=limits, executor=executor, open_text=open_text(edition.tokenizer), clock=time.monotonic)


@contextlib.asynccontextmanager
async def serving(
    *,
    text: Tokenizer | str | None = "default",
    facts: ModelFacts | None = None,
    fault_token: int | None = None,
    prepare: Callable[[FakeRanks], None] = lambda ranks: None,
    wait: bool = True,
    reopen: Callable[[Edition], Edition] = lambda edition: Edition(edition.config, edition.tokenizer),
    tracing: Tracing | None = None,
    **sections: dict[str, Any],
) -> AsyncIterator[RunningServer]:
    """Start a server on a free port, and stop it at the end.

    Args:
        text: the tokenizer; ``None`` for a model without one.
        facts: of the fake model; by default the tokenizer's vocabulary, 256 positions and 512 blocks of 4.
        fault_token: a prompt with this id breaks inside the engine.
        prepare: called with the ranks of each life before they start.
        wait: whether to wait until the model is loaded, or only until its ranks start.
        reopen: what a reload finds, given the first edition.
        tracing: told of calls and requests.
        sections: options by section.
    """
    edition = Edition(config_of(**sections), tokenizer() if isinstance(text, str) else text)
    facts = facts or fake_facts(vocab_size=tokenizer().vocab_size, max_model_len=256, eos_ids=(EOS,), num_blocks=512)
    metrics = Metrics(version="0", num_ranks=1)
    lives: list[FakeRanks] = []

    def make_group(edition: Edition) -> FakeRanks:
        lives.append(FakeRanks(facts, FakeExecutor(facts, fault_token=fault_token)))
        prepare(lives[-1])
        return lives[-1]

    async def reopened() -> Edition:
        return reopen(edition)

    gateway = Gateway(
        edition=edition,
        reopen=reopened,
        make_group=make_group,
        make_engine=engine_of,
        metrics=metrics,
        clock=time.monotonic,
        tracing=tracing,
    )
    server = RpcServer(gateway, metrics, edition.config, tracing=tracing)
    address = await server.start()
    gateway.launch()
    # Channels to one address share a connection unless told otherwise, also across tests.
    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        running = RunningServer(gateway, metrics, lives, address, channel)
        try:
            await (gateway.until_serving() if wait else running.until(lambda: lives))
            yield running
        finally:
            await gateway.stop()
            await server.stop(5)


def request(ids: tuple[int, ...] = (5, 6, 7), tokens: int | None = 4, **fields: Any) -> inference_pb2.GenerateRequest:
    """A request for ``tokens`` greedy tokens after ``ids``; fields in messages are given as ``sampling={"top_k": 1}``."""
    message = inference_pb2.GenerateRequest(token_ids={"ids": ids})
    message.stopping.ignore_eos = True
    if tokens is not None:
        message.stopping.max_new_tokens = tokens
    if "text" in fields or "chat" in fields:
        message.ClearField("token_ids")
    message.MergeFrom(inference_pb2.GenerateRequest(**fields))
    return message


def state_is(server: RunningServer, state: State) -> Callable[[], bool]:
    return lambda: server.gateway.state is state

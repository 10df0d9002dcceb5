"""The composition root: build, wire, start, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

from host import heap
from host.endpoint import MetricsEndpoint
from serve.config import ModelConfig, RpcConfig, ServerConfig
from serve.engine.engine import Engine, EngineLimits
from serve.engine.executor import Executor, ModelFacts
from serve.errors import StartError
from serve.metrics import Metrics
from serve.rpc.server import RpcServer
from serve.runtime.edition import Edition
from serve.runtime.gateway import Gateway
from serve.runtime.memory import keep_trimmed, set_aside
from serve.runtime.opening import open_edition, places_of, see
from serve.runtime.seams import RankGroup
from serve.runtime.service_manager import ServiceManager
from serve.runtime.watch import Watch
from serve.text.detokenizer import open_text
from serve.tracing.opening import open_tracing
from serve.worker.executor import RankExecutor
from serve.worker.rank_process import ForkStarter
from serve.worker.rehearsal import rehearse

STOP_GRACE_SECONDS = 2.0
"""After the drain: for the last messages of calls that have ended to leave."""

HURRY_GRACE_SECONDS = 0.5
"""After a second signal, in place of ``STOP_GRACE_SECONDS``."""

_SWITCH_SECONDS = 0.0005
"""How long the loop's thread may keep the engine's waiting for the interpreter; Python's 5 ms is a good part of a step."""

DESCRIPTORS = 65_536
"""File descriptors this process may have, where the system lets it."""

_OWN_DESCRIPTORS = 256
"""What this process needs beside one for each client's connection: ranks, libraries, files while a checkpoint is opened."""

_ARENAS = 2
"""Heaps of all threads together."""

_LARGE_BYTES = 256 * 1024
"""Memory asked for in pieces this large goes back to the system when it is freed; see ``prepare_process``."""

_log = logging.getLogger(__name__)


def run(
    config: ServerConfig,
    *,
    version: str,
    starter: ForkStarter | None = None,
    manager: ServiceManager | None = None,
    make_group: Callable[[ServerConfig], RankGroup] | None = None,
    try_out: Callable[[ServerConfig], Awaitable[None]] | None = None,
) -> int:
    """Serve until told to stop.

    Args:
        config: every option.
        version: of the package, for ``build_info``.
        starter: forks ranks, and what tries a checkpoint; programs of their own without it.
        manager: told how the server is.
        make_group: makes the ranks' handle; ``RankExecutor`` without it.
        try_out: finds out, before ranks that serve are given up, what new ones would refuse.

    Returns:
        The exit code: 0 after SIGTERM or SIGINT, 2 if the configuration or the model is at fault, 1 for anything else.
    """
    try:
        prepare_process()
        _warn_of_few_descriptors(config)
        make_group = make_group or (lambda config: RankExecutor(config, starter))
        try_out = try_out or (lambda config: rehearse(config, starter))
        asyncio.run(serve(config, version=version, manager=manager, make_group=make_group, try_out=try_out))
    except StartError as error:
        print(f"tessera-serve: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:
        _log.exception("tessera-serve broke")
        return 1
    return 0


def prepare_process() -> None:
    """Set what this process's threads and memory need, whatever is served."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Else large messages teach it to keep such memory, once for each of gRPC's threads: a hundred megabytes after a few dozen.
    heap.give_back(_LARGE_BYTES)
    # gRPC's threads come and go with connections: after 1,500 hostile ones their heaps kept 45 MiB, two keep 14.
    heap.share_arenas(_ARENAS)
    # Every connection is a file descriptor. The soft limit is there for programs that cannot count beyond it.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _warn_of_few_descriptors(config: ServerConfig) -> None:
    limit, wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[0], config.rpc.max_connections + _OWN_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < wanted:
        _log.warning(
            "this process may have %d file descriptors; rpc.max_connections is %d, which needs %d: raise the limit (ulimit -n, "
            "LimitNOFILE) or lower the option",
            limit, config.rpc.max_connections, wanted,
        )  # fmt: skip


async def serve(
    config: ServerConfig,
    *,
    version: str,
    manager: ServiceManager | None = None,
    make_group: Callable[[ServerConfig], RankGroup],
    try_out: Callable[[ServerConfig], Awaitable[None]],
) -> None:
    """Serve until SIGTERM or SIGINT; a second one does not wait for the calls in flight.

    Raises:
        StartError: the server cannot start, or cannot go on.
    """
    # Build.
    edition, metrics, tracing = open_edition(config), _metrics(config.model, version), open_tracing(config, version)

    # Wire.
    gateway = Gateway(
        edition=edition,
        reopen=lambda: _reopen(config, try_out),
        make_group=lambda edition: make_group(edition.config),
        make_engine=make_engine,
        metrics=metrics,
        clock=time.monotonic,
        tracing=tracing,
    )
    rpc = RpcServer(gateway, metrics, edition.config, tracing=tracing)
    told, manager = _Signals(), manager or ServiceManager()
    gateway.on_state_change(manager.state_changed)
    watch = _watch(config, gateway, metrics)

    # Start. The ports come first: one that is taken is known before the model is loaded.
    async with contextlib.AsyncExitStack() as running:
        endpoint = running.enter_context(contextlib.closing(_listen(metrics, rpc, config.rpc)))
        running.callback(tracing.close)
        running.enter_context(told.handled())
        await running.enter_async_context(manager.kept_informed())
        address = await rpc.start()
        try:
            gateway.launch()
            if await _unless(told.stop, gateway.until_serving()):
                set_aside()
                print(ready_line(edition.config, gateway.facts, address, endpoint.url), flush=True)
                async with _running(keep_trimmed(), *([watch.run()] if watch is not None else [])):
                    await _unless(told.stop, _until_fatal(gateway))
            # Drain.
            _log.info("stopping: %d calls in flight", gateway.num_in_flight)
            await _unless(told.hurry, gateway.drain())
        finally:
            # Stop.
            await asyncio.gather(gateway.stop(), rpc.stop(HURRY_GRACE_SECONDS if told.hurry.is_set() else STOP_GRACE_SECONDS))


async def _reopen(config: ServerConfig, try_out: Callable[[ServerConfig], Awaitable[None]]) -> Edition:
    """What the model's folder holds now, if it can be served."""
    again = await asyncio.to_thread(open_edition, config)
    try:
        await try_out(again.config)
    except BaseException:
        again.release()
        raise
    return again


def _metrics(served: ModelConfig, version: str) -> Metrics:
    stages = served.pipeline_parallel_size
    metrics = Metrics(version=version, num_ranks=served.num_ranks, num_stages=stages, model_name=served.served_name)
    metrics.follows(served.watch)
    return metrics


def _listen(metrics: Metrics, rpc: RpcServer, config: RpcConfig) -> MetricsEndpoint:
    """The metrics port, guarded as the gRPC port is."""
    return metrics.listen(config.host, config.metrics_port, wrap=rpc.wrap, guard=rpc.guard_of_metrics)


def _watch(config: ServerConfig, gateway: Gateway, metrics: Metrics) -> Watch | None:
    """What follows the runs in the folders of model and adapter, where that is asked for."""
    if config.model.watch is None:
        return None
    return Watch(
        look=lambda: asyncio.to_thread(see, config),
        reload=gateway.reload,
        served=lambda: places_of(gateway.edition.config.model),
        failed=metrics.reload_refused,
        every_seconds=config.model.watch,
    )


@contextlib.asynccontextmanager
async def _running(*jobs: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Within, these go on. That one has ended by an error is logged."""
    tasks = [asyncio.create_task(job) for job in jobs]
    for task in tasks:
        task.add_done_callback(_tell_error)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tell_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("what goes on beside calls has ended: %s", task.get_coro(), exc_info=error)


def make_engine(edition: Edition, facts: ModelFacts, executor: Executor) -> Engine:
    """The engine on ranks that are ready."""
    limits, open_text_of = engine_limits(edition.config), open_text(edition.tokenizer)
    return Engine(facts=facts, limits=limits, executor=executor, open_text=open_text_of, clock=time.monotonic)


def engine_limits(config: ServerConfig) -> EngineLimits:
    """What the engine may do at once, by the options."""
    return EngineLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_step_tokens=config.scheduler.max_step_tokens,
        max_queued_requests=config.admission.max_queued_requests,
        max_queued_tokens=config.admission.max_queued_tokens,
        prefix_caching=config.cache.prefix_caching,
        speculative_tokens=config.scheduler.speculative_tokens,
        drafts=bool(config.model.draft_model),
        async_scheduling=config.scheduler.async_scheduling,
    )


def ready_line(config: ServerConfig, facts: ModelFacts | None, address: str, metrics_url: str) -> str:
    """What whoever started the server waits for."""
    assert facts is not None, "a server that serves knows its model"
    return (
        f"tessera ready grpc={address} metrics={metrics_url} model={config.model.served_name} "
        f"tp={config.model.tensor_parallel_size} pp={config.model.pipeline_parallel_size} dtype={facts.dtype} "
        f"kv_blocks={facts.num_blocks}" + ("" if facts.checkpoint_step is None else f" step={facts.checkpoint_step}")
    )


class _Signals:
    """Turns SIGTERM and SIGINT into two events."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """Set by the first signal."""
        self.hurry = asyncio.Event()
        """Set by the second."""

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _told(self, number: signal.Signals) -> None:
        _log.info("%s received", number.name)
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _unless(event: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Do ``work`` unless ``event`` comes first, which ends it. Returns whether it was done."""
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


async def _until_fatal(gateway: Gateway) -> None:
    raise await gateway.until_given_up()

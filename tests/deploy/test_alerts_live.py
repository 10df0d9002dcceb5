"""Every alert fires in a real Prometheus for its cause, of servers that have it, and for none that is well.

The servers have real gRPC, engines and supervisors; their ranks are the tests' own, so that they can be lost, held and slowed.
Windows of rates are as they are; what an alert waits for is seconds here, and so are a few thresholds of time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from finetune.observe.metrics import TrainMetrics
from serve.engine.executor import Loss
from serve.engine.plan import StepPlan, StepResult
from serve.errors import ConfigError
from serve.rpc.tokens import add_token
from serve.runtime.edition import Edition
from serve.v1 import admin_pb2
from tests.deploy.balancers import free_ports
from tests.deploy.prometheus import HELD, Prometheus, in_a_hurry, scraping
from tests.deploy.test_alerts import RULES, alerts
from tests.deploy.tools import needs
from tests.repo.documents import REPOSITORY
from tests.serve.fake_executor import fake_facts
from tests.serve.rpc.running import FakeRanks, RunningServer, request, serving
from tests.serve.rpc.test_certificates import make_pair
from tests.support.server import until

pytestmark = [pytest.mark.deploy, needs("prometheus"), pytest.mark.timeout(600)]

SHORTER: Final = {
    "tessera_queue_oldest_seconds > 60": "tessera_queue_oldest_seconds > 2",
    "rate(tessera_step_seconds_count[5m]) == 0": "rate(tessera_step_seconds_count[5s]) == 0",
    "p99_rate5m > 30": "p99_rate5m > 1",
}
FAULT: Final = 9
"""A prompt with this id breaks."""
PATIENCE_SECONDS: Final = 90.0
ONE_PROCESS: Final = """
import sys
from serve.metrics import Metrics
Metrics(version="0", num_ranks=1).listen("127.0.0.1", int(sys.argv[1]))
sys.stdin.read()
"""


class Watched:
    """Servers by what befalls them, and the Prometheus that looks at them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: dict[str, RunningServer] = {}
        self.instances: dict[str, str] = {}
        self._stack = contextlib.AsyncExitStack()
        self._shown: dict[str, contextlib.ExitStack] = {}
        self._running: list[asyncio.Task[None]] = []
        self.prometheus: Prometheus
        self.jobs: dict[str, list[str]] = {}
        """Names of those whom each job scrapes."""

    async def __aenter__(self) -> Watched:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._stack.aclose()

    async def serve(self, name: str, **options: Any) -> RunningServer:
        """Another server."""
        server = self.servers[name] = await self._stack.enter_async_context(serving(**options))
        shown = self._shown[name] = contextlib.ExitStack()
        self.instances[name] = shown.enter_context(contextlib.closing(server.metrics.listen("127.0.0.1", 0))).address
        self._stack.callback(shown.close)
        return server

    async def end(self, name: str) -> None:
        """Nobody answers at its metrics port any more."""
        await asyncio.to_thread(self._shown[name].close)

    async def scrape(self, jobs: dict[str, list[str]]) -> None:
        """Start Prometheus, and wait until it has seen everybody: an increase is one over what was seen."""
        rules = in_a_hurry(await asyncio.to_thread(RULES.read_text))
        for usual, shorter in SHORTER.items():
            assert usual in rules
            rules = rules.replace(usual, shorter)
        file = self.folder / "rules.yml"
        await asyncio.to_thread(file.write_text, rules)
        self.jobs = jobs
        targets = {job: [self.instances[name] for name in names] for job, names in jobs.items()}
        within = contextlib.ExitStack()
        self._stack.push_async_callback(asyncio.to_thread, within.close)
        self.prometheus = await asyncio.to_thread(within.enter_context, scraping(self.folder, targets, file))
        await self.until(lambda: sum(self.prometheus.query("up")) == sum(map(len, targets.values())))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for what Prometheus says."""
        await asyncio.to_thread(until, condition, PATIENCE_SECONDS, 0.25)

    def keep(self, work: Callable[[], Coroutine[Any, Any, object]], beside: int = 1) -> None:
        """Do it again and again, so many at a time, whatever becomes of it."""

        async def again() -> None:
            while True:
                with contextlib.suppress(grpc.RpcError):
                    await work()
                await asyncio.sleep(0.05)

        self._running += [asyncio.create_task(again()) for _ in range(beside)]


def slowed(ranks: FakeRanks) -> None:
    """Each step takes longer than the objective of a token."""
    quick = ranks.execute

    def execute(plan: StepPlan) -> StepResult:
        time.sleep(0.3)
        return quick(plan)

    ranks.execute = execute  # type: ignore[method-assign]


def never_back() -> Callable[[FakeRanks], None]:
    """Ranks that, once lost, are loaded for ever."""
    lives = itertools.count()

    def prepare(ranks: FakeRanks) -> None:
        if next(lives):
            ranks.loaded.clear()

    return prepare


def lose(server: RunningServer, loss: Loss) -> None:
    server.ranks.dead_rank = lambda: loss  # type: ignore[method-assign]


async def lose_again_and_again(server: RunningServer) -> None:
    for life in range(1, 4):
        server.ranks.kill()
        await server.until(lambda life=life: len(server.lives) > life)  # type: ignore[misc]
        await server.until(lambda: server.gateway.state.value == "serving")


def refused(edition: Edition) -> Edition:
    raise ConfigError("the folder holds no whole checkpoint")


def of_the_day_before_yesterday(edition: Edition) -> Edition:
    return Edition(edition.config, edition.tokenizer, written_seconds=time.time() - 2 * 86400)


@contextlib.asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[Watched]:
    """A server for each cause, one that is well, a run of training, and Prometheus."""
    certificate, key = make_pair(folder, "ends", days=1)
    small = fake_facts(vocab_size=300, max_model_len=64, num_blocks=16)
    run = TrainMetrics(model_name="mine")
    run.began(step=0, steps=10)
    run._saved_at.set(time.time() - 7 * 3600)
    with contextlib.closing(run.listen(0)) as training:
        async with Watched(folder) as all_:
            for name in ("well", "gone", "alone", "restarts", "frozen", "memory"):
                await all_.serve(name)
            await all_.serve("down", prepare=never_back())
            await all_.serve("breaks", fault_token=FAULT)
            await all_.serve("full", prepare=slowed, scheduler={"max_num_seqs": 1}, admission={"max_queued_requests": 1})
            await all_.serve("cache", facts=small)
            await all_.serve("preempts", facts=small)
            await all_.serve("slow", prepare=slowed, scheduler={"max_num_seqs": 1})
            await all_.serve("refused", reopen=refused)
            await all_.serve("old", reopen=of_the_day_before_yesterday)
            await all_.serve("certificate", rpc={"tls_cert": str(certificate), "tls_key": str(key)})
            tokens = folder / "tokens.json"
            add_token(tokens, "somebody", scopes=("generate",), expires=None, given={})
            await all_.serve("tokens", rpc={"tokens": str(tokens)})
            audit = folder / "audit"
            audit.mkdir()
            await all_.serve("unwritten", rpc={"audit_log": str(audit / "calls")})
            all_.instances |= {"training": training.address, "crashes": f"127.0.0.1:{free_ports()[0]}"}
            with crashing(all_.instances["crashes"]) as again:
                names = [name for name in all_.instances if name not in ("slow", "alone", "training")]
                await all_.scrape({"tessera": names, "slow": ["slow"], "alone": ["alone"], "training": ["training"]})
                for file in (certificate, tokens):
                    await asyncio.to_thread(file.write_text, "{")
                await asyncio.to_thread(shutil.rmtree, audit)
                await strike(all_, again)
                yield all_


@contextlib.contextmanager
def crashing(address: str) -> Iterator[Callable[[], None]]:
    """A process that has a server's metrics; what is given starts it anew."""
    words = [sys.executable, "-c", ONE_PROCESS, address.rpartition(":")[2]]
    lives: list[subprocess.Popen[bytes]] = []

    def again() -> None:
        for life in lives[-1:]:
            life.kill()
            life.communicate()
        lives.append(subprocess.Popen(words, cwd=REPOSITORY, stdin=subprocess.PIPE))

    again()
    try:
        yield again
    finally:
        lives[-1].kill()
        lives[-1].communicate()


async def shake_hands(address: str) -> None:
    """Connect by TLS, with whoever it is."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(host, int(port), ssl=anybody)
        writer.close()
        await writer.wait_closed()


async def strike(all_: Watched, again: Callable[[], None]) -> None:
    """Bring every cause about."""
    servers = all_.servers
    all_.keep(lambda: servers["well"].inference.Generate(request()))
    all_.keep(lambda: servers["unwritten"].inference.Generate(request()))
    all_.keep(lambda: servers["breaks"].inference.Generate(request((5, FAULT))))
    all_.keep(lambda: servers["full"].inference.Generate(request(tokens=100)), beside=4)
    servers["cache"].ranks.last_step = 45
    all_.keep(lambda: servers["cache"].inference.Generate(request(tuple(range(5, 21)), 47)))
    all_.keep(lambda: servers["preempts"].inference.Generate(request(tuple(range(5, 13)), 50)), beside=4)
    all_.keep(lambda: servers["slow"].inference.Generate(request(tokens=8)), beside=3)
    anybodys = (("authorization", "Bearer anybodys"),)
    all_.keep(lambda: servers["tokens"].inference.Generate(request(), metadata=anybodys))
    all_.keep(lambda: shake_hands(servers["certificate"].address))
    lose(servers["frozen"], Loss("rank 0 fell silent", "frozen"))
    lose(servers["memory"], Loss("rank 0 was killed for its memory", "memory"))
    lose(servers["down"], Loss("rank 0 died", "died"))
    await lose_again_and_again(servers["restarts"])
    servers["old"].metrics.follows(30.0)
    await servers["old"].admin.Reload(admin_pb2.ReloadRequest())
    with pytest.raises(grpc.RpcError):
        await servers["refused"].admin.Reload(admin_pb2.ReloadRequest())
    started = f'process_start_time_seconds{{instance="{all_.instances["crashes"]}"}}'
    for _ in range(3):
        before = await asyncio.to_thread(all_.prometheus.query, started)
        again()
        await all_.until(lambda before=before: all_.prometheus.query(started) not in ([], before))  # type: ignore[misc]


CAUSES: Final = {
    "TesseraDown": "down", "TesseraFewerServers": "", "TesseraModelGone": "", "TesseraServerGone": "gone",
    "TesseraCrashLoop": "crashes", "TesseraRanksRestarting": "restarts", "TesseraRanksFrozen": "frozen",
    "TesseraRankOutOfMemory": "memory", "TesseraErrors": "breaks", "TesseraNotFinite": "breaks", "TesseraRefusing": "full",
    "TesseraStarving": "full", "TesseraStuck": "cache", "TesseraCacheFull": "cache", "TesseraPreempting": "preempts",
    "TesseraSlowFirstToken": "", "TesseraSlowTokens": "", "TesseraSlowTokensForDays": "", "TesseraReloadRefused": "refused",
    "TesseraCheckpointOld": "old", "TesseraTrainNotSaved": "training", "TesseraCertificateEnds": "certificate",
    "TesseraCertificateEndsNow": "certificate", "TesseraTokensRefused": "tokens", "TesseraCertificateRefused": "certificate",
    "TesseraAuditLinesLost": "unwritten",
}  # fmt: skip
"""Who has what each alert is for; of a model, nobody by name."""


async def test_every_alert_fires_for_its_cause_and_none_for_a_server_that_is_well(tmp_path: Path) -> None:
    assert sorted(CAUSES) == sorted(alerts())
    async with watched(tmp_path) as all_:
        # All but what stays down and what is no server; of that number one is missing from then on.
        well = len(all_.jobs["tessera"]) - len(("down", "crashes"))
        await all_.until(lambda: all_.prometheus.query(HELD) == [well])
        await all_.end("gone")
        await all_.end("alone")
        expected = {(alert, all_.instances.get(name, "")) for alert, name in CAUSES.items()}
        seen: set[tuple[str, str]] = set()

        def all_seen() -> bool:
            seen.update(all_.prometheus.firing())
            return expected <= seen

        with contextlib.suppress(AssertionError):
            await all_.until(all_seen)
        assert expected - seen == set(), f"silent; told were {sorted(seen)}"
        # Where the machine has no time, nobody answers Prometheus within a second.
        of_the_well = {alert for alert, instance in seen if instance == all_.instances["well"]}
        assert of_the_well <= {"TesseraServerGone"}

"""Fourth and fifth act: ``tessera-serve`` on two ranks, and three completions streamed from it at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from examples.demo import metrics, screen
from examples.demo.children import Child, Children, PartFailed, command, wait_for_line
from serve.client import AsyncClient, Delta

PROMPTS = ("def read_config(path):\n", "class Connection:\n", "    def close(self):\n")
MAX_NEW_TOKENS = 160
SEED = 1
START_SECONDS = 240.0
# Watching and drawing share the cores with the ranks: often enough to look alive, and no more.
WATCH_SECONDS = 0.2
DRAW_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Server:
    """A server that said it is ready."""

    child: Child
    grpc: str
    metrics_url: str
    facts: dict[str, str]
    """All of the start-up line's ``name=value`` pairs."""
    start_seconds: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """What the server's own metrics say of the three calls."""

    num_tokens: int
    seconds: float
    first_token_seconds: float
    """Mean over the calls."""
    kv_blocks_peak: int
    kv_blocks_total: int
    kv_blocks_after: int
    """Blocks still in use once all calls have ended."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def start_server(children: Children, checkpoints: Path) -> Server:
    """Start two tensor-parallel ranks on free ports and wait until they serve.

    Raises:
        PartFailed: the server ended, or took longer than ``START_SECONDS``.
    """
    started = time.monotonic()
    argv = [*command("tessera-serve", "serve"), "--model", str(checkpoints), "--tensor-parallel-size", "2"]
    child = children.start("tessera-serve", [*argv, "--port", "0", "--metrics-port", "0"])
    line = wait_for_line(child, "tessera ready ", START_SECONDS)
    facts = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
    return Server(child, facts["grpc"], facts["metrics"], facts, time.monotonic() - started)


async def stream(console: Console, server: Server) -> Streamed:
    """Stream the three prompts at the same time, drawing them as they grow, and read the server's metrics around them."""
    panels = [screen.Completion(prompt) for prompt in PROMPTS]
    before = await asyncio.to_thread(metrics.read, server.metrics_url)
    peak = [0]
    async with AsyncClient(server.grpc) as client:
        watcher = asyncio.create_task(_watch_blocks(server, peak))
        drawer = asyncio.create_task(_draw(console, panels))
        started = time.monotonic()
        try:
            async with asyncio.TaskGroup() as calls:
                for panel in panels:
                    calls.create_task(_fill(client, panel))
            seconds = time.monotonic() - started
        except ExceptionGroup as failed:
            raise PartFailed(f"streaming failed: {failed.exceptions[0]}", server.child.log) from failed
        finally:
            for task in (watcher, drawer):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
    after = await asyncio.to_thread(metrics.read, server.metrics_url)
    return Streamed(
        num_tokens=after.generation_tokens - before.generation_tokens,
        seconds=seconds,
        first_token_seconds=(after.first_token_seconds - before.first_token_seconds)
        / max(1, after.num_first_tokens - before.num_first_tokens),
        kv_blocks_peak=peak[0],
        kv_blocks_total=after.kv_blocks_total,
        kv_blocks_after=after.kv_blocks_used,
    )


def describe(streamed: Streamed) -> list[tuple[str, str]]:
    """The figures as rows of a table."""
    return [
        ("time to first token", f"{streamed.first_token_seconds * 1000:.0f} ms, mean of the three calls"),
        ("tokens per second", f"{streamed.tokens_per_second:,.0f} ({streamed.num_tokens} tokens in {streamed.seconds:.1f} s)"),
        (
            "KV blocks in use",
            f"{streamed.kv_blocks_peak} of {streamed.kv_blocks_total} at most, {streamed.kv_blocks_after} now",
        ),
    ]


async def _fill(client: AsyncClient, panel: screen.Completion) -> None:
    """Stream one completion into its panel."""
    started = time.monotonic()
    async for event in client.stream(panel.prompt, max_new_tokens=MAX_NEW_TOKENS, temperature=0.7, top_p=0.9, seed=SEED):
        if not isinstance(event, Delta):
            continue
        if panel.first_token_seconds is None:
            panel.first_token_seconds = time.monotonic() - started
        panel.text += event.text
        panel.num_tokens += len(event.token_ids)
    panel.done = True


async def _watch_blocks(server: Server, peak: list[int]) -> None:
    """Keep the largest ``kv_blocks_used`` seen; a gauge has no memory of its own."""
    while True:
        reading = await asyncio.to_thread(metrics.read, server.metrics_url)
        peak[0] = max(peak[0], reading.kv_blocks_used)
        await asyncio.sleep(WATCH_SECONDS)


async def _draw(console: Console, panels: list[screen.Completion]) -> None:
    """Redraw until cancelled, and once more then; without a terminal only that last time."""

    def picture() -> Table:
        return screen.completions(panels, console.width, screen.panel_height(console))

    if not console.is_terminal:
        try:
            await asyncio.Event().wait()
        finally:
            console.print(picture())
    with Live(picture(), console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(picture(), refresh=True)
                await asyncio.sleep(DRAW_SECONDS)
        finally:
            live.update(picture(), refresh=True)

"""The demo on one screen: text, train, shards, serve, stream, stop. Exit code 0 only if every part did what it should."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from examples.demo import corpus, screen, serving, training
from examples.demo.children import Children, PartFailed, describe_exit, tail

STOP_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Train, shard, serve and stream a small GPT.")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="run folder; what an earlier demo left there is removed"
    )
    out: Path = parser.parse_args().out
    console = screen.make_console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for name in ("text", "run", "logs"):
        shutil.rmtree(out / name, ignore_errors=True)
    try:
        with Children(out / "logs") as children:
            play(console, children, out)
    except (PartFailed, corpus.NoSource) as failure:
        show_failure(console, failure)
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped. Nothing is left running.", style="yellow")
        return 128 + signal.SIGINT
    return 0


def play(console: Console, children: Children, out: Path) -> None:
    """The six acts, in order. Raises ``PartFailed`` at the first that does not do what it should."""
    started = time.monotonic()
    console.print()
    console.rule(Text("Tessera: train a GPT, keep it as shards, serve the shards", style="bold"), style=screen.ACCENT)
    console.print()

    text = corpus.gather(out / "text")
    version = sys.version.split()[0]
    screen.act(
        console, 1, "Text", f"the standard library of Python {version}: {text.num_files} files, {text.num_bytes / 1e6:.1f} MB"
    )

    screen.act(console, 2, "Train", "a 4-million-parameter GPT-NeoX, ZeRO-3 with CPU offload, two ranks; about a minute")
    trained = training.train(console, children, text.folder, out / "run")
    losses = f"loss {trained.first_loss:.2f} → {trained.last_loss:.2f}"
    screen.detail(console, f"{losses} at {trained.tokens_per_second:,.0f} tokens/s, {trained.seconds:.0f} s in all")

    checkpoints = out / "run" / "checkpoints"
    screen.act(console, 3, "Shards", describe_shards(checkpoints))

    screen.act(console, 4, "Serve", "tessera-serve with two tensor-parallel ranks")
    server = serving.start_server(children, checkpoints)
    screen.detail(console, f"ready on {server.grpc} after {server.start_seconds:.1f} s, {server.facts['kv_blocks']} KV blocks")

    screen.act(console, 5, "Stream", "three prompts at once over gRPC")
    streamed = asyncio.run(serving.stream(console, server))
    console.print(screen.figures(serving.describe(streamed)))

    stop(console, children, server)
    console.print()
    console.rule(Text(f"done in {time.monotonic() - started:.0f} s", style="bold"), style=screen.ACCENT)
    console.print(f"The model stays in {checkpoints}. Serve it yourself:", style="dim")
    console.print(f"  .venv/bin/tessera-serve --model {checkpoints} --tensor-parallel-size 2", markup=False)
    console.print("  .venv/bin/tessera-generate 'def main():' --max-new-tokens 64", markup=False)


def describe_shards(checkpoints: Path) -> str:
    """The newest checkpoint's folder and its weights, as ``checkpoint`` itself sees them."""
    from checkpoint import open_checkpoint  # here, because it imports torch: the demo's first line should not wait for that

    with open_checkpoint(checkpoints, verify="sha256") as opened:
        shards = sorted({info.file for info in opened.tensors.values()})
        size = sum((opened.path / shard).stat().st_size for shard in shards)
        return (
            f"{len(opened.tensors)} tensors in {len(shards)} files, {size / 1e6:.1f} MB, every SHA-256 verified: "
            f"{checkpoints / opened.path.name}"
        )


def stop(console: Console, children: Children, server: serving.Server) -> None:
    """Drain the server as an operator would, and prove that nothing is left."""
    started = time.monotonic()
    code = children.stop(server.child, STOP_SECONDS)
    if code != 0:
        raise PartFailed(f"tessera-serve ended with {describe_exit(code)} after SIGTERM", server.child.log)
    if left := children.left_over():
        raise PartFailed("still running: " + ", ".join(f"{process.pid} {process.name()}" for process in left))
    screen.act(console, 6, "Stop", f"server drained and exited 0 in {time.monotonic() - started:.1f} s; no process is left")


def show_failure(console: Console, failure: PartFailed | corpus.NoSource) -> None:
    """What failed, and what the part at fault wrote last."""
    console.print(f"\nThe demo failed: {failure}", style="bold red", markup=False)
    log = getattr(failure, "log", None)
    for path in (log, log.with_suffix(".out")) if log else ():
        if lines := tail(path, 20):
            console.print(f"last lines of {path}:", style="dim", markup=False)
            console.print("\n".join(f"  {line}" for line in lines), markup=False)


if __name__ == "__main__":
    sys.exit(main())

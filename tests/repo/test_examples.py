"""The examples and the demo's streaming act run against a real gRPC server with a model that can be computed by hand."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.children import Child, PartFailed
from examples.demo.serving import PROMPTS, Server, stream
from tests.repo.documents import REPOSITORY
from tests.serve.rpc.running import FakeRanks, RunningServer, serving
from tests.serve.runtime.ranks import LOSING


async def run_example(module: str, *arguments: str) -> tuple[int, str, str]:
    """Run an example in a process of its own; exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@contextlib.contextmanager
def as_started_by_the_demo(server: RunningServer, folder: Path):
    """A ``Server`` record of a server that runs in this process; its program is a stand-in that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (folder / "x.out").touch()
    (folder / "x.log").touch()
    child = Child("tessera-serve", process, folder / "x.out", folder / "x.log")
    with contextlib.closing(server.metrics.listen("127.0.0.1", 0)) as endpoint:
        yield Server(child, server.address, endpoint.url, {}, 0.0)


async def test_the_blocking_example_completes_and_scores() -> None:
    async with serving() as server:
        code, out, err = await run_example("examples.client", "import os", "--address", server.address)
        assert code == 0, err
        assert out.startswith("fake: ")
        assert "import os" in out
        assert out.count("log-likelihood of") == 2
        assert server.count("Generate", "OK") == 1
        assert server.count("Score", "OK") == 1


async def test_the_asyncio_example_streams_every_prompt_to_its_end() -> None:
    async with serving() as server:
        code, out, err = await run_example("examples.stream_async", "a", "b", "c", "--address", server.address)
        assert code == 0, err
        for number in range(3):
            assert any(line.startswith(f"[{number}] ") and f"seed {number}" in line for line in out.splitlines())
        assert server.count("GenerateStream", "OK") == 3


async def test_an_example_that_is_refused_says_so_and_ends_with_1() -> None:
    async with serving() as server:
        code, _, err = await run_example(
            "examples.stream_async", "a", "--max-new-tokens", "100000", "--address", server.address
        )
        assert code == 1
        assert "max_new_tokens" in err
        assert "Traceback" not in err


async def test_the_demo_streams_side_by_side_and_reads_its_figures(tmp_path: Path) -> None:
    async with serving() as server:
        with as_started_by_the_demo(server, tmp_path) as started:
            console = Console(file=io.StringIO(), width=120)
            streamed = await stream(console, started)
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        assert all(prompt.splitlines()[0] in shown for prompt in PROMPTS)
        assert streamed.num_tokens > 0
        assert streamed.first_token_seconds > 0
        assert streamed.kv_blocks_after == 0
        assert streamed.kv_blocks_total == 512
        assert f"{streamed.tokens_per_second:,.0f}" != "0"


async def test_a_server_that_breaks_while_streaming_fails_the_demo(tmp_path: Path) -> None:
    def stop_after_ten_steps(ranks: FakeRanks) -> None:
        ranks.last_step = 10

    async with serving(prepare=stop_after_ten_steps, supervisor=LOSING) as server:
        with as_started_by_the_demo(server, tmp_path) as started:
            call = asyncio.create_task(stream(Console(file=io.StringIO(), width=120), started))
            await server.until(lambda: server.ranks.num_steps == 10)
            server.ranks.kill()
            with pytest.raises(PartFailed, match="streaming failed"):
                await call


async def test_the_readmes_python_runs() -> None:
    """Each ``python`` block of the README, against a server at the address that stands in it."""
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    async with serving() as server:
        for block in blocks:
            assert "127.0.0.1:50051" in block
            program = block.replace("127.0.0.1:50051", server.address)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            async with asyncio.timeout(60):
                out, err = await process.communicate()
            assert process.returncode == 0, err.decode()
            assert out
        assert server.count("Generate", "OK") == 1
        assert server.count("GenerateStream", "OK") == 1

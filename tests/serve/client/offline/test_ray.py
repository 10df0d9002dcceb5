"""The example for Ray Data, on a Ray of two workers that listens on loopback alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from serve.client import generate_file
from tests.repo.documents import REPOSITORY
from tests.serve.client.offline.test_generate_file import are_exact, numbered
from tests.serve.rpc.running import serving

pytestmark = pytest.mark.slow


def addresses_that_listen(pid: int) -> set[str]:
    """Addresses on which a process and those below it take connections."""
    found = set()
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            found |= {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}
        except psutil.NoSuchProcess:
            continue
    return found


async def test_ray_workers_answer_a_file_as_the_command_does_and_go_on_where_one_was_ended(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the package ray: pip install 'ray[data]'")
    lines, files = numbered(24, tokens=12), (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines[:5]))
    async with serving() as one, serving() as other:
        addresses = [one.address, other.address]
        await asyncio.to_thread(generate_file, *files, addresses=addresses)
        files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
        with files[1].open("a") as half:
            half.write('{"line": 6, "id": "q')
        one.ranks.last_step = one.ranks.num_steps + 5
        command = [
            sys.executable,
            "-m",
            "examples.ray_batch",
            *map(str, files),
            "--address",
            ",".join(addresses),
            "--at-once",
            "4",
        ]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=REPOSITORY, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        await one.until_held()  # its workers are in the middle of their work
        assert addresses_that_listen(process.pid) <= {"127.0.0.1", "::ffff:127.0.0.1"}
        one.ranks.last_step = None
        _, err = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, err.decode()
        assert are_exact(files, lines)
        assert one.count("Generate", "OK") + other.count("Generate", "OK") == 24
        report = await asyncio.to_thread(generate_file, *files, addresses=addresses)
        assert (report.num_before, report.num_failed) == (24, 0)

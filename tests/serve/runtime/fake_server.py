"""``tessera-serve`` on fake ranks, as a process: ``python -m tests.serve.runtime.fake_server MODE [options]``."""

from __future__ import annotations

import logging
import os
import sys

from serve import app, cli
from serve.config import ServerConfig
from serve.engine.executor import ExecutorDied
from tests.serve.runtime.ranks import FakeRanks


def make_group(mode: str, config: ServerConfig) -> FakeRanks:
    """Ranks that take 20 ms for a step; ``loading`` ones are never ready, ``dying`` ones fail their first step."""
    ranks = FakeRanks(config.model.tensor_parallel_size)
    ranks.step_seconds = 0.02
    if mode == "loading":
        ranks.ready.clear()
    elif mode == "dying":
        ranks.step_error = ExecutorDied("rank 0 died: signal SIGKILL")
    return ranks


def main(mode: str, arguments: list[str]) -> int:
    config = cli.resolve(vars(cli._parser().parse_args(arguments)), os.environ)
    logging.basicConfig(level="INFO", stream=sys.stderr)
    return app.run(config, version="0", make_group=lambda config: make_group(mode, config))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

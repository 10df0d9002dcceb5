"""What ``srun`` is to what it starts, on this machine alone: one task a node, signals passed on, the worst exit code."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys


def main(words: list[str]) -> int:
    """Start the command that follows the options once for each node of the job."""
    command = list(itertools.dropwhile(lambda word: word.startswith("--"), words))
    count = int(os.environ["SLURM_NNODES"])
    tasks = []
    for node in range(count):
        told = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": str(count)}
        tasks.append(subprocess.Popen(command, env={**os.environ, **told}))

    def pass_on(number: int, _: object) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tries a checkpoint in a process of its own, so that what the ranks would refuse is known while other ranks still serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence

from host.forked import ForkServerLost
from host.modules import module_command
from host.process import be_killed_first, give_way
from serve import logs
from serve.config import ServerConfig
from serve.errors import ConfigError, RankStartError, StartError
from serve.worker import wire
from serve.worker.rank_loop import choose_device, die_with_parent
from serve.worker.rank_output import RankOutput
from serve.worker.rank_process import ForkStarter, rank_environment

_log = logging.getLogger(__name__)


async def rehearse(config: ServerConfig, starter: ForkStarter | None = None) -> None:
    """Do all of a load that needs neither the model's memory nor an accelerator. When cancelled it ends at once.

    Args:
        starter: forks the process, where ranks are forked.

    Raises:
        ConfigError: the checkpoint or an option is at fault.
        RankStartError: the process failed, or took longer than ``supervisor.start_timeout_seconds``.
    """
    told, environment = wire.encode_config(config), rank_environment(0, 1, config.model.device, config.model.gpus)
    output = RankOutput("serve.rehearsal")
    try:
        async with asyncio.timeout(config.supervisor.start_timeout_seconds):
            if starter is None:
                answer, code = await _by_program(told, environment, output.writes)
            else:
                answer, code = await _by_fork(told, environment, starter, output.writes)
    except TimeoutError:
        raise RankStartError("trying the checkpoint took longer than supervisor.start_timeout_seconds") from None
    finally:
        output.handed_over()
    if not answer:
        raise RankStartError(f"the process that tried the checkpoint ended with {code}")
    try:
        report = wire.decode_report(answer)
    except wire.Malformed as error:
        raise RankStartError(f"the process that tried the checkpoint answered with {error}") from None
    if isinstance(report, wire.Failed):
        raise report.error()


async def _by_program(told: bytes, environment: dict[str, str], output: int) -> tuple[bytes, int | None]:
    pipe, command = asyncio.subprocess.PIPE, module_command(__name__)
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=output, env=environment)
    except OSError as error:  # no memory, no descriptor or no process to be had
        raise RankStartError(f"the process that tries the checkpoint could not be started: {error.strerror}") from error
    try:
        answer, _ = await process.communicate(told)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return answer, process.returncode


async def _by_fork(told: bytes, environment: dict[str, str], starter: ForkStarter, output: int) -> tuple[bytes, int | None]:
    given_up = threading.Event()

    def unless() -> None:
        if given_up.is_set():
            raise RankStartError("trying the checkpoint was given up")

    asked = asyncio.create_task(asyncio.to_thread(starter.ask, f"{__name__}:main", told, environment, unless, output))
    try:
        return await asyncio.shield(asked)
    except (ForkServerLost, OSError):
        return await _by_program(told, environment, output)
    finally:
        given_up.set()
        await asyncio.gather(asked, return_exceptions=True)


def main(_: Sequence[str] = ()) -> int:
    """Read a configuration from standard input, try it, and write what was found to standard output."""
    die_with_parent()
    be_killed_first()
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    logs.set_up_for_server("WARNING")
    give_way(5)  # the ranks are serving meanwhile
    try:
        report = _verdict(wire.decode_config(sys.stdin.buffer.read()))
    except wire.Malformed as error:
        report = wire.Failed(f"it was told {error}", configured=False)
    os.write(answer_fd, wire.encode(report))
    return 0


def _verdict(config: ServerConfig) -> wire.Report:
    """What is wrong, or that nothing is."""
    try:
        import torch

        from serve.worker import loader

        torch.set_num_threads(1)  # several files are read at once
        loader.rehearse(config, choose_device(config.model.device, 0))
    except StartError as error:
        return wire.Failed(str(error), configured=isinstance(error, ConfigError))
    except Exception as error:
        _log.exception("the rehearsal broke")
        return wire.Failed(f"{type(error).__name__}: {error}", configured=False)
    return wire.Fine()


if __name__ == "__main__":
    sys.exit(main())

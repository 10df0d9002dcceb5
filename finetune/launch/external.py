"""A run whose ranks another launcher started: torchrun, DeepSpeed's launcher on several nodes, Slurm's srun.

Such a launcher starts ``tessera-finetune tune CONFIG`` once per rank, with RANK, LOCAL_RANK, WORLD_SIZE and MASTER_* in the
environment. Rank 0 prepares the data and tells the others; ``run.output`` must be a folder that all nodes see.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
from rich.console import Console

from finetune.config import TuneConfig
from finetune.errors import ConfigError, FinetuneError, RunError
from finetune.launch.common import claimed_run, ending_with_it, saying, silent
from finetune.launch.instructions import Command, Instructions, Refused, decoded, encoded
from finetune.launch.prerequisites import built_ops, make_ready
from finetune.machine import inventory
from finetune.machine.process import without_collection
from finetune.machine.swap import clear_leftovers
from host.modules import import_path
from host.process import end_process

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the way to it is the way to other nodes, also from one whose own name is a loopback
address."""
_OTHER_NAMES = {
    "RANK": ("SLURM_PROCID",),
    "LOCAL_RANK": ("SLURM_LOCALID",),
    "WORLD_SIZE": ("SLURM_NTASKS",),
    "LOCAL_WORLD_SIZE": ("LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"),  # the first is DeepSpeed's launcher's
}


def started_by_launcher(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several ranks already; then the usual names are set from Slurm's or DeepSpeed's own."""
    found = dict(environment)
    for name, others in _OTHER_NAMES.items():
        value = next((environment[other] for other in (name, *others) if environment.get(other)), None)
        if value is not None:
            found[name] = value
    if not all(name in found for name in _NAMES):
        return False
    environment.update(found)
    return True


def world_size() -> int:
    """How many ranks torchrun, Slurm or another launcher started for this run, on all machines."""
    return int(os.environ["WORLD_SIZE"])


def on_several_machines() -> bool:
    """Whether the launcher started ranks elsewhere too, or may have: one that does not say how many are here."""
    return world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def interface_towards(host: str) -> str | None:
    """The network interface that this machine reaches ``host`` through; ``None`` for itself, or where that is unknown.

    Nothing is sent.

    Gloo listens on the address of the machine's own name, which on many systems is a loopback one that no other node reaches.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            mine = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(mine.partition("%")[0]).is_loopback:
        return None
    named = psutil.net_if_addrs().items()
    return next((name for name, found in named if any(one.address.partition("%")[0] == mine for one in found)), None)


def train(config: TuneConfig, console: Console, *, command: Command, anyway: bool) -> NoReturn:
    """Be one rank of the run, and end with it. Rank 0 alone writes to ``console``."""
    rank = int(os.environ["RANK"])
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Launchers set one thread per rank, or none; the fair share is what an offloaded optimizer needs.
    os.environ["OMP_NUM_THREADS"] = str(config.run.threads or max(1, inventory.usable_cores() // local_ranks))
    os.environ["HF_HUB_OFFLINE"] = "1"
    interface = interface_towards(os.environ["MASTER_ADDR"])
    if interface is None and on_several_machines():
        interface = interface_towards(_ELSEWHERE)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    quiet = Console(file=open(os.devnull, "w"))  # noqa: SIM115  # as long as the process
    with ExitStack() as stack:

        def report(error: BaseException, code: int) -> None:
            if isinstance(error, FinetuneError) and str(error):
                print(f"error: rank {rank}: {error}", file=sys.stderr)
            with suppress(OSError):
                stack.close()  # locks and swap files

        with ending_with_it(report):
            _rank(config, console if rank == 0 else quiet, stop, stack, command=command, anyway=anyway)
    end_process(0)


def check_not_stopped(stop: threading.Event) -> None:
    """Raise once the launcher has asked for an end.

    Raises:
        RunError: it has; there is nothing to save yet.
    """
    if stop.is_set():
        raise RunError("stopped by SIGTERM before training began")


def _rank(
    config: TuneConfig, console: Console, stop: threading.Event, stack: ExitStack, *, command: Command, anyway: bool
) -> None:
    with without_collection():
        from finetune.distributed import tell_everyone
        from finetune.launch.rank import choose_device, prepare_process, train_rank

        device = choose_device(config, local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), by_launcher=True)
        prepare_process(device)
        from finetune.engines.zero import engine

    say, first = saying(console), int(os.environ["RANK"]) == 0
    place = engine.start_ranks(device, int(os.environ.get("LOCAL_RANK", "0")))
    mine = encoded(_prepare(config, console, stop, stack, command=command, anyway=anyway)) if first else b""
    told = decoded(tell_everyone(mine.decode()).encode())
    if isinstance(told, Refused):
        error = FinetuneError(told.message if first else "")
        error.exit_code = told.exit_code
        raise error
    config = replace(config, model=replace(config.model, path=told.model_path))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        built_ops(config, say)  # rank 0 built them on its own node
        if told.swap is not None:
            clear_leftovers(Path(told.swap).parent, say)
    tell_everyone("built")
    told = replace(told, ops=built_ops(config, silent))
    train_rank(config, told, place, stop.is_set, console, command=command)


def _prepare(
    config: TuneConfig, console: Console, stop: threading.Event, stack: ExitStack, *, command: Command, anyway: bool
) -> Instructions | Refused:
    """What rank 0 does for all: hold the run's folders until ``stack`` is closed, and make everything ready."""
    from finetune.launch.rank import look_ahead

    say = saying(console)
    try:
        run = stack.enter_context(claimed_run(config, say))
        (run.output / "logs").mkdir(exist_ok=True)
        look_ahead(run.config, console, command=command, anyway=anyway)
        return make_ready(run.config, say, lambda: check_not_stopped(stop), swap=run.swap)
    except FinetuneError as error:
        return Refused(message=str(error), exit_code=error.exit_code)
    except OSError as error:
        rule = f"run.output: {config.run.output} cannot be written: {error}"
        return Refused(message=rule, exit_code=ConfigError.exit_code)


def hand_over(hostfile: Path, words: list[str]) -> None:
    """Become DeepSpeed's launcher, which starts this command on every node of ``hostfile``; does not return.

    Raises:
        FinetuneError: there is no such file.
    """
    if not hostfile.is_file():
        error = FinetuneError(f"--hostfile: {hostfile} is no file; a line is HOSTNAME slots=RANKS")
        error.exit_code = 2
        raise error
    launcher = ["-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--no_local_rank", "--module", "finetune"]
    # For the launcher and, as it hands on every PYTHON variable, for the ranks: no module is taken from the working directory.
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": import_path(os.environ)}
    os.execv(sys.executable, [sys.executable, *launcher, *words])

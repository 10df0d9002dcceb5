"""A run whose ranks another launcher started: torchrun, DeepSpeed's launcher on several nodes, Slurm's srun.

Such a launcher starts ``tessera-finetune tune CONFIG`` once per rank, with RANK, LOCAL_RANK, WORLD_SIZE and MASTER_* in the
environment. Rank 0 prepares the data and tells the others; ``run.output`` must be a folder that all nodes see.
"""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import yaml
from rich.console import Console
from rich.markup import escape

from finetune.config import TuneConfig
from finetune.errors import ConfigError, FinetuneError, RunError
from finetune.machine import inventory
from finetune.machine.process import end_process, without_collection
from finetune.machine.swap import claimed_swap, clear_leftovers
from finetune.output.folder import claimed_output
from host.modules import import_path

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
    """Ranks the launcher started."""
    return int(os.environ["WORLD_SIZE"])


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


def train(config: TuneConfig, settings: Mapping[str, Any], console: Console, *, command: str, anyway: bool) -> NoReturn:
    """Be one rank of the run, and end with it. Rank 0 alone writes to ``console``."""
    rank = int(os.environ["RANK"])
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Launchers set one thread per rank, or none; the fair share is what an offloaded optimizer needs.
    os.environ["OMP_NUM_THREADS"] = str(config.run.threads or max(1, inventory.usable_cores() // local_ranks))
    os.environ["HF_HUB_OFFLINE"] = "1"
    others = world_size() > local_ranks
    interface = interface_towards(os.environ["MASTER_ADDR"]) or (interface_towards(_ELSEWHERE) if others else None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    quiet = Console(file=open(os.devnull, "w"))  # noqa: SIM115  # as long as the process
    with ExitStack() as stack:
        try:
            _rank(config, settings, console if rank == 0 else quiet, stop, stack, command=command, anyway=anyway)
        except BaseException as error:
            code = error.exit_code if isinstance(error, FinetuneError) else 1
            if not isinstance(error, FinetuneError):
                traceback.print_exc()
            elif str(error):
                print(f"error: rank {rank}: {error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            with suppress(OSError):
                stack.close()  # locks and swap files
            # No clean-up that could wait for other ranks: threads of a torn process group may never end.
            os._exit(code)
    end_process(0)


def check_not_stopped(stop: threading.Event) -> None:
    """Raise once the launcher has asked for an end.

    Raises:
        RunError: it has; there is nothing to save yet.
    """
    if stop.is_set():
        raise RunError("stopped by SIGTERM before training began")


def _rank(
    config: TuneConfig,
    settings: Mapping[str, Any],
    console: Console,
    stop: threading.Event,
    stack: ExitStack,
    *,
    command: str,
    anyway: bool,
) -> None:
    with without_collection():
        from finetune.distributed import tell_everyone
        from finetune.launch.prerequisites import built_ops, make_ready, settled
        from finetune.launch.rank import choose_device, look_ahead, train_rank

        device = choose_device(config, local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        os.environ["DS_ACCELERATOR"] = device
        from finetune.engines.zero import engine

    def say(text: str) -> None:
        console.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)

    place = engine.start_ranks(device, int(os.environ.get("LOCAL_RANK", "0")))
    told: dict[str, Any] = {}
    if int(os.environ["RANK"]) == 0:
        try:
            output = stack.enter_context(claimed_output(config))
            config = settled(config, say)
            settings = {**settings, "model": {**settings["model"], "path": config.model.path}}
            swap = stack.enter_context(claimed_swap(config, say))
            (output / "logs").mkdir(exist_ok=True)
            text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
            (output / "config.yaml").write_text(text, encoding="utf-8")
            look_ahead(config, console, command=command, anyway=anyway)
            told = {**make_ready(config, say, lambda: check_not_stopped(stop), swap=swap), "model.path": config.model.path}
        except FinetuneError as error:
            told = {"error": str(error), "exit_code": error.exit_code}
        except OSError as error:
            told = {"error": f"run.output: {config.run.output} cannot be written: {error}", "exit_code": ConfigError.exit_code}
    told = json.loads(tell_everyone(json.dumps(told)))
    if "error" in told:
        error = FinetuneError(told["error"] if int(os.environ["RANK"]) == 0 else "")
        error.exit_code = told["exit_code"]
        raise error
    config = replace(config, model=replace(config.model, path=told["model.path"]))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        built_ops(config, say)  # rank 0 built them on its own node
        if told["swap"] is not None:
            clear_leftovers(Path(told["swap"]).parent, say)
    tell_everyone("built")
    told["ops"] = built_ops(config, lambda _: None)
    train_rank(config, told, place, stop.is_set, console, pipeline=command == "pretrain")


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

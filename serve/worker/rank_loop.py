"""The program of one rank: load, say so, then one plan after another until the other end closes.

Called with RANK STEP_FD ORDER_FD PULSE_FD SHARED_FD RENDEZVOUS LOG_LEVEL, in a process forked for it or as
``python -P -m serve.worker.rank_loop``, with three inherited sockets: one carries the configuration and the plans down and the
results up, one orders that are followed beside the steps and their answers, one a heartbeat up. SHARED_FD is a file of memory,
RENDEZVOUS one where ranks meet.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from host.process import name_process
from serve import logs
from serve.config import ServerConfig
from serve.errors import ConfigError, StartError
from serve.worker import wire
from serve.worker.progress import Progress
from serve.worker.vitals import PULSE

if TYPE_CHECKING:
    import torch

    from serve.worker.exchange import Exchange
    from serve.worker.runner import Runner

RANK_NAME: Final = "tessera-rank-"
"""What the system calls a rank's process, before its number."""
PULSE_SECONDS: Final = 0.25
_BEATS_PER_LOOK: Final = 8
"""Heartbeats from one look at the device's memory to the next."""
_PR_SET_PDEATHSIG: Final = 1

_log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Run one rank; returns when the server closes its end."""
    began = time.monotonic()
    rank, step_fd, order_fd, pulse_fd, shared_fd = (int(argument) for argument in arguments[:5])
    rendezvous = arguments[5]
    die_with_parent()
    name_process(f"{RANK_NAME}{rank}")
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    # Ctrl-C and a service manager's SIGTERM may reach the whole group; the server drains first and then ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.set_up_for_server(arguments[6])
    steps, orders, pulse = (socket.socket(fileno=fd) for fd in (step_fd, order_fd, pulse_fd))
    progress = Progress()
    threading.Thread(target=_beat, args=(pulse, progress), daemon=True, name="pulse").start()
    try:
        try:
            config = wire.decode_config(wire.receive(steps))
        except wire.Malformed as error:
            wire.send(steps, wire.encode(wire.Failed(f"rank {rank} was told {error}", configured=False)))
        else:
            loaded = _load(config, rank, rendezvous, shared_fd, steps, began, progress)
            if loaded is not None:
                runner, exchange = loaded
                exchange.start(orders)
                _serve(runner, exchange, steps, progress)
    except wire.ConnectionLost:
        pass  # the server is gone; so is the work
    # Threads of communication libraries may hold on to a peer that is dead already: leave without asking them.
    logging.shutdown()
    os._exit(0)


def _load(
    config: ServerConfig, rank: int, rendezvous: str, shared_fd: int, steps: socket.socket, began: float, progress: Progress
) -> tuple[Runner, Exchange] | None:
    """Load the model and report; ``None`` when that failed and was reported."""
    try:
        import torch

        import serve.worker.lean_imports  # noqa: F401  # before what it imports for the others
        from serve.model.weight_memory import gather_pages
        from serve.worker.canary import check_forward
        from serve.worker.drafting import draft_bytes_per_block, load_draft
        from serve.worker.exchange import Exchange
        from serve.worker.loader import Stopwatch, load_rank
        from serve.worker.parallel import join_ranks
        from serve.worker.runner import Runner
        from serve.worker.verify import verify_logits

        device = choose_device(config.model.device, int(os.environ["LOCAL_RANK"]))
        os.environ["DS_ACCELERATOR"] = device.type  # DeepSpeed guesses otherwise, and warns that it does
        size, stages = config.model.tensor_parallel_size, config.model.pipeline_parallel_size
        memory, patience_seconds = None if shared_fd < 0 else shared_fd, config.supervisor.start_timeout_seconds
        torch.set_grad_enabled(False)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # read when torch is loaded, perhaps for other ranks
        model, ranks = load_rank(
            config,
            rank,
            device,
            lambda: join_ranks(rank, size, device, rendezvous, memory, patience_seconds, progress, stages),
            Stopwatch((("import", time.monotonic() - began),)),
            beside=draft_bytes_per_block(config, rank, device),
        )
        runner = Runner(model, ranks, load_draft(config, model, rank))
        with progress.with_others():
            check_forward(config.model, model, ranks, runner)
            if config.model.verify_logits:
                verify_logits(config, model, ranks)
            if runner.graphs is not None:
                runner.graphs.capture()
    except StartError as error:
        wire.send(steps, wire.encode(wire.Failed(str(error), configured=isinstance(error, ConfigError))))
        return None
    except Exception as error:
        _log.exception("the rank could not be loaded")
        wire.send(steps, wire.encode(wire.Failed(f"{type(error).__name__}: {error}", configured=False)))
        return None
    progress.waiting = True  # from here on it has nothing to do but what it is told
    wire.send(steps, wire.encode(wire.Ready(model.facts)))
    gather_pages()
    return runner, Exchange(config, model, ranks, runner)


def _serve(runner: Runner, exchange: Exchange, steps: socket.socket, progress: Progress) -> None:
    while True:
        plan = wire.decode_plan(wire.receive(steps))
        progress.mark()
        result = runner.execute(plan) if plan.swap is None else exchange.take(plan)
        progress.mark()
        if result is not None:
            wire.send(steps, wire.encode(result))


def choose_device(wanted: str, rank: int) -> torch.device:
    """The device of a rank, by ``model.device``.

    Raises:
        ConfigError: there is none.
    """
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("model.device is cuda; torch finds no CUDA device here")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"model.tensor_parallel_size and model.pipeline_parallel_size ask for {rank + 1} or more devices; there are "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", rank)


def _beat(pulse: socket.socket, progress: Progress) -> None:
    """Say that this process is alive, and how far it is; a frozen one falls silent."""
    try:
        for beat in itertools.count():
            if beat % _BEATS_PER_LOOK == 0:
                progress.device_bytes = _device_bytes()
            pulse.send(PULSE.pack(progress.waiting, progress.count, progress.device_bytes))
            time.sleep(PULSE_SECONDS)
    except OSError:
        os._exit(0)  # nobody listens any more


def _device_bytes() -> int:
    """What torch has taken of the devices' memory for this process; looking initialises no device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends, whatever this process is doing then."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

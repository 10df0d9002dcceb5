"""The program of one rank: load, say so, then one plan after another until the other end closes.

Called with RANK STEP_FD ORDER_FD PULSE_FD SHARED_FD RENDEZVOUS LOG_LEVEL, in a process forked for it or as
``python -P -m serve.worker.rank_loop``, with three inherited sockets: one carries the configuration and the plans down and the
results up, one orders that are followed beside the steps and their answers, one a heartbeat up. SHARED_FD is a file of memory,
RENDEZVOUS one where ranks meet.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from host import heap
from host.process import be_killed_first, name_process
from serve import logs
from serve.config import ServerConfig
from serve.errors import ConfigError, StartError
from serve.worker import wire
from serve.worker.progress import Progress
from serve.worker.vitals import PULSE, LastWords

if TYPE_CHECKING:
    import torch

    from serve.engine.plan import StepPlan
    from serve.worker.loader import RankModel
    from serve.worker.order_loop import OrderLoop
    from serve.worker.parallel import Ranks
    from serve.worker.runner import Runner
    from serve.worker.step_loop import FaultOf

RANK_NAME: Final = "tessera-rank-"
"""What the system calls a rank's process, before its number."""
_STEP_BYTES: Final = 256 << 20
"""What a heap of a rank keeps of a step's tensors for the next one. A prompt's step cleared pages for 4 % of its time."""
LEAN: Final = ("serve.worker.lean_torch", "serve.worker.lean_imports")
"""What imports torch and transformers for ranks."""
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
    be_killed_first()
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
                runner, order_loop, fault_of = loaded
                order_loop.start(orders)
                from serve.worker.step_loop import StepLoop

                StepLoop(runner, order_loop, steps, progress, pulse, fault_of).run()
    except wire.ConnectionLost:
        pass  # the server is gone; so is the work
    # Threads of communication libraries may hold on to a peer that is dead already: leave without asking them.
    logging.shutdown()
    os._exit(0)


def _load(
    config: ServerConfig, rank: int, rendezvous: str, shared_fd: int, steps: socket.socket, began: float, progress: Progress
) -> tuple[Runner, OrderLoop, FaultOf] | None:
    """Load the model and report; ``None`` when that failed and was reported.

    Returns:
        What computes steps, what follows orders beside them, and what is to be said of a step that fails.
    """
    name = "the device"
    try:
        for module in LEAN:  # before they are imported in another way
            importlib.import_module(module)
        import torch

        from serve.worker import gpus
        from serve.worker.canary import check_forward
        from serve.worker.drafting import draft_bytes_per_block, load_draft, with_blocks_of
        from serve.worker.exchange import Exchange
        from serve.worker.loader import RankModel, Stopwatch, load_rank
        from serve.worker.order_loop import OrderLoop
        from serve.worker.packing import Packing
        from serve.worker.parallel import join_ranks
        from serve.worker.profiler import Profiler
        from serve.worker.runner import Runner
        from serve.worker.verify import verify_logits

        device = choose_device(config.model.device, int(os.environ["LOCAL_RANK"]))
        name = gpus.name_of(device)  # asked for while it is well
        gpus.take(device, config.cache)
        gpus.tell(device, rank, config.ranks_per_node[0])
        os.environ["DS_ACCELERATOR"] = device.type  # DeepSpeed guesses otherwise, and warns that it does
        size, stages = config.model.tensor_parallel_size, config.model.pipeline_parallel_size
        memory, patience_seconds = None if shared_fd < 0 else shared_fd, config.supervisor.start_timeout_seconds
        torch.set_grad_enabled(False)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # read when torch is loaded, perhaps for other ranks
        tried, beside = list[RankModel | None](), draft_bytes_per_block(config, rank, device)
        join = partial(join_ranks, rank, size, device, rendezvous, memory, patience_seconds, progress, stages)
        watch = Stopwatch((("import", time.monotonic() - began),))
        model, ranks = load_rank(config, rank, device, join, watch, beside=beside, trial=_trial(config, progress, tried))
        draft = with_blocks_of(model, tried[0], config) if tried else load_draft(config, model, rank)
        runner = Runner(model, ranks, draft, model.narrow)
        with progress.with_others():
            check_forward(config.model, model, ranks, runner)
            if config.model.verify_logits and not tried:
                verify_logits(config, model, ranks)
            if runner.graphs is not None:
                runner.graphs.capture()
        _keep_memory(device)
        ranks.limit_exchanges(config.supervisor.step_timeout_seconds)
    except StartError as error:
        wire.send(steps, wire.encode(wire.Failed(str(error), configured=isinstance(error, ConfigError))))
        return None
    except Exception as error:
        wire.send(steps, wire.encode(_not_loaded(error, rank, name)))
        return None
    progress.waiting = True  # from here on it has nothing to do but what it is told
    wire.send(steps, wire.encode(wire.Ready(model.facts)))
    packing = Packing([each.filler.take_waiting() for each in (model, draft) if each], runner.rest, model.narrow)
    order_loop = OrderLoop(Exchange(config, model, ranks, runner, packing), Profiler(model, runner.recorded), device)
    return runner, order_loop, _faults(config, model, ranks, name, beside)


def _keep_memory(device: torch.device) -> None:
    if device.type == "cpu":
        heap.keep(_STEP_BYTES)


def _trial(config: ServerConfig, progress: Progress, drafts: list[RankModel | None]) -> Callable[[RankModel, Ranks], int]:
    """What ``load_rank`` tries steps by. The draft model is loaded before blocks are counted, and left in ``drafts``.

    So is the whole model that the ranks' logits are compared with: there is no room for it beside the blocks.
    """
    from serve.worker import gpus
    from serve.worker.drafting import load_draft
    from serve.worker.trial import bytes_of_steps
    from serve.worker.verify import verify_logits

    def trial(model: RankModel, ranks: Ranks) -> int:
        if config.model.verify_logits:
            with progress.with_others():
                verify_logits(config, model, ranks)
            gpus.give_back(model.device)
        drafts.append(draft := load_draft(config, model, ranks.rank))
        with progress.with_others():
            return bytes_of_steps(config, model, ranks, draft)

    return trial


def _not_loaded(error: Exception, rank: int, device: str) -> wire.Failed:
    """What is reported of an error while the model was loaded. Only one that is this rank's own is logged with its place."""
    if "torch" in sys.modules:
        from serve.worker.device_faults import fault

        if (words := fault(error, device, "while the model was loaded")) is not None:
            by_others = words.kind == "exchange"
            _log.error("%s", words.sentence, exc_info=not by_others)
            return wire.Failed(f"rank {rank}: {words.sentence}", configured=False, by_others=by_others)
    _log.exception("the rank could not be loaded")
    return wire.Failed(f"{type(error).__name__}: {error}", configured=False)


def _faults(config: ServerConfig, model: RankModel, ranks: Ranks, device: str, beside: int) -> FaultOf:
    """``beside``: what a draft model's keys and values of a block take."""
    from serve.worker.device_faults import step_fault
    from serve.worker.sizing import bytes_per_block

    kv_heads = model.survey.heads.shared_heads(ranks.rank).width
    block_bytes = bytes_per_block(model.survey, config, kv_heads, ranks.stage) + beside

    def fault_of(error: Exception, plan: StepPlan) -> LastWords | None:
        return step_fault(error, device, plan, config, num_blocks=model.facts.num_blocks, block_bytes=block_bytes)

    return fault_of


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
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f", by CUDA_VISIBLE_DEVICES {visible!r}"
        if visible is not None and "MIG-" in visible:
            why += ", of which CUDA shows a process one slice (MIG)"
        raise ConfigError(
            f"model.tensor_parallel_size (times model.pipeline_parallel_size) asks for rank {rank}; there are "
            f"{torch.cuda.device_count()} CUDA devices{why}"
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
    cuda = sys.modules.get("torch.cuda")
    is_initialized = getattr(cuda, "is_initialized", None)  # not there yet while another thread imports torch
    if cuda is None or is_initialized is None or not is_initialized():
        return 0
    return sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends, whatever this process is doing then."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a machine for fine-tuning is: versions, ``tessera-finetune doctor``, and the speeds that offloading depends on.

``python -m benchmarks.gpu_machine`` measures the speeds in a process of its own, and prints them as a JSON object:

* ``pinned_gb_s``: how fast one large buffer in pinned memory is copied to the device and from there, in 10^9 bytes a second.
* ``cpu_adam``: what DeepSpeed's CPU Adam updates with as many threads as a run of one rank has: parameters a second, and
  10^9 bytes a second. Each parameter has its fp32 weight, gradient and two moments read, and but for the gradient written.

``--rehearse`` measures few and on the CPU alone, where copies are of plain memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu_record import why
from finetune.machine import inventory, ops

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("torch", "deepspeed", "transformers", "triton", "nvidia-ml-py", "liger-kernel", "flash-attn", "kernels")
MOST_SECONDS: Final = 240.0
"""For the speeds: of it, DeepSpeed's CPU Adam may take a minute to be built."""
ADAM_BYTES: Final = 28
"""That an update reads and writes of a parameter."""
_DOCTOR_SECONDS: Final = 90.0
_ROUNDS: Final = 5
"""That are timed, behind one that is not."""

Row = dict[str, Any]


def machine(seconds: float, *, rehearse: bool) -> Row:
    """All that is to be known of it, for the head of a record; what could not be found out, with why.

    Args:
        seconds: it ends within so many.
    """
    ends = time.monotonic() + seconds
    told: Row = {"versions": versions(), "gpudirect_storage_driver": Path("/proc/driver/nvidia-fs").exists()}
    told["doctor"] = _told([sys.executable, "-m", "finetune", "doctor", "--json"], {}, min(seconds, _DOCTOR_SECONDS))
    environment = {"OMP_NUM_THREADS": str(inventory.usable_cores()), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "benchmarks.gpu_machine", *(["--rehearse"] if rehearse else [])]
    told["speeds"] = _told(command, environment, min(MOST_SECONDS, ends - time.monotonic()))
    return told


def versions() -> Row:
    """Of Python, of the packages that matter here, of CUDA as torch was built for it, and of NVIDIA's driver."""
    found: Row = {"python": platform.python_version(), "cuda": torch.version.cuda, "driver": None}
    found |= {name: inventory.version_of(name) for name in PACKAGES}
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
        found["driver"] = said[0] if said else "not told: nvidia-smi said nothing"
    except (OSError, subprocess.SubprocessError) as error:
        found["driver"] = f"not told: {why(error)}"
    return found


def _told(command: list[str], environment: dict[str, str], seconds: float) -> Row:
    """The JSON object that a command prints, behind whatever else it prints; ``failed`` where it does not."""
    if seconds <= 0:
        return {"failed": "the time was over before it began"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it took longer than the {seconds:.0f} s it had"}
    begin = max(0, ("\n" + done.stdout).find("\n{"))  # libraries say which accelerator they found before it
    try:
        found: Row = json.loads(done.stdout[begin:])
    except ValueError:
        return {"failed": f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"}
    return found


def speeds(device: str, *, copied: int, parameters: int) -> Row:
    """The speeds; of one that cannot be measured, why.

    Args:
        copied: bytes of the buffer.
        parameters: that are updated at once.
    """
    found: Row = {}
    acts: dict[str, Callable[[], Row]] = {
        "pinned_gb_s": lambda: copies(device, copied),
        "cpu_adam": lambda: updates(parameters),
    }
    for name, act in acts.items():
        try:
            found[name] = act()
        except Exception as error:  # the other one is not lost by it, and the record says it
            found[name] = {"failed": why(error)}
    failed = [f"{name}: {told['failed']}" for name, told in found.items() if "failed" in told]
    return found | ({"failed": "; ".join(failed)} if failed else {})


def copies(device: str, num_bytes: int) -> Row:
    """10^9 bytes a second to the device and from there, each the median; on the CPU of memory that is not pinned.

    Raises:
        RuntimeError: there is no room for it.
    """
    is_cuda = device == "cuda"
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            if is_cuda:
                torch.cuda.synchronize()

        return num_bytes / 1e9 / _seconds(copy)

    found: Row = {"bytes": num_bytes, "is_pinned": is_cuda and host.is_pinned()}
    return found | {"to_device": rate(there, host), "from_device": rate(host, there)}


def updates(parameters: int) -> Row:
    """What DeepSpeed's CPU Adam updates a second, the median; it is built where no run has built it yet.

    Raises:
        RuntimeError: it could not be built, or there is no room for it.
    """
    built = ops.ensure(ops.CPU_ADAM, lambda text: print(text, file=sys.stderr, flush=True))
    if not built.available:
        raise RuntimeError(built.reason)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from finetune.machine.build_ops import load_op

    load_op(ops.CPU_ADAM, ops.library_of(ops.CPU_ADAM))
    weight = torch.nn.Parameter(torch.full((parameters,), 0.5))
    weight.grad = torch.full((parameters,), 0.25)
    optimizer = DeepSpeedCPUAdam([weight], lr=1e-4)
    rate = parameters / _seconds(optimizer.step)
    assert float(weight.detach().max()) < 0.5, "weights are changed"
    threads = torch.get_num_threads()
    return {"parameters": parameters, "threads": threads, "parameters_per_second": rate, "gb_s": rate * ADAM_BYTES / 1e9}


def _seconds(act: Callable[[], object]) -> float:
    """The median."""
    taken = []
    for _ in range(1 + _ROUNDS):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def main() -> int:
    """``python -m benchmarks.gpu_machine``; 1 where a speed could not be measured, which the object says."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="few and on the CPU: whether it works, not how fast")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --rehearse measures on the CPU")
    if args.rehearse:
        found = speeds("cpu", copied=1 << 20, parameters=1 << 16)
    else:
        found = speeds("cuda", copied=1 << 30, parameters=100_000_000)
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    return int("failed" in found)


if __name__ == "__main__":
    sys.exit(main())

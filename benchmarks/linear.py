"""What the linear layers of a decode step cost: ``python -m benchmarks.linear``.

The matrices of four layers and of the head of Pythia-160M's shape, each with weights of its own so that they come from memory,
multiplied by 1 to 128 rows: the compiled kernels, oneDNN's packed weights where it has the type, and plain torch, in turns in
one process. ``--beside LIBRARY`` takes turns with kernels that were built from other sources, of the same interface. Kernels
of another level than the processor's best (``--level x86-64-v3``) are compiled into a folder for the run; on a processor with
more, hold the peers to the same: ``ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2``. With ``--threads 1`` it is the
processor's time that counts, which says something on a machine that does other work as well.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from typing import Final

import torch

from benchmarks import kernels
from serve.model.linear import Matmul, Packer, choose_packer, plain
from serve.model.quantized import quantizing_packer

LAYERS: Final = 4
SHAPES: Final = ((2304, 768), (768, 768), (3072, 768), (768, 3072))
"""(outputs, inputs) of a layer."""
HEAD: Final = (50_304, 768)
ROWS: Final = (1, 8, 16, 32, 128)
CPU: Final = torch.device("cpu")
_MOST_SECONDS: Final = 2.0
"""A call that takes longer is timed once."""


def products(dtype: torch.dtype, libraries: dict[str, ctypes.CDLL]) -> dict[str, list[Matmul]]:
    """Every product of a step, by who computes it."""
    torch.manual_seed(0)
    weights = [torch.randn(shape).to(dtype) * 0.02 for shape in SHAPES * LAYERS + (HEAD,)]
    packers: dict[str, Packer | None] = {"plain torch": plain}
    name, onednn = choose_packer(CPU, dtype, None)
    packers |= {name: onednn} if onednn is not None else {}
    for who, library in libraries.items():
        packers |= {who: choose_packer(CPU, dtype, library)[1]}
        for name in ("int8", "int4"):
            packers[name if who == "kernel" else f"{name} {who}"] = quantizing_packer(name, 32, dtype, library)[1]
    return {who: [pack(weight, None) for weight in weights] for who, pack in packers.items() if pack is not None}


def measure(dtype: torch.dtype, libraries: dict[str, ctypes.CDLL], repeats: int, threads: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step's products by rows and by who computes them; medians."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    found: dict[str, dict[str, float]] = {}
    steps = products(dtype, libraries)
    for rows in ROWS:
        inputs = {width: torch.randn(rows, width).to(dtype) for width in (768, 3072)}
        seconds: dict[str, list[float]] = {who: [] for who in steps}
        for number in range(repeats + 1):
            for who, step in kernels.in_turns(steps, number):
                if seconds[who] and seconds[who][0] > _MOST_SECONDS:
                    continue
                began = clock()
                for product, (_, width) in zip(step, SHAPES * LAYERS + (HEAD,), strict=True):
                    product(inputs[width])
                seconds[who].append(clock() - began)
        found[str(rows)] = {who: round(1e3 * statistics.median(each[1:] or each), 3) for who, each in seconds.items()}
        print(
            f"{dtype} {rows:4} rows: " + "  ".join(f"{who} {value:.2f}" for who, value in found[str(rows)].items()), flush=True
        )
    return found


def main() -> int:
    """Run, print and record."""
    options = kernels.parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    with kernels.kernels_of(options.level) as library:
        libraries = kernels.taking_turns(library, options.beside)
        record = kernels.record_of(
            "milliseconds of four layers' and the head's products of Pythia-160M's shape, by rows; "
            f"{options.threads} threads, " + ("processor time" if options.threads == 1 else "wall time") + "; medians",
            library,
            lambda dtype: measure(dtype, libraries, options.repeats, options.threads),
        )
    if not options.no_record:
        kernels.keep(record, "linear")
    return 0


if __name__ == "__main__":
    sys.exit(main())

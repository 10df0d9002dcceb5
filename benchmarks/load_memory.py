"""What each rank that serves needs of memory, and reads, for every layout of another trainer; see ``benchmarks.load --memory``.

``python -m benchmarks.load_memory FOLDER LAYOUT`` writes a save of a layout whose code is no dependency, from its description.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.load_server import KV_CACHE_GIB, bytes_read, peak_bytes, serving, wait_until_unmapped

MIB: Final = 1 << 20
LIMIT_MIB: Final = 128 + 600
"""What a rank may need beside its weights and its KV cache: the largest tensor's slice, and the libraries."""
READ_BAR: Final = 1.1
DTYPE: Final = "bfloat16"
ITEM_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A save, and what has to be said to serve it."""

    folder: str
    needs: tuple[str, ...] = ()
    """Saves that are written before it."""
    options: tuple[str, ...] = ()


CASES: Final[dict[str, Case]] = {
    "ZeRO-3": Case("zero3"),
    "ZeRO-2": Case("zero2"),
    "ZeRO-2, masters": Case("zero2", options=("--master-weights",)),
    "universal": Case("universal", ("zero3",)),
    "pipeline": Case("pipeline"),
    "AutoTP": Case("autotp"),
    "torch.distributed.checkpoint": Case("dcp"),
    "Hugging Face": Case("hf"),
    "Hugging Face, .bin": Case("bin"),
    "PEFT adapter": Case("peft", ("hf",)),
    "GPT-NeoX": Case("neox"),
    "Megatron-LM": Case("megatron"),
    "Megatron-LM torch_dist": Case("torch-dist"),
}
"""Layouts by name."""
DESCRIBED: Final = ("neox", "megatron", "torch-dist")
"""Written from their description by what the tests have for it."""
_WHOLE: Final = ("layernorm.weight", "layernorm.bias", "layer_norm.weight", "layer_norm.bias", "dense.bias", "4h_to_h.bias")
"""How the names of tensors end that every rank has whole."""


def measure_memory(
    work: Path,
    layouts: Sequence[str],
    make: Callable[[Sequence[str]], None],
    keep: Callable[[str, Any], None],
    console: Console,
) -> None:
    """Of each rank that serves 405 million parameters in bfloat16, saved by four ranks: the peak of its resident memory
    (VmHWM) once all weights are packed, its weights, and all that it read after its imports, by the kernel's count, beside what
    its elements take in files. Files that it mapped are not in that count.

    Bars: the peak is at most the weights, the KV cache and 728 MiB; what is read at most 1.1 of what is stored.
    """
    with tempfile.TemporaryDirectory() as scratch:
        imports = {ranks: bytes_read_by_imports(Path(scratch) / "small", ranks) for ranks in (1, 2)}
    table = Table("layout", "ranks", "weights", "beside them", "limit", "read / stored", title=f"MiB of a rank in {DTYPE}")
    for layout in layouts:
        case = CASES[layout]
        _make(work, (*case.needs, case.folder), make)
        for ranks in (1, 2):
            found = _measure(work / case.folder, ranks, case.options, imports[ranks])
            keep(f"{layout}, {ranks} ranks" if ranks > 1 else f"{layout}, 1 rank", found)
            beside = max(found["beside_mib"])
            ratio = max(found["read_to_stored"])
            bad = "" if beside <= LIMIT_MIB and ratio <= READ_BAR else " [red]missed"
            shown = (f"{found['weights_mib']:.0f}", f"{beside:.0f}", f"{LIMIT_MIB}", f"{ratio:.3f}{bad}")
            table.add_row(layout, str(ranks), *shown)
            console.print(
                f"[dim]{layout}, {ranks}: {beside:.0f} MiB beside {shown[0]}, read {ratio:.3f} of what is stored{bad}"
            )
    console.print(table)


def _make(work: Path, names: Sequence[str], make: Callable[[Sequence[str]], None]) -> None:
    described = [name for name in names if name in DESCRIBED and not (work / name).exists()]
    if len(described) < len(names):
        make([name for name in names if name not in DESCRIBED])
    for name in described:
        subprocess.run([sys.executable, "-m", "benchmarks.load_memory", str(work), name], check=True)


def _measure(folder: Path, ranks: int, options: Sequence[str], imports: int) -> dict[str, Any]:
    elements, stored = _share(folder, ranks, options)
    with serving(folder, ranks, DTYPE, options) as served:
        for pid in served.ranks:
            wait_until_unmapped(pid, folder.parent)
        peaks = [peak_bytes(pid) for pid in served.ranks]
        reads = [bytes_read(pid) - imports for pid in served.ranks]
    weights = elements * ITEM_BYTES
    cache = KV_CACHE_GIB * (1 << 30) / ranks
    return {
        "weights_mib": round(weights / MIB, 1),
        "kv_cache_mib": round(cache / MIB, 1),
        "peak_mib": [round(peak / MIB, 1) for peak in peaks],
        "beside_mib": [round((peak - weights - cache) / MIB, 1) for peak in peaks],
        "read_to_stored": [round(read / stored, 4) for read in reads],
    }


def _share(folder: Path, ranks: int, options: Sequence[str]) -> tuple[float, float]:
    """Elements of a rank's part, and the bytes that the files have for them."""
    from checkpoint import Given, open_structure

    elements = stored = 0.0
    with open_structure(folder, given=Given(master_weights="--master-weights" in options)) as structure:
        for name, place in structure.weights.places.items():
            parts = 1 if name.endswith(_WHOLE) else ranks
            count = 1
            for size in place.shape:
                count *= size
            elements += count / parts
            stored += place.num_bytes / parts
    return elements, stored


def bytes_read_by_imports(scratch: Path, ranks: int) -> int:
    """What a rank reads that serves nearly nothing."""
    from tests.support.models import save

    save("gpt_neox", scratch)
    size = sum(file.stat().st_size for file in scratch.rglob("*.safetensors"))
    with serving(scratch, ranks, DTYPE) as served:
        return min(bytes_read(pid) for pid in served.ranks) - size


def write_described(folder: Path, name: str) -> None:
    """Write ``folder/name`` as four ranks of its trainer would leave it."""
    from benchmarks.load_saves import RANKS, make_model
    from tests.support import megatron, neox
    from tests.support.megatron_dist import save_torch_dist

    model = make_model()
    made = folder / f"{name}-unfinished"
    made.mkdir(parents=True)
    if name == "neox":
        neox.save_neox(made, model, neox.Form(model_parallel=RANKS))
    else:
        model.config.use_parallel_residual = False  # Megatron has no other
        form = megatron.Form(tensor=RANKS, names="fused")
        (megatron.save_megatron if name == "megatron" else save_torch_dist)(made, model, form)
    made.rename(folder / name)


if __name__ == "__main__":
    write_described(Path(sys.argv[1]), sys.argv[2])

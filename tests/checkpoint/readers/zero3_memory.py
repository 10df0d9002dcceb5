"""Reads a tensor-parallel rank's slice of every tensor of a save: bytes of the slices, stored and read, and the peak's growth.

python zero3_memory.py SAVE RANKS
"""

import sys
from pathlib import Path

import torch

from checkpoint import open_checkpoint


def peak() -> int:
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)


def main(save: str, ranks: int) -> None:
    before = peak()
    kept = []
    with open_checkpoint(save) as checkpoint:
        for number, (name, info) in enumerate(checkpoint.tensors.items()):
            dim = number % len(info.shape)
            index = (slice(None),) * dim + (slice(0, info.shape[dim] // ranks),)
            kept.append(checkpoint.read(name, index, dtype=torch.bfloat16))
        print(
            sum(tensor.nbytes for tensor in kept),
            sum(4 * tensor.numel() for tensor in kept),
            checkpoint.bytes_read,
            peak() - before,
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

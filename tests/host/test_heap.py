"""What the C library keeps of memory, looked at in processes of their own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from host.modules import import_path

HEAPS = """
import ctypes, sys, threading
from host import heap
heap.share_arenas(int(sys.argv[1]))
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
all_have_some = threading.Barrier(8)
def take():
    assert libc.malloc(1000)
    all_have_some.wait()
threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has such heaps")
def test_threads_share_the_heaps_that_there_are() -> None:
    def heaps(count: int) -> int:
        words = [sys.executable, "-c", HEAPS, str(count)]
        done = subprocess.run(words, env={"PYTHONPATH": import_path({})}, capture_output=True, text=True, check=True)
        return done.stdout.count("<heap nr=")

    assert heaps(2) == 2
    assert heaps(6) > 2, "each of the threads would have one of its own"


BETWEEN = """
import ctypes, os
from host import heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

pieces = [libc.malloc(16_000) for _ in range(4_000)]
for piece in pieces:
    ctypes.memset(piece, 1, 16_000)
for number, piece in enumerate(pieces):
    if number % 10 != 9:  # every tenth stays, so that no end of the heap is free
        libc.free(piece)
before = resident()
heap.trim()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps such memory")
def test_what_lies_between_pieces_in_use_goes_back() -> None:
    words = [sys.executable, "-c", BETWEEN]
    done = subprocess.run(words, env={"PYTHONPATH": import_path({})}, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0.8 * 3_600 * 16_000


OVER_AND_OVER = """
import ctypes, resource
from host import heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)

def pages_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    sizes = (6, 9, 12, 15, 15, 15)  # together more than twice the largest
    pieces = [libc.malloc(size << 20) for size in sizes]
    for piece, size in zip(pieces, sizes):
        ctypes.memset(piece, 1, size << 20)
    for piece in pieces:
        libc.free(piece)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def later():
    return [pages_of_a_step() for _ in range(4)][-1]

print(later())
heap.keep(256 << 20)
print(later())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps such memory")
def test_what_is_made_over_and_over_is_made_of_the_same_pages() -> None:
    words = [sys.executable, "-c", OVER_AND_OVER]
    done = subprocess.run(words, env={"PYTHONPATH": import_path({})}, capture_output=True, text=True, check=True)
    left_alone, kept = map(int, done.stdout.split())
    assert left_alone > 1_000, "this C library keeps them by itself"
    assert kept < 100

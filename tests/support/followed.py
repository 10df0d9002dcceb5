"""Notes, in every process that it is put before, which of Tessera's files are gone through while a file of one byte says so.

For ``PYTHONPATH``: Python imports a module ``sitecustomize`` when it starts, and this directory's copy is that one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

FLAG: Final = "FOLLOWED_FLAG"
"""The variable that names the file; the files are noted beside it, one file for each process."""

PROGRAM: Final = """
import mmap, os, sys, threading
flag = os.environ.get("{flag}")
if flag:
    root = "{root}/"
    with open(flag, "r+b") as opened:
        on = mmap.mmap(opened.fileno(), 1)
    seen = set()
    beside = {{"tessera-watch", "tessera-metrics", "pulse", "pack-weights"}}  # whether or not there is a call

    def note(frame, event, argument):
        if event == "call" and on[0] == 49:
            name = frame.f_code.co_filename
            if name not in seen and name.startswith(root) and threading.current_thread().name not in beside:
                seen.add(name)
                with open(f"{{flag}}.{{os.getpid()}}", "a") as notes:
                    notes.write(name[len(root):] + "\\n")

    sys.setprofile(note)
    threading.setprofile(note)
"""


def prepare(folder: Path, root: Path) -> tuple[str, ...]:
    """Make what a command needs before it to be followed.

    Args:
        folder: an empty one, for what is noted.
        root: of the files that count.

    Returns:
        Words before the command.
    """
    (folder / "sitecustomize.py").write_text(PROGRAM.format(flag=FLAG, root=root))
    (folder / "flag").write_bytes(b"0")
    return "env", f"PYTHONPATH={folder}:{root}", f"{FLAG}={folder / 'flag'}"


def switch(folder: Path, *, on: bool) -> None:
    """Begin to note, or end it."""
    with (folder / "flag").open("r+b") as opened:
        opened.write(b"1" if on else b"0")


def noted(folder: Path) -> set[str]:
    """The files that were gone through, from the root."""
    return {line for notes in folder.glob("flag.*") for line in notes.read_text().split()}

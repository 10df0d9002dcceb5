"""Triton's interpreter, a fifth to a third quicker: what it puts in the place of the language is put there once."""

from __future__ import annotations

from typing import Any


def patch_once() -> None:
    """Let the interpreter patch what a kernel's module sees of the language once for each module, and leave it so.

    It looks at every member of the language in each launch and in each call of one kernel from another. To be called in a
    process that compiles nothing.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[int]()

    def once(kernel: Any) -> Any:
        seen = id(kernel.__globals__)
        if seen not in patched:
            patched.add(seen)
            patch(kernel)
        return interpreter._LangPatchScope()  # nothing to undo

    interpreter._patch_lang = once

"""Triton's interpreter, three times as quick: what it works out anew for each operation is worked out once.

Its kernels are small here, so that nearly all of its time is Python's: the members of the language that it looks for, names of
types, shapes as tuples of constants. Which operations are done on which numbers stays its own; how
these are rounded, ``rounding`` says.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.serve.model.cuda.rounding import as_devices_round


def patch_once() -> None:
    """Let the interpreter do its bookkeeping once, and round as devices do.

    To be called in a process that compiles nothing.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter._patch_lang = _patched_once(interpreter)
    interpreter._patch_attr = _bound_to(interpreter.interpreter_semantic)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter._convert_float = as_devices_round(interpreter._convert_float)
    core._unwrap_if_constexpr = _quick_for_plain(core._unwrap_if_constexpr, core)
    _give_types_sets(core.dtype)
    _keep_shapes(core)
    # It computes every sum again in 64 bits, and looks at it where a kernel is debugged alone.
    assert not interpreter.interpreter_builder.options.debug
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    TritonSemantic.broadcast_impl_value = _leaving_equal_shapes(TritonSemantic.broadcast_impl_value)


def _patched_once(interpreter: Any) -> Any:
    """It looks at every member of the language in each launch and in each call of one kernel from another."""
    patch, patched = interpreter._patch_lang, set[int]()

    def once(kernel: Any) -> Any:
        seen = id(kernel.__globals__)
        if seen not in patched:
            patched.add(seen)
            patch(kernel)
        return interpreter._LangPatchScope()  # nothing to undo

    return once


def _bound_to(semantic: Any) -> Any:
    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        called = member
        while hasattr(called, "__wrapped__"):  # which look whether there is what is given here
            called = called.__wrapped__

        def bound(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return called(*args, **named)

        scope.set_attr(owner, name, bound)

    return patch_attr


def _by_name(found: Any) -> Any:
    """It makes a table of all types for each that it looks up."""
    known: dict[str, np.dtype[Any]] = {}

    def kept(dtype: Any) -> np.dtype[Any]:
        if (numpy_type := known.get(dtype.name)) is None:
            numpy_type = known[dtype.name] = found(dtype)
        return numpy_type

    return kept


def _quick_for_plain(unwrap: Any, core: Any) -> Any:
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    return unwrapped


def _give_types_sets(dtype: Any) -> None:
    """A type goes through lists of names that it puts together each time."""
    signed, unsigned, floating = map(frozenset, (dtype.SINT_TYPES, dtype.UINT_TYPES, dtype.FP_TYPES))
    integers, equal = signed | unsigned, dtype.__eq__
    dtype.is_int = lambda self: self.name in integers
    dtype.is_int_signed = lambda self: self.name in signed
    dtype.is_int_unsigned = lambda self: self.name in unsigned
    dtype.is_floating = lambda self: self.name in floating
    dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    dtype.__hash__ = lambda self: hash(self.name)


def _keep_shapes(core: Any) -> None:
    """What follows from a shape, for blocks and for tensors: a tuple of the language, of constants, and their product."""

    @functools.cache
    def facts_of(*shape: int) -> tuple[Any, int, Any, Any]:
        numel = core.validate_block_shape(shape)
        return core.tuple(list(shape)), numel, core.tuple([core.constexpr(size) for size in shape]), core.constexpr(numel)

    of_no_shape = core.constexpr(1), core.tuple([])

    @functools.cache
    def name_of(element: str, *shape: int) -> str:
        return f"<{facts_of(*shape)[0]}, {element}>"

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, (list, tuple, core.tuple))
        sizes = [size.value if type(size) is core.constexpr else size for size in shape]
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, *_ = facts_of(*sizes)
        self.name = name_of(element_ty.name, *sizes)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            _, _, self.shape, self.numel = facts_of(*type.shape.values)
        else:
            self.numel, self.shape = of_no_shape

    core.block_type.__init__ = make_block
    core.tensor.__init__ = make_tensor
    core.block_type.to_ir = lambda self, builder: self  # made of the same types, as the interpreter's types are the language's


def _leaving_equal_shapes(broadcast: Any) -> Any:
    """It takes the shapes of two blocks for different ones, whatever they are."""

    def left(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return left

"""A restricted unpickler: reads the tables of tensors that ``torch.save`` writes, and can do nothing else.

``torch.load`` is never called. Three walls stand one behind the other:

1. the byte code is walked first, without running it, and only so many operations of those that such tables need are let
   through;
2. a global is looked up among those that the layout is known to name, and nowhere else: no module is imported and no attribute
   fetched by name;
3. what a table yields are inert stand-ins, not the classes that the pickle names, and a tree of them of bounded size.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

from checkpoint.errors import CheckpointError, shown
from checkpoint.layout import MAX_DIMENSIONS, zero_size_rule
from checkpoint.readers.files.stand_ins import Bag, Refused, Table, check_bounded

MAX_PICKLE_BYTES = 64 << 20
"""A table takes about 200 bytes a tensor."""
MAX_OPERATIONS = 1 << 21
"""A table takes about 20 a tensor; a million of them take a second, and up to 100 MB of memory."""


# These stand-ins are named tuples: the pickle machine's BUILD operation, which sets attributes, has no hold on them.


class StoredTensor(NamedTuple):
    """One tensor as the table describes it: a view into one of the archive's storages."""

    storage_key: str
    dtype: str
    storage_items: int
    """Elements of the whole storage."""
    first_item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _StorageType(NamedTuple):
    dtype: str


class _Storage(NamedTuple):
    key: str
    dtype: str
    num_items: int


NUMPY_ARRAYS: Final = frozenset(
    {
        "_codecs.encode",
        "numpy.dtype",
        "numpy.ndarray",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
    }
)
"""What an array or a number of numpy is written with, as states of random numbers are."""


class _Maker:
    """A callable without a dictionary, so that a pickle can neither change it nor reach a function's insides through it."""

    __slots__ = ("_make",)
    _make: Callable[..., Any]

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "_make", make)

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise pickle.UnpicklingError("the table tries to change what builds it")


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Refused(f"the table has {shown(value)} where a count must stand")
    return value


def _counts(value: object) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
        raise Refused(f"the table has {shown(value)} where a tuple of at most {MAX_DIMENSIONS} counts must stand")
    return tuple(_count(item) for item in value)


def _rebuild_tensor(storage: object, first_item: object, shape: object, strides: object, *more: object) -> StoredTensor:
    """Stand-in of ``torch._utils._rebuild_tensor_v2``; gradients and hooks are not wanted."""
    if not isinstance(storage, _Storage) or not storage.dtype:
        raise Refused("a tensor of the table has no storage with a dtype")
    if any(isinstance(item, dict) and (item.get("neg") or item.get("conj")) for item in more):
        raise Refused("a tensor of the table is a lazily negated view; save it after .resolve_neg()")
    made = StoredTensor(storage.key, storage.dtype, storage.num_items, _count(first_item), _counts(shape), _counts(strides))
    if len(made.shape) != len(made.strides):
        raise Refused(f"a tensor of the table has shape {made.shape} and strides {made.strides}")
    return made


def _rebuild_untyped(*_: object) -> NoReturn:
    """Stand-in of ``torch._utils._rebuild_tensor_v3``, which torch writes for the dtypes of ``_UNREAD`` alone."""
    raise Refused("a tensor of the table has no storage with a dtype")


def _rebuild_parameter(data: object, *_: object) -> StoredTensor:
    """Stand-in of ``torch._utils._rebuild_parameter``."""
    if not isinstance(data, StoredTensor):
        raise Refused("a parameter of the table holds no tensor")
    return data


def _rebuild_typed(function: object, kind: object, arguments: object, _: object) -> StoredTensor:
    """Stand-in of ``torch._tensor._rebuild_from_type_v2``: a tensor with attributes, such as FSDP gives it; they are left."""
    if not isinstance(function, _Maker) or kind is not _TENSOR_TYPE or type(arguments) is not tuple:
        raise Refused("a tensor of the table is of another class than torch's own")
    made = function(*arguments)
    if not isinstance(made, StoredTensor):
        raise Refused("a tensor of the table is made by what makes no tensor")
    return made


def _make_table(*args: object) -> Table:
    """Stand-in of ``OrderedDict()``, which pickles empty and fills it after."""
    if args and args != ([],):
        raise Refused("an OrderedDict of the table is built from arguments")
    return Table()


_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}

DTYPES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's names of dtypes, and the format's."""

_TENSOR_TYPE: Final = "torch.Tensor"

_UNREAD: Final = frozenset(
    {
        "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    }
)  # fmt: skip
"""torch's names of dtypes that have no storage of their own; no tensor is read in them."""

_TENSORS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Maker(_make_table),
    ("torch._utils", "_rebuild_tensor_v2"): _Maker(_rebuild_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Maker(_rebuild_untyped),
    ("torch._utils", "_rebuild_parameter"): _Maker(_rebuild_parameter),
    ("torch", "Size"): _Maker(_counts),
    ("torch.storage", "UntypedStorage"): _StorageType(""),
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}

_WITH_ATTRIBUTES: dict[tuple[str, str], Any] = {
    ("torch._tensor", "_rebuild_from_type_v2"): _Maker(_rebuild_typed),
    ("torch._utils", "_rebuild_parameter_with_state"): _Maker(_rebuild_parameter),
    ("torch", "Tensor"): _TENSOR_TYPE,
    ("torch.nn.parameter", "Parameter"): _TENSOR_TYPE,
}
"""Globals of tensors that had attributes, where a layout does not take them for values of no interest."""

_OPERATION_NAMES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID
"""
_OPERATIONS = frozenset(_OPERATION_NAMES.split())
"""Every operation of the pickle machine that a table of tensors needs; none that imports, instantiates or extends."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the pickles of one layout may name beside tensors. Everything here becomes a ``Bag``."""

    classes: frozenset[str] = frozenset()
    """Module and name, joined by a dot."""
    packages: frozenset[str] = frozenset()
    """First parts of modules whose every name is allowed: where what stands in a pickle is for its writer's users to choose."""
    calls: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """By module and name, what is called instead: functions of this project that take what the pickle gives."""

    def find(self, module: str, name: str) -> Any:
        """What stands in for the global; ``None`` where it is not allowed."""
        whole = f"{module}.{name}"
        if whole in self.calls:
            return _Maker(self.calls[whole])
        if whole in self.classes or module.partition(".")[0] in self.packages:
            return type("Bag", (Bag,), {"CLASS": whole, "__slots__": ()})
        return None


_NOTHING = Allowed()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Allowed) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _TENSORS[module, name]
        except KeyError:
            pass
        if (module, name) not in self._made:
            self._made[module, name] = self._allowed.find(module, name) or _WITH_ATTRIBUTES.get((module, name))
        if self._made[module, name] is None and module == "torch" and name in _UNREAD:
            what = ", as quantised weights have" if name.startswith("float") else ""
            raise Refused(f"it holds a tensor of dtype torch.{name}{what}; supported are {', '.join(DTYPES)}")
        if self._made[module, name] is None:
            raise Refused(f"the pickle names {module}.{name}; only tables of tensors are read, so this is refused")
        return self._made[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise Refused("the pickle refers to something that is not a storage")
        _, kind, key, _, num_items = pid
        if not isinstance(kind, _StorageType) or not isinstance(key, str):
            raise Refused("the pickle has a storage of unknown type")
        return _Storage(key, kind.dtype, _count(num_items))


def read_table(data: bytes, file: str) -> dict[str, StoredTensor]:
    """Turn the bytes of ``data.pkl`` into names and places of tensors, running nothing of the pickle's choice.

    Raises:
        CheckpointError: the pickle does or holds something other than a flat table of tensors; what it is, is named.
    """
    table = _load(data, file, _NOTHING, _OPERATIONS, MAX_OPERATIONS)
    try:
        return check_table(table)
    except Refused as error:
        raise CheckpointError(file, str(error)) from None


def read_tree(data: bytes, file: str, allowed: Allowed, most: int = MAX_OPERATIONS) -> Any:
    """Turn the bytes of ``data.pkl`` into a tree with tensors at any depth, running nothing of the pickle's choice.

    Args:
        allowed: the classes that it may name besides those of tensors.
        most: operations of the pickle machine that building the tree may take.

    Returns:
        a tree of dictionaries, lists, tuples, plain values, ``StoredTensor`` and ``Bag``. It is proved to be a tree of bounded
        size, and nothing else about its form; a tensor is, by ``check_tensor``, when it is used.

    Raises:
        CheckpointError: the pickle names a class or uses an operation that this layout has no need of.
    """
    return _load(data, file, allowed, _OPERATIONS | {"NEWOBJ"}, most)


def _load(data: bytes, file: str, allowed: Allowed, operations: frozenset[str], most: int) -> Any:
    try:
        made = _Unpickler(_checked(data, operations, most), allowed).load()
        check_bounded(made, (StoredTensor, _StorageType, _Storage), 2 * most)
        return made
    except Refused as error:
        raise CheckpointError(file, str(error)) from None
    except Exception as error:  # The machine raises nearly anything on broken input, and broken is all it can be.
        raise CheckpointError(file, f"its data.pkl is not a readable table of tensors: {error}") from error


_REPLACED = {"EMPTY_DICT": 1, "FRAME": 9}
"""Operations, and the bytes they take."""
_NEW_TABLE = b"ccollections\nOrderedDict\n)R"


def _checked(data: bytes, operations: frozenset[str], most: int) -> bytes:
    """Walk the byte code without running it. It has no jumps, so what is seen here is what would run.

    Returns:
        the byte code with stand-ins for plain dictionaries, which the machine would fill without a look at the keys, and
        without frames, whose lengths that changes.
    """
    parts: list[bytes] = []
    copied = end = 0
    for number, (operation, argument, position) in enumerate(pickletools.genops(data)):
        name, place = operation.name, position or 0
        if name not in operations:
            raise Refused(f"the pickle uses the operation {name}, which no table of tensors needs")
        if number >= most:
            raise Refused(f"the pickle takes more than {most} operations")
        if name in _REPLACED:
            parts += [data[copied:place], _NEW_TABLE if name == "EMPTY_DICT" else b""]
            copied = place + _REPLACED[name]
        # Memo slots are numbered as they are made; a far number would make the machine allocate up to there.
        elif name in ("BINPUT", "LONG_BINPUT") and int(argument or 0) > number:
            raise Refused(f"the pickle uses memo slot {argument} at operation {number}")
        end = place + 1
    if end != len(data):
        raise Refused("the pickle has bytes after its end")
    return b"".join((*parts, data[copied:]))


def _kind(value: object) -> str:
    return "dict" if isinstance(value, Table) else type(value).__name__


def check_table(table: object) -> dict[str, StoredTensor]:
    """A flat dictionary from names to tensors that lie inside their storages.

    Raises:
        Refused: it is none.
    """
    if not isinstance(table, dict):
        raise Refused(f"holds {_kind(table)}, not a table of tensors")
    for name, tensor in table.items():
        if not isinstance(name, str):
            raise Refused(f"the table has the key {name!r}, which is not a name")
        if not isinstance(tensor, StoredTensor):
            raise Refused(f"entry {name!r} is {_kind(tensor)}, not a tensor; only flat tables of tensors are read")
        check_tensor(name, tensor)
    return table


def check_tensor(name: str, tensor: StoredTensor) -> None:
    """A tensor has elements, and they lie inside its storage.

    Raises:
        Refused: they do not.
    """
    if 0 in tensor.shape:
        raise Refused(zero_size_rule(name, tensor.shape))
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.strides, strict=True)):
        raise Refused(f"tensor {name!r} repeats its elements (stride 0); save it after .contiguous()")
    last = tensor.first_item + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    if last >= tensor.storage_items or math.prod(tensor.shape) > tensor.storage_items:
        raise Refused(f"tensor {name!r} reaches element {last} of a storage of {tensor.storage_items}")

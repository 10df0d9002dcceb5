"""Torch archives: tables of tensors are read, and nothing in them runs."""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import CheckpointError, open_checkpoint
from checkpoint.readers.files.pickles import Allowed, read_table, read_tree
from tests.checkpoint.folders import assert_holds, some_tensors, write_config
from tests.checkpoint.readers.hostile import MOST_SECONDS

NAME = "pytorch_model.bin"


class Calls:
    """Pickles as a call of any function with any arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def archive(
    folder: Path, table: bytes, *, storages: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> Path:
    """A zip archive as torch writes it, around any ``data.pkl``."""
    write_config(folder)
    with zipfile.ZipFile(folder / NAME, "w", compression) as made:
        made.writestr("archive/data.pkl", table)
        for key, data in (storages or {}).items():
            made.writestr(f"archive/data/{key}", data)
    return folder


def saved(folder: Path, value: object, **options: Any) -> Path:
    torch.save(value, write_config(folder) / NAME, **options)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.file == NAME
    return caught.value.rule


def test_a_lazily_negated_view_is_refused(tmp_path: Path) -> None:
    """Its storage holds the elements with the other sign, which only a flag beside it tells."""
    with pytest.raises(CheckpointError, match="lazily negated"):
        open_checkpoint(saved(tmp_path, {"weight": torch._neg_view(torch.ones(3))}))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_state_dict_of_every_dtype_is_read(tmp_path: Path, protocol: int) -> None:
    tensors = some_tensors() | {
        "ids": torch.arange(5),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        "u8": torch.arange(3).byte(),
    }
    with open_checkpoint(saved(tmp_path, tensors, pickle_protocol=protocol)) as checkpoint:
        assert_holds(checkpoint, tensors)


def test_a_module_s_own_state_dict_is_read_parameters_and_all(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 3)
    state = module.state_dict(keep_vars=True)
    assert isinstance(state["weight"], torch.nn.Parameter)
    with open_checkpoint(saved(tmp_path, state)) as checkpoint:
        assert_holds(checkpoint, {name: value.detach() for name, value in state.items()})


def test_tensors_that_share_a_storage_are_read_each_from_its_place(tmp_path: Path) -> None:
    base = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    tensors = {"all": base, "again": base, "rows": base[2:4], "columns": base[:, 1:3], "turned": base.t()}
    with open_checkpoint(saved(tmp_path, tensors)) as checkpoint:
        assert_holds(checkpoint, tensors)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (os.system, ("touch {canary}",)),
        (eval, ("open('{canary}', 'w')",)),
        (exec, ("open('{canary}', 'w')",)),
        (open, ("{canary}", "w")),
        (os.mkdir, ("{canary}",)),
        (getattr, ("x", "join")),
        (torch.load, ("{canary}",)),
        (pickle.loads, (b"",)),
    ],
)
def test_a_pickle_that_calls_anything_is_refused_by_name_and_does_not_run(
    tmp_path: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    canary = tmp_path / "canary"
    args = tuple(arg.format(canary=str(canary)) if isinstance(arg, str) else arg for arg in args)
    folder = saved(tmp_path / "ck", {"w": torch.ones(2), "x": Calls(function, *args)})
    assert re.search(rf"names \w+(\.\w+)*\.{function.__name__}; only", refusal(folder))
    assert not canary.exists()


@pytest.mark.parametrize("value", [{1, 2}, bytearray(b"x"), complex(1, 2), b"bytes", torch.Generator, torch.device("cpu")])
def test_other_objects_are_refused(tmp_path: Path, value: object) -> None:
    assert refusal(saved(tmp_path, {"w": torch.ones(2), "x": value}))


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (torch.ones(2), "not a table"),
        ([torch.ones(2)], "not a table"),
        ({}, "holds no tensor"),
        ({"w": torch.ones(2), "step": 3}, "entry 'step' is int, not a tensor"),
        ({"model": {"w": torch.ones(2)}}, "entry 'model' is dict, not a tensor"),
        ({3: torch.ones(2)}, "key 3"),
        ({"w": torch.ones(0)}, "ZeRO-3"),
        ({"w": torch.ones(1).expand(5)}, "stride 0"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
        ({"w": torch.ones(2, device="meta")}, "names torch._utils._rebuild_meta_tensor_no_storage"),
        ({"w": torch.ones(2).to_sparse()}, "names torch._utils._rebuild_sparse_tensor"),
    ],
)
def test_what_is_no_flat_table_of_dense_tensors_is_refused(tmp_path: Path, value: object, rule: str) -> None:
    assert rule in refusal(saved(tmp_path, value))


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [
        (torch.float8_e4m3fn, "a tensor of dtype torch.float8_e4m3fn, as quantised weights have; supported are"),
        (torch.float8_e5m2, "a tensor of dtype torch.float8_e5m2, as quantised weights have; supported are"),
        (torch.float8_e8m0fnu, "a tensor of dtype torch.float8_e8m0fnu, as quantised weights have; supported are"),
        (torch.uint16, "a tensor of dtype torch.uint16; supported are"),
        (torch.uint64, "a tensor of dtype torch.uint64; supported are"),
    ],
)
def test_a_dtype_that_is_not_read_is_refused_by_its_name(tmp_path: Path, dtype: torch.dtype, rule: str) -> None:
    assert rule in refusal(saved(tmp_path, {"plain": torch.ones(2), "w": torch.ones(2).to(dtype)}))


def test_the_form_before_torch_1_6_is_refused(tmp_path: Path) -> None:
    assert "since 1.6" in refusal(saved(tmp_path, {"w": torch.ones(2)}, _use_new_zipfile_serialization=False))


def test_compressed_and_encrypted_entries_are_refused(tmp_path: Path) -> None:
    packed = archive(tmp_path / "a", pickle.dumps({}) * 50, compression=zipfile.ZIP_DEFLATED)
    assert "is compressed" in refusal(packed)
    folder = archive(tmp_path / "b", pickle.dumps({}))
    data = bytearray((folder / NAME).read_bytes())
    directory = data.index(b"PK\x01\x02")
    data[directory + 8] |= 1
    (folder / NAME).write_bytes(data)
    assert "is encrypted" in refusal(folder)


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    folder = archive(tmp_path, pickle.dumps({}))
    with zipfile.ZipFile(folder / NAME, "a") as made:
        made.writestr("archive/byteorder", b"big")
    assert "big-endian" in refusal(folder)


def test_entries_that_overlap_or_leave_a_gap_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(16), "b": torch.zeros(16)}) / NAME
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as made:
        place = next(info.header_offset for info in made.infolist() if info.filename.endswith("data/0"))
    for change in (64, -8):  # the filling before the tensor's bytes, whose length stands in the entry's own header alone
        data = bytearray(whole)
        filling = int.from_bytes(data[place + 28 : place + 30], "little")
        data[place + 28 : place + 30] = (filling + change).to_bytes(2, "little")
        path.write_bytes(data)
        assert "what follows it begins at" in refusal(tmp_path)


def test_a_table_that_was_changed_is_refused_by_its_check_sum_where_it_has_one(tmp_path: Path) -> None:
    path = saved(tmp_path, {"aaaa": torch.ones(2)}) / NAME
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"aaab"))
    assert "its check sum does not hold" in refusal(tmp_path)
    torch.serialization.set_crc32_options(False)
    try:
        saved(tmp_path, {"aaaa": torch.ones(2)})
    finally:
        torch.serialization.set_crc32_options(True)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, {"aaaa": torch.ones(2)})


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_given_twice_is_refused(tmp_path: Path) -> None:
    folder = archive(tmp_path, pickle.dumps({}))
    with zipfile.ZipFile(folder / NAME, "a") as made:
        made.writestr("archive/data.pkl", pickle.dumps({}))
    assert "twice" in refusal(folder)


def test_two_tables_or_none_are_refused(tmp_path: Path) -> None:
    folder = archive(tmp_path, pickle.dumps({}))
    with zipfile.ZipFile(folder / NAME, "a") as made:
        made.writestr("other/data.pkl", pickle.dumps({}))
    assert "must hold one data.pkl; it holds 2" in refusal(folder)


def tensor_pickle(
    *,
    key: bytes = b"0",
    items: int = 4,
    first: int = 0,
    shape: tuple[int, ...] = (4,),
    strides: tuple[int, ...] = (1,),
    after: bytes = b"",
) -> bytes:
    """``{"w": tensor}`` as torch writes it, with these numbers; ``after`` runs on the finished tensor."""

    def number(value: int) -> bytes:
        return b"\x8a\x08" + struct.pack("<q", value)

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    def text(value: bytes) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value

    storage = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(key) + text(b"cpu") + number(items) + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(first) + numbers(shape) + numbers(strides) + b"\x89}tR"
    return b"\x80\x02}" + text(b"w") + tensor + after + b"s."


def test_the_hand_made_pickle_is_a_good_one(tmp_path: Path) -> None:
    data = struct.pack("<4f", 1, 2, 3, 4)
    with open_checkpoint(archive(tmp_path, tensor_pickle(), storages={"0": data})) as checkpoint:
        assert checkpoint.read("w").tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("numbers", "rule"),
    [
        ({"first": 1}, "reaches element 4 of a storage of 4"),
        ({"strides": (2,)}, "reaches element 6"),
        ({"shape": (1 << 40,)}, "reaches element"),
        ({"shape": (4, 4), "strides": (1, 1)}, "reaches element"),
        ({"first": -1}, "has -1 where a count must stand"),
        ({"strides": (-1,)}, "has -1 where a count must stand"),
        ({"shape": (2, 2)}, "shape (2, 2) and strides (1,)"),
        ({"items": 5}, "has a storage of 20 bytes; its entry has 16"),
        ({"items": -4}, "has -4 where a count must stand"),
        ({"key": b"7"}, "'archive/data/7', which is missing"),
        ({"key": b"../data.pkl"}, "'archive/data/../data.pkl', which is missing"),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(tmp_path: Path, numbers: dict[str, Any], rule: str) -> None:
    assert rule in refusal(archive(tmp_path, tensor_pickle(**numbers), storages={"0": b"\0" * 16}))


@pytest.mark.parametrize("rebuild", [b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"])
def test_bytes_without_a_dtype_are_no_tensor(tmp_path: Path, rebuild: bytes) -> None:
    table = tensor_pickle().replace(b"torch\nFloatStorage", b"torch.storage\nUntypedStorage")
    table = table.replace(b"_rebuild_tensor_v2", rebuild)
    assert "has no storage with a dtype" in refusal(archive(tmp_path, table, storages={"0": b"\0" * 4}))


@pytest.mark.parametrize(
    "after",
    [b"]K\x07ab", b"N}X\x05\x00\x00\x00shapeK\x01s\x86b", b"}X\x05\x00\x00\x00shapeK\x01sb"],
    ids=["list", "slots", "dictionary"],
)
def test_a_pickle_cannot_change_a_tensor_after_it_was_checked(tmp_path: Path, after: bytes) -> None:
    assert "not a readable table" in refusal(archive(tmp_path, tensor_pickle(after=after), storages={"0": b"\0" * 16}))


def test_a_pickle_cannot_change_what_builds_the_tables_of_later_files(tmp_path: Path) -> None:
    for state in (b"}X\x05\x00\x00\x00_makeNsb", b"N}X\x05\x00\x00\x00_makeNs\x86b"):
        with pytest.raises(CheckpointError):
            read_table(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + state + b".", NAME)
    for state in (b"}X\x05\x00\x00\x00dtypeNsb", b"N}X\x05\x00\x00\x00dtypeNs\x86b"):
        with pytest.raises(CheckpointError):
            read_table(b"\x80\x02ctorch\nFloatStorage\n" + state + b".", NAME)
    test_the_hand_made_pickle_is_a_good_one(tmp_path)


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        (b"\x80\x02}r\xff\xff\xff\x7f.", "memo slot 2147483647"),
        (b"\x80\x02\x82\x01.", "operation EXT1"),
        (b"(iposix\nsystem\n.", "operation INST"),
        (b"(cposix\nsystem\no.", "operation OBJ"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "names posix.system"),
        (b"\x80\x04\x8c\x05torch\x8c\x09load.load\x93.", "names torch.load.load"),
        (b"ctorch\nload\n.", "names torch.load"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f.", "not a readable table"),
        (b"\x80\x02}.}.", "bytes after its end"),
        (b"", "not a readable table"),
        (b"\x80\x02", "not a readable table"),
        (b"\x80\x02K\x01Q.", "refers to something that is not a storage"),
        (b"\x80\x02(X\x07\x00\x00\x00storageK\x01K\x01K\x01K\x01tQ.", "a storage of unknown type"),
        (b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.", "built from arguments"),
    ],
)
def test_byte_code_that_no_table_needs_is_refused(table: bytes, rule: str) -> None:
    with pytest.raises(CheckpointError, match="^" + NAME) as caught:
        read_table(table, NAME)
    assert rule in caught.value.rule


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


DOUBLED = b")" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))
"""A tuple of two tuples that are one, sixty deep: 2^60 values when written out."""


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        (b"}" + (text("module") + b"K\x01s") * 10 + b".", "the key 'module' is given twice"),
        (b"}(" + (text("w") + b"K\x01") * 10 + b"u.", "the key 'w' is given twice"),
        (b"}(K\x01K\x01\x88K\x01u.", "the key True is given twice"),
        (
            b"}cargparse\nNamespace\n)\x81}(" + text("a") + b"K\x01" + text("a") + b"K\x02ubK\x01s.",
            "the key 'a' is given twice",
        ),
        (b"}" + text("x") + DOUBLED + b"s.", "values when what is shared is written out"),
        (b"}" + DOUBLED + b"K\x01s.", "a tuple of tuples as a key"),
        (b"}q\x00" + text("x") + b"h\x00s.", "holds itself"),
        (b"]" * 200 + b"a" * 199 + b".", "more than 128 deep"),
        (b"}\x8a\x09" + b"\x01" * 9 + b"K\x01s.", "a number beyond 2^63 as a key"),
        (b"N0" * (1 << 20) + b"N.", "operation POP"),
        (b"](" + b"N" * (1 << 21) + b"e.", "more than 2097152 operations"),
    ],
    ids=["setitem", "setitems", "equal", "bag", "doubled", "doubled-key", "itself", "deep", "large-key", "pop", "long"],
)
def test_a_pickle_that_says_a_thing_twice_or_makes_much_of_little_is_refused_at_once(tree: bytes, rule: str) -> None:
    begun = time.thread_time()
    with pytest.raises(CheckpointError, match="^" + NAME) as caught:
        read_tree(b"\x80\x02" + tree, NAME, Allowed(classes=frozenset(("argparse.Namespace",))))
    assert rule in caught.value.rule
    assert time.thread_time() - begun < MOST_SECONDS


def test_a_directory_that_claims_to_be_large_is_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2)}) / NAME
    whole = path.read_bytes()
    at = whole.rindex(b"PK\x05\x06")
    with open(path, "r+b") as file:  # a hole, which takes no room
        file.seek(1 << 30)
        file.write(whole[at : at + 12] + struct.pack("<II", 1 << 29, (1 << 30) - (1 << 29)) + whole[at + 20 :])
    assert "its directory has 536870912 bytes" in refusal(tmp_path)


def test_a_table_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoint.readers.files.torch_zip.MAX_PICKLE_BYTES", 100)
    assert "at most 100 are read" in refusal(saved(tmp_path, some_tensors()))


def test_an_archive_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2)}) / NAME
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert refusal(tmp_path)


def test_changing_one_byte_of_the_table_never_runs_anything(tmp_path: Path) -> None:
    made = io.BytesIO()
    torch.save({"w": torch.ones(2), "v": torch.ones(3)}, made)
    with zipfile.ZipFile(made) as source:
        table = source.read(next(name for name in source.namelist() if name.endswith("data.pkl")))
    choose = random.Random(9)
    for position in range(len(table)):
        for _ in range(4):
            changed = table[:position] + bytes([choose.randrange(256)]) + table[position + 1 :]
            try:
                found = read_table(changed, NAME)
            except CheckpointError:
                continue
            assert all(type(tensor).__name__ == "StoredTensor" for tensor in found.values())

"""Bytes of files as streams, whatever they are packed in; and documents cut into pieces, however they come."""

from __future__ import annotations

import gzip
import io
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from finetune.data.readers import items
from finetune.data.readers.items import Piece, cut, cut_stream
from finetune.data.readers.streams import Damaged, chunks_of, inner_suffix, is_compressed, line_of, open_bytes

CONTENT = b"".join(b"line %d: " % number + b"x" * (number % 97) + b"\n" for number in range(3000)) + b"no end of line"
PACK: dict[str, Callable[[bytes], bytes]] = {"": lambda content: content, ".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize(
    ("name", "inner", "compressed"),
    [
        ("a.jsonl", ".jsonl", False),
        ("a.JSONL", ".jsonl", False),
        ("a.jsonl.gz", ".jsonl", True),
        ("a.JSON.ZST", ".json", True),
        ("a.gz", "", True),
        ("a.b.txt", ".txt", False),
        ("gz", "", False),
    ],
)
def test_the_suffix_below_the_packing_decides(name: str, inner: str, compressed: bool) -> None:
    assert inner_suffix(Path("some.folder") / name) == inner
    assert is_compressed(Path("some.folder") / name) is compressed


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_stream_gives_the_bytes_that_were_packed_in_chunks_and_in_lines(tmp_path: Path, suffix: str, parts: int) -> None:
    """Several members or frames one after another are one file, as ``cat`` makes them."""
    file = tmp_path / f"a.txt{suffix}"
    step = -(-len(CONTENT) // parts)
    file.write_bytes(b"".join(PACK[suffix](CONTENT[at : at + step]) for at in range(0, len(CONTENT), step)))
    draw = random.Random(parts)
    chunks = []
    with open_bytes(file) as stream:
        while chunk := chunks_of(stream, draw.randint(1, 5000)):
            chunks.append(chunk)
    assert b"".join(chunks) == CONTENT
    with open_bytes(file) as stream:
        lines = list(iter(lambda: line_of(stream), b""))
    assert lines == io.BytesIO(CONTENT).readlines()
    with open_bytes(file) as stream:
        assert [line_of(stream, 4) for _ in range(3)] == [b"line", b" 0: ", b"\n"], (
            "a line longer than is asked for comes in parts"
        )


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_empty_file_is_an_empty_stream(tmp_path: Path, suffix: str) -> None:
    for name, content in (("packed", PACK[suffix](b"")), ("bare", b"")):
        file = tmp_path / f"{name}{suffix}"
        file.write_bytes(content)
        with open_bytes(file) as stream:
            assert chunks_of(stream, 10) == b""


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("read", [lambda stream: chunks_of(stream, 1000), line_of], ids=["chunks", "lines"])
def test_a_file_cut_anywhere_or_altered_is_damaged_and_never_silently_short(
    tmp_path: Path, suffix: str, read: Callable[[object], bytes]
) -> None:
    packed = PACK[suffix](random.Random(1).randbytes(3000))
    file = tmp_path / f"a{suffix}"
    damaged = [packed[:length] for length in (1, 5, 12, 100, len(packed) // 2, len(packed) - 1)]
    damaged.append(b"\0" + packed[1:])
    for content in damaged:
        file.write_bytes(content)

        def read_all() -> None:
            with open_bytes(file) as stream:
                while read(stream):
                    pass

        with pytest.raises(Damaged):
            read_all()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(items, "PIECE_CHARACTERS", 10)
    return 10


@pytest.mark.parametrize("seed", range(6))
def test_a_document_is_cut_at_line_ends_however_it_was_chunked(small_pieces: int, seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices("ab\né", weights=[5, 5, draw.choice([0, 1, 5]), 1], k=draw.randint(1, 200)))
    pieces = list(cut(text))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(1 <= len(piece.text) <= small_pieces for piece in pieces)
    for piece in pieces[:-1]:
        assert piece.text.endswith("\n") or (len(piece.text) == small_pieces and "\n" not in piece.text)
    cuts = sorted(draw.choices(range(len(text) + 1), k=12))
    chunks = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert list(cut_stream(iter(chunks))) == pieces


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("\n", ["\n"]),
        ("0123456789", ["0123456789"]),
        ("0123456789\n", ["0123456789", "\n"]),
        ("012345678\n9", ["012345678\n", "9"]),
        ("\n0123456789abc", ["\n", "0123456789", "abc"]),
    ],
)
def test_pieces_at_the_very_limit(small_pieces: int, text: str, pieces: list[str]) -> None:
    assert list(cut(text)) == [Piece(piece, ends_document=number == len(pieces)) for number, piece in enumerate(pieces, 1)]

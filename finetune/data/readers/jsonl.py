"""JSONL: one JSON object a line, also compressed. Plain files are cut into parts at line ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import IO

from finetune.data.readers.items import Fault, Item, Part, Record
from finetune.data.readers.streams import Damaged, is_compressed, line_of, open_bytes

_LONGEST_LINE = 1 << 28
_BOM = b"\xef\xbb\xbf"


class JsonlReader:
    """Reads JSONL. A position is the byte at which a line begins; of a compressed file, the number of lines before it."""

    def parts(self, part: Part, target_bytes: int) -> list[tuple[Part, int]]:
        size = part.file.stat().st_size
        if is_compressed(part.file):
            return [(part, size)]
        count = max(1, -(-size // target_bytes))
        bounds = [size * index // count for index in range(count + 1)]
        return [(Part(part.file, part.kind, begin, end), end - begin) for begin, end in pairwise(bounds)]

    def read(self, part: Part, *, skip_invalid: bool) -> Iterator[Item]:
        try:
            with open_bytes(part.file) as stream:
                for position, line in _lines(stream, part):
                    if line.strip():
                        yield position, _parsed(line)
        except Damaged as error:
            yield part.begin, Fault(f"the compressed data is damaged ({error}); make the file again")
        except OSError as error:
            yield part.begin, Fault(f"cannot be read: {error.strerror or error}; check that it exists and may be read")

    def place(self, part: Part, position: int) -> str:
        return self.places(part, [position])[0]

    def places(self, part: Part, positions: Sequence[int]) -> list[str]:
        """Places of ascending positions, in one pass over the file."""
        numbers = positions if is_compressed(part.file) else _line_ends_before(part, positions)
        return [f"{part.file}, line {number + 1}" for number in numbers]


def _lines(stream: IO[bytes], part: Part) -> Iterator[tuple[int, bytes]]:
    """Every line that begins inside the part, with its position."""
    counted = is_compressed(part.file)
    offset = part.begin
    if offset > 0:
        stream.seek(offset - 1)
        offset -= 1
        while not (skipped := line_of(stream, _LONGEST_LINE)).endswith(b"\n"):
            if not skipped:
                return
            offset += len(skipped)
        offset += len(skipped)  # the line that began before the part is its neighbour's
    number = 0
    while part.end is None or offset < part.end:
        line = line_of(stream, _LONGEST_LINE)
        if not line:
            return
        yield (number if counted else offset), line.removeprefix(_BOM) if offset == 0 else line
        offset += len(line)
        while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):  # the rest of a line that is refused
            line = line_of(stream, _LONGEST_LINE)
            offset += len(line)
        number += 1


def _line_ends_before(part: Part, positions: Sequence[int]) -> list[int]:
    counts: list[int] = []
    count = at = 0
    with part.file.open("rb") as stream:
        for position in positions:
            while at < position and (chunk := stream.read(min(position - at, 1 << 20))):
                count += chunk.count(b"\n")
                at += len(chunk)
            counts.append(count)
    return counts


def _parsed(line: bytes) -> Record | Fault:
    if len(line) >= _LONGEST_LINE:
        return Fault(f"is longer than {_LONGEST_LINE >> 20} MiB; JSONL has one object a line, and text belongs in a text file")
    try:
        record = json.loads(line.rstrip(b"\r\n").decode("utf-8"))  # a column behind its end would be of no line
    except UnicodeDecodeError as error:
        return Fault(f"byte {error.start} of the line is not UTF-8; write the file as UTF-8")
    except json.JSONDecodeError as error:
        return Fault(f"column {error.pos + 1}: not valid JSON: {error.msg}; each line must be one JSON object")
    except RecursionError:
        return Fault("the JSON is nested too deeply; a record needs a few levels only")
    except ValueError as error:  # a number with too many digits
        return Fault(f"not valid JSON: {error}")
    if not isinstance(record, dict):
        return Fault(f'must be an object such as {{"text": …}}; it is {type(record).__name__}')
    return Record(record)

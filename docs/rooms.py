"""Draws the rooms of ``finetune/`` as ``docs/rooms.svg``: the layers of its contract, and who really imports whom.

``make pictures`` runs it; ``--check`` proves that the committed picture is what the imports make, and writes nothing. The
layers are those of ``pyproject.toml``, the arrows those of the graph that import-linter walks, as thick as files import files.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURE = REPOSITORY / "docs/rooms.svg"
ROOT, CONTRACT = "finetune", "layers of finetune"
sys.path.insert(0, str(REPOSITORY))  # the packages as they lie here, installed or not
NEIGHBOURS = ("checkpoint", "configuration", "host")
"""The packages beside ``ROOT``, which stand below it: none of them imports it."""

ROW, HEIGHT, GAP = 58, 34, 20
"""From one row of boxes to the next; of a box; between two boxes of a row. All lengths are SVG units."""
MARGIN, ROOM = 190, 200
"""Beside the boxes, for arrows that pass layers by; a box of two in a row."""
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #111827; text-anchor: middle }
.files { font-size: 11px; fill: #6b7280 } .say { font-size: 12px; fill: #4b5563; text-anchor: start }
.room { fill: #ffffff; stroke: #2563eb } .beside { fill: #f3f4f6; stroke: #6b7280 } .page { fill: #f9fafb }
.left { stroke: #2563eb } .right { stroke: #d97706 } .down { stroke: #059669 }
path { fill: none; stroke-opacity: 0.5; stroke-linecap: round } path:hover { stroke-opacity: 1 }
circle.left { fill: #2563eb } circle.right { fill: #d97706 } circle.down { fill: #059669 } circle { stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f3f4f6 } .files, .say { fill: #9ca3af } .page { fill: #0d1117 }
  .room { fill: #172033; stroke: #60a5fa } .beside { fill: #1f2937; stroke: #9ca3af }
  .left { stroke: #60a5fa } .right { stroke: #fbbf24 } .down { stroke: #34d399 }
  circle.left { fill: #60a5fa } circle.right { fill: #fbbf24 } circle.down { fill: #34d399 }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Where a room is drawn."""

    name: str
    files: int
    x: int
    y: int
    width: int
    row: int
    side: int
    """-1 on the left of its row, 1 on the right, 0 alone in it."""

    @property
    def middle(self) -> int:
        return self.x + self.width // 2


def layers() -> list[list[str]]:
    """The rooms of each layer, from the top: first those of the contract, then the packages beside."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    contract = next(each for each in contracts if each["name"] == CONTRACT)
    return [*([room.strip() for room in layer.split("|")] for layer in contract["layers"]), list(NEIGHBOURS)]


def imports(graph: grimp.ImportGraph) -> Counter[tuple[str, str]]:
    """How many times a file of one room imports a file of another, by (importer, imported)."""
    pairs = (
        (room_of(importer), room_of(imported))
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    return Counter((a, b) for a, b in pairs if a != b and "" not in (a, b) and a not in NEIGHBOURS)


def room_of(module: str) -> str:
    """The room that a file is in; of ``finetune`` itself, which is none, an empty name."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == ROOT else package


def boxes(graph: grimp.ImportGraph) -> dict[str, Box]:
    """Every room's box: rows of one wide or two narrow ones, a layer of more rooms in several rows."""
    files = Counter(map(room_of, graph.modules))
    rows = [layer[i : i + 2] for layer in layers() for i in range(0, len(layer), 2)]
    found = {}
    for row, rooms in enumerate(rows):
        for place, name in enumerate(rooms):
            alone = len(rooms) == 1
            found[name] = Box(
                name=name, files=files[name], row=row, y=56 + row * ROW, width=ROOM if not alone else ROOM + ROOM // 2,
                x=MARGIN + (ROOM // 4 + GAP // 2 if alone else place * (ROOM + GAP)), side=0 if alone else 2 * place - 1,
            )  # fmt: skip
    return found


def arrow(importer: Box, imported: Box, count: int, number: int) -> Iterator[str]:
    """One arrow, ending in a dot: straight down to the next row, else around the rows between on the free side."""
    sides = {importer.side, imported.side} - {0}
    kind, title = "down", f"<title>{importer.name} imports {imported.name}: {count}</title>"
    width = f"{0.8 + 0.9 * count**0.5:.1f}"
    if imported.row - importer.row == 1 or sides == {-1, 1}:
        x0, y0, x1, y1 = importer.middle, importer.y + HEIGHT, imported.middle, imported.y
        bend = (y1 - y0) // 2
        path = f"M{x0},{y0} C{x0},{y0 + bend} {x1},{y1 - bend} {x1},{y1}"
    else:
        side = sides.pop() if sides else (-1, 1)[number % 2]
        kind = "left" if side < 0 else "right"
        x0, x1 = (box.x if side < 0 else box.x + box.width for box in (importer, imported))
        y0, y1 = importer.y + HEIGHT * 2 // 3, imported.y + HEIGHT // 3
        out = (min if side < 0 else max)(x0, x1) + side * (24 + 15 * (imported.row - importer.row))
        path = f"M{x0},{y0} C{out},{y0} {out},{y1} {x1},{y1}"
    yield f'<path d="{path}" class="{kind}" stroke-width="{width}">{title}</path>'
    yield f'<circle cx="{x1}" cy="{y1}" r="3" class="{kind}"/>'


def drawing() -> str:
    """The picture as SVG text; the same for the same imports."""
    graph = grimp.build_graph(ROOT, *NEIGHBOURS, cache_dir=None)
    places, arrows = boxes(graph), sorted(imports(graph).items())
    width, height = 2 * MARGIN + 2 * ROOM + GAP, 56 + ROW * (1 + max(box.row for box in places.values()))
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="The rooms of {ROOT} and their imports" '
        f'xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>',
        f'<rect width="{width}" height="{height}" rx="8" class="page"/>',
        f'<text x="16" y="24" class="say">{sum(count for _, count in arrows)} imports between the rooms of {ROOT}/ and the '
        "packages beside it (grey).</text>",
        '<text x="16" y="41" class="say">Lines end in a dot at what is imported, thicker for more imports; all go down.</text>',
    ]
    for number, ((importer, imported), count) in enumerate(arrows):
        parts += arrow(places[importer], places[imported], count, number)
    for box in places.values():
        kind = "beside" if box.name in NEIGHBOURS else "room"
        parts.append(f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{HEIGHT}" rx="6" class="{kind}"/>')
        label = f'<tspan font-weight="600">{box.name}</tspan>'
        if kind == "room":
            label += f' <tspan class="files">{box.files} {"files" if box.files > 1 else "file"}</tspan>'
        parts.append(f'<text x="{box.middle}" y="{box.y + HEIGHT // 2 + 5}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Write the picture, or compare it with the one that is there; returns the exit code."""
    made = drawing()
    if sys.argv[1:] != ["--check"]:
        PICTURE.write_text(made, encoding="utf-8")
    elif PICTURE.read_text(encoding="utf-8") != made:
        print("docs/rooms.svg is not what the imports make; run `make pictures` and commit it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

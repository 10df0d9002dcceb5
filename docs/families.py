"""Writes the table of ``docs/families.md`` from ``serve/model/families.py``.

``make pictures`` runs it; ``--check`` proves that the committed table is what the code says, and writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs/families.md"
BEGIN, END = "<!-- table: docs/families.py -->\n", "<!-- end of table -->\n"
sys.path.insert(0, str(REPOSITORY))  # the packages as they lie here, installed or not

from serve.model.families import FAMILIES, Family  # noqa: E402  # the path comes first

HEADER = ("`model_type`", "attention reached through", "positions, by the kernel", "cut", "what else it takes")


def main(arguments: list[str]) -> int:
    """Write the table, or with ``--check`` compare it; 1 where it differs."""
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    wanted = head + BEGIN + "\n" + table() + "\n" + END + tail
    if "--check" not in arguments:
        PAGE.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        print("docs/families.md is not what serve/model/families.py says; make pictures writes it", file=sys.stderr)
        return 1
    return 0


def table() -> str:
    """One row a family, in the order of their names."""
    rows = [HEADER, ("---",) * len(HEADER), *(_row(FAMILIES[name]) for name in sorted(FAMILIES))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _row(family: Family) -> tuple[str, ...]:
    return f"`{family.name}`", _reached(family), _positions(family), _cut(family), "; ".join(_more(family)) or "–"


def _reached(family: Family) -> str:
    if family.replaces_forward:
        return "another `forward`"
    return "another `_attn`" if family.replaces_attn else "transformers' interface"


def _positions(family: Family) -> str:
    if family.alibi:
        return "ALiBi"
    if family.replaces_forward:
        return "rotary, whole heads"
    if family.turns_pairs:
        return "rotary, pairs of a part of each head, on GPUs"
    if not family.rotary_function:
        return "–"
    turned = "rotary, whole heads or a part" if family.partial_rotary else "rotary, whole heads"
    return f"{turned}, on GPUs" if family.other_angles else turned


def _cut(family: Family) -> str:
    joined = [name for name, kinds in family.rows.items() if len(kinds) > 1]
    parts = [f"`{name.rpartition('.')[2]}` by its parts" for name in (*joined, *family.halves)]
    if family.expert_cuts:
        parts.append("inside each expert")
    return "; ".join(parts) or "by heads and features"


def _more(family: Family) -> list[str]:
    facts = {
        "weights stored as [in, out]": family.conv1d,
        f"heads in {family.head_blocks} blocks, each cut": family.head_blocks > 1,
        "ALiBi where its configuration says so": family.name == "falcon",
        "a score without a value for each head (sink)": family.sinks,
        "norms summed over ranks": bool(family.norms_over_heads),
        "a norm for each head": bool(family.norms_by_head),
        "scaled embedding; scores and logits capped": family.scaled_embedding,
        "experts stored one by one": bool(family.expert_tensors),
        "numbers of heads read from the configuration": family.local_config,
        "scores without a scale": not family.scaled,
    }
    return [fact for fact, holds in facts.items() if holds]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Notices other packages that bear the general names under which Tessera's own parts are imported."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

NAMES = ("serve", "finetune", "checkpoint", "configuration", "host")
"""The packages that an installation of Tessera brings beside ``tessera`` itself."""
DISTRIBUTION = "tessera"


def found_in_place(*names: str) -> list[str]:
    """A sentence for each of these packages that Python finds elsewhere than beside this one."""
    here = Path(__file__).resolve().parents[1]
    sentences = []
    for name in names:
        specification = importlib.util.find_spec(name)
        if specification is None:
            sentences.append(f"Tessera's package {name!r} is missing from {here}; install Tessera again.")
            continue
        places = [Path(place).resolve() for place in specification.submodule_search_locations or ()]
        if here / name not in places:
            found = ", ".join(map(str, places)) or specification.origin
            sentences.append(
                f"Python finds {name!r} at {found}, which is another package than Tessera's in {here}: "
                "start from another folder, or install Tessera into an environment of its own."
            )
    return sentences


def installed_over(names: tuple[str, ...] = NAMES) -> list[str]:
    """A sentence for each of these packages that another distribution brings too, so that one's files lie over the other's.

    Reads the list of files of every distribution: some tenths of a second.
    """
    owners = metadata.packages_distributions()
    sentences = []
    for name in names:
        others = sorted({owner for owner in owners.get(name, ()) if owner.lower() != DISTRIBUTION})
        if others:
            sentences.append(
                f"the package {name!r} is also installed by {', '.join(others)}, whose files lie over Tessera's: "
                "install Tessera into an environment of its own."
            )
    return sentences

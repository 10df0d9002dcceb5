"""Helm itself, by the Python package that carries it: ``helm_render.py CHART VALUES NAME NAMESPACE`` as ``helm template``.

Run with the Python of ``make deploy-tools``. VALUES is JSON. What ``helm lint --strict`` finds goes to standard error and ends
it with 1.
"""

from __future__ import annotations

import json
import sys


def main(chart: str, values: str, name: str, namespace: str) -> int:
    """Render and lint one chart."""
    from helm_python.chart import Chart, lint

    found = lint(chart, json.loads(values), strict=True, namespace=namespace)
    if wrong := [message for message in found["messages"] if message["severity"] > 1] + found["errors"]:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    with Chart.load(chart) as loaded:
        print(*loaded.render(json.loads(values), name=name, namespace=namespace).values(), sep="\n---\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

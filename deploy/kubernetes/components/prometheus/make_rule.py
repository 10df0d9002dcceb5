"""Writes prometheus-rule.yaml: the rules of deploy/prometheus as its operator takes them. ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
RULES = HERE.parents[2] / "prometheus" / "tessera.rules.yml"
TARGET = HERE / "prometheus-rule.yaml"
COMMENT = "# Written by make_rule.py from deploy/prometheus/tessera.rules.yml.\n"


def text() -> str:
    """What the file should hold."""
    about = {"name": "tessera", "labels": {"app.kubernetes.io/name": "tessera"}}
    rules = yaml.safe_load(RULES.read_text())
    rule = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": about, "spec": rules}
    return COMMENT + yaml.safe_dump(rule, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text())
    elif TARGET.read_text() != text():
        sys.exit(f"{TARGET} is not what {RULES} says; python {Path(__file__).name} writes it")

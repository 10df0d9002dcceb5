"""Prometheus' configuration and rules, read by Prometheus' own tool."""

from __future__ import annotations

import pytest

from tests.deploy.tools import needs, run
from tests.repo.documents import REPOSITORY

FOLDER = REPOSITORY / "deploy/prometheus"

pytestmark = [pytest.mark.deploy, needs("promtool")]


def test_prometheus_reads_its_configuration_and_the_rules_it_names() -> None:
    said = run("promtool", "check", "config", "prometheus.yml", folder=FOLDER)
    assert "1 rule files found" in said
    assert "SUCCESS" in said

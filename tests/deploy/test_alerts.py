"""Every alert fires for its cause, stays silent before it and in an hour of healthy load, and has its paragraph."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.alerts import CASES, EXCHANGES, Case, group, healthy, lives
from tests.deploy.tools import needs, run
from tests.repo.documents import REPOSITORY

RULES = REPOSITORY / "deploy/prometheus/tessera.rules.yml"

pytestmark = pytest.mark.deploy


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for each in groups for rule in each["rules"] if "alert" in rule}


def tried(folder: Path, tests: dict[str, Any]) -> None:
    file = folder / "tests.yml"
    # Groups of rules have no order, so what one records another may see an evaluation later; after five minutes it is gone.
    every = "1m" if tests["interval"] == "1m" else "2m"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": every, "tests": [tests]}))
    assert "SUCCESS" in run("promtool", "test", "rules", str(file), folder=folder)


def expectations(case: Case) -> list[dict[str, Any]]:
    rule, unit = alerts()[case.alert], int(case.interval.removesuffix("m"))
    fires = {"exp_labels": {**case.labels, **rule["labels"]}, "exp_annotations": rule["annotations"]}
    return [
        {"eval_time": f"{case.silent_minutes * unit}m", "alertname": case.alert, "exp_alerts": []},
        {"eval_time": f"{case.firing_minutes * unit}m", "alertname": case.alert, "exp_alerts": [fires]},
    ]


def test_every_alert_is_tried() -> None:
    assert sorted(case.alert for case in CASES) == sorted(alerts())


@needs("promtool")
@pytest.mark.parametrize("case", CASES, ids=[case.alert for case in CASES])
def test_an_alert_fires_for_its_cause_and_for_the_server_that_has_it_alone(case: Case, tmp_path: Path) -> None:
    tried(tmp_path, group(case.all_series(), case.interval, expectations(case)))


@needs("promtool")
def test_without_any_server_there_is_an_alert(tmp_path: Path) -> None:
    rule = alerts()["TesseraDown"]
    fires = {"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}
    tried(tmp_path, group({}, "1m", [{"eval_time": "2m", "alertname": "TesseraDown", "exp_alerts": [fires]}]))


@needs("promtool")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_server_is_missed_while_replicas_give_way_to_newer_ones(exchange: str, tmp_path: Path) -> None:
    missing = ("TesseraFewerServers", "TesseraModelGone")
    silent = [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for name in missing for minute in range(90)]
    tried(tmp_path, group(EXCHANGES[exchange], "1m", silent))


@needs("promtool")
def test_a_model_that_was_taken_away_is_told_of_for_an_hour(tmp_path: Path) -> None:
    rule = alerts()["TesseraModelGone"]
    fires = {"exp_labels": {"job": "tessera", "model_name": "m", **rule["labels"]}, "exp_annotations": rule["annotations"]}
    other = {'tessera_engine_up{job="tessera",instance="c",model_name="n"}': "1x120"}
    moments = [(19, []), (26, [fires]), (75, [fires]), (85, [])]
    told = [
        {"eval_time": f"{minute}m", "alertname": "TesseraModelGone", "exp_alerts": expected} for minute, expected in moments
    ]
    tried(tmp_path, group(lives(a="1x19 stale", b="1x19 stale") | other, "1m", told))


@needs("promtool")
def test_a_server_that_is_missing_is_missed_whatever_another_release_of_its_model_gains(tmp_path: Path) -> None:
    rule = alerts()["TesseraFewerServers"]
    of_mine = {"job": "tessera", "model_name": "m", "namespace": "there", "release": "mine"}
    fires = {"exp_labels": {**of_mine, **rule["labels"]}, "exp_annotations": rule["annotations"]}
    series = {}
    for release, values in (("mine", ["1x40", "1x9 stale"]), ("yours", ["1x40", "_x9 1x30"])):
        for pod, value in enumerate(values):
            words = ",".join(f'{label}="{text}"' for label, text in (of_mine | {"release": release}).items())
            series[f'tessera_engine_up{{{words},instance="{release}-{pod}"}}'] = value
    tried(tmp_path, group(series, "1m", [{"eval_time": "30m", "alertname": "TesseraFewerServers", "exp_alerts": [fires]}]))


@needs("promtool")
def test_no_alert_fires_in_an_hour_and_a_half_of_healthy_load(tmp_path: Path) -> None:
    moments = [
        {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for name in alerts() for minute in range(5, 90, 5)
    ]
    tried(tmp_path, group(healthy(), "1m", moments))


def test_every_alert_has_its_paragraph_in_the_runbook() -> None:
    page = (REPOSITORY / "docs/runbook.md").read_text()
    paragraphs = dict(re.findall(r"^### (\w+)\n\n(.+?)(?=\n\n#|\Z)", page, re.MULTILINE | re.DOTALL))
    assert sorted(paragraphs) == sorted(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert len(paragraphs[name]) > 150, f"{name}: what it means and what to do takes more words"

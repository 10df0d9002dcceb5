"""A Prometheus of its own: on loopback, with its own folder, ended by its process id."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.ports import held_port
from tests.support.server import until

READY_SECONDS = 60.0
HELD = 'min_over_time(tessera:servers_up{job="tessera"}[5s])'
"""How many servers there were for as long as rules in a hurry want, before they miss one."""
_USUAL, _HURRIED = "tessera:servers_up[10m])[1h:1m]", "tessera:servers_up[5s])[1h:1s]"


def in_a_hurry(rules: str) -> str:
    """The rules with seconds for the minutes that they wait: how long that is, promtool's tests try."""
    assert _USUAL in rules, "the number of servers is compared in another way"
    return re.sub(r"for: \d+m", "for: 2s", rules).replace(_USUAL, _HURRIED)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address
        # A proxy in the environment has no business with loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, **words: str) -> Any:
        """What its API answers."""
        url = f"http://{self._address}{path}" + (f"?{urllib.parse.urlencode(words)}" if words else "")
        try:
            with self._opener.open(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{words.get('query', path)}: {error.read().decode()}") from error

    def is_ready(self) -> bool:
        try:
            with self._opener.open(f"http://{self._address}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def query(self, expression: str) -> list[float]:
        """The values of an instant query's series, at this moment."""
        return [float(series["value"][1]) for series in self.get("/api/v1/query", query=expression)["result"]]

    def firing(self) -> set[tuple[str, str]]:
        """(alert, instance) of what fires."""
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {
            (each["labels"]["alertname"], each["labels"].get("instance", "")) for each in alerts if each["state"] == "firing"
        }


@contextmanager
def scraping(folder: Path, targets: dict[str, list[str]], rules: Path) -> Iterator[Prometheus]:
    """Start one that scrapes each job's targets and evaluates rules every second; end it with the block."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": hosts}]} for job, hosts in targets.items()],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with held_port() as port, running(folder, f"127.0.0.1:{port}") as started:
        yield started


@contextmanager
def running(folder: Path, address: str) -> Iterator[Prometheus]:
    """Within, the one that listens at ``address`` with the configuration in this folder is ready."""
    words = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        started = Prometheus(address)
        until(lambda: started.is_ready() or process.poll() is not None, READY_SECONDS)
        assert process.poll() is None, (folder / "log").read_text()
        yield started
    finally:
        process.terminate()
        process.wait(timeout=30)

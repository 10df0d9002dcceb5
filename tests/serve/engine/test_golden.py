"""The scheduling policy as text: each script says what was asked and what was done, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.engine.golden_script import run_script

SCRIPTS = sorted((Path(__file__).parent / "golden").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_the_engine_does_what_the_script_says(script: Path) -> None:
    written = script.read_text(encoding="utf-8")
    assert run_script(written) == written


def test_every_policy_has_its_script() -> None:
    stems = {script.stem for script in SCRIPTS}
    assert stems >= {
        "chunking",
        "preemption",
        "prefix",
        "fairness",
        "num_sequences",
        "priority",
        "deadline",
        "queue",
        "speculation",
    }


def test_outputs_come_from_the_engine_and_not_from_the_script() -> None:
    script = SCRIPTS[0].read_text(encoding="utf-8")
    altered = script.replace("free=", "free=9")
    assert altered != script
    assert run_script(altered) == script

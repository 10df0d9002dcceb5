"""One model with a tokenizer, and transformers' answers to it, for the tests that are not about families."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.support import reference
from tests.support.models import save


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gpt_neox", tmp_path_factory.mktemp("e2e") / "neox")


@pytest.fixture(scope="session")
def model(folder: Path) -> PreTrainedModel:
    return reference.load(folder)

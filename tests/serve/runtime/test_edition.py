"""What a server reads is held: its checkpoint, and what that is made of beside."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpoint import claimed
from serve.app import open_edition
from serve.config import ModelConfig, ServerConfig
from serve.errors import RankStartError
from tests.checkpoint.readers.test_adapters import LINEAR, adapted, llama


def is_free(folder: Path) -> bool:
    with claimed(folder) as free:
        return free


@pytest.mark.parametrize("way", ["an adapter that names its base", "a base with an adapter"])
def test_an_adapter_and_its_base_are_held_until_they_are_served_no_more(way: str, tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    base = tmp_path / "base"
    options = {"path": str(adapter)} if way.startswith("an") else {"path": str(base), "adapter": str(adapter)}
    edition = open_edition(ServerConfig(model=ModelConfig(**options)))
    assert not is_free(adapter)
    assert not is_free(base)
    edition.check_folder()
    shutil.move(base, tmp_path / "elsewhere")
    with pytest.raises(RankStartError, match=f"{base}, the folder that is served, was removed"):
        edition.check_folder()
    edition.release()
    assert is_free(adapter)
    assert is_free(tmp_path / "elsewhere")

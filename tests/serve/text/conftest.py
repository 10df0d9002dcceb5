from __future__ import annotations

from pathlib import Path

import pytest

from serve.text.tokenizer import Tokenizer, load_tokenizer
from tests.serve.text.folders import FOLDERS, make_folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: make_folder(name, root) for name in FOLDERS}


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    loaded = {name: load_tokenizer(folder) for name, folder in folders.items()}
    return {name: tokenizer for name, tokenizer in loaded.items() if tokenizer is not None}

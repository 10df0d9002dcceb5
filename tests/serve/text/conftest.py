from __future__ import annotations

import pytest

from checkpoint.text.tokenizer import Tokenizer
from serve.text.tokenizer import load_tokenizer
from tests.support.tokenizers import FOLDERS, make_folder


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    loaded = {name: load_tokenizer(make_folder(name, root)) for name in FOLDERS}
    return {name: tokenizer for name, tokenizer in loaded.items() if tokenizer is not None}

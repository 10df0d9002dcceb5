"""Released folders of served families that name code of their own (``auto_map``): opened and served, and nothing of it runs."""

from __future__ import annotations

import json
import logging
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import CheckpointError, open_checkpoint, open_structure
from checkpoint.given import NOTHING_GIVEN
from finetune.data.tokenizer import copy_tokenizer
from finetune.model.build import config_of
from finetune.trained.inspect import inspect
from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.runtime.opening import open_edition
from tests.serve.worker.test_loader import layout, load
from tests.support.models import save

CLASSES = {"phi3": "Phi3", "falcon": "Falcon"}
TEXT = "the quick brown fox"


def plant(folder: Path, family: str) -> Path:
    """Have the folder name code as the released ones do; returns the file that the code writes when it is run."""
    ran, name = folder / "ran", CLASSES[family]
    for module in (f"configuration_{family}", f"modeling_{family}", f"tokenization_{family}"):
        (folder / f"{module}.py").write_text(f"import pathlib\n\npathlib.Path({str(ran)!r}).touch()\n")
    auto_map = {
        "AutoConfig": f"configuration_{family}.{name}Config",
        "AutoModelForCausalLM": f"modeling_{family}.{name}ForCausalLM",
    }
    told = [None, f"tokenization_{family}.{name}TokenizerFast"]
    change(folder / "config.json", auto_map=auto_map)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": told}, tokenizer_class=f"{name}TokenizerFast")
    return ran


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@torch.inference_mode()
def hidden(path: Path) -> torch.Tensor:
    model = load(path)
    model.state.layout = layout(0, 30)
    ids, places = torch.arange(30)[None] * 7 + 3, torch.arange(30)[None]
    return model.head(model.body(input_ids=ids, position_ids=places, use_cache=False, return_dict=True).last_hidden_state)


@pytest.mark.parametrize("family", CLASSES)
def test_it_is_served_exactly_and_nothing_in_it_runs(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(family, tmp_path / "model")
    plain, config = hidden(folder), ServerConfig(model=ModelConfig(path=str(folder)), cache=CacheConfig(kv_cache_gib=0.01))
    edition = open_edition(config)
    assert edition.tokenizer is not None
    ids = edition.tokenizer.encode(TEXT)
    assert "code in the folder" not in caplog.text
    ran = plant(folder, family)
    runpy.run_path(str(folder / f"modeling_{family}.py"))
    assert ran.is_file(), "what is planted tells when it runs"
    ran.unlink()
    with caplog.at_level(logging.INFO):
        edition = open_edition(config)
    assert caplog.text.count("code in the folder") == 1
    assert edition.tokenizer is not None
    assert edition.tokenizer.encode(TEXT) == ids
    assert torch.equal(hidden(folder), plain)
    assert not ran.exists()


@pytest.mark.parametrize("family", CLASSES)
def test_it_is_trained_from_and_looked_at_and_nothing_in_it_runs(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path / "model")
    ran = plant(folder, family)
    with open_checkpoint(folder) as checkpoint:
        assert not hasattr(config_of(checkpoint), "auto_map")
    copy_tokenizer(folder, tmp_path / "copy", "tokenizer.path")
    found = inspect(folder, given=NOTHING_GIVEN)
    assert (found.problems, found.facts["code in the folder"]) == ([], "named by auto_map of config.json, and never run")
    assert not ran.exists()


def test_a_family_that_is_not_served_would_need_its_code_and_is_refused(tmp_path: Path) -> None:
    folder = save("falcon", tmp_path)
    ran = plant(folder, "falcon")
    change(folder / "config.json", model_type="RefinedWebModel")
    with pytest.raises(CheckpointError, match=r"auto_map, .*never done, and model_type 'RefinedWebModel' is no family"):
        open_structure(folder)
    assert not ran.exists()

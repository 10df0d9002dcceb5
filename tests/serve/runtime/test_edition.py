"""What a server reads is held: its checkpoint, and what that is made of beside."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from checkpoint import claimed
from serve.config import ModelConfig, ServerConfig
from serve.errors import ConfigError, RankStartError
from serve.runtime.opening import open_edition, see
from tests.checkpoint.readers.test_adapters import LINEAR, adapted, in_cache, llama
from tests.finetune.base_model.test_identity import adapter_on
from tests.support.models import build


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


@pytest.mark.parametrize("newer", ["adapter", "base"])
@pytest.mark.parametrize("way", ["an adapter that names its base", "a base with an adapter"])
def test_a_watch_sees_the_newest_of_an_adapters_run_and_of_its_bases(way: str, newer: str, tmp_path: Path) -> None:
    adapted(tmp_path, llama, target_modules=LINEAR)
    runs = {name: tmp_path / "runs" / name for name in ("adapter", "base")}
    for name, run in runs.items():
        shutil.copytree(tmp_path / name, run / "checkpoint-1")
    told = {"path": "adapter", "base": "base"} if way.startswith("an") else {"path": "base", "adapter": "adapter"}
    options = ServerConfig(model=ModelConfig(**{option: str(runs[name]) for option, name in told.items()}))
    edition = open_edition(options)
    edition.release()
    sight = see(options)
    assert sight is not None
    assert sight.paths == tuple(str(runs[name] / "checkpoint-1") for name in told.values())
    assert set(sight.paths) == {str(held.path) for held in edition.holds}, "what is seen is what is served"
    shutil.copytree(tmp_path / newer, runs[newer] / "checkpoint-2")
    then = see(options)
    assert then is not None
    assert set(then.paths) - set(sight.paths) == {str(runs[newer] / "checkpoint-2")}
    again = open_edition(options)
    again.release()
    assert {str(held.path) for held in again.holds} == set(then.paths)


def test_a_model_with_an_adapter_is_as_old_as_the_newer_of_the_two(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    for number, file in enumerate(sorted([*adapter.iterdir(), *(tmp_path / "base").iterdir()])):
        os.utime(file, (1000 + number, 1000 + number))
    edition = open_edition(ServerConfig(model=ModelConfig(path=str(tmp_path / "base"), adapter=str(adapter))))
    edition.release()
    os.utime(adapter / "adapter_config.json", (5000, 5000))
    newer = open_edition(ServerConfig(model=ModelConfig(path=str(tmp_path / "base"), adapter=str(adapter))))
    newer.release()
    assert (edition.written_seconds or 0) < 2000
    assert newer.written_seconds == 5000


def test_an_adapter_of_tessera_is_served_beside_the_base_it_was_trained_beside_alone(tmp_path: Path) -> None:
    """Known by its files, since a base of another trainer has no manifest."""
    build("gpt_neox").save_pretrained(tmp_path / "hf")
    adapter = adapter_on(tmp_path / "hf", tmp_path / "lora")
    shutil.copytree(tmp_path / "hf", tmp_path / "copy")
    for options in ({"path": str(adapter)}, {"path": str(adapter), "base": str(tmp_path / "copy")}):
        open_edition(ServerConfig(model=ModelConfig(**options))).release()
    file = tmp_path / "hf" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    for options in ({"path": str(adapter)}, {"path": str(tmp_path / "hf"), "adapter": str(adapter)}):
        with pytest.raises(
            ConfigError, match=r"hf: is not the model that .*-00000002 was trained beside, .*--base-changed accept"
        ):
            open_edition(ServerConfig(model=ModelConfig(**options)))
        open_edition(ServerConfig(model=ModelConfig(**options, base_changed="accept"))).release()
    elsewhere = ServerConfig(model=ModelConfig(path=str(adapter), base=str(tmp_path / "copy")))
    open_edition(elsewhere).release()
    described = tmp_path / "copy" / "config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"layer_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match="copy: is not the model that"):
        open_edition(elsewhere)


@pytest.mark.parametrize("changed", ["weights", "configuration"])
def test_ranks_do_not_load_an_adapter_upon_a_base_that_changed_under_it(changed: str, tmp_path: Path) -> None:
    build("gpt_neox").save_pretrained(tmp_path / "hf")
    adapter = adapter_on(tmp_path / "hf", tmp_path / "lora")
    edition = open_edition(ServerConfig(model=ModelConfig(path=str(adapter))))
    assert edition.check_folder()
    if changed == "weights":
        file = tmp_path / "hf" / "model.safetensors"
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    else:
        described = tmp_path / "hf" / "config.json"
        described.write_text(json.dumps(json.loads(described.read_text()) | {"layer_norm_eps": 0.5}))
    with pytest.raises(RankStartError, match=r"what is served has changed, .*hf: is not the model that .* was trained beside"):
        edition.check_folder()
    edition.release()


def test_models_and_adapters_of_the_hub_are_served_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    base, added = (in_cache(tmp_path / "hub", folder, f"org/{folder.name}") for folder in (tmp_path / "base", adapter))
    for options, want in (
        ({"path": "hf:org/base"}, (base, None, "base")),
        ({"path": "hf:org/base@main"}, (base, None, "base")),
        ({"path": "hf:org/base", "adapter": "hf:org/adapter"}, (base, added, "base")),
        ({"path": "hf:org/adapter", "base": "hf:org/base", "name": "mine"}, (added, base, "mine")),
    ):
        edition = open_edition(ServerConfig(model=ModelConfig(**options)))
        model = edition.config.model
        assert (Path(model.path), *map(Path, filter(None, (model.base, model.adapter)))) == tuple(filter(None, want[:2]))
        assert model.name == want[2]
        edition.release()


@pytest.mark.parametrize("key", ["path", "base", "adapter"])
def test_a_name_that_the_hub_s_cache_has_not_is_told_by_its_key(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    options = {"path": str(adapter if key == "base" else tmp_path / "base")} | {key: "hf:org/none"}
    with pytest.raises(ConfigError, match=rf"^model\.{key}: .*org/none.* nothing is downloaded here.*hf download org/none"):
        open_edition(ServerConfig(model=ModelConfig(**options)))

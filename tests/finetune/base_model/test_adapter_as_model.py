"""An adapter with its base is the model that training begins with, known by the files of both; no base of another adapter."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoint import CheckpointError, Given, open_checkpoint, pinned
from checkpoint.opening.prove import model_config, tokenizer_place
from finetune.base_model.identity import identified, settle_base
from finetune.base_model.opened import open_base_model
from finetune.config.load import load_config
from finetune.data.prepare import prepare
from finetune.errors import ConfigError
from finetune.forecast.estimate import model_config_of
from finetune.train.initial_model import InitialModel
from finetune.trained.export import export
from finetune.trained.merge import merge
from tests.finetune.base_model.test_identity import adapter_on, begin, config
from tests.finetune.base_model.test_identity import save as save_step
from tests.finetune.support import write_config
from tests.support.descriptors import descriptors
from tests.support.models import build, save, tokenizer


def folders(root: Path) -> tuple[Path, Path]:
    """A base and an adapter of one layer."""
    base, adapter = save("llama", root / "base"), root / "adapter"
    adapter.mkdir()
    with open_checkpoint(base) as checkpoint:
        rows, columns = checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].shape
    factors = {"lora_A": torch.ones(1, columns), "lora_B": torch.ones(rows, 1)}
    names = {key: f"base_model.model.model.layers.0.mlp.up_proj.{key}.weight" for key in factors}
    save_file({names[key]: tensor for key, tensor in factors.items()}, adapter / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    return base, adapter


def identity_of(path: Path) -> str:
    with open_checkpoint(path) as checkpoint:
        return identified(checkpoint).identity


def changed(file: Path) -> None:
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)


def test_it_is_known_by_the_files_of_both_and_by_its_description(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    seen = [identity_of(base), identity_of(adapter), identity_of(adapter)]
    assert seen[1] == seen[2]
    changed(adapter / "adapter_model.safetensors")
    seen.append(identity_of(adapter))
    changed(base / "model.safetensors")
    seen.append(identity_of(adapter))
    description = adapter / "adapter_config.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"lora_alpha": 3}))
    seen.append(identity_of(adapter))
    assert len(set(seen)) == 5


@pytest.mark.parametrize("added", [False, True])
def test_a_new_adapter_has_a_whole_model_for_its_base(added: bool, tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    tree = {
        "model": {"path": str(base), "adapter": str(adapter)} if added else {"path": str(adapter), "base": str(base)},
        "tokenizer": {"path": str(tmp_path / "tokenizer.json")},
        "data": {"train": str(tmp_path / "rows.txt"), "seq_len": 32, "eval_fraction": 0},
        "schedule": {"steps": 1},
        "run": {"output": str(tmp_path / "run"), "device": "cpu", "precision": "fp32"},
    }
    config = load_config(write_config(tree, tmp_path / "run.yaml"))
    prepared = prepare(config, lambda _: None)
    begun = InitialModel(config, prepared)
    assert begun.base is not None
    assert begun.base.identity == identity_of(adapter)
    before = descriptors()
    with pytest.raises(ConfigError, match=r"is no base for another adapter \(lora\).*tessera-finetune export"):
        InitialModel(load_config(write_config(tree | {"lora": {}}, tmp_path / "lora.yaml")), prepared)
    for weights in (True, False):
        with pytest.raises(ConfigError, match=r"is no base for another adapter \(lora\)"):
            model_config_of(load_config(tmp_path / "lora.yaml"), weights=weights)
    assert descriptors() <= before
    for model, rule in (
        ({"path": str(base), "base": str(base)}, "has a whole model, and needs none"),
        ({"path": str(base), "base": str(base), "adapter": str(adapter)}, "leave one of them out"),
        ({"path": str(adapter), "adapter": str(adapter)}, "there is one at a time"),
    ):
        with pytest.raises(ConfigError, match=rule):
            InitialModel(load_config(write_config(tree | {"model": model}, tmp_path / "x.yaml")), prepared)


def test_the_adapters_own_tokenizer_counts_wherever_it_is_named(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    (adapter / "config.json").write_bytes((base / "config.json").read_bytes())
    assert tokenizer_place(adapter).path == base.resolve()
    tokenizer().save(str(adapter / "tokenizer.json"))
    for path, given in ((adapter, Given()), (base, Given(adapter=str(adapter)))):
        assert tokenizer_place(path, given).path == adapter.resolve()
        assert model_config(path, given)[0]["model_type"] == "llama"
    with pytest.raises(CheckpointError, match="there is one at a time"):
        pinned(adapter, Given(adapter=str(adapter)))


def test_a_base_model_is_named_beside_an_adapter_alone(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    given = Given(base=str(base))
    assert pinned(base, given).base == str(base), "which opening it then refuses"
    with pytest.raises(CheckpointError, match=rf"{base}: is given as an adapter's base model; {base} has a whole model"):
        open_checkpoint(base, given=given)
    for opened in (pinned, lambda path, given: open_checkpoint(path, given=given)):
        with pytest.raises(CheckpointError, match="leave one of them out"):
            opened(base, Given(base=str(base), adapter=str(adapter)))
        with pytest.raises(CheckpointError, match=f"{base}: is a checkpoint of Hugging Face, no adapter"):
            opened(base, Given(adapter=str(base)))


@pytest.mark.parametrize("state", ["resume state", "checkpoints alone"])
@pytest.mark.parametrize("added", [False, True])
def test_a_run_that_began_with_an_adapter_goes_on_without_its_base(added: bool, state: str, tmp_path: Path) -> None:
    """Its own saves are whole models."""
    base, adapter = folders(tmp_path)
    tree = config(base if added else adapter, tmp_path / "out", lora=False)
    if added:
        tree = replace(tree, model=replace(tree.model, adapter=str(adapter)))
    begin(tree)
    shutil.rmtree(adapter if added else base)
    own = save_step(build("llama"), tmp_path / "out" / "checkpoints", 2)
    if state != "resume state":
        shutil.rmtree(tmp_path / "out" / "resume")
    said: list[str] = []
    gone_on = settle_base(tree, said.append)
    assert gone_on.model.path == str(own.resolve())
    assert "the run goes on without it, by what it saved itself" in said[0]
    open_base_model(gone_on).close()


def test_the_base_is_the_very_folder_that_a_root_means_when_the_run_begins(tmp_path: Path) -> None:
    root = tmp_path / "base" / "checkpoints"
    first = save_step(build("gpt_neox"), root, 4)
    adapter = adapter_on(first, tmp_path / "lora")
    shutil.copytree(tmp_path / "lora", tmp_path / "more")
    described = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(root)}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    begins = settle_base(config(adapter, tmp_path / "out", lora=False), print)
    assert begins.model.base == str(first.resolve())
    added = replace(begins.model, path=str(first), base=None, adapter=str(tmp_path / "more"))
    begins = settle_base(replace(begins, model=added), print)
    assert begins.model.adapter == str((tmp_path / "more" / adapter.name).resolve())


def test_an_adapter_of_tessera_is_proved_beside_a_base_without_a_manifest(tmp_path: Path) -> None:
    build("gpt_neox").save_pretrained(tmp_path / "hf")
    adapter = adapter_on(tmp_path / "hf", tmp_path / "lora")
    tree = config(adapter, tmp_path / "out", lora=False)
    open_base_model(tree).close()
    export(adapter, tmp_path / "whole")
    changed(tmp_path / "hf" / "model.safetensors")
    for refused in (lambda: open_base_model(tree), lambda: export(adapter, tmp_path / "other")):
        with pytest.raises((CheckpointError, ConfigError), match=r"hf: is not the model that .* was trained beside, .*model "):
            refused()
    assert not (tmp_path / "other").exists()
    with open_checkpoint(adapter) as opened:
        opened.check_base(Given(any_base=True))


def test_an_adapter_in_the_newest_of_another_trainer_s_folders_is_merged(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    for step in (5, 10):
        shutil.copytree(adapter, tmp_path / "trainer" / f"checkpoint-{step}")
    changed(tmp_path / "trainer" / "checkpoint-10" / "adapter_model.safetensors")
    merge(tmp_path / "trainer", tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    with open_checkpoint(tmp_path / "out") as out, open_checkpoint(tmp_path / "trainer" / "checkpoint-10") as newest:
        assert torch.equal(out.read(name), newest.read(name))
    with pytest.raises(ConfigError, match="it is not an adapter"):
        merge(base, tmp_path / "none")


def test_a_base_with_an_adapter_in_its_own_files_is_none_for_another(tmp_path: Path) -> None:
    base, _ = folders(tmp_path)
    inner = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    save_file({name: tensor.contiguous() for name, tensor in inner.state_dict().items()}, base / "model.safetensors")
    inner.peft_config["default"].save_pretrained(str(base))
    open_base_model(config(base, tmp_path / "out", lora=False)).close()
    with pytest.raises(CheckpointError, match=r"is no base for another adapter \(lora\)"):
        open_base_model(config(base, tmp_path / "out"))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"base": "gone"}, "model.base: gone: names the base model 'gone', which is no folder here; name its folder"),
        ({"base": "~nobody-here/x"}, "model.base: ~nobody-here/x: names the base model '~nobody-here/x', which is no path"),
        ({"path": "base", "adapter": "gone"}, "model.adapter: gone: there is no such folder"),
        ({"path": "base", "adapter": "a\0b"}, "is no path: "),
        ({"path": "base", "adapter": "~nobody-here/x"}, "model.adapter: ~nobody-here/x: there is no such folder"),
        ({"path": "~nobody-here/x"}, "model.path: ~nobody-here/x: "),
        ({"path": "base", "base": "base"}, "model.base: base: is given as an adapter's base model; "),
    ],
)
def test_a_fault_is_told_by_the_key_that_names_it(
    model: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    tree = config(tmp_path / "adapter", tmp_path / "out", lora=False)
    tree = replace(tree, model=replace(tree.model, **model))
    with pytest.raises(ConfigError) as caught:
        model_config_of(tree)
    assert says in str(caught.value)

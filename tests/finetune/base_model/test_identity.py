"""A base model is one folder, named absolutely and known again by a hash: adapters never meet another one without a word."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoint import CheckpointWriter, Given, open_checkpoint
from finetune.base_model.given import given_of
from finetune.base_model.identity import candidates, identified, recorded, settle_base
from finetune.cli import main
from finetune.config import DataConfig, LoraConfig, ModelConfig, RunConfig, TuneConfig
from finetune.errors import ConfigError
from finetune.model.adapters import adapter_config_of, add_adapters, as_peft_names_them
from finetune.model.build import saved_config, tied_names
from finetune.trained.merge import adapter_folder, merge
from tests.support.models import build

IDS = torch.tensor([[5, 9, 40, 200, 17, 3, 88]])


def save(model: PreTrainedModel, root: Path, step: int) -> Path:
    with CheckpointWriter(root, step=step, config=saved_config(model.config, model.dtype)) as writer:
        for name, parameter in model.named_parameters():
            if name not in tied_names(model):
                writer.add(name, parameter.detach())
    return root / f"step-{step:08d}"


def changed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The same model trained on: every weight is another number."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=draw)
    return model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A base run's folder with the checkpoint of step 4."""
    save(build("gpt_neox"), tmp_path / "base" / "checkpoints", 4)
    return tmp_path / "base"


def save_later_step(run: Path) -> Path:
    """What the base run saves while an adapter is trained upon step 4."""
    return save(changed(build("gpt_neox"), 1), run / "checkpoints", 8)


def config(path: Path, output: Path, *, lora: bool = True, resume: str = "auto") -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output=str(output), resume=resume),  # type: ignore[arg-type]
        data=DataConfig(train=("text",)),
        model=ModelConfig(path=str(path)),
        lora=LoraConfig(rank=2) if lora else None,
    )


def settled_path(tree: TuneConfig, said: list[str] | None = None) -> Path:
    path = settle_base(tree, (lambda _: None) if said is None else said.append).model.path
    assert path is not None
    return Path(path)


def begin(tree: TuneConfig) -> Path:
    """Decide on the base as a new run does, and leave a resume state that says so."""
    folder = settled_path(tree)
    with open_checkpoint(folder) as base:
        state = CheckpointWriter(Path(tree.run.output) / "resume", step=2, config=base.config, extra=recorded(identified(base)))
        with state as writer:
            writer.add("master.x", torch.ones(2))
    return folder


def adapter_on(folder: Path, root: Path) -> Path:
    """An adapter upon the checkpoint in ``folder``, with the manifest that training writes."""
    wrapped = add_adapters(build("gpt_neox"), LoraConfig(rank=2), base=str(folder), seed=0)
    trained = {name: p.detach() for name, p in wrapped.named_parameters() if p.requires_grad}
    draw = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(t.shape, generator=draw) for name, t in as_peft_names_them(wrapped, trained).items()}
    with open_checkpoint(folder) as base:
        described = {"config": base.config, "adapter_config": adapter_config_of(wrapped), "extra": recorded(identified(base))}
    with CheckpointWriter(root, step=2, **described) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return root / "step-00000002"


def test_of_a_run_s_own_snapshots_the_one_named_is_taken(tmp_path: Path) -> None:
    root = tmp_path / "base" / "snapshots"
    first, second = save(build("gpt_neox"), root, 10), save(changed(build("gpt_neox"), 1), root, 20)
    begin(config(first, tmp_path / "out"))
    assert candidates(second) == [second.resolve()]
    with pytest.raises(ConfigError, match=r"step-00000020 is another model; the adapters of this run were trained beside"):
        settle_base(config(second, tmp_path / "out"), print)


def test_the_adapter_that_counts_is_taken_rather_than_that_of_the_highest_step(run: Path, tmp_path: Path) -> None:
    root = tmp_path / "lora" / "checkpoints"
    counts = adapter_on(run / "checkpoints" / "step-00000004", root)
    later = root / "step-00000009"
    shutil.copytree(counts, later)
    assert (root / "latest").read_text().strip() == counts.name
    assert adapter_folder(root.parent) == adapter_folder(root) == counts, "a run gone on from an older save left the later one"
    (root / "latest").unlink()
    assert adapter_folder(root) == later
    (later / "adapter_model.safetensors").write_bytes(b"")
    assert adapter_folder(root) == counts, "the later one is not whole"
    assert adapter_folder(later) == later, "named itself, it is taken, for its fault to be told"


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


def test_a_root_is_settled_to_one_folder_wherever_the_command_is_given(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = run / "checkpoints" / "step-00000004"
    monkeypatch.chdir(tmp_path)
    for path in (run, run / "checkpoints", step, Path("base"), Path("base/checkpoints")):
        assert settled_path(config(path, tmp_path / "out")) == step.resolve()
    with pytest.raises(ConfigError, match=r"model\.path: .*elsewhere: there is no such folder"):
        settle_base(config(tmp_path / "elsewhere", tmp_path / "out"), print)


@pytest.mark.parametrize("lora", [True, False])
def test_a_resumed_run_keeps_the_base_it_began_with(run: Path, tmp_path: Path, lora: bool) -> None:
    tree = config(run, tmp_path / "out", lora=lora)
    step = begin(tree)
    later = save_later_step(run)
    said: list[str] = []
    assert settled_path(tree, said) == step
    assert "means step-00000008 by now" in said[0]
    assert settled_path(config(run, tmp_path / "new", lora=lora)) == later.resolve(), "a new run takes the newest"
    assert settled_path(config(step, tmp_path / "out", lora=lora)) == step


def test_a_base_that_was_moved_is_known_again(run: Path, tmp_path: Path) -> None:
    tree = config(run, tmp_path / "out")
    begin(tree)
    save_later_step(run)
    moved = tmp_path / "archive" / "gpt"
    moved.parent.mkdir()
    run.rename(moved)
    with pytest.raises(ConfigError, match=r"model\.path: .*no such folder; .*trained beside .*step-00000004 \(manifest "):
        settled_path(tree)
    assert settled_path(config(moved, tmp_path / "out")) == (moved / "checkpoints" / "step-00000004").resolve()
    moved.rename(run)
    for gone in (tmp_path / "wrong", Path("~nobody-here/x")):
        assert settled_path(config(gone, tmp_path / "out")).name == "step-00000004", "where it was, it still is"


def test_adapters_do_not_go_on_beside_another_base_and_whole_models_say_so(run: Path, tmp_path: Path) -> None:
    tree = config(run, tmp_path / "out")
    begin(tree)
    save_later_step(run)
    shutil.rmtree(run / "checkpoints" / "step-00000004")  # as save.keep does
    with pytest.raises(ConfigError, match=r"step-00000008 is another model; .* it is there no more"):
        settled_path(tree)
    said: list[str] = []
    assert settled_path(config(run, tmp_path / "out", lora=False), said).name == "step-00000008"
    assert "is not what this run began with" in said[0]
    shutil.rmtree(run)
    own = save(build("gpt_neox"), tmp_path / "out" / "checkpoints", 2)
    assert settled_path(config(run, tmp_path / "out", lora=False), said) == own.resolve()
    assert "goes on without it" in said[1]


def test_a_run_that_goes_on_by_its_own_save_asks_no_more_for_the_config_of_its_base(run: Path, tmp_path: Path) -> None:
    """As of another trainer's folder, which was removed with the configuration that was given for it."""
    described = run / "checkpoints" / "step-00000004" / "config.json"
    given = described.rename(tmp_path / "config.json")
    (described.parent / "manifest.json").unlink()
    tree = config(described.parent, tmp_path / "out", lora=False)
    tree = replace(tree, model=replace(tree.model, config=str(given)))
    assert given_of(tree).config == str(given)
    own = save(build("gpt_neox"), tmp_path / "out" / "checkpoints", 2)
    shutil.rmtree(run)
    given.unlink()
    gone_on = settle_base(tree, lambda _: None)
    assert gone_on.model.path == str(own.resolve())
    with open_checkpoint(own, given=given_of(gone_on)) as checkpoint:
        assert checkpoint.config["model_type"] == "gpt_neox"


def test_a_folder_without_a_manifest_is_known_by_its_tensors(tmp_path: Path) -> None:
    build("gpt_neox").save_pretrained(tmp_path / "hf")
    tree = config(tmp_path / "hf", tmp_path / "out")
    begin(tree)
    (tmp_path / "hf" / "model.safetensors").touch()
    assert settled_path(tree) == (tmp_path / "hf").resolve()
    shutil.rmtree(tmp_path / "hf")
    changed(build("gpt_neox"), 2).save_pretrained(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"have changed; .* \(model "):
        settled_path(tree)


def test_an_older_snapshot_of_the_hub_s_cache_is_gone_on_with(tmp_path: Path) -> None:
    snapshots = tmp_path / "models--org--name" / "snapshots"
    build("gpt_neox").save_pretrained(snapshots / "aa")
    tree = config(snapshots / "aa", tmp_path / "out")
    begin(tree)
    changed(build("gpt_neox"), 2).save_pretrained(snapshots / "bb")
    assert settled_path(config(snapshots / "bb", tmp_path / "out")) == (snapshots / "aa").resolve()
    assert settled_path(config(snapshots / "bb", tmp_path / "new")) == (snapshots / "bb").resolve()


def test_an_adapter_is_merged_with_its_own_base_whatever_was_saved_since(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = run / "checkpoints" / "step-00000004"
    adapter = adapter_on(step, tmp_path / "lora" / "checkpoints")
    expected = logits_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(step), str(adapter)))
    save_later_step(run)
    merge(tmp_path / "lora", tmp_path / "named")
    merge(tmp_path / "lora", tmp_path / "root", given=Given(base=str(run)))
    for made in ("named", "root"):
        torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / made)), expected)
    monkeypatch.chdir("/")
    torch.testing.assert_close(logits_of(AutoPeftModelForCausalLM.from_pretrained(str(adapter))), expected)
    words = ["merge", str(tmp_path / "lora"), str(tmp_path / "other"), "--base", str(run / "checkpoints" / "step-00000008")]
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"is not the model that {adapter} was trained beside, {step.resolve()} (manifest " in said
    assert "--base-changed accept" in said
    assert not (tmp_path / "other").exists()
    assert main([*words, "--base-changed", "accept"]) == 0
    with (adapter / "manifest.json").open("a") as manifest:
        manifest.write(" ")
    with pytest.raises(ConfigError, match=r"step-00000002: manifest\.json: was changed"):
        merge(adapter, tmp_path / "changed")


def test_an_adapter_of_an_earlier_release_is_merged_with_a_word_that_its_base_is_not_proved(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = adapter_on(run / "checkpoints" / "step-00000004", tmp_path / "lora")
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": str(run / "checkpoints")}))
    (adapter / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        merge(adapter, tmp_path / "merged")
    assert f"{adapter} does not say what its base model held; {run.resolve()}" in caplog.text

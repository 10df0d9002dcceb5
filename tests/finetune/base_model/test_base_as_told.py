"""A base is known by its configuration and how its files are read too; an adapter remembers what training was told of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import CheckpointError, CheckpointWriter, Given, open_checkpoint
from checkpoint.given import NOTHING_GIVEN, recorded_of, with_recorded
from checkpoint.opening.identity import identity_of
from checkpoint.opening.prove import open_structure
from finetune.base_model.identity import Base, identified, recorded, settle_base
from finetune.base_model.opened import open_base_model
from finetune.config import LoraConfig
from finetune.errors import ConfigError
from finetune.model.adapters import adapter_config_of, add_adapters, as_peft_names_them
from finetune.train.position import RunPosition
from finetune.train.recovery import SavedWeights
from finetune.train.resume import ResumeState
from finetune.trained.export import export
from finetune.trained.merge import merge
from finetune.trained.open import open_trained
from tests.finetune.base_model.test_identity import begin, config, settled_path
from tests.support.models import build, save, tokenizer

DENSE = "gpt_neox.layers.0.attention.dense.weight"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the tensors of a student and of its teacher, of one shape."""
    folder = save("gpt_neox", tmp_path / "two")
    tensors = load_file(folder / "model.safetensors")
    both = {f"student.{name}": tensor for name, tensor in tensors.items()}
    save_file(both | {f"teacher.{name}": tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def adapter_on(folder: Path, root: Path, given: Given = NOTHING_GIVEN, base: Base | None = None) -> Path:
    """An adapter with random weights, and the manifest that training upon the base writes."""
    wrapped = add_adapters(build("gpt_neox"), LoraConfig(rank=2), base=str(folder), seed=0)
    trained = {name: parameter.detach() for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    draw = torch.Generator().manual_seed(3)
    with open_checkpoint(folder, given=given) as opened:
        extra = recorded(base or identified(opened))
        described = {"config": opened.config, "adapter_config": adapter_config_of(wrapped), "extra": extra}
    with CheckpointWriter(root, step=2, **described) as writer:
        for name, tensor in as_peft_names_them(wrapped, trained).items():
            writer.add(name, torch.randn(tensor.shape, generator=draw))
    return root / "step-00000002"


def dense_of(path: Path, **given: str) -> torch.Tensor:
    with open_checkpoint(path, given=Given(**given)) as opened:  # type: ignore[arg-type]
        return opened.read(DENSE)


def test_what_training_was_told_of_a_base_need_not_be_said_again(two: Path, tmp_path: Path) -> None:
    adapter = adapter_on(two, tmp_path / "lora", Given(prefix="student."))
    want = dense_of(adapter, prefix="student.")
    assert torch.equal(dense_of(adapter), want)
    for made in (export(adapter, tmp_path / "exported"), merge(adapter, tmp_path / "merged")):
        assert torch.equal(dense_of(made), want)
    tokenizer().save(str(adapter / "tokenizer.json"))
    assert torch.equal(open_trained(adapter, torch.float32).model.get_parameter(DENSE), want)
    assert not torch.equal(dense_of(adapter, prefix="teacher."), want)
    for refused in (merge, export):
        with pytest.raises(ConfigError, match=r"two: is not the model that .*-00000002 was trained beside, "):
            refused(adapter, tmp_path / "other", given=Given(prefix="teacher."))


def test_a_base_written_anew_is_accepted_if_the_user_says_so(two: Path, tmp_path: Path) -> None:
    """Of what training was told, the names' prefix, say, is not looked for in a base that has another layout by now."""
    adapter = adapter_on(two, tmp_path / "lora", Given(prefix="student."))
    anew = export(two, tmp_path / "anew", given=Given(prefix="student."), ranks=2)
    for refused in (merge, export):
        with pytest.raises(
            (CheckpointError, ConfigError), match=r"'student\.'.* \(training was told: prefix student\.; .* accept"
        ):
            refused(adapter, tmp_path / "other", given=Given(base=str(anew)))
    accepted, want = Given(base=str(anew), any_base=True), dense_of(adapter)
    with open_checkpoint(adapter, given=accepted) as opened:
        assert torch.equal(opened.read(DENSE), want)
    assert torch.equal(dense_of(merge(adapter, tmp_path / "merged", given=accepted)), want)
    assert torch.equal(open_trained(adapter, torch.float32, accepted).model.get_parameter(DENSE), want)
    tree = config(adapter, tmp_path / "out", lora=False)
    told = replace(tree.model, base=str(anew), base_changed="accept")
    settled = settle_base(replace(tree, model=told), print)
    with open_base_model(settled) as opened:
        assert torch.equal(opened.read(DENSE), want)
    with pytest.raises(CheckpointError, match="training was told"):
        open_base_model(replace(settled, model=replace(settled.model, base_changed="refuse")))


def test_adapters_go_on_upon_a_base_that_is_read_as_it_was(two: Path, tmp_path: Path) -> None:
    def told(prefix: str | None):  # type: ignore[no-untyped-def]
        tree = config(two, tmp_path / "out")
        return replace(tree, model=replace(tree.model, weights_prefix=prefix))

    with open_checkpoint(two, given=Given(prefix="student.")) as base:
        state = CheckpointWriter(tmp_path / "out" / "resume", step=2, config=base.config, extra=recorded(identified(base)))
    with state as writer:
        writer.add("master.x", torch.ones(2))
    assert settle_base(told("student."), print).model.path == str(two)
    with pytest.raises(ConfigError, match=r"what is said of how they are read \(model\) have changed; .*, prefix student\.\)"):
        settle_base(told("teacher."), print)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_parameters", {"rope_type": "default", "rope_theta": 300.0}), ("layer_norm_eps", 0.5), ("hidden_act", "relu")],
)
def test_a_base_of_another_configuration_is_another_model(key: str, value: object, tmp_path: Path) -> None:
    folder = save("gpt_neox", tmp_path / "hf")
    adapter = adapter_on(folder, tmp_path / "lora")
    begin(config(folder, tmp_path / "out"))
    file = folder / "config.json"
    held = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(held.items())) | {"transformers_version": "6.0.0", "use_cache": False}))
    assert settled_path(config(folder, tmp_path / "out")) == folder
    merge(adapter, tmp_path / "merged")
    file.write_text(json.dumps(held | {key: value}))
    with pytest.raises(ConfigError, match="its configuration has changed"):
        settled_path(config(folder, tmp_path / "out"))
    for refused in (merge, export):
        with pytest.raises(ConfigError, match=r"hf: is not the model that"):
            refused(adapter, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"hf: is not the model that"):
        open_trained(folder, torch.float32, Given(adapter=str(adapter)))


@pytest.mark.parametrize(
    ("family", "was", "now"),
    [
        ("mistral", {"sliding_window": None}, {"sliding_window": 4}),
        ("mistral", {"sliding_window": 4}, {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": 2.0}, {"attn_logit_softcapping": None}),
        ("gpt_neox", {}, {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 10000}),
        ("gpt2", {"n_inner": None}, {"activation_function": "relu"}),
    ],
)
def test_what_a_configuration_leaves_out_counts_as_its_default(
    family: str, was: dict[str, object], now: dict[str, object], tmp_path: Path
) -> None:
    folder = save(family, tmp_path / "hf")
    held = json.loads((folder / "config.json").read_text()) | was
    found = []
    width = held.get("hidden_size", held.get("n_embd"))
    usual = {"n_inner": 4 * width} if family == "gpt2" else {"head_dim": held.get("head_dim") or width // 4}
    same = {"problem_type": "x", "num_labels": 7, **usual} | ({} if family == "gpt2" else {"max_position_embeddings": 4096})
    for said in ({}, now, same):
        values = {key: value for key, value in (held | said).items() if value is not None or key != "rope_parameters"}
        (folder / "config.json").write_text(json.dumps(values))
        with open_checkpoint(folder) as opened:
            found.append(identified(opened))
    assert "its configuration has changed: " in found[1].difference(found[0])
    assert found[2].is_recorded_as(found[0]), "computes the same"


def test_a_configuration_that_was_given_to_training_is_known_of_a_base_with_a_manifest_too(tmp_path: Path) -> None:
    model = build("llama")
    with CheckpointWriter(tmp_path / "base", step=1, config=model.config.to_dict()) as writer:
        for name, tensor in model.state_dict().items():
            writer.add(name, tensor)
    base, longer = tmp_path / "base" / "step-00000001", tmp_path / "longer.json"
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    longer.write_text(json.dumps(json.loads((base / "config.json").read_text()) | {"rope_parameters": scaled}))
    with open_checkpoint(base, given=Given(config=str(longer))) as opened:
        told = identified(opened)
    with open_checkpoint(base) as opened:
        assert "rope_parameters was {'factor': 4.0" in identified(opened).difference(told).replace(
            "'rope_type': 'linear', ", ""
        )


@pytest.mark.parametrize("moved", [False, True])
def test_adapters_go_on_where_another_trainer_s_root_has_a_newer_save(moved: bool, tmp_path: Path) -> None:
    for step in (2, 4):
        build("gpt_neox", seed=step).save_pretrained(tmp_path / "trainer" / f"checkpoint-{step}")
    shutil.move(tmp_path / "trainer" / "checkpoint-4", tmp_path / "later")
    begin(config(tmp_path / "trainer", tmp_path / "out"))
    adapter = adapter_on(tmp_path / "trainer" / "checkpoint-2", tmp_path / "lora")
    shutil.move(tmp_path / "later", tmp_path / "trainer" / "checkpoint-4")
    root = Path(shutil.move(tmp_path / "trainer", tmp_path / "elsewhere")) if moved else tmp_path / "trainer"
    assert settled_path(config(root, tmp_path / "out")) == root / "checkpoint-2"
    whole = merge(adapter, tmp_path / "merged", given=Given(base=str(root)))
    assert torch.equal(dense_of(whole), dense_of(adapter, base=str(root / "checkpoint-2")))


def test_what_earlier_releases_recorded_is_known_without_the_configuration(tmp_path: Path) -> None:
    folder = save("gpt_neox", tmp_path / "hf")
    with open_structure(folder) as structure:
        earlier = Base(folder=str(folder), identity=str(identity_of(structure).earlier))
        assert earlier.identity.startswith("tensors:")
        assert structure.manifest is None
    adapter = adapter_on(folder, tmp_path / "lora", base=earlier)
    assert json.loads((adapter / "manifest.json").read_text())["extra"]["base"].keys() == {"folder", "identity"}
    merge(adapter, tmp_path / "merged")
    save_file({name: t + 1 for name, t in load_file(folder / "model.safetensors").items()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"hf: is not the model that .* \(tensors [0-9a-f]{12}\)"):
        merge(adapter, tmp_path / "other")


def test_a_tokenizer_that_training_was_given_is_the_copy_beside_the_adapter(tmp_path: Path) -> None:
    folder = save("gpt_neox", tmp_path / "hf")
    elsewhere = tmp_path / "tokenizer.json"
    tokenizer().save(str(elsewhere))
    adapter = adapter_on(folder, tmp_path / "lora", Given(tokenizer=str(elsewhere)))
    with open_checkpoint(adapter) as opened:
        assert opened.given == Given(tokenizer=str(elsewhere))
    elsewhere.rename(adapter / "tokenizer.json")
    with open_checkpoint(adapter) as opened:
        assert opened.given == Given(tokenizer=str(adapter))
        opened.check_base()


def test_what_is_recorded_says_what_is_left_open_and_nothing_that_breaks_a_rule(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.touch()
    given = Given(config=str(file), prefix="a.", neox_qkv_layout="per-head", master_weights=True, base="x", adapter="y")
    kept = {"config": str(file), "prefix": "a.", "neox_qkv_layout": "per-head", "master_weights": True}
    assert recorded_of(given) == kept
    assert with_recorded(NOTHING_GIVEN, kept) == replace(given, base=None, adapter=None)
    assert with_recorded(Given(prefix="b."), kept).prefix == "b."
    wrong = {
        "config": str(tmp_path / "gone"),
        "prefix": 1,
        "neox_qkv_layout": "rows",
        "master_weights": "yes",
        "base": "z",
        "": 2,
    }
    assert with_recorded(NOTHING_GIVEN, wrong) == NOTHING_GIVEN


def test_a_folder_that_cannot_be_opened_is_told_rather_than_taken_for_another(tmp_path: Path) -> None:
    folder = save("gpt_neox", tmp_path / "hf")
    adapter = adapter_on(folder, tmp_path / "lora")
    (folder / "config.json").write_text("{")
    with pytest.raises((CheckpointError, ConfigError), match=r"config\.json: "):
        merge(adapter, tmp_path / "out")


@pytest.mark.parametrize("kind", ["resume state", "adapters alone"])
def test_what_earlier_releases_recorded_is_gone_on_with(kind: str, tmp_path: Path) -> None:
    """Also on the ranks, which compare once more."""
    folder = save("gpt_neox", tmp_path / "hf")
    with open_checkpoint(folder) as opened:
        now, hf_config = identified(opened), dict(opened.config)
    earlier = Base(folder=str(folder), identity=str(now.earlier))
    assert now.is_recorded_as(earlier)
    assert not now.is_recorded_as(replace(earlier, identity="tensors:0"))
    assert now.is_recorded_as(now)
    if kind == "resume state":
        extra = {**recorded(earlier), "progress": RunPosition(step=2, samples=8).record(), "settings": {}}
        with CheckpointWriter(tmp_path / "resume", step=2, config=hf_config, extra=extra) as writer:
            writer.add("master.x", torch.ones(2))
        state: ResumeState | SavedWeights = ResumeState(open_checkpoint(tmp_path / "resume"))
    else:
        state = SavedWeights(adapter_on(folder, tmp_path / "checkpoints", base=earlier), config(folder, tmp_path / "out"), ())
    state.check({}, now)
    with pytest.raises(ConfigError, match="trained beside"):
        state.check({}, replace(now, identity="model:1", earlier="tensors:1"))


def test_a_configuration_in_other_words_is_the_same(tmp_path: Path) -> None:
    """As another release of transformers saves it, or the hub mends it."""
    words: dict[str, dict[str, object]] = {
        "old": {
            "rope_theta": 1e4,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "eos_token_id": 0,
            "pretraining_tp": None,
        },
        "new": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}, "eos_token_id": 1},
        "plain": {"rope_theta": 1e4, "attention_bias": False, "rope_scaling": None},
        "neox": {"rotary_emb_base": 1e4},
    }
    held = json.loads((save("llama", tmp_path / "hf") / "config.json").read_text())
    del held["rope_parameters"]
    found = {}
    for name, said in words.items():
        (tmp_path / "hf" / "config.json").write_text(json.dumps(held | said))
        with open_checkpoint(tmp_path / "hf") as opened:
            found[name] = identified(opened)
    assert found["new"].is_recorded_as(found["old"])
    assert found["old"].is_recorded_as(found["new"])
    assert found["plain"].is_recorded_as(found["neox"])
    assert not found["plain"].is_recorded_as(found["new"]), "positions that are scaled are another model"
    assert not found["new"].is_recorded_as(found["neox"])

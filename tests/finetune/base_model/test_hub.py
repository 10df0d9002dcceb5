"""Models of the hub by name: found in the hub's own cache, without a network; only what is needed is asked for."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from checkpoint import CheckpointWriter, Given, open_checkpoint
from finetune.base_model.hub import folder_of, located
from finetune.base_model.opened import open_base_model
from finetune.cli import main
from finetune.config import TuneConfig
from finetune.config.load import load_config
from finetune.errors import ConfigError
from finetune.launch.prerequisites import make_ready, settled
from finetune.model.build import load_model
from finetune.train.initial_model import InitialModel
from tests.finetune.base_model.test_adapter_as_model import folders as adapter_folders
from tests.finetune.base_model.test_identity import begin, settled_path
from tests.finetune.base_model.test_identity import save as save_checkpoint
from tests.finetune.support import run_command, small_run, write_config
from tests.finetune.train.test_tune import losses_of
from tests.support.models import build, save

COMMITS = ("a" * 40, "b" * 40)


def into_cache(cache: Path, name: str, folder: Path, commit: str, *refs: str) -> None:
    """Lay the files of a folder into a cache as huggingface_hub does: blobs, a snapshot of links to them, refs."""
    root = cache / f"models--{name.replace('/', '--')}"
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        (root / "blobs" / blob).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob)
    for ref in refs:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / ref).write_text(commit)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF_HOME with ``someone/small`` in two revisions, and ``old``, whose weights are in the old format."""
    root = tmp_path_factory.mktemp("hub")
    first, second = (save("gpt_neox", root / f"model-{seed}", seed=seed) for seed in (0, 1))
    into_cache(root / "home" / "hub", "someone/small", first, COMMITS[0], "main")
    into_cache(root / "home" / "hub", "someone/small", second, COMMITS[1], "v2")
    torch.save(load_file(second / "model.safetensors"), second / "pytorch_model.bin")
    (second / "model.safetensors").unlink()
    into_cache(root / "home" / "hub", "old", second, COMMITS[1], "main")
    into_cache(root / "home" / "hub", "partly", _without(second, "pytorch_model.bin"), COMMITS[0], "main")
    return root / "home"


def _without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


@pytest.fixture
def offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As HF_HUB_OFFLINE=1 and HF_HOME make it, which the library reads when it is imported. Returns the cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    return home / "hub"


def query_of(folder: Path) -> torch.Tensor:
    with open_checkpoint(folder) as checkpoint:
        return load_model(checkpoint, torch.float32).gpt_neox.layers[0].attention.query_key_value.weight


def test_names_and_revisions_are_folders_of_the_cache(offline: Path) -> None:
    snapshots = offline / "models--someone--small" / "snapshots"
    main_folder, other = folder_of("hf:someone/small", "model.path"), folder_of("hf:someone/small@v2", "model.path")
    assert (main_folder, other) == (snapshots / COMMITS[0], snapshots / COMMITS[1])
    assert folder_of(f"hf:someone/small@{COMMITS[1]}", "model.path") == other
    assert not torch.equal(query_of(main_folder), query_of(other))
    assert torch.equal(query_of(folder_of("hf:old", "model.path")), query_of(other)), "through the restricted unpickler"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hf:someone/none", "revision main of someone/none is not in the cache {cache}, and HF_HUB_OFFLINE is set"),
        ("hf:someone/none", "where there is a network, `hf download someone/none` fetches it; or give a folder"),
        ("hf:someone/small@v3", "revision v3 of someone/small is not in the cache"),
        ("hf:partly", "no weights (*.safetensors or *.bin) in"),
        ("hf:a/b/c", "a model of the hub is named hf:ORG/NAME or hf:ORG/NAME@REVISION"),
        ("gpt2", "gpt2: there is no such folder; a model of the Hugging Face hub is named hf:gpt2"),
        ("someone/small", "a model of the Hugging Face hub is named hf:someone/small"),
    ],
)
def test_what_is_not_there_is_told_with_the_way_to_it(offline: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        folder_of(name, "model.path")
    assert str(caught.value).startswith("model.path")
    assert says.format(cache=offline) in str(caught.value)


def test_the_commonest_first_try_is_answered_by_every_command(
    tmp_path: Path, text_folder: Path, offline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = small_run(text_folder, tmp_path / "run")
    del tree["model"], tree["tokenizer"]
    config = str(write_config({**tree, "model": {"path": "gpt2"}}, tmp_path / "run.yaml"))
    (tmp_path / "p.txt").write_text("def\n")
    for words in (
        ["tune", config],
        ["plan", config],
        ["prepare", config],
        ["data", "check", config],
        ["tune", config, "--model.path", str(text_folder), "--tokenizer.path", "gpt2"],
        ["evaluate", "gpt2", "--data", str(text_folder)],
        ["predict", "gpt2", "--prompts", str(tmp_path / "p.txt")],
        ["export", "gpt2", str(tmp_path / "out")],
    ):
        assert main(words) == 2
        assert "a model of the Hugging Face hub is named hf:gpt2" in " ".join(capsys.readouterr().err.split()), words
    assert not (tmp_path / "run").exists()


def test_a_plan_and_data_need_no_weights(tmp_path: Path, text_folder: Path, offline: Path) -> None:
    tree = small_run(text_folder, tmp_path / "run")
    del tree["model"], tree["tokenizer"]
    config = str(write_config({**tree, "model": {"path": "hf:partly"}}, tmp_path / "run.yaml"))
    assert main(["plan", config, "--ram-gib", "100"]) == 0
    assert main(["data", "check", config]) == 0


def fake_hub(files: Sequence[str], folder: Path, asked: list[str]) -> Callable[..., str]:
    """Stands in for ``snapshot_download`` where there is a network: writes what the patterns ask for."""

    def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        folder.mkdir(exist_ok=True)
        for name in files:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (folder / name).touch()
                asked.append(name)
        return str(folder)

    return snapshot_download


OTHERS = [
    "README.md",
    "model.onnx",
    "tf_model.h5",
    "flax_model.msgpack",
    "onnx/model.safetensors",
    "modeling_own.py",
    "rust_model.ot",
]
SMALL = ["config.json", "generation_config.json", "tokenizer.json", "vocab.json", "merges.txt"]


@pytest.mark.parametrize(
    ("need", "there", "wanted"),
    [
        ("model", ["model.safetensors", "pytorch_model.bin"], [*SMALL, "model.safetensors"]),
        (
            "model",
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
            [*SMALL, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
        ),
        ("model", ["pytorch_model.bin"], [*SMALL, "pytorch_model.bin"]),
        ("tokenizer", ["model.safetensors"], SMALL),
        ("config", ["model.safetensors"], SMALL[:2]),
    ],
)
def test_only_what_is_needed_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, need: str, there: list[str], wanted: list[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_hub([*OTHERS, *SMALL, *there], tmp_path / "got", asked))
    folder_of("hf:someone/model", "model.path", need)  # type: ignore[arg-type]
    assert sorted(set(asked)) == sorted(wanted)


@pytest.mark.parametrize("need", ["model", "config", "adapter"])
def test_of_an_adapter_its_own_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, need: str) -> None:
    asked: list[str] = []
    own = ["adapter_config.json", "adapter_model.safetensors", "manifest.json", "tokenizer.json"]
    there = [*OTHERS, *own, *(("config.json", "model.safetensors") if need == "adapter" else ())]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_hub(there, tmp_path / "got", asked))
    folder_of("hf:someone/lora", "model.path", need)  # type: ignore[arg-type]
    assert set(asked) - {"config.json"} == set(own)


def test_of_a_model_with_an_adapter_beside_it_the_model_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many publish what they merged: with the adapter's weights there it could not be told which is meant."""
    asked: list[str] = []
    there = [*SMALL, "model.safetensors", "adapter_config.json", "adapter_model.safetensors"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_hub(there, tmp_path / "got", asked))
    folder_of("hf:someone/merged", "model.path")
    assert set(there) - set(asked) == {"adapter_model.safetensors"}


def test_names_become_folders_before_a_run(tmp_path: Path, text_folder: Path, offline: Path) -> None:
    tree = small_run(text_folder, tmp_path / "run", tokenizer={"path": "hf:someone/small"})
    del tree["tokenizer"]["train"]
    tree["model"] = {"path": "hf:someone/small@v2"}
    said: list[str] = []
    config = located(load_config(write_config(tree, tmp_path / "run.yaml")), said.append)
    assert config.model.path == str(offline / "models--someone--small" / "snapshots" / COMMITS[1])
    assert config.tokenizer.path == str(offline / "models--someone--small" / "snapshots" / COMMITS[0])
    assert said[0] == f"hf:someone/small@v2 is {config.model.path}"


def test_adapters_and_their_bases_are_named_by_the_hub_as_well(tmp_path: Path, text_folder: Path, offline: Path) -> None:
    base, adapter = adapter_folders(tmp_path / "lora")
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(described | {"base_model_name_or_path": "someone/llama"}))
    into_cache(offline, "someone/llama", base, COMMITS[0], "main")
    into_cache(offline, "someone/lora", adapter, COMMITS[1], "main")
    of_base, of_adapter = (offline / f"models--someone--{name}" / "snapshots" for name in ("llama", "lora"))
    for model in (
        {"path": "hf:someone/lora"},
        {"path": "hf:someone/lora", "base": "hf:someone/llama"},
        {"path": "hf:someone/llama", "adapter": "hf:someone/lora"},
    ):
        tree = small_run(text_folder, tmp_path / "run") | {"model": model}
        config = located(load_config(write_config(tree, tmp_path / "run.yaml")))
        named = {config.model.path, config.model.base, config.model.adapter} - {None}
        assert named <= {str(of_base / COMMITS[0]), str(of_adapter / COMMITS[1])}
        with open_base_model(config) as opened:
            assert opened.parts == f"{of_base / COMMITS[0]} with the adapter {of_adapter / COMMITS[1]}"
    with open_checkpoint(base, given=Given(adapter="hf:someone/lora")) as opened:
        assert opened.is_adapted
    assert folder_of("hf:someone/lora", "model.path", "config") == of_adapter / COMMITS[1]
    wrong = small_run(text_folder, tmp_path / "run") | {"model": {"path": "hf:someone/llama", "adapter": "hf:someone/llama"}}
    with pytest.raises(ConfigError, match=r"^model\.adapter: hf:someone/llama: no adapter \(adapter_config\.json, "):
        located(load_config(write_config(wrong, tmp_path / "run.yaml")))


def test_what_is_far_too_large_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_folder: Path) -> None:
    asked: list[str] = []
    folder = tmp_path / "got"
    folder.mkdir()
    sizes = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 8000}

    def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        asked.extend(allow_patterns)
        (folder / "config.json").write_text(json.dumps(sizes))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    tree = small_run(text_folder, tmp_path / "run")
    del tree["tokenizer"]
    tree["model"] = {"path": "hf:someone/huge"}
    assert main(["tune", str(write_config(tree, tmp_path / "run.yaml"))]) == 2
    assert asked == ["config.json", "generation_config.json", "adapter_config.json"]


def test_a_run_goes_on_without_the_hub_by_its_base_or_by_what_it_saved(
    tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    into_cache(tmp_path / "hub", "someone/own", save("gpt_neox", tmp_path / "model"), COMMITS[0], "main")
    tree = small_run(text_folder, tmp_path / "run", run={"resume": "auto"})
    file = write_config({**tree, "model": {"path": "hf:someone/own"}, "tokenizer": {}}, tmp_path / "run.yaml")
    config, adapters = load_config(file), load_config(file, [("lora.rank", "2")])
    base = begin(located(config))
    root = tmp_path / "hub" / "models--someone--own"
    assert base == (root / "snapshots" / COMMITS[0]).resolve()

    def gone_on(config: TuneConfig) -> tuple[Path, list[str]]:
        said: list[str] = []
        return settled_path(located(config, said.append), said), said

    assert gone_on(config) == (base, [f"hf:someone/own is {root / 'snapshots' / COMMITS[0]}"])
    (root / "refs" / "main").unlink()  # the name means nothing any more, but the snapshot is there
    for one in (config, adapters):
        folder, said = gone_on(one)
        assert folder == base
        assert "revision main of someone/own is not in the cache" in said[0]
        assert said[1].endswith(f"going on with {base}, this run's base")
    shutil.rmtree(root)
    with pytest.raises(ConfigError, match=r"nor to be had from it; the adapters .* it is there no more: put it back"):
        gone_on(adapters)
    state = tmp_path / "run" / "resume" / "step-00000002"
    folder, said = gone_on(config)
    assert folder == state.resolve()
    assert said[1].endswith(f"goes on without it, by what it saved itself: {state}")
    assert said[2].startswith(f"{state} holds no generation_config.json")
    own = save_checkpoint(build("gpt_neox"), tmp_path / "run" / "checkpoints", 2)
    folder, said = gone_on(config)
    assert folder == own.resolve()
    assert "goes on without it, by what it saved itself" in said[1]
    shutil.rmtree(tmp_path / "run" / "resume")  # weights alone record no base, and hold all the same
    assert gone_on(config)[0] == own.resolve()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="revision main of someone/own is not in the cache"):
        located(config)


@pytest.mark.parametrize("of_base", [True, False], ids=["the base's tokenizer", "a tokenizer by its own name"])
def test_a_resume_state_alone_goes_on_without_the_hub_with_the_tokenizer_that_the_data_keep(
    tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch, of_base: bool
) -> None:
    """As after a kill between the first resume state and the first checkpoint."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = save("gpt_neox", tmp_path / "model")
    into_cache(tmp_path / "hub", "someone/own", model, COMMITS[0], "main")
    tree = small_run(text_folder, tmp_path / "run", run={"resume": "auto"})
    named = {"model": {"path": "hf:someone/own"}, "tokenizer": {}}
    if not of_base:
        named = {"model": tree["model"], "tokenizer": {"path": "hf:someone/own"}}
    config = load_config(write_config({**tree, **named}, tmp_path / "run.yaml"))
    quiet: list[str] = []
    began = make_ready(settled(located(config), quiet.append), quiet.append).prepared
    values, generation = json.loads((model / "config.json").read_text()), {"eos_token_id": 7}
    extra = {"settings": {"data": began.fingerprint, "tokenizer.class": ""}}
    root = tmp_path / "run" / "resume"
    with CheckpointWriter(root, step=2, config=values, generation_config=generation, extra=extra) as writer:
        for name, tensor in load_file(model / "model.safetensors").items():
            writer.add(f"master.{name}", tensor)
    shutil.rmtree(tmp_path / "hub")
    shutil.rmtree(model)
    said: list[str] = []
    here = settled(located(config, said.append), said.append)
    made = make_ready(here, said.append).prepared
    assert f"tokenizer: the run goes on with the one that it kept: {began.tokenizer}" in said
    assert (made.fingerprint, made.num_ids, made.known_as) == (began.fingerprint, began.num_ids, ())
    if of_base:
        first = InitialModel(here, made)
        assert (first.hf_config.to_dict()["hidden_size"], first.generation_config) == (values["hidden_size"], generation)
    shutil.rmtree(tmp_path / "run" / "data")
    with pytest.raises(ConfigError, match=r"^tokenizer.* kept no copy .* name a folder that has it as tokenizer.path"):
        settled(located(config), quiet.append)


@pytest.mark.slow
def test_a_model_of_the_hub_is_trained_and_evaluated_offline(home: Path, tmp_path: Path, text_folder: Path) -> None:
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    tree = small_run(text_folder, tmp_path / "run", schedule={"steps": 2, "warmup": 1}, lora={"rank": 2})
    del tree["tokenizer"]
    tree["model"] = {"path": "hf:old"}
    done = run_command("tune", write_config(tree, tmp_path / "run.yaml"), env=environment)
    assert done.returncode == 0, done.stderr
    assert f"hf:old is {home}" in done.stdout.replace("\n", "")
    assert sorted(losses_of(tmp_path / "run")) == [1, 2]
    text = text_folder / "module_0.py"
    for model in ("hf:old", tmp_path / "run"):
        done = run_command("evaluate", model, "--data", text, "--json", env=environment)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["loss"] > 0
    done = run_command("merge", tmp_path / "run", tmp_path / "merged", "--base", "hf:old@main", env=environment)
    assert (done.returncode, done.stderr) == (0, "")

"""The ids a model is trained on are those its served checkpoint gives, whatever tokenizer it was trained with."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from checkpoint import CheckpointWriter
from checkpoint.text.tokenizer_class import CLASS_WHATEVER_IS_NAMED
from checkpoint.text.tokenizer_files import TOKENIZER_FILES
from finetune.config import TuneConfig
from finetune.config.load import load_config
from finetune.data.prepare import Prepared, prepare
from finetune.data.rows import JoinedRows, open_rows
from finetune.errors import ConfigError
from finetune.launch.prerequisites import make_ready
from serve.model.families import FAMILIES
from serve.text.tokenizer import load_tokenizer
from tests.finetune.support import small_run, write_config
from tests.support.tokenizers import CORPUS, make_folder, write

OWN = {
    "gpt_neox": "gpt_neox_class",
    "gpt2": "gpt2_files",
    "gpt_bigcode": "gpt_neox_class",
    "gpt_neo": "gpt2_files",
    "gptj": "gptj_prefix_space",
    "codegen": "phi",
    "opt": "opt",
    "phi": "phi",
    "phi3": "mistral_prepend",
    "llama": "llama",
    "mistral": "mistral_prepend",
    "mixtral": "mistral_prepend",
    "gpt_oss": "llama3",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "olmo2": "gpt_neox_class",
    "stablelm": "gpt_neox_class",
    "gemma2": "llama",
    "bloom": "gpt_neox",
    "falcon": "gpt_neox",
}
"""A kind of tokenizer that models of each served family come with."""

DOCUMENTS = [*CORPUS, "In 2026 and 1234567890 e\u0301, \u212b: they'LL  say\n\n\tso.", "  <s> a</s>b <s>c"]
"""Numbers, letters in two Unicode forms, white space and special tokens, around which classes cut differently."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number, document in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_text(document, encoding="utf-8", newline="")
    return folder


def run_of(text: Path, model_type: str, kind: str, **sections: Any) -> TuneConfig:
    """A run of that family with its ``own`` tokenizer, one that is ``learned``, or the one of that kind of folder."""
    root = text.parent
    data = {"train": str(text), "pattern": "*.txt", "seq_len": 8, "eval_fraction": 0, "folder": str(root / "data")}
    tree = small_run(text, root / "run", **{**sections, "data": {**data, **sections.get("data", {})}})
    tree["model"] = {"new": {"model_type": model_type}}
    if kind == "own":
        folder = make_folder(OWN[model_type], root / model_type)
        write(folder, "config.json", {"model_type": model_type})
        tree |= {"model": {"path": str(folder)}, "tokenizer": {}}
    elif kind != "learned":
        folder = root / kind if (root / kind).is_dir() else make_folder(kind, root)
        tree["tokenizer"] = {"path": str(folder)}
    return load_config(write_config(tree, root / "run.yaml"))


def named_class(made: Prepared) -> str:
    return str(json.loads((made.tokenizer_folder / "tokenizer_config.json").read_text())["tokenizer_class"])


def trained_ids(made: Prepared) -> list[int]:
    rows = open_rows(made, "train")
    assert isinstance(rows, JoinedRows)
    return rows.stream(0, rows.num_tokens)[0].tolist()


def served(made: Prepared, model_type: str, folder: Path) -> Path:
    """A checkpoint's folder as far as its tokenizer is concerned."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (made.tokenizer_folder / name).is_file():
            shutil.copy(made.tokenizer_folder / name, folder)
    write(folder, "config.json", {"model_type": model_type})
    return folder


def asked_ids(folder: Path, end: int) -> list[int]:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return list(chain.from_iterable((*tokenizer.encode(text, add_special_tokens=False), end) for text in DOCUMENTS))


def test_every_served_family_is_tried() -> None:
    assert set(OWN) == set(FAMILIES)


@pytest.mark.parametrize("model_type", OWN)
def test_the_class_that_counts_whatever_is_named_is_the_one_transformers_takes(model_type: str) -> None:
    from transformers.models.auto import tokenization_auto as theirs

    registered, expected = theirs.TOKENIZER_MAPPING_NAMES.get(model_type), None
    if registered == "TokenizersBackend":
        expected = ""
    elif model_type in theirs.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
        expected = registered
    assert CLASS_WHATEVER_IS_NAMED.get(model_type) == expected


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        *((model_type, kind) for model_type in OWN for kind in ("own", "gptj_prefix_space", "learned")),
        *(("qwen2", kind) for kind in ("gpt_neox_class", "gpt_neox_silent", "llama3")),
        ("gpt2", "mistral_prepend"),
        *(("phi3", kind) for kind in ("gpt_neox_class", "llama", "opt")),
    ],
)
def test_what_was_trained_is_what_is_served(model_type: str, kind: str, tmp_path: Path, text: Path) -> None:
    from transformers import AutoTokenizer

    made = prepare(run_of(text, model_type, kind), lambda _: None)
    folder = served(made, model_type, tmp_path / "served")
    assert trained_ids(made) == asked_ids(folder, made.end_of_text_id)
    if kind == "learned":
        theirs = AutoTokenizer.from_pretrained(folder)
        assert trained_ids(made) == [id_ for text in DOCUMENTS for id_ in (*theirs(text)["input_ids"], made.end_of_text_id)]


@pytest.mark.parametrize("kind", ["llama", "wordpiece", "unigram"])
def test_a_vocabulary_that_the_models_class_cannot_use_is_refused(kind: str, text: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer\.path: .* qwen2 is read with Qwen2Tokenizer, .*not the byte-level one"):
        prepare(run_of(text, "qwen2", kind), lambda _: None)


def test_the_class_is_told_at_the_start_and_only_where_the_files_do_not_decide(text: Path) -> None:
    said: list[str] = []
    for model_type, kind in (("llama", "learned"), ("qwen2", "own"), ("gpt2", "llama3")):
        prepare(run_of(text, model_type, kind), said.append)
    assert not [line for line in said if "Qwen2Tokenizer" in line]
    for _ in range(2):  # when the tokenizer is made, and when it is found again
        said.clear()
        prepare(run_of(text, "qwen2", "learned"), said.append)
        assert [line for line in said if line.startswith("tokenizer: read as Qwen2Tokenizer")]


def test_one_folder_of_data_keeps_the_tokenizers_of_two_families_apart(text: Path) -> None:
    kinds = {model_type: prepare(run_of(text, model_type, "learned"), lambda _: None) for model_type in ("gpt2", "qwen2")}
    assert kinds["gpt2"].tokenizer != kinds["qwen2"].tokenizer
    assert named_class(kinds["gpt2"]) == "PreTrainedTokenizerFast"
    assert named_class(kinds["qwen2"]) == "Qwen2Tokenizer"


def test_a_run_of_an_earlier_release_goes_on_with_the_ids_that_it_began_with(tmp_path: Path, text: Path) -> None:
    config = run_of(text, "qwen2", "learned", run={"resume": "auto"})
    began = prepare(config, lambda _: None, of_model=False)
    assert named_class(began) == "PreTrainedTokenizerFast"
    save(config, began, {"data": began.fingerprint})
    said: list[str] = []
    assert make_ready(config, said.append).prepared == began
    assert [line for line in said if "which makes others of some texts" in line]
    (text / "0.txt").write_text("something else " * 20)
    accepting = run_of(text, "qwen2", "learned", run={"resume": "auto"}, data={"changed": "accept"})
    made = make_ready(accepting, said.append).prepared
    learned = [folder.tokenizer_folder / "tokenizer.json" for folder in (began, made)]
    assert learned[0].read_bytes() == learned[1].read_bytes()


def test_a_run_that_recorded_the_class_goes_on_with_it(tmp_path: Path, text: Path) -> None:
    config = run_of(text, "qwen2", "learned", run={"resume": "auto"})
    began = prepare(config, lambda _: None)
    save(config, began, {"data": began.fingerprint, "tokenizer.class": "Qwen2Tokenizer"})
    assert make_ready(config, lambda _: None).prepared == began


def save(config: TuneConfig, made: Prepared, settings: dict[str, Any]) -> None:
    """A checkpoint and a resume state of this run, with one tensor each."""
    import torch

    files = [made.tokenizer_folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    for root, more in (("checkpoints", files), ("resume", [])):
        described: dict[str, Any] = {"config": {"model_type": "qwen2"}, "extra": {"settings": json.loads(json.dumps(settings))}}
        with CheckpointWriter(Path(config.run.output) / root, step=2, tokenizer_files=more, **described) as writer:
            writer.add("x", torch.ones(2))

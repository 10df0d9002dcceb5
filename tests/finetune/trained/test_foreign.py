"""Checkpoints of other trainers are exported, and their tokenizers used, under the names that transformers looks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoint import CheckpointError, open_checkpoint
from checkpoint.opening.prove import tokenizer_place
from checkpoint.readers.surroundings import tokenizer_at
from finetune.data.tokenizer import copy_tokenizer, open_tokenizer, usual_folder
from finetune.errors import ConfigError
from finetune.model.build import load_model
from finetune.trained.export import export
from tests.support.models import build, save, tokenizer
from tests.support.neox import Form, save_neox
from tests.support.reference import load


def test_a_checkpoint_of_gpt_neox_is_exported_with_its_tokenizer(tmp_path: Path) -> None:
    made = build("gpt_neox", vocab_size=tokenizer().get_vocab_size())
    save_neox(tmp_path / "run", made, Form(model_parallel=2), **{"tokenizer-type": "HFTokenizer", "vocab-file": "/x/own.json"})
    tokenizer().save(str(tmp_path / "run" / "own.json"))
    out = export(tmp_path / "run", tmp_path / "out")
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        # Averages of norms that drifted apart are rounded.
        torch.testing.assert_close(load(out)(ids).logits, made(ids).logits, rtol=0, atol=1e-4)
    assert open_tokenizer(out).encode("the lazy dog") == tuple(tokenizer().encode("the lazy dog").ids)
    assert open_tokenizer(usual_folder(tokenizer_place(tmp_path / "run"), "model.path")).end_of_text_id == 0


def test_one_file_of_a_tokenizer_is_copied_under_the_usual_names(tmp_path: Path) -> None:
    model = json.loads(tokenizer().to_str())["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "gpt2-merges.txt").write_text("".join(" ".join(merge) + "\n" for merge in model["merges"]))
    folder = usual_folder(tokenizer_at(str(tmp_path / "gpt2-vocab.json")), "tokenizer.path")
    copy_tokenizer(folder, tmp_path / "copy", "tokenizer.path")
    text = "naïve café <|endoftext|>"
    assert list(open_tokenizer(tmp_path / "copy").encode(text)) == tokenizer().encode(text).ids
    (tmp_path / "any.model").write_bytes(b"\x0a")
    with pytest.raises(ConfigError, match=r"tokenizer\.path: .*is no SentencePiece model"):
        usual_folder(tokenizer_at(str(tmp_path / "any.model")), "tokenizer.path")


def test_a_mixture_whose_experts_are_stored_one_by_one_is_trained_as_the_stacks_it_has(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "model", with_tokenizer=False)
    with open_checkpoint(folder, stacked=True) as checkpoint:
        model = load_model(checkpoint, torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids, use_cache=False).logits, load(folder)(ids, use_cache=False).logits)
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match="stores experts one by one"):
        load_model(checkpoint, torch.float32)
    assert export(folder, tmp_path / "out").is_dir()

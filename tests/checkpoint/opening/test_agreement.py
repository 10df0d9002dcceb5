"""Tensors against the configuration: names old and new, ties, shapes, and the tokenizer's ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import Checkpoint, CheckpointError, open_checkpoint
from tests.checkpoint.folders import plain_folder, sharded_folder, some_tensors, write_config

EXPECTED = {"transformer.wte.weight": (11, 6), "transformer.h.0.attn.c_attn.weight": (6, 18), "lm_head.weight": (11, 6)}
TIED = {"lm_head.weight": "transformer.wte.weight"}


def model_tensors(**other: torch.Tensor) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(shape, generator=make) for name, shape in EXPECTED.items()}
    return tensors | {name.replace("__", "."): tensor for name, tensor in other.items()}


def opened(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    return open_checkpoint(plain_folder(folder, tensors))


def refusal(checkpoint: Checkpoint, *, tied: dict[str, str] | None = None) -> CheckpointError:
    with checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.check_tensors(EXPECTED, tied=tied or {})
    return caught.value


def test_the_tensors_of_the_model_agree(tmp_path: Path) -> None:
    with opened(tmp_path, model_tensors()) as checkpoint:
        checkpoint.check_tensors(EXPECTED)
        assert checkpoint.bytes_read == 0


def test_a_missing_tensor_is_named_with_the_file_that_should_list_it(tmp_path: Path) -> None:
    tensors = model_tensors()
    del tensors["transformer.h.0.attn.c_attn.weight"]
    error = refusal(opened(tmp_path, tensors))
    assert error.file == "model.safetensors"
    assert "'transformer.h.0.attn.c_attn.weight', which the model of config.json has" in error.rule


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    with open_checkpoint(sharded_folder(tmp_path)) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.check_tensors({f"w{number}": (1,) for number in range(10)})
    assert caught.value.file == "model.safetensors.index.json"
    assert "'w0', 'w1', 'w2', 'w3' and 6 more" in caught.value.rule


def test_an_unexpected_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    error = refusal(opened(tmp_path, model_tensors(transformer__h__1__attn__c_attn__weight=torch.ones(6, 18))))
    assert error.file == "model.safetensors"
    assert "'transformer.h.1.attn.c_attn.weight', which the model of config.json does not have" in error.rule


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    error = refusal(opened(tmp_path, model_tensors() | {"transformer.wte.weight": torch.ones(12, 6)}))
    assert error.file == "model.safetensors"
    assert "'transformer.wte.weight' has shape [12, 6]; the model of config.json makes it [11, 6]" in error.rule


def test_an_integer_tensor_is_no_weight(tmp_path: Path) -> None:
    error = refusal(opened(tmp_path, model_tensors() | {"transformer.wte.weight": torch.ones(11, 6, dtype=torch.int8)}))
    assert "must be floating point" in error.rule


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.0.attn.bias",
        "transformer.h.0.attn.masked_bias",
        "transformer.h.0.attn.attention.bias",
        "gpt_neox.layers.0.attention.masked_bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "transformer.h.0.attn.embed_positions",
        "h.0.attn.bias",
    ],
)
def test_buffers_of_old_releases_are_left_alone(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, model_tensors() | {name: torch.ones(1, 1, 4, 4, dtype=torch.uint8)}) as checkpoint:
        checkpoint.check_tensors(EXPECTED)


@pytest.mark.parametrize("name", ["transformer.h.0.attn.c_attn.bias", "transformer.my_embed_positions", "transformer.wte.bias"])
def test_biases_of_other_modules_are_not_taken_for_such_buffers(tmp_path: Path, name: str) -> None:
    assert repr(name) in refusal(opened(tmp_path, model_tensors() | {name: torch.ones(18)})).rule


def test_an_attention_bias_that_the_model_has_is_checked(tmp_path: Path) -> None:
    with (
        opened(tmp_path, {"h.attn.bias": torch.ones(3)}) as checkpoint,
        pytest.raises(CheckpointError, match=r"shape \[3\]; the model of config\.json makes it \[4\]"),
    ):
        checkpoint.check_tensors({"h.attn.bias": (4,)})


@pytest.mark.parametrize("kept", ["lm_head.weight", "transformer.wte.weight"])
def test_either_of_two_tied_tensors_may_be_the_one_that_is_stored(tmp_path: Path, kept: str) -> None:
    tensors = model_tensors()
    for name in {"lm_head.weight", "transformer.wte.weight"} - {kept}:
        del tensors[name]
    with opened(tmp_path, tensors) as checkpoint:
        checkpoint.check_tensors(EXPECTED, tied=TIED)
        checkpoint.check_tensors({name: shape for name, shape in EXPECTED.items() if name != "lm_head.weight"}, tied=TIED)
        for name in ("lm_head.weight", "transformer.wte.weight"):
            assert checkpoint.resolve(name, TIED) == kept
            assert torch.equal(checkpoint.read(checkpoint.resolve(name, TIED)), tensors[kept])
        with pytest.raises(CheckpointError, match="has no tensor"):
            checkpoint.check_tensors(EXPECTED)


def test_two_tied_tensors_both_stored_must_be_equal(tmp_path: Path) -> None:
    tensors = model_tensors()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    with opened(tmp_path, tensors) as checkpoint:
        checkpoint.check_tensors(EXPECTED, tied=TIED)
    tensors["lm_head.weight"][10, 5] += 1
    error = refusal(opened(tmp_path, tensors), tied=TIED)
    assert error.file == "config.json"
    assert "they differ" in error.rule


def test_tied_tensors_of_one_storage_are_not_read_to_compare_them(tmp_path: Path) -> None:
    tensors = model_tensors()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    torch.save(tensors, write_config(tmp_path) / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.check_tensors(EXPECTED, tied=TIED)
        assert checkpoint.bytes_read == 0


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("transformer.h.0.ln_1.weight", "h.0.ln_1.weight"),
        ("gpt_neox.layers.0.attention.dense.weight", "layers.0.attention.dense.weight"),
        ("model.decoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ("lm_head.weight", "embed_out.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_reader_asks_with_the_name_of_today(tmp_path: Path, asked: str, stored: str) -> None:
    tensor = torch.randn(4, generator=torch.Generator().manual_seed(4))
    with opened(tmp_path, {stored: tensor}) as checkpoint:
        assert checkpoint.resolve(asked) == stored
        assert torch.equal(checkpoint.read(asked), tensor)
        checkpoint.check_tensors({asked: (4,)})


def test_a_name_that_is_there_under_no_form(tmp_path: Path) -> None:
    with opened(tmp_path, model_tensors()) as checkpoint, pytest.raises(CheckpointError, match=r"has no tensor 'wpe\.weight'"):
        checkpoint.read("wpe.weight")


def test_a_tied_gpt_neox_with_the_old_name_of_its_head(tmp_path: Path) -> None:
    save_file({"embed_out.weight": torch.ones(3, 2)}, write_config(tmp_path) / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        tied = {"lm_head.weight": "gpt_neox.embed_in.weight"}
        checkpoint.check_tensors({"gpt_neox.embed_in.weight": (3, 2)}, tied=tied)
        assert checkpoint.resolve("gpt_neox.embed_in.weight", tied) == "embed_out.weight"


BPE = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9, "content": "<end>"}]}
UNIGRAM = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({}, None),
        ({"tokenizer.json": BPE}, 10),
        ({"tokenizer.json": BPE | {"added_tokens": []}}, 8),
        ({"tokenizer.json": UNIGRAM}, 2),
        ({"vocab.json": {"a": 0, "b": 4}}, 5),
        ({"vocab.json": {"a": 0, "b": 4}, "added_tokens.json": {"<end>": 6}}, 7),
    ],
)
def test_the_tokenizer_s_ids_are_counted_and_compared_with_the_rows(
    tmp_path: Path, files: dict[str, object], size: int | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with opened(tmp_path, some_tensors()) as checkpoint:
        assert checkpoint.tokenizer_vocab_size == size
        checkpoint.check_tokenizer(10)
        if size is not None:
            checkpoint.check_tokenizer(size)
            with pytest.raises(
                CheckpointError, match=rf"^(tokenizer|vocab)\.json: has ids up to {size - 1}; the embedding has"
            ):
                checkpoint.check_tokenizer(size - 1)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        "{}",
        '{"model": {}}',
        '{"model": {"vocab": {}}}',
        '{"model": {"vocab": {"a": -1}}}',
        '{"model": {"vocab": {"a": "1"}}}',
        '{"model": {"vocab": {"a": 1}}, "added_tokens": [3]}',
        '{"model": {"vocab": {"a": 1}}, "added_tokens": [{}]}',
    ],
)
def test_a_broken_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    plain_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=r"^tokenizer\.json: "):
        checkpoint.check_tokenizer(100)

"""What is written opens in transformers, and what transformers writes opens here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from checkpoint import CheckpointWriter, open_checkpoint


def gpt_neox() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**shape, max_position_embeddings=32)).eval()


def tied_gpt2() -> PreTrainedModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()


MODELS = pytest.mark.parametrize("make", [gpt_neox, tied_gpt2])


def shapes_and_ties(model: PreTrainedModel) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}, dict(model.all_tied_weights_keys)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(20).view(1, -1)).logits


@MODELS
@pytest.mark.parametrize("max_shard_bytes", [4000, 1 << 20], ids=["shards", "one file"])
def test_a_written_model_opens_in_transformers(tmp_path: Path, make: type[PreTrainedModel], max_shard_bytes: int) -> None:
    model = make()
    with CheckpointWriter(tmp_path, step=1, config=model.config.to_dict(), max_shard_bytes=max_shard_bytes) as writer:
        for name, parameter in model.named_parameters():  # each tied parameter once
            writer.add(name, parameter)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "step-00000001", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(logits(again.eval()), logits(model))


@MODELS
@pytest.mark.parametrize("max_shard_size", ["5KB", "1GB"])
def test_what_transformers_saves_agrees_with_its_config_and_is_read_exactly(
    tmp_path: Path, make: type[PreTrainedModel], max_shard_size: str
) -> None:
    model = make()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    expected, tied = shapes_and_ties(model)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.check_tensors(expected, tied=tied)
        for name, tensor in model.state_dict().items():
            assert torch.equal(checkpoint.read(checkpoint.resolve(name, tied)), tensor)


@MODELS
def test_what_torch_saves_is_read_exactly(tmp_path: Path, make: type[PreTrainedModel]) -> None:
    model = make()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    expected, tied = shapes_and_ties(model)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.check_tensors(expected, tied=tied)
        for name, tensor in model.state_dict().items():
            assert torch.equal(checkpoint.read(name), tensor)


@MODELS
def test_a_bare_base_model_answers_to_the_causal_model_s_names(tmp_path: Path, make: type[PreTrainedModel]) -> None:
    model = make()
    model.base_model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, tensor in model.state_dict().items():
            if not name.startswith("lm_head."):
                assert torch.equal(checkpoint.read(name), tensor)

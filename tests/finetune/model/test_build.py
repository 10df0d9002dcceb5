"""A new model's configuration is checked against transformers and the data before anything is built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters

from checkpoint import open_checkpoint
from finetune.errors import ConfigError
from finetune.model import build
from finetune.model.build import (
    _always,
    build_empty,
    config_of,
    decay_groups,
    fill,
    initialise,
    load_model,
    meta_shapes,
    new_config,
    saved_config,
    shapes_of,
    tied_names,
)
from tests.support.models import save

TINY: dict[str, dict[str, Any]] = {
    "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "gptj": {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    "opt": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "llama": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48},
}


def made(model_type: str, **changes: Any) -> Any:
    return new_config({"model_type": model_type, **TINY[model_type], **changes}, num_ids=50, seq_len=16, end_of_text_id=3)


@pytest.mark.parametrize("model_type", TINY)
def test_a_new_model_fits_tokenizer_and_data(model_type: str) -> None:
    config = made(model_type)
    assert config.vocab_size == 50
    assert config.max_position_embeddings == 16
    assert (config.bos_token_id, config.eos_token_id) == (3, 3)
    model = build_empty(config, torch.float32, nullcontext())
    initialise(model, _always, 0)
    logits = model(input_ids=torch.arange(16)[None], use_cache=False).logits
    assert logits.shape == (1, 16, 50)
    assert logits.isfinite().all()


@pytest.mark.parametrize("model_type", TINY)
def test_new_weights_are_those_transformers_would_draw(model_type: str) -> None:
    """Same kinds of numbers, not the same numbers: zeros and ones in the same places, and about the same spread."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(made(model_type))
    ours = build_empty(made(model_type), torch.float32, nullcontext())
    initialise(ours, _always, 1)
    for (name, mine), (_, yours) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        a, b = mine.detach(), yours.detach()
        assert float(a.std(correction=0)) == pytest.approx(float(b.std(correction=0)), rel=0.4, abs=1e-6), name
        assert float(a.mean()) == pytest.approx(float(b.mean()), abs=0.02), name


def test_positions_keep_their_type_where_deepspeed_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``zero.Init`` has ``torch.arange`` give numbers of the model's type: 257 is none in bf16."""
    plain, make, noted = torch.arange, build._made, list[torch.Tensor]()

    @contextmanager
    def changed() -> Iterator[None]:
        with monkeypatch.context() as patch:
            wrap = partition_parameters.zero_wrapper_for_fp_tensor_constructor
            patch.setattr(torch, "arange", wrap(plain, torch.bfloat16, torch.device("cpu")))
            noted.append(torch.arange(258.0))
            yield

    def noting(*of: Any) -> Any:
        noted.append(torch.arange(258.0))
        return make(*of)

    monkeypatch.setattr(build, "_made", noting)
    build_empty(made("llama"), torch.bfloat16, changed())
    assert [part.dtype for part in noted] == [torch.bfloat16, torch.float32]
    assert noted[1][257] == 257.0
    assert torch.arange is plain


def test_weights_of_a_device_are_drawn_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose generator draws the numbers of runs that have them elsewhere; what no rule sets stays as it was."""
    here, there = (build_empty(made("gpt2"), torch.float32, nullcontext()) for _ in range(2))
    drawn, draw = list[set[int]](), build.initialise_module
    lies = {parameter.data_ptr(): name for name, parameter in there.named_parameters()}

    def drawing(owner: Any, module: Any) -> None:
        drawn.append({parameter.data_ptr() for parameter in module.parameters(recurse=False)})
        draw(owner, module)

    initialise(here, _always, 4)
    monkeypatch.setattr(build, "initialise_module", drawing)
    monkeypatch.setattr(build, "_is_on_device", lambda parameter: True)
    initialise(there, _always, 4)
    assert not set().union(*drawn) & set(lies), "nothing was drawn where the weights lie"
    assert {parameter.data_ptr(): name for name, parameter in there.named_parameters()} == lies, "where they are again"
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))


def test_weights_of_a_device_are_there_again_when_they_could_not_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_empty(made("gpt2"), torch.float32, nullcontext())
    places = [parameter.data_ptr() for parameter in model.parameters()]

    def failing(*_: object) -> None:
        raise ArithmeticError("as a rule may")

    monkeypatch.setattr(build, "initialise_module", failing)
    monkeypatch.setattr(build, "_is_on_device", lambda parameter: True)
    with pytest.raises(ArithmeticError, match="as a rule may"):
        initialise(model, _always, 4)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_equal_seeds_give_equal_weights() -> None:
    first, second, other = (build_empty(made("gpt2"), torch.float32, nullcontext()) for _ in range(3))
    for model, seed in ((first, 4), (second, 4), (other, 5)):
        initialise(model, _always, seed)
    name, _ = next(first.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hiden_size": 64}, ["model.new.hiden_size", "unknown key", "hidden_size"]),
        ({"model_type": "bert"}, ["model.new.model_type is 'bert'", "causal"]),
        ({"model_type": "nonsense"}, ["model.new.model_type is 'nonsense'", "gpt_neox"]),
        ({"model_type": 5}, ["model.new.model_type is 5"]),
        ({"vocab_size": 49}, ["model.new: vocab_size is 49", "tokenizer has 50 ids"]),
        ({"max_position_embeddings": 15}, ["data.seq_len is 16", "at most 15"]),
        ({"hidden_size": "wide"}, ["model.new", "hidden_size"]),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes: dict[str, Any], says: list[str]) -> None:
    settings = {"model_type": "gpt_neox", **TINY["gpt_neox"], **changes}
    with pytest.raises(ConfigError) as caught:
        new_config(settings, num_ids=50, seq_len=16, end_of_text_id=3)
    assert [part for part in says if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"hidden_act": "nothing"}, "'nothing'"), ({"rope_parameters": {"rope_type": "magic", "rope_theta": 1.0}}, "magic")],
)
def test_what_transformers_does_not_have_is_told(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = save("llama", tmp_path, with_tokenizer=False)
    described = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(described))
    with open_checkpoint(folder) as opened:
        for build in (lambda: load_model(opened, torch.float32), lambda: meta_shapes(config_of(opened))):
            with pytest.raises(ConfigError, match=says):
                build()


def test_tied_weights_are_one_parameter_under_the_owner_name() -> None:
    model = build_empty(made("gpt2"), torch.float32, nullcontext())
    assert tied_names(model) == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in shapes_of(model)


def test_vectors_do_not_decay() -> None:
    model = build_empty(made("gpt_neox"), torch.float32, nullcontext())
    decayed, others = decay_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_filling_reads_every_parameter_once() -> None:
    model = build_empty(made("gpt2"), torch.float32, nullcontext())
    read: list[str] = []

    def zeros(name: str) -> torch.Tensor:
        read.append(name)
        return torch.zeros(shapes_of(model)[name])

    fill(model, zeros, _always)
    assert read == list(shapes_of(model))
    assert all(not parameter.any() for parameter in model.parameters())


def test_the_saved_configuration_names_architecture_and_dtype() -> None:
    saved = saved_config(made("gpt_neox"), torch.bfloat16)
    assert saved["architectures"] == ["GPTNeoXForCausalLM"]
    assert saved["dtype"] == "bfloat16"
    assert saved["model_type"] == "gpt_neox"

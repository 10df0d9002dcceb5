"""Megatron's layouts of a model of transformers, written from their description: cut over ranks and stages, with arguments."""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

Table = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a checkpoint is laid out."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    """Parts of each stage, which take turns."""
    names: str = "core"
    """What tensors are called: ``core``, ``fused`` (norms inside the maps behind them) or ``legacy``, in nested tables."""
    multiple: int = 8
    has_thirds: bool = False
    """A rank's queries, then its keys, then its values, as Megatron-DeepSpeed has them since December 2024."""


def save_megatron(root: Path, model: PreTrainedModel, form: Form, *, step: int = 10, **args: Any) -> Path:
    """Write ``root/latest_checkpointed_iteration.txt`` and the folder of the iteration, which is returned."""
    folder = root / f"iter_{step:07d}"
    root.mkdir(parents=True, exist_ok=True)
    (root / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
    told = argparse.Namespace(**(arguments_of(model, form) | args))
    per_chunk = int(model.config.num_hidden_layers) // (form.pipeline * form.chunks)
    for rank in range(form.tensor):
        whole = _Rank(model, form, rank)
        for stage in range(form.pipeline):
            tables = {}
            for chunk in range(form.chunks):
                begin = (chunk * form.pipeline + stage) * per_chunk
                key = "model" if form.chunks == 1 else f"model{chunk}"
                tables[key] = whole.stage(range(begin, begin + per_chunk))
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if form.pipeline > 1 else "")
            (folder / name).mkdir(parents=True)
            torch.save(tables | _beside(told, step), folder / name / "model_optim_rng.pt")
    return folder


def save_megatron_deepspeed(
    root: Path, model: PreTrainedModel, form: Form, *, layers: bool, step: int = 10, **args: Any
) -> Path:
    """Write ``root/latest`` and the folder of DeepSpeed that it names.

    Args:
        layers: whether there are files of layers, as a pipeline leaves them.
    """
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))  # of which there is no folder
    told = argparse.Namespace(**arguments_of(model, form) | args)
    count = int(model.config.num_hidden_layers)
    for rank in range(form.tensor):
        whole = _Rank(model, form, rank)
        module = None if layers else whole.stage(range(count))
        torch.save({"module": module} | _beside(told, step), folder / f"mp_rank_{rank:02d}_model_states.pt")
        files = {1: whole.embedding, **{2 + number: whole.layer(number) for number in range(count)}, 2 + count: whole.norm}
        if whole.head is not None:
            files[3 + count] = {"lm_head.weight": whole.head}
        for number, table in files.items() if layers else ():
            torch.save(OrderedDict(table), folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    return folder


def arguments_of(model: PreTrainedModel, form: Form) -> dict[str, Any]:
    """The arguments of a run that trains ``model``."""
    config = model.config
    kind = str(config.model_type)
    heads = int(config.num_attention_heads)
    found: dict[str, Any] = {
        "num_layers": int(config.num_hidden_layers),
        "hidden_size": int(config.hidden_size),
        "ffn_hidden_size": int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size),
        "num_attention_heads": heads,
        "kv_channels": int(config.hidden_size) // heads,
        "max_position_embeddings": int(config.max_position_embeddings),
        "make_vocab_size_divisible_by": form.multiple,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "tensor_model_parallel_size": form.tensor,
        "pipeline_model_parallel_size": form.pipeline,
        "virtual_pipeline_model_parallel_size": form.chunks if form.chunks > 1 else None,
        "params_dtype": torch.bfloat16,
        **({"ds_sequence_parallel_fpdt": False} if form.has_thirds else {}),
        "num_experts": None,
        "save": Path("/nowhere"),
        "bias_gelu_fusion": False,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "add_bias_linear": True,
    }
    if kind == "gpt2":
        return found | {"position_embedding_type": "learned_absolute"}
    found |= {"position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0}
    if kind == "gpt_neox":
        return found | {"rotary_percent": config.rope_parameters["partial_rotary_factor"]}
    return found | {
        "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2",
        "group_query_attention": True,
        "num_query_groups": int(config.num_key_value_heads),
    }


def _beside(told: argparse.Namespace, step: int) -> dict[str, Any]:
    return {
        "args": told,
        "checkpoint_version": 3.0,
        "iteration": step,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
        "rng_state": [{"random_rng_state": random.Random(1).getstate(), "np_rng_state": np.random.RandomState(1).get_state()}],
    }


def rank_table(model: PreTrainedModel, form: Form, rank: int) -> Table:
    """All tensors of a tensor-parallel rank that has every layer."""
    table = _Rank(model, form, rank).stage(range(int(model.config.num_hidden_layers)))
    return {name: tensor for name, tensor in table.items() if isinstance(tensor, torch.Tensor)}


class _Rank:
    """One tensor-parallel rank's part of the model."""

    def __init__(self, model: PreTrainedModel, form: Form, rank: int) -> None:
        self._form, self._rank, self._config = form, rank, model.config
        self._state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        words, positions, self._each, norm = _NAMES[str(model.config.model_type)]
        self.embedding: Table = {"word_embeddings.weight": self._vocabulary(self._state[words])}
        if positions:
            self.embedding["position_embeddings.weight"] = self._state[positions]
        prefix = f"{norm}."
        self.norm = {name.removeprefix(prefix): tensor for name, tensor in self._state.items() if name.startswith(prefix)}
        self.head = None if model.config.tie_word_embeddings else self._vocabulary(self._state["lm_head.weight"])

    def stage(self, numbers: range) -> dict[str, Any]:
        """The tables of a stage with these layers, which it counts from 0; first and last have what is before and behind."""
        table: dict[str, Any] = {
            f"layers.{number - numbers.start}.{name}": tensor
            for number in numbers
            for name, tensor in self.layer(number).items()
        }
        first, last = numbers.start == 0, numbers.stop == int(self._config.num_hidden_layers)
        if last:
            table |= {f"final_layernorm.{kind}": tensor for kind, tensor in self.norm.items()}
        head = self.embedding["word_embeddings.weight"] if self.head is None else self.head
        if self._form.names == "legacy":
            inner: dict[str, Any] = {"encoder": OrderedDict(table)}
            if first:
                inner["embedding"] = {name.split(".")[0]: {"weight": tensor} for name, tensor in self.embedding.items()}
            if last and self.head is not None:
                inner["output_layer"] = {"weight": head}
            tied = {"word_embeddings_for_head": {"weight": head}} if last and not first and self.head is None else {}
            return {"language_model": inner, **tied}
        found = {f"decoder.{name}": tensor for name, tensor in table.items()}
        found |= {f"embedding.{name}": tensor for name, tensor in self.embedding.items()} if first else {}
        if last and (self.head is not None or not first):
            found["output_layer.weight"] = head
        return found | {"decoder.layers.0.self_attention.linear_qkv._extra_state": None}

    def layer(self, number: int) -> Table:
        """A layer's own part, by its names in this form."""
        prefix = f"{self._each}.{number}."
        inner = {name.removeprefix(prefix): tensor for name, tensor in self._state.items() if name.startswith(prefix)}
        named = _PLAIN[str(self._config.model_type)](inner, self)
        if self._form.names == "legacy":
            return named
        return {_renamed(name, self._form.names): tensor for name, tensor in named.items()}

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(self._form.tensor, dim=0)[self._rank].clone()

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(self._form.tensor, dim=1)[self._rank].clone()

    def groups(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The rows of each key/value head: its queries, the key, the value; or of all of them, one kind after the other."""
        if self._form.has_thirds:
            return torch.cat([self.rows(query), self.rows(key), self.rows(value)])
        shared = int(getattr(self._config, "num_key_value_heads", 0) or self._config.num_attention_heads)
        stacked = [part.reshape(shared, -1, *part.shape[1:]) for part in (query, key, value)]
        return self.rows(torch.cat(stacked, dim=1).reshape(-1, *query.shape[1:]))

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.rows(gate), self.rows(up)])

    def _vocabulary(self, tensor: torch.Tensor) -> torch.Tensor:
        multiple = self._form.multiple * self._form.tensor
        filled = -(-len(tensor) // multiple) * multiple - len(tensor)
        return self.rows(torch.cat([tensor, torch.full((filled, tensor.shape[1]), 7.0, dtype=tensor.dtype)]))


def _renamed(name: str, names: str) -> str:
    """A legacy name as Megatron's core has it."""
    first, _, kind = name.rpartition(".")
    fused = {"input_layernorm": "self_attention.linear_qkv", "post_attention_layernorm": "mlp.linear_fc1"}
    if names == "fused" and first in fused:
        return f"{fused[first]}.layer_norm_{kind}"
    known = {
        "post_attention_layernorm": "pre_mlp_layernorm",
        "self_attention.query_key_value": "self_attention.linear_qkv",
        "self_attention.dense": "self_attention.linear_proj",
        "mlp.dense_h_to_4h": "mlp.linear_fc1",
        "mlp.dense_4h_to_h": "mlp.linear_fc2",
    }
    return f"{known.get(first, first)}.{kind}"


def _gpt2(inner: Table, rank: _Rank) -> Table:
    found: Table = {}
    for kind in ("weight", "bias"):
        query, key, value = inner[f"attn.c_attn.{kind}"].t().chunk(3, dim=0)
        found |= {
            f"input_layernorm.{kind}": inner[f"ln_1.{kind}"],
            f"post_attention_layernorm.{kind}": inner[f"ln_2.{kind}"],
            f"self_attention.query_key_value.{kind}": rank.groups(query, key, value),
            f"mlp.dense_h_to_4h.{kind}": rank.rows(inner[f"mlp.c_fc.{kind}"].t()),
        }
    for ours, theirs in (("self_attention.dense", "attn.c_proj"), ("mlp.dense_4h_to_h", "mlp.c_proj")):
        found |= {f"{ours}.weight": rank.columns(inner[f"{theirs}.weight"].t()), f"{ours}.bias": inner[f"{theirs}.bias"]}
    return found


def _neox(inner: Table, rank: _Rank) -> Table:
    found = {name: tensor for name, tensor in inner.items() if "layernorm" in name}
    for kind in ("weight", "bias"):
        found[f"self_attention.query_key_value.{kind}"] = rank.rows(inner[f"attention.query_key_value.{kind}"])
        found[f"mlp.dense_h_to_4h.{kind}"] = rank.rows(inner[f"mlp.dense_h_to_4h.{kind}"])
    for ours, theirs in (("self_attention.dense", "attention.dense"), ("mlp.dense_4h_to_h", "mlp.dense_4h_to_h")):
        found |= {f"{ours}.weight": rank.columns(inner[f"{theirs}.weight"]), f"{ours}.bias": inner[f"{theirs}.bias"]}
    return found


def _llama(inner: Table, rank: _Rank) -> Table:
    found = {name: tensor for name, tensor in inner.items() if "layernorm" in name}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in inner:
            parts = (inner[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
            found[f"self_attention.query_key_value.{kind}"] = rank.groups(*parts)
    found["mlp.dense_h_to_4h.weight"] = rank.gated(inner["mlp.gate_proj.weight"], inner["mlp.up_proj.weight"])
    found["self_attention.dense.weight"] = rank.columns(inner["self_attn.o_proj.weight"])
    found["mlp.dense_4h_to_h.weight"] = rank.columns(inner["mlp.down_proj.weight"])
    return found


_PLAIN = {"gpt2": _gpt2, "gpt_neox": _neox, "llama": _llama, "qwen2": _llama}
_NAMES = {
    "gpt_neox": ("gpt_neox.embed_in.weight", "", "gpt_neox.layers", "gpt_neox.final_layer_norm"),
    "gpt2": ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h", "transformer.ln_f"),
    "llama": ("model.embed_tokens.weight", "", "model.layers", "model.norm"),
    "qwen2": ("model.embed_tokens.weight", "", "model.layers", "model.norm"),
}

"""GPT-NeoX's layout of a model of transformers, written from its description: cut over ranks, with its settings."""

from __future__ import annotations

import json
import random
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

    model_parallel: int = 1
    pipeline: bool = True
    """Files of layers; without, everything in files of ranks."""
    generation: str = "linear1"
    """What the maps of the MLP are called: ``linear1``, ``dense_h_to_4h``, or for a gated one ``w1``."""
    qkv: str = "blocks"
    """Of heads that share keys: ``blocks`` or ``per-head``."""
    head: str = "column"
    """``output_layer_parallelism``: ranks share a head of its own by rows (``column``) or by columns (``row``)."""
    multiple: int = 8
    """What the vocabulary is filled up to a multiple of, times ``model_parallel``."""


def save_neox(root: Path, model: PreTrainedModel, form: Form, *, step: int = 40, **settings: Any) -> Path:
    """Write ``root/latest`` and the checkpoint it names.

    Args:
        settings: of the YAML, over those that the model has.

    Returns:
        the checkpoint's folder.
    """
    folder = root / f"global_step{step}"
    (folder / "configs").mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    known = settings_of(model, form) | settings
    (folder / "configs" / "model.yml").write_text("# as it was given\n" + json.dumps(known, indent=2).replace("\n}", ",\n}"))
    (folder / "configs" / "local.yml").write_text('{"train-batch-size": 4, "save": "/nowhere"}\n')
    ranks = [_rank(model, form, rank) for rank in range(form.model_parallel)]
    for rank, layers in enumerate(ranks):
        module = {f"sequential.{number}.{name}": tensor for number, table in layers.items() for name, tensor in table.items()}
        torch.save(_beside(step, None if form.pipeline else module), folder / f"mp_rank_{rank:02d}_model_states.pt")
        for number, table in layers.items() if form.pipeline else ():
            torch.save(table, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    return folder


def settings_of(model: PreTrainedModel, form: Form) -> dict[str, Any]:
    """The YAML of a run that trains ``model``."""
    config = model.config.to_dict()
    kind = config["model_type"]
    found: dict[str, Any] = {
        "pipe_parallel_size": int(form.pipeline),
        "model-parallel-size": form.model_parallel,
        "make-vocab-size-divisible-by": form.multiple,
        "num-layers": config.get("num_hidden_layers", config.get("n_layer")),
        "hidden-size": config.get("hidden_size", config.get("n_embd")),
        "num-attention-heads": config.get("num_attention_heads", config.get("n_head")),
        "seq-length": 128,
        "max-position-embeddings": config.get("max_position_embeddings", config.get("n_positions")),
        "no-weight-tying": not config["tie_word_embeddings"],
        "attention-config": [[["flash"], "all"]],
        "layernorm_epsilon": 1.0e-5,
        **({"output-layer-parallelism": form.head} if form.head != "column" else {}),
    }
    if kind == "gpt2":
        return found | {"pos-emb": "learned", "activation": "gelu"}
    found |= {"pos-emb": "rotary"}
    if kind == "gpt_neox":
        share = config["rope_parameters"]["partial_rotary_factor"]
        return found | {"rotary-pct": share, "gpt-j-residual": config["use_parallel_residual"], "bias-gelu-fusion": False}
    found |= {
        "norm": "rmsnorm",
        "rms-norm-epsilon": config["rms_norm_eps"],
        "num-kv-heads": config["num_key_value_heads"],
        "use_bias_in_attn_linear": bool(config.get("attention_bias")),
        "use_bias_in_mlp": bool(config.get("mlp_bias")),
        "activation": "swiglu",
    }
    if form.generation == "w1":
        found |= {"mlp_type": "llama", "activation": "silu"}
    if kind == "mistral":
        found["sliding-window-width"] = config["sliding_window"] - 1
    return found


def _beside(step: int, module: Table | None) -> dict[str, Any]:
    """What a file of a rank holds beside the weights."""
    return {
        "module": module,
        "sparse_tensor_module_names": set[str](),
        "iteration": step,
        "args": {"num_layers": 3, "tokenizer_type": "HFTokenizer"},
        "random_rng_state": random.Random(1).getstate(),
        "np_rng_state": np.random.RandomState(1).get_state(),
        "torch_rng_state": torch.arange(16, dtype=torch.uint8),
        "dp_world_size": 1,
    }


def _rank(model: PreTrainedModel, form: Form, rank: int) -> dict[int, Table]:
    """The layers of one rank, by their numbers."""
    kind = str(model.config.model_type)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    cut = _Cut(form, rank, summed=kind == "gpt_neox" and bool(model.config.use_parallel_residual))
    words, positions, each, norm = _NAMES[kind]
    layers: dict[int, Table] = {0: {"word_embeddings.weight": cut.vocabulary(state[words])}}
    if positions:
        layers[0]["position_embeddings.weight"] = state[positions].clone()
    count = int(model.config.num_hidden_layers)
    for number in range(count):
        prefix = f"{each}.{number}."
        inner = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        heads = (int(model.config.num_attention_heads), int(getattr(model.config, "num_key_value_heads", 0) or 0))
        layers[2 + number] = _LAYERS[kind](inner, cut, heads)
    names = [name for name in state if name.startswith(f"{norm}.")]
    layers[3 + count] = {}
    for name in names:
        kept = "scale" if kind in ("llama", "mistral") else name.rpartition(".")[2]
        layers[3 + count][f"norm.{kept}"] = cut.norm(state[name])
    if not model.config.tie_word_embeddings:
        layers[4 + count] = {"final_linear.weight": cut.head(state["lm_head.weight"])}
    return layers


class _Cut:
    """One rank's part of each kind of tensor."""

    def __init__(self, form: Form, rank: int, *, summed: bool) -> None:
        self.form, self._rank, self._summed = form, rank, summed

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(self.form.model_parallel, dim=0)[self._rank].clone()

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(self.form.model_parallel, dim=1)[self._rank].clone()

    def bias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Behind a row-parallel layer: every rank has the same, which are added up or not."""
        return tensor / self.form.model_parallel if self._summed else tensor.clone()

    def norm(self, tensor: torch.Tensor) -> torch.Tensor:
        """Ranks drift apart a little; their average is the tensor."""
        return tensor + 0.125 * (self._rank - (self.form.model_parallel - 1) / 2)

    def head(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.columns(self._filled(tensor)) if self.form.head == "row" else self.vocabulary(tensor)

    def vocabulary(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.rows(self._filled(tensor))

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        multiple = self.form.multiple * self.form.model_parallel
        filled = -(-len(tensor) // multiple) * multiple - len(tensor)
        return torch.cat([tensor, torch.full((filled, tensor.shape[1]), 7.0, dtype=tensor.dtype)])


def _neox(inner: Table, cut: _Cut, heads: tuple[int, int]) -> Table:
    names = ("linear1", "linear2") if cut.form.generation == "linear1" else ("dense_h_to_4h", "dense_4h_to_h")
    table = {name: cut.norm(tensor) for name, tensor in inner.items() if "layernorm" in name}
    for kind in ("weight", "bias"):
        table[f"attention.query_key_value.{kind}"] = cut.rows(inner[f"attention.query_key_value.{kind}"])
        table[f"mlp.{names[0]}.{kind}"] = cut.rows(inner[f"mlp.dense_h_to_4h.{kind}"])
    for ours, theirs in (("attention.dense", "attention.dense"), (f"mlp.{names[1]}", "mlp.dense_4h_to_h")):
        table[f"{ours}.weight"] = cut.columns(inner[f"{theirs}.weight"])
        table[f"{ours}.bias"] = cut.bias(inner[f"{theirs}.bias"])
    if names[0] != "linear1":
        table["attention.rotary_emb.inv_freq"] = torch.arange(4.0)
    return table


def _gpt2(inner: Table, cut: _Cut, heads: tuple[int, int]) -> Table:
    """The same names as ``_neox``, of tensors that transformers keeps turned, with all queries first."""
    turned: Table = {
        f"{theirs}.{kind}": inner[f"{ours}.{kind}"].t().contiguous()
        for ours, theirs in _TURNED.items()
        for kind in ("weight", "bias")
    }
    for kind in ("weight", "bias"):
        packed = inner[f"attn.c_attn.{kind}"].t()
        by_head = packed.reshape(3, heads[0], -1, *packed.shape[1:]).transpose(0, 1)
        turned[f"attention.query_key_value.{kind}"] = by_head.reshape(packed.shape).contiguous()
    return _neox(turned, cut, heads)


_TURNED = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "attention.dense",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}


def _llama(inner: Table, cut: _Cut, heads: tuple[int, int]) -> Table:
    table = {name.replace(".weight", ".scale"): cut.norm(tensor) for name, tensor in inner.items() if "layernorm" in name}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in inner:
            table[f"attention.query_key_value.{kind}"] = _packed(inner, kind, cut, heads)
        if f"mlp.up_proj.{kind}" in inner:
            up, gate = (cut.rows(inner[f"mlp.{name}_proj.{kind}"]) for name in ("up", "gate"))
            if cut.form.generation == "w1":
                table |= {f"mlp.w3.{kind}": up, f"mlp.w1.{kind}": gate}
            else:
                table[f"mlp.linear1.{kind}"] = torch.cat([up, gate])
    down = "mlp.w2" if cut.form.generation == "w1" else "mlp.linear2"
    for ours, theirs in (("attention.dense", "self_attn.o_proj"), (down, "mlp.down_proj")):
        table[f"{ours}.weight"] = cut.columns(inner[f"{theirs}.weight"])
        if f"{theirs}.bias" in inner:
            table[f"{ours}.bias"] = cut.bias(inner[f"{theirs}.bias"])
    return table


def _packed(inner: Table, kind: str, cut: _Cut, heads: tuple[int, int]) -> torch.Tensor:
    query, key, value = (cut.rows(inner[f"self_attn.{name}_proj.{kind}"]) for name in "qkv")
    here = heads[0] // cut.form.model_parallel
    if heads[0] != heads[1] and cut.form.qkv == "blocks":
        return torch.cat([query, key, value])
    stacked = [part.reshape(here, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(stacked, dim=1).reshape(-1, *query.shape[1:])


_LAYERS = {"gpt_neox": _neox, "gpt2": _gpt2, "llama": _llama, "mistral": _llama}
_NAMES = {
    "gpt_neox": ("gpt_neox.embed_in.weight", "", "gpt_neox.layers", "gpt_neox.final_layer_norm"),
    "gpt2": ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h", "transformer.ln_f"),
    "llama": ("model.embed_tokens.weight", "", "model.layers", "model.norm"),
    "mistral": ("model.embed_tokens.weight", "", "model.layers", "model.norm"),
}

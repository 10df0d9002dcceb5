"""What is trained, and the tokenizer that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune.config.checks import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What is trained: an existing model, or a new one. Exactly one of the two is set."""

    path: str | None = None
    """Folder of a checkpoint to start from, of any layout that is read, or a run's; or ``hf:ORG/NAME[@REVISION]`` of the
    Hugging Face hub. A peft adapter begins with its base model and itself as one, all of whose weights are trained."""

    base: str | None = None
    """Where ``path`` is an adapter: the folder of its base model, or ``hf:ORG/NAME``, if its ``adapter_config.json`` does not
    name it."""

    adapter: str | None = None
    """The folder of a peft adapter, or ``hf:ORG/NAME``, that is added to the model of ``path`` before its weights are
    trained."""

    base_changed: Literal["refuse", "accept"] = "refuse"
    """What happens to a base that is not the one which an adapter of Tessera, ``path`` or ``adapter``, was trained beside."""

    config: str | None = None
    """The model's ``config.json``, or a folder that has one, for a checkpoint with none beside, above or in its weights."""

    neox_qkv_layout: Literal["blocks", "per-head"] = "blocks"
    """How GPT-NeoX packed heads that share keys: ``blocks`` since November 2024, ``per-head`` before; no checkpoint says."""

    master_weights: bool = False
    """In a DeepSpeed folder of ZeRO-0, 1 or 2: begin with the optimizer's fp32 master weights, not the trained module. Refused
    where there are none to read; of ZeRO-3 and universal saves they are what is read anyway."""

    layer_map: str | None = None
    """For a DeepSpeed pipeline of no known family: a YAML or JSON file that says which names of the model each layer has."""

    adapter_config: str | None = None
    """The ``adapter_config.json`` of a DeepSpeed save with a LoRA adapter in the model, where it is not beside or above it."""

    weights_prefix: str | None = None
    """What the names of the weights begin with, such as ``app.model.``, in a checkpoint that holds several things by names."""

    new: Mapping[str, Any] | None = None
    """A new model: ``model_type`` and any keys of its transformers configuration. ``vocab_size`` and the longest
    position default to the tokenizer's size and ``data.seq_len``."""

    def __post_init__(self) -> None:
        require((self.path is None) != (self.new is None), "model", "both or neither", "set exactly one of path and new")
        require(self.config is None or self.path is not None, "model.config", self.config, "be absent without model.path")
        prefix = self.weights_prefix
        require(prefix is None or self.path is not None, "model.weights_prefix", prefix, "be absent without model.path")
        for key in ("path", "base", "adapter", "config", "layer_map", "adapter_config"):
            require(getattr(self, key) != "", f"model.{key}", "", "name a folder or file, or be left out")
        for key in ("base", "adapter"):
            given = getattr(self, key)
            require(given is None or self.path is not None, f"model.{key}", given, "be absent without model.path")
        if self.new is not None:
            require("model_type" in self.new, "model.new", dict(self.new), "name a model_type, for example gpt_neox")
            require("auto_map" not in self.new, "model.new.auto_map", "set", "be absent: code from model folders is never run")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTokenizerConfig:
    """A new byte-level BPE tokenizer, learned from the training text."""

    vocab_size: int
    """Ids in all: 256 bytes, the end-of-text token and the learned merges."""

    max_bytes: int = 64 * 1024 * 1024
    """Text the merges are learned from, at most; the rest of the data is only tokenised."""

    def __post_init__(self) -> None:
        require(self.vocab_size >= 257, "tokenizer.train.vocab_size", self.vocab_size, "be at least 257")
        require(self.max_bytes >= 1, "tokenizer.train.max_bytes", self.max_bytes, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """How text becomes ids. Neither key set: the tokenizer of ``model.path``."""

    path: str | None = None
    """Folder with ``tokenizer.json``, or one file of a tokenizer; or ``hf:ORG/NAME[@REVISION]``."""

    train: TrainTokenizerConfig | None = None
    """Learn a new one from the data."""

    def __post_init__(self) -> None:
        require(self.path != "", "tokenizer.path", "", "name a folder or file, or be left out")
        require(self.path is None or self.train is None, "tokenizer.path", self.path, "be absent when tokenizer.train is set")

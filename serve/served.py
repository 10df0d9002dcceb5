"""Which model is served, and how its weights lie on the devices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, Literal

from serve.naming import own_name
from serve.rules import require, require_positive

GPU_NAME: Final = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")
"""What ``CUDA_VISIBLE_DEVICES`` may call a GPU: its number, its UUID, or that of a slice of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which checkpoint is served, and how its weights lie on the devices."""

    path: str
    """Folder of a checkpoint of any layout that is read, or of a run; or ``hf:ORG/NAME[@REVISION]`` in the hub's cache."""

    name: str = ""
    """Name clients see; empty means the last part of ``path`` that is a run's own, not ``checkpoints`` or ``step-00000320``."""

    config: str = ""
    """The model's ``config.json``, or a folder that has one, for a checkpoint with none beside, above or in its weights."""

    tokenizer: str = ""
    """Folder of the tokenizer's files, or one such file, for a checkpoint with none beside, above or in its weights."""

    neox_qkv_layout: Literal["blocks", "per-head"] = "blocks"
    """How GPT-NeoX packed heads that share keys: ``blocks`` since November 2024, ``per-head`` before; no checkpoint says."""

    weights_prefix: str | None = None
    """What the names of the weights begin with, such as ``app.model.``, in a checkpoint that holds several things by names."""

    adapter: str = ""
    """Folder of a LoRA adapter, or ``hf:ORG/NAME`` in the hub's local cache, that is added to the model as it is loaded.
    ``path`` may be an adapter's folder itself."""

    base: str = ""
    """Folder of the base model, or ``hf:ORG/NAME`` in the hub's local cache, where ``path`` is an adapter that does not say."""

    base_changed: Literal["refuse", "accept"] = "refuse"
    """What happens to a base model that is not the one an adapter of Tessera was trained beside, such as one that was written
    anew in other files."""

    adapter_config: str = ""
    """The ``adapter_config.json`` of a DeepSpeed save with a LoRA adapter in the model, where it is not beside or above it."""

    master_weights: bool = False
    """In a DeepSpeed folder of ZeRO-0, 1 or 2: serve the optimizer's fp32 master weights, not the module as it was trained.
    Refused where there are none to read; of ZeRO-3 and universal saves they are what is read anyway."""

    layer_map: str = ""
    """For a DeepSpeed pipeline of no known family: a YAML or JSON file that says which names of the model each layer has."""

    tensor_parallel_size: int = 1
    """Ranks that share every layer. Each takes whole heads: at most as many ranks as query heads."""

    pipeline_parallel_size: int = 1
    """Stages that share the layers, one after another, each of ``tensor_parallel_size`` ranks: at most as many as layers. Of
    two numbers of ranks the one with fewer stages answers sooner; a stage needs little of the network before it."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights, activations and cache: ``auto`` is the checkpoint's own."""

    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """What the weights of linear layers are rounded to as they are read: ``int8`` is whole numbers with a scale for each
    output, ``int4`` with one for each ``quantization_group`` of its inputs; activations and the cache keep ``dtype``, but that
    bf16 activations are rounded to 8 bits where a CPU multiplies bytes. ``fp8`` is for GPUs of compute capability 8.9 or
    higher, and rounds activations too."""

    quantization_group: int = 32
    """Inputs that share a scale with ``int4``: 32, 64 or 128. Smaller groups round less and take more room."""

    experts: Literal["inside", "whole"] = "inside"
    """How tensor parallel ranks share a layer's experts: each has a part of every one (``inside``), or some of them
    (``whole``), for which few tokens wait longer."""

    draft_model: str = ""
    """Folder of a smaller checkpoint with the same tokenizer, which guesses the tokens of ``speculative_tokens``; rank 0 has
    all of it. Empty: they are looked up in what texts have said before."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is cuda where there is one, else cpu."""

    gpus: str = ""
    """Which GPUs the ranks take, one each in this order: numbers as ``nvidia-smi`` gives them, or UUIDs, with commas between
    them; empty is the order of ``CUDA_VISIBLE_DEVICES``, or all that there are. A slice of a GPU (MIG) serves one rank."""

    verify: Literal["auto", "structure", "sha256"] = "auto"
    """What is proved of the checkpoint before it is served: ``structure`` reads headers and sizes, ``sha256`` every byte
    against the manifest; ``auto`` is sha256 where there is a manifest."""

    verify_logits: bool = False
    """Whether several ranks are compared with the whole model, which rank 0 then loads beside its part, before they serve."""

    watch: float | None = None
    """Seconds between two looks for a newer checkpoint at ``path``, or at ``base`` or ``adapter`` where they are given, served
    then as by ``Admin.Reload``; ``None``: no looks."""

    swap_memory_gib: float | None = None
    """GiB that newer weights may take beside those that are served, on all ranks together; ``None`` is what is free. With less
    than they need they are read into place while no step is computed."""

    max_model_len: int | None = None
    """Positions (prompt and output) a sequence may have; ``None`` is the model's own limit."""

    def __post_init__(self) -> None:
        require(bool(self.path), "model.path", self.path, "name a checkpoint folder")
        require(self.tensor_parallel_size >= 1, "model.tensor_parallel_size", self.tensor_parallel_size, "be at least 1")
        stages = self.pipeline_parallel_size
        require(stages >= 1, "model.pipeline_parallel_size", stages, "be at least 1")
        require(
            stages == 1 or not self.draft_model,
            "model.pipeline_parallel_size",
            stages,
            "be 1 with model.draft_model; guesses that are looked up in texts are computed by any number of stages",
        )
        require(
            stages == 1 or not self.verify_logits,
            "model.pipeline_parallel_size",
            stages,
            "be 1 with model.verify_logits, which compares ranks that share every layer",
        )
        require(
            self.quantization_group in (32, 64, 128), "model.quantization_group", self.quantization_group, "be 32, 64 or 128"
        )
        require(
            self.quantization == "none" or not self.verify_logits,
            "model.quantization",
            self.quantization,
            "be none with model.verify_logits: each rank rounds its own part of a weight, so ranks differ from the whole model",
        )
        if self.watch is not None:
            require_positive("model.watch", self.watch)
        require(
            self.swap_memory_gib is None or (math.isfinite(self.swap_memory_gib) and self.swap_memory_gib >= 0),
            "model.swap_memory_gib",
            self.swap_memory_gib,
            "be 0 or more",
        )
        require(
            self.max_model_len is None or self.max_model_len >= 2,
            "model.max_model_len",
            self.max_model_len,
            "be at least 2",
        )
        if self.gpus:
            self._check_gpus(self.gpus.split(","))

    def _check_gpus(self, names: list[str]) -> None:
        known = all(GPU_NAME.fullmatch(name) for name in names) and len(set(names)) == len(names)
        require(known, "model.gpus", self.gpus, "be different numbers or UUIDs (GPU-…, MIG-…) with commas between them")
        require(self.device != "cpu", "model.gpus", self.gpus, "be empty with model.device cpu")
        enough = len(names) >= self.num_ranks
        require(enough, "model.gpus", self.gpus, f"name one GPU for each of {self.num_ranks} ranks")
        slices = self.num_ranks > 1 and any(name.startswith("MIG-") for name in names)
        require(not slices, "model.gpus", self.gpus, "name whole GPUs for several ranks: slices (MIG) exchange nothing")

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def served_name(self) -> str:
        """The name clients see, and every series of the server bears."""
        return self.name or own_name(self.path) or self.path

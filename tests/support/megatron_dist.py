"""Megatron's ``torch_dist`` layout of a model of transformers, written from its description with the classes of the format."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from transformers import PreTrainedModel

from tests.support.megatron import Form, arguments_of, rank_table

_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_ROWS = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "word_embeddings.weight",
    "output_layer.weight",
)


def megatrons_plan() -> type[SavePlan]:
    """The class of Megatron 0.11 to 0.15, which can be pickled."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    plan = type("MCoreSavePlan", (SavePlan,), {"__module__": name})
    for end in [at for at, letter in enumerate(name + ".") if letter == "."]:
        sys.modules.setdefault(name[:end], types.ModuleType(name[:end]))
    vars(sys.modules[name])["MCoreSavePlan"] = plan
    return plan


def save_torch_dist(
    root: Path,
    model: PreTrainedModel,
    form: Form,
    *,
    stacked: bool = True,
    beside: bool = True,
    plan: type[SavePlan] | None = None,
) -> Path:
    """Write ``root/latest_checkpointed_iteration.txt`` and the folder of the iteration.

    Args:
        stacked: whether layers are rows of one tensor.
        beside: whether the arguments are in ``common.pt``, and not among the tensors.
        plan: of what the table keeps what each rank meant to write, if it does.
    """
    folder = root / "iter_0000010"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    common = {"args": argparse.Namespace(**arguments_of(model, form)), "checkpoint_version": 3.0, "iteration": 10}
    gated = str(model.config.model_type) == "llama"
    save = _Save(folder / "__0_0.distcp")
    tables = [rank_table(model, form, rank) for rank in range(form.tensor)]
    count = int(model.config.num_hidden_layers)
    for name in tables[0]:
        if not stacked or ".layers." not in name:
            save.add(name, _boxes(name, [table[name] for table in tables], gated=gated))
        elif ".layers.0." in name:
            layers = [name.replace("layers.0.", f"layers.{number}.") for number in range(count)]
            boxes = [_boxes(layer, [table[layer] for table in tables], gated=gated) for layer in layers]
            stack = [((number, *start), part[None]) for number, found in enumerate(boxes) for start, part in found]
            save.add(name.replace("layers.0.", "layers."), stack)
    save.add("optimizer.state.exp_avg.embedding.word_embeddings.weight", [((0,), torch.ones(4))])
    if beside:
        torch.save(common, folder / "common.pt")
    else:
        save.add_item("common_state/shard_0_1", [common])
    save.end(folder / ".metadata", plan)
    return folder


Box = tuple[tuple[int, ...], torch.Tensor]
"""Where a part begins in the whole, and the part."""


def _boxes(name: str, parts: list[torch.Tensor], *, gated: bool) -> list[Box]:
    """The ranks' parts of a tensor. Of a gated MLP all gates come before all else."""
    if name.endswith(_COLUMNS):
        return [((0, rank * part.shape[1]), part) for rank, part in enumerate(parts)]
    if gated and name.endswith("linear_fc1.weight"):
        parts = [half for which in (0, 1) for half in (part.chunk(2)[which] for part in parts)]
    elif not name.endswith(_ROWS):
        parts = parts[:1]
    found: list[Box] = []
    reached = 0
    for part in parts:
        found.append(((reached, *(0 for _ in part.shape[1:])), part))
        reached += part.shape[0]
    return found


class _Save:
    """One file of boxes, and the table that says where they are."""

    def __init__(self, file: Path) -> None:
        self._file, self._data = file, bytearray()
        self._tensors: dict[str, Any] = {}
        self._lies: dict[MetadataIndex, _StorageInfo] = {}

    def add(self, name: str, boxes: list[Box]) -> None:
        chunks = [ChunkStorageMetadata(torch.Size(start), part.shape) for start, part in boxes]
        ends = [[a + n for a, n in zip(start, part.shape, strict=True)] for start, part in boxes]
        whole = torch.Size([max(end) for end in zip(*ends, strict=True)])
        self._tensors[name] = TensorStorageMetadata(TensorProperties(boxes[0][1].dtype), whole, chunks)
        for number, (start, part) in enumerate(boxes):
            self._lies[MetadataIndex(name, torch.Size(start), number)] = self._put(part.clone())

    def add_item(self, name: str, value: object) -> None:
        self._tensors[name] = BytesStorageMetadata()
        self._lies[MetadataIndex(name)] = self._put(value)

    def _put(self, value: object) -> _StorageInfo:
        held = io.BytesIO()
        torch.save(value, held)
        begin = len(self._data)
        self._data += held.getvalue()
        return _StorageInfo(self._file.name, begin, len(held.getvalue()))

    def end(self, table: Path, plan: type[SavePlan] | None) -> None:
        self._file.write_bytes(self._data)
        metadata = Metadata(self._tensors, None, self._lies)
        if plan is not None:
            data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), torch.Size([1])), TensorProperties(), torch.Size([1]))
            items = [WriteItem(index, WriteItemType.SHARD, tensor_data=data) for index in self._lies]
            vars(metadata)["all_local_plans"] = [plan(items)]
        table.write_bytes(pickle.dumps(metadata))

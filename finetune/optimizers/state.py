"""What each optimizer keeps of each parameter, and which parameters it treats as matrices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from finetune.model.adapters import base_of
from finetune.model.build import decay_groups, shapes_of
from finetune.model.pretrained import head_of
from finetune.optimizers.kinds import KINDS


def matrices_of(model: nn.Module, optimizer: str) -> frozenset[str]:
    """Names of the trained parameters that ``optimizer`` treats as matrices; none for one that works element by element.

    Adafactor and ZenFlow take every parameter of two dimensions. Muon leaves out embeddings and the output layer, whose rows
    belong to single tokens; an adapter's factors are matrices to all. GPT-2's weights are stored transposed and its queries,
    keys and values fused, as GPT-NeoX's are: each tensor is one matrix, the way round it is stored.
    """
    kind = KINDS[optimizer]
    if kind.matrix_state is None:
        return frozenset()
    tables: set[int] = set()
    if not kind.tables_are_matrices:
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        head = head_of(base_of(model))
        tables |= set() if head is None else {id(head.weight)}
    shapes = shapes_of(model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return frozenset(name for name, parameter in trained if len(shapes[name]) == 2 and id(parameter) not in tables)


def state_of(model: nn.Module, optimizer: str) -> dict[str, tuple[str, ...]]:
    """Trained parameter -> keys of the state that has an element for each of its own."""
    matrices = matrices_of(model, optimizer)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: KINDS[optimizer].keys_of(matrix=name in matrices) for name in trained}


def whole_state_of(model: nn.Module, optimizer: str) -> dict[str, tuple[str, int]]:
    """``<key>.<parameter>`` -> parameter and length, of the state that is whole on every rank that updates the parameter."""
    shapes, matrices, whole = shapes_of(model), matrices_of(model, optimizer), KINDS[optimizer].whole_state
    ordered = [name for name, _ in model.named_parameters() if name in matrices]
    return {f"{key}.{name}": (name, shapes[name][dimension]) for name in ordered for key, dimension in whole.items()}


def groups_of(
    model: nn.Module, optimizer: str, weight_decay: float, *, only: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Parameters for the optimizer, those that decay and those that do not; what it treats as matrices in its own groups.

    Args:
        only: names of the parameters taken; unset: all that are trained.
    """
    trained = state_of(model, optimizer).keys()
    taken = trained if only is None else trained & set(only)
    matrices = matrices_of(model, optimizer) & taken
    others = taken - matrices
    return [*decay_groups(model, weight_decay, only=matrices), *decay_groups(model, weight_decay, only=others)]

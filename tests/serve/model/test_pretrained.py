"""Models that are built without memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import CONFIG_MAPPING, GPTNeoXConfig

from serve.model.pretrained import _MAKER, _NoLargeMemory, new_model_on_meta
from tests.support.models import FAMILIES, MORE_FAMILIES, SMALL


@pytest.mark.parametrize(
    ("make", "is_computed"),
    [
        (lambda: torch.zeros(3, 4), True),
        (lambda: torch.ones((1 << 13, 1 << 12), dtype=torch.bool), False),
        (lambda: torch.full((5000, 5000), -1.0), False),
        (lambda: torch.full(size=(2,), fill_value=1), True),
        (lambda: torch.arange(2048), True),
        (lambda: torch.arange(start=0, end=1 << 40, step=2), False),
        (lambda: torch.empty(3), False),
        (lambda: torch.empty(3, device="cpu"), True),
    ],
)
def test_only_what_is_small_is_computed(make: Callable[[], torch.Tensor], is_computed: bool) -> None:
    with _NoLargeMemory():
        assert make().is_meta is not is_computed


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_a_model_has_the_shapes_types_and_ties_of_one_with_memory(family: str) -> None:
    config = CONFIG_MAPPING[family](**SMALL[family])
    built = new_model_on_meta(config, torch.bfloat16, attention="eager")
    with torch.device("meta"):
        expected = _MAKER.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    for ours, theirs in ((built.named_parameters, expected.named_parameters), (built.named_buffers, expected.named_buffers)):
        found = dict(ours(remove_duplicate=False))
        assert all(tensor.is_meta for tensor in found.values())
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
            name: (tensor.shape, tensor.dtype) for name, tensor in theirs(remove_duplicate=False)
        }
        assert len({id(tensor) for tensor in found.values()}) == len(
            {id(tensor) for _, tensor in theirs(remove_duplicate=False)}
        )


def test_a_model_of_a_trillion_parameters_takes_no_memory() -> None:
    config = GPTNeoXConfig(hidden_size=1 << 17, intermediate_size=1 << 19, num_hidden_layers=8, num_attention_heads=1 << 10)
    model = new_model_on_meta(config, torch.bfloat16, attention="eager")
    assert sum(parameter.numel() for parameter in model.parameters()) > 10**12

"""The layers of a pipeline obey the keys of ``activations`` as ``tune`` does: the same loss and gradients in another order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import finetune.model.loss
from finetune.config import ActivationConfig
from finetune.data.targets import IGNORE_INDEX
from finetune.engines.pipeline.layers import LossTally, build_on_meta, give_memory, split
from finetune.model.build import _always, initialise, new_config

CPU = torch.device("cpu")
VOCABULARY, LENGTH = 61, 8
CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}
WAYS = {
    "checkpoint: device": ActivationConfig(checkpoint="device"),
    "checkpoint: cpu": ActivationConfig(checkpoint="cpu"),
    "loss_rows: 3": ActivationConfig(loss_rows=3),
    "loss_rows: 3, checkpoint: cpu": ActivationConfig(loss_rows=3, checkpoint="cpu"),
    "loss_rows: 0": ActivationConfig(loss_rows=0),
    "loss_rows: 0, checkpoint: device": ActivationConfig(loss_rows=0, checkpoint="device"),
}


def step(activations: ActivationConfig, pieces: int, *, targets: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one micro-batch through all layers here, and the gradient of every weight."""
    config = new_config({**CONFIG, "vocab_size": VOCABULARY}, num_ids=VOCABULARY, seq_len=LENGTH, end_of_text_id=0)
    model, tally = build_on_meta(config, torch.float32), LossTally(CPU)
    layers = split(model, CPU, tally, activations, head_pieces=pieces)
    give_memory(model.parameters(), CPU)
    initialise(model, _always, 3)
    tally.start(1.0, 1)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    wanted = ids[:, 1:].clone()
    wanted[0, : LENGTH // 2 if targets else LENGTH] = IGNORE_INDEX  # with two pieces, all that the first has
    torch.manual_seed(5)  # dropout
    flow: object = (ids[:, :-1], wanted)
    for layer in layers:
        flow = layer(flow)
    assert isinstance(flow, torch.Tensor)
    flow.backward()
    return float(tally.total), {name: parameter.grad for name, parameter in model.named_parameters()}


@contextmanager
def logits_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Rows of the logits that are made, in one piece."""
    seen: set[int] = set()
    whole, chunk = torch.nn.Linear.forward, finetune.model.loss._chunk

    def of_linear(module: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        if module.out_features == VOCABULARY:
            seen.add(hidden.numel() // hidden.shape[-1])
        return whole(module, hidden)

    def of_chunk(hidden: torch.Tensor, *others: object) -> torch.Tensor:
        seen.add(len(hidden))
        return chunk(hidden, *others)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", of_linear)
        patch.setattr(finetune.model.loss, "_chunk", of_chunk)
        yield seen


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_loss_and_its_gradients_are_the_same(way: str, pieces: int) -> None:
    for targets in (True, False):
        expected, seen = (step(activations, pieces, targets=targets) for activations in (ActivationConfig(), WAYS[way]))
        assert seen[0] == pytest.approx(expected[0], rel=1e-6)
        for name, gradient in expected[1].items():
            assert torch.allclose(seen[1][name], gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("pieces", [1, 2])
def test_as_many_logits_exist_at_once_as_the_key_says(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with logits_seen(monkeypatch) as seen:
        step(ActivationConfig(loss_rows=3), pieces)
    assert max(seen) == 3
    with logits_seen(monkeypatch) as seen:
        step(ActivationConfig(loss_rows=0), pieces)
    assert seen == {2 * LENGTH // pieces}, "targets or not"


@pytest.mark.parametrize(("where", "moved"), [("none", 0), ("device", 0), ("cpu", 2)])
def test_the_inputs_of_blocks_wait_where_the_key_says(where: str, moved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[torch.Size] = []

    def to_cpu() -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: waiting.append(tensor.shape) or tensor, lambda tensor: tensor)

    monkeypatch.setattr("finetune.model.recompute.save_on_cpu", to_cpu)
    step(ActivationConfig(checkpoint=where), 1)  # type: ignore[arg-type]
    assert waiting == [torch.Size([2, LENGTH, 32])] * moved

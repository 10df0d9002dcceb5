"""Parts of training on a CUDA device, by the libraries themselves: packed rows, the fused loss, inputs kept on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from finetune.data.batches import Microbatch
from finetune.machine.pinned import PinnedMemory
from finetune.model import recompute
from finetune.model.fused_loss import LigerLoss, fused_linear_cross_entropy, liger_loss
from finetune.model.host_inputs import HostInputs
from finetune.model.isolation import forward_inputs
from finetune.model.loss import linear_cross_entropy, token_losses
from finetune.model.packed_attention import FAMILIES, PackedAttention, Varlen, varlen_attention
from tests.finetune.machine.pinning import Driver
from tests.finetune.model.test_host_inputs import Copies as HostCopies
from tests.finetune.model.test_isolation import packed, tiny
from tests.finetune.stand_ins import CountedLiger, CountedVarlen
from tests.gpu.device import DEVICE, ON_DEVICE, REHEARSED, some

pytestmark = ON_DEVICE
PLACE = torch.device(DEVICE)
APART = 0.02
"""What rounding to bf16 may make of a loss, as a share of it, and of the angle between gradients."""


def learnt(model: PreTrainedModel, batch: Microbatch, *, masked: bool) -> tuple[float, Tensor]:
    """The loss, and all gradients one after the other."""
    loss = token_losses(model(**forward_inputs(batch, model.config, PLACE, masked=masked)).logits, batch.targets.to(PLACE))
    loss.backward()
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return float(loss.detach()), gradient


@pytest.mark.parametrize("family", some(sorted(FAMILIES), "mistral"))
def test_attention_by_lengths_learns_what_a_mask_does(family: str) -> None:
    varlen: Varlen | None = CountedVarlen() if REHEARSED else varlen_attention()
    assert varlen is not None, "torch 2.11 and later"
    batch, _ = packed()
    model = tiny(family).to(PLACE, torch.bfloat16)
    masked, wanted = learnt(model, batch, masked=True)
    attention = PackedAttention(model, varlen)
    attention.begin(batch.inputs, batch.segments, PLACE)
    by_length, gradient = learnt(model, batch, masked=False)
    assert by_length == pytest.approx(masked, rel=APART)
    assert float(torch.cosine_similarity(gradient, wanted, dim=0)) > 1 - APART


def test_blocks_whose_inputs_wait_on_the_host_learn_what_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps one behind the other, none of which is waited for: they write the buffers of those that are still computed."""
    made = recompute.cuda_inputs() if not REHEARSED else HostInputs(PinnedMemory(Driver()), HostCopies(), DEVICE)
    monkeypatch.setattr(recompute, "cuda_inputs", lambda: made)
    width, rows = (32, 32) if REHEARSED else (2048, 8192)
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()).to(PLACE) for _ in range(8)]
    inputs = [torch.randn(rows, width, device=PLACE) for _ in range(6)]
    found: dict[str, list[Tensor]] = {"device": [], "cpu": []}
    for where, gradients in found.items():
        for x in inputs:
            hidden = first = x.clone().requires_grad_()
            for block in blocks:
                with recompute._kept(where, pin_memory=True):
                    hidden = checkpoint(block, hidden, use_reentrant=True)
            hidden.square().sum().backward()
            assert first.grad is not None
            gradients.append(first.grad)
    assert made.num_bytes == len(blocks) * rows * width * 4, "pinned, once for all steps"
    for mine, others in zip(found["cpu"], found["device"], strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not REHEARSED and liger_loss() is None, reason="liger-kernel is not installed")
def test_the_fused_loss_is_the_one_in_rows() -> None:
    liger: LigerLoss | None = CountedLiger() if REHEARSED else liger_loss()
    assert liger is not None
    source = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 5000, (300,), generator=source).to(PLACE)
    targets[::3] = -100
    found = []
    for fused in (False, True):
        source.manual_seed(2)
        hidden, weight = (torch.randn(n, 64, generator=source).to(PLACE, torch.bfloat16).requires_grad_() for n in (300, 5000))
        loss = (
            fused_linear_cross_entropy(hidden, weight, None, targets, liger)
            if fused
            else linear_cross_entropy(hidden, weight, None, targets)
        )
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        found.append((float(loss.detach()), torch.cat([hidden.grad, weight.grad]).flatten().float()))
    assert found[1][0] == pytest.approx(found[0][0], rel=APART)
    assert float(torch.cosine_similarity(found[1][1], found[0][1], dim=0)) > 1 - APART

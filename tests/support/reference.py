"""What transformers itself says: the judge of every token and logprob."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


class _Generates(Protocol):
    """A causal model, which transformers' types do not tell from any other."""

    def generate(self, ids: torch.Tensor, **options: object) -> torch.Tensor: ...


def load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers loads it."""
    capped = getattr(AutoConfig.from_pretrained(path), "attn_logit_softcapping", None) is not None
    # Earlier versions choose an attention that knows of no soft-cap.
    attention = {"attn_implementation": "eager"} if capped else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **attention)
    nn.Module.eval(model)
    return model


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` greedy tokens after the prompt, EOS ignored."""
    ids = torch.tensor([list(prompt)])
    out = cast(_Generates, model).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


@torch.inference_mode()
def chosen(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The likeliest token after the prompt, and after each token of ``answer`` but the last.

    It is ``answer`` where that is greedy, and only there: what ``greedy`` tells of as many tokens, by one forward pass.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    tokens: list[int] = model(ids).logits[0, len(prompt) - 1 :].argmax(dim=-1).tolist()
    return tokens[: len(answer)]


@torch.inference_mode()
def in_bf16(path: Path, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after each position with weights in bf16, [len(ids), vocabulary] in fp32: computed in fp32, and in bf16."""
    model = load(path, torch.bfloat16)
    row = torch.tensor([list(ids)])
    rounded = model(row).logits[0].float()
    nn.Module.float(model)
    return model(row).logits[0], rounded


@torch.inference_mode()
def logprobs(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Log-softmax after each position, [len(ids), vocabulary]."""
    logits_TV: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits_TV.double().log_softmax(dim=1)

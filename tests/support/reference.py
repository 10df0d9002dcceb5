"""What transformers itself says: the judge of every token and logprob."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load(path: Path) -> PreTrainedModel:
    """The model as transformers loads it, fp32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` greedy tokens after the prompt, EOS ignored."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def logprobs(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Log-softmax after each position, [len(ids), vocabulary]."""
    return model(torch.tensor([list(ids)])).logits[0].double().log_softmax(dim=1)

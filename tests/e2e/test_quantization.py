"""Weights rounded as two ranks read them, at the start and by a reload: near the plain model's, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve.v1 import admin_pb2, inference_pb2, models_pb2
from tests.support import reference
from tests.support.models import save_step
from tests.support.server import Server, serving

PROMPT = tuple((5 * place * place) % 400 + 1 for place in range(48))


def logprobs_of(server: Server) -> torch.Tensor:
    """Of each token of the prompt but the first, as the server says."""
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(PROMPT)
    request.stopping.max_new_tokens = 1
    request.response.prompt_logprobs = 0
    answer = server.inference.Generate(request, timeout=400)
    return torch.tensor([each.logprob for each in answer.prompt.logprobs[1:]])


def expected(folder: Path) -> torch.Tensor:
    """The same by transformers in fp32, with the weights as they are."""
    with torch.inference_mode():
        logits = reference.load(folder)(torch.tensor([PROMPT])).logits[0, :-1].float()
    return logits.log_softmax(dim=1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().mean())


@pytest.mark.parametrize(("quantization", "dtype", "near"), [("int8", "bfloat16", 0.05), ("int4", "float32", 0.4)])
def test_two_ranks_round_what_they_read(tmp_path: Path, quantization: str, dtype: str, near: float) -> None:
    root = tmp_path / "run"
    first = save_step(root, 1, "llama", tmp_path / "first")
    options = ("--tensor-parallel-size", "2", "--quantization", quantization, "--dtype", dtype)
    with serving(root, *options) as server:
        assert distance(expected(first), logprobs_of(server)) < near
        second = save_step(root, 2, "llama", tmp_path / "second", seed=1)
        server.admin.Reload(admin_pb2.ReloadRequest(), timeout=600)
        assert server.models.GetModel(models_pb2.GetModelRequest(), timeout=400).checkpoint_step == 2
        assert server.metrics()["tessera_weight_swaps_total"] == 1
        assert distance(expected(second), logprobs_of(server)) < near < distance(expected(first), expected(second))

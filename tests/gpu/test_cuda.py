"""The same parity on a CUDA device: ``make test-gpu``. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from serve.v1 import inference_pb2
from tests.support import reference
from tests.support.models import FAMILIES, VOCABULARY, save
from tests.support.server import Server, serving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]


def _generate(server: Server, prompt: list[int], tokens: int) -> list[int]:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_new_tokens = tokens
    request.stopping.ignore_eos = True
    return list(server.inference.Generate(request, timeout=120).completions[0].token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_on_cuda(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path / family, with_tokenizer=False)
    model = reference.load(folder)
    source = random.Random(1)
    prompts = [[source.randrange(1, VOCABULARY) for _ in range(length)] for length in (1, 17, 64, 200, 300)]
    with (
        serving(folder, "--dtype", "float32", "--max-step-tokens", "64", device="cuda") as server,
        ThreadPoolExecutor(5) as pool,
    ):
        got = list(pool.map(lambda prompt: _generate(server, prompt, 64), prompts))
    assert got == [reference.greedy(model, prompt, 64) for prompt in prompts]

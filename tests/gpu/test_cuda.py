"""A server on a CUDA device beside transformers: ``make test-gpu``. Elsewhere these tests are skipped, and say so."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve.v1 import inference_pb2
from tests.gpu.device import DEVICE, ON_DEVICE, REHEARSED, some
from tests.support import reference
from tests.support.models import VOCABULARY, save
from tests.support.server import Server, serving

pytestmark = ON_DEVICE
FAMILIES = ("gpt_neox", "llama", "gemma2")
"""Every family is compared without a server around it; of a server three are enough: plain, grouped, and with soft-caps."""
LENGTHS, TOKENS = ((1, 17, 40), 6) if REHEARSED else ((1, 17, 64, 200, 300), 64)


def _generate(server: Server, prompt: list[int], tokens: int) -> list[int]:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_new_tokens = tokens
    request.stopping.ignore_eos = True
    return list(server.inference.Generate(request, timeout=120).completions[0].token_ids)


def says_what_transformers_does(folder: Path, *options: str) -> list[str]:
    """Ask a server with these options for prompts of several lengths side by side; returns its log, whole."""
    model = reference.load(folder)
    source = random.Random(1)
    prompts = [[source.randrange(1, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    given = ("--dtype", "float32", "--max-step-tokens", "64", "--max-num-seqs", "4", "--kv-cache-gib", "0.02", *options)
    with serving(folder, *given, device=DEVICE) as server, ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda prompt: _generate(server, prompt, TOKENS), prompts))
    assert got == [reference.greedy(model, prompt, TOKENS) for prompt in prompts]
    return server.log


@pytest.mark.parametrize("family", some(FAMILIES, "llama"))
def test_a_server_says_what_transformers_does(family: str, tmp_path: Path) -> None:
    says_what_transformers_does(save(family, tmp_path / family, with_tokenizer=False), "--cuda-graphs", "on")

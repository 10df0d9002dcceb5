"""A server whose decoding steps are captured, here on the CPU: the same answers, of the weights that are served."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serve.v1 import admin_pb2, inference_pb2
from tests.support import reference
from tests.support.models import VOCABULARY, save_step
from tests.support.server import Server, serving, until

TOKENS = 24


def _generate(server: Server, prompt: list[int]) -> list[int]:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_new_tokens = TOKENS
    request.stopping.ignore_eos = True
    return list(server.inference.Generate(request, timeout=400).completions[0].token_ids)


def test_answers_are_those_of_the_weights_also_after_they_were_exchanged(tmp_path: Path) -> None:
    root, source = tmp_path / "run", random.Random(2)
    prompts = [[source.randrange(1, VOCABULARY) for _ in range(length)] for length in (1, 17, 40, 90, 5)]
    first = save_step(root, 1, "llama", tmp_path / "first")
    options = ("--cuda-graphs", "on", "--cuda-graph-max-batch", "4", "--max-num-seqs", "8", "--max-step-tokens", "64")
    with serving(root, *options, "--kv-cache-gib", "0.02") as server, ThreadPoolExecutor(5) as pool:
        for step, checkpoint in enumerate((first, save_step(root, 2, "llama", tmp_path / "second", seed=1))):
            if step:
                server.admin.Reload(admin_pb2.ReloadRequest(), timeout=600)
                assert server.metrics()["tessera_weight_swaps_total"] == 1
            model = reference.load(checkpoint)
            got = list(pool.map(lambda prompt: _generate(server, prompt), prompts))
            assert got == [reference.greedy(model, prompt, TOKENS) for prompt in prompts]
        until(lambda: sum("captured 3 decoding steps, of up to 4 rows" in line for line in server.log) == 2)

"""A server whose ranks find the likeliest tokens by narrower copies of their heads gives transformers' own tokens."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from serve.v1 import inference_pb2
from tests.support import reference
from tests.support.kernels import cpu_kernels
from tests.support.models import save
from tests.support.server import Server, serving, until

NEW_TOKENS = 40
PROMPTS = ((5, 6, 7, 8), (100, 3), (17,) * 40)


def answers(server: Server) -> list[list[int]]:
    calls = []
    for prompt in PROMPTS:
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(prompt)
        request.stopping.max_new_tokens = NEW_TOKENS
        request.stopping.ignore_eos = True
        calls.append(server.inference.Generate.future(request))
    return [list(call.result(timeout=240).completions[0].token_ids) for call in calls]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_tokens_are_the_same_before_the_heads_are_copied_and_afterwards(family: str, ranks: int, tmp_path: Path) -> None:
    """And while they are: calls come all the time, and each rank has its copy at a time of its own."""
    cpu_kernels()
    folder = save(family, tmp_path / "model", with_tokenizer=False, vocab_size=8192)
    model = reference.load(folder)
    expected = [reference.greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    options = ("--tensor-parallel-size", str(ranks), "--log-level", "debug")
    with serving(folder, *options) as server:
        found, enough = list[list[list[int]]](), threading.Event()

        def ask() -> None:
            while not enough.is_set():
                found.append(answers(server))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: sum("are found by a copy of the head in" in line for line in server.log) == ranks)
        there = len(found)
        until(lambda: len(found) > there + 4)
        enough.set()
        asking.join()
        assert [each for each in found if each != expected] == []
        assert not any("is given up" in line or "in every step" in line for line in server.log)
    with serving(folder, *options, "--no-narrow-head") as server:
        assert answers(server) == expected
        assert not any("a copy of the head" in line for line in server.log)

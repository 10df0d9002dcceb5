"""What transformers says in fp32, with how near each second choice was.

In a process of its own: ``python -m benchmarks.engines.reference MODEL ASKED OUT``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.engines.environments import run
from benchmarks.engines.peers import Kitchen


def reference_of(kitchen: Kitchen, shape: str, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """For each prompt ``ids``, the ``second`` choices, and the ``gaps`` between both logits; computed once and kept."""
    asked = json.dumps({"prompts": prompts, "tokens": tokens})
    model = kitchen.checkpoint(shape)
    kept = model.with_name(f"{shape}-reference-{hashlib.sha256(asked.encode()).hexdigest()[:12]}.json")
    if not kept.is_file():
        question = kept.with_suffix(".asked")
        question.write_text(asked, encoding="utf-8")
        run(
            [sys.executable, "-m", "benchmarks.engines.reference", str(model), str(question), str(kept)],
            kept.with_suffix(".log"),
            {"OMP_NUM_THREADS": "1"},  # sums of one order, whatever the machine has
        )
    found: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def compute(model: str, question: str, out: str) -> None:
    """Greedy tokens of one padless batch, and the two likeliest of each step."""
    import torch
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    from benchmarks.pretrained import read_model

    asked = json.loads(Path(question).read_text(encoding="utf-8"))
    ids = torch.tensor(asked["prompts"])
    network = read_model(model, "float32")
    with torch.inference_mode():
        said = network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked["tokens"], min_new_tokens=asked["tokens"],
            do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    assert isinstance(said, GenerateDecoderOnlyOutput)
    assert said.logits is not None
    values, places = torch.stack(said.logits, dim=1).topk(2)
    told = [
        {
            "ids": places[row, :, 0].tolist(),
            "second": places[row, :, 1].tolist(),
            "gaps": (values[row, :, 0] - values[row, :, 1]).tolist(),
        }
        for row in range(len(asked["prompts"]))
    ]
    unfinished = Path(out).with_suffix(".unfinished")
    unfinished.write_text(json.dumps(told), encoding="utf-8")
    unfinished.rename(out)


if __name__ == "__main__":
    compute(*sys.argv[1:])

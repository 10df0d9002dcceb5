"""CTranslate2's generator, with ids that are turned into its vocabulary's strings before time is taken of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ctranslate2

from benchmarks.engines.systems.answering import AtOnce, answer


class CTranslate2:
    """A generator of one worker with all threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.versions = {"ctranslate2": ctranslate2.__version__}
        self._words = json.loads((Path(settings["model"]) / "vocabulary.json").read_text(encoding="utf-8"))
        self._generator = ctranslate2.Generator(
            settings["model"], device="cpu", compute_type=settings["type"], inter_threads=1, intra_threads=settings["threads"]
        )

    def generate(self, prompts: list[list[int]], tokens: int, exact: bool, every: float) -> list[list[int]]:
        """See ``Engine``; its cache has the type of the model, so nothing is rounded."""
        if every:
            raise AtOnce
        answers = self._generator.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            max_batch_size=0, beam_size=1, sampling_topk=1, max_length=tokens, min_length=tokens,
            include_prompt_in_result=False, end_token=[],
        )  # fmt: skip
        return [list(answer.sequences_ids[0]) for answer in answers]

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    answer(CTranslate2)

"""transformers' own ``generate`` on one batch, in the environment of the repository."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.engines.systems.answering import AtOnce, answer
from benchmarks.pretrained import read_model, without_progress_bars


class Transformers:
    """A model with all threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        torch.set_num_threads(settings["threads"])
        without_progress_bars()
        self._model = read_model(settings["model"], settings["dtype"])

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], tokens: int, exact: bool, every: float) -> list[list[int]]:
        """See ``Engine``; its cache has the type of the model. Prompts must be of one length, so that nothing is padded."""
        if every:
            raise AtOnce
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        found: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return found

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    answer(Transformers)

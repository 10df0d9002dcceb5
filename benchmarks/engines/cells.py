"""What is measured: shapes, precisions and cells, by names that ``--cells`` takes."""

from __future__ import annotations

import fnmatch
import random
from dataclasses import dataclass
from typing import Any, Final

NEW_TOKENS: Final = 64
ARRIVAL_SECONDS: Final = 0.02
"""Soon enough that prompts wait for those before them on few cores: what is measured is the engine, not the pace."""
PRECISIONS: Final = ("fp32", "bf16", "int8")
VOCABULARY: Final = {"160m": 50_304, "llama-350m": 32_000, "llama-1.1b": 32_000, "gpt2-medium": 50_304}
"""Of each shape."""
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "160m": {
        "model_type": "gpt_neox", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "max_position_embeddings": 2048, "rotary_pct": 0.25,
    },
    "llama-350m": {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 2816, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    },
    "llama-1.1b": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 5632, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    },
    "gpt2-medium": {
        "model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024,
        "n_ctx": 1024,  # which llama.cpp's converter asks for
    },
}  # fmt: skip
"""Pythia-160M's, two Llamas' with grouped queries, GPT-2 medium's."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of each engine: so many prompts at once of so many tokens each."""

    shape: str
    precision: str
    kind: str
    """``decode``: tokens a second after the first ones. ``prefill``: prompt tokens a second until the last first token.
    ``arrivals``: tokens a second of prompts that come one by one, ``ARRIVAL_SECONDS`` apart, until the last is answered."""
    batch: int
    prompt_tokens: int

    @property
    def name(self) -> str:
        """As in ``160m/bf16/decode/8x64``."""
        return f"{self.shape}/{self.precision}/{self.kind}/{self.batch}x{self.prompt_tokens}"

    @property
    def every(self) -> float:
        """Seconds from one prompt to the next."""
        return ARRIVAL_SECONDS if self.kind == "arrivals" else 0.0

    def prompts(self) -> list[list[int]]:
        """Random ids, the same in every run; neither the end of text nor the bytes among them."""
        source = random.Random(self.name)
        vocabulary = VOCABULARY[self.shape]
        return [[source.randrange(300, vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.batch)]

    def rate(self, first_seconds: float, whole_seconds: float) -> float | None:
        """Tokens a second, of one new token's and of all new tokens' seconds; ``None`` where noise was longer than the work."""
        if self.kind == "arrivals":
            return self.batch * (NEW_TOKENS + 1) / whole_seconds
        if self.kind == "prefill":
            return self.batch * self.prompt_tokens / first_seconds
        if whole_seconds <= first_seconds:
            return None
        return self.batch * NEW_TOKENS / (whole_seconds - first_seconds)


QUICK: Final = tuple(Cell("160m", precision, "decode", batch, 64) for precision in PRECISIONS for batch in (1, 8, 32))
USUAL: Final = (
    *QUICK,
    *(Cell("160m", precision, "prefill", *size) for precision in PRECISIONS for size in ((1, 1024), (8, 512))),
    *(Cell("160m", precision, "decode", batch, 1024) for precision in PRECISIONS for batch in (1, 8)),
    *(Cell("llama-350m", precision, "decode", batch, 64) for precision in PRECISIONS for batch in (1, 8, 32)),
)
WHOLE: Final = tuple(cell for cell in USUAL if cell in QUICK or cell.kind == "prefill" or cell.precision == "bf16")
"""What a run measures that is not told otherwise. The others take patterns: ``--cells 'llama-350m/int8/*'``."""
CELLS: Final = (
    *USUAL,
    *(
        Cell(shape, precision, "decode", batch, 64)
        for shape in ("llama-1.1b", "gpt2-medium")
        for precision in PRECISIONS
        for batch in (1, 8, 32)
    ),
    *(Cell("160m", precision, "arrivals", 32, 64) for precision in PRECISIONS),
)


def chosen(patterns: list[str], quick: bool) -> list[Cell]:
    """Cells by their names' patterns, those of one shape and precision together.

    Raises ``ValueError`` for a pattern of no cell.
    """
    cells = list(QUICK if quick else WHOLE)
    if patterns:
        for pattern in patterns:
            if not any(fnmatch.fnmatch(cell.name, pattern) for cell in CELLS):
                raise ValueError(f"no cell is called {pattern}; there are {', '.join(cell.name for cell in CELLS)}")
        cells = [cell for cell in CELLS if any(fnmatch.fnmatch(cell.name, pattern) for pattern in patterns)]
    return sorted(cells, key=lambda cell: (list(SHAPES).index(cell.shape), PRECISIONS.index(cell.precision)))

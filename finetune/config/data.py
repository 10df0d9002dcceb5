"""What the model learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finetune.config.checks import require


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What the model learns from. Documents are joined by the end-of-text token and cut to ``seq_len``; nothing is padded."""

    train: tuple[str, ...]
    """Files, folders or globs: text (one document each) or JSONL (one ``{"text": …}`` a line, names ending in .jsonl)."""

    pattern: str = "*"
    """Names of the files taken from folders, at any depth, for example ``*.py``."""

    text_key: str = "text"
    """Key of the text in a JSONL line."""

    seq_len: int = 512
    """Tokens of one sample."""

    eval: tuple[str, ...] = ()
    """Files for evaluation; empty: ``eval_fraction`` of the data is held out."""

    eval_fraction: float = 0.01
    """Share of the tokens held out for evaluation, whole documents chosen by ``seed``; 0 evaluates nothing."""

    seed: int = 0
    """Order of the samples and choice of the held-out documents."""

    invalid_text: Literal["refuse", "skip"] = "refuse"
    """What happens to a file that is not UTF-8."""

    def __post_init__(self) -> None:
        require(bool(self.train) and all(self.train), "data.train", list(self.train), "name at least one file, folder or glob")
        require(self.seq_len >= 2, "data.seq_len", self.seq_len, "be at least 2")
        require(0.0 <= self.eval_fraction < 1.0, "data.eval_fraction", self.eval_fraction, "lie between 0 and 1, 1 excluded")
        require(self.seed >= 0, "data.seed", self.seed, "be 0 or more")

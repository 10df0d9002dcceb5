"""What the model learns from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from finetune.config.checks import require

Format = Literal["auto", "text", "completion", "alpaca", "sharegpt", "messages"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One entry of ``data.train`` or ``data.eval`` that says more than a path. What is unset is as in ``data``."""

    path: str
    """File, folder, glob, folder of a saved ``datasets`` data set, ``hf:NAME[,CONFIG][:SPLIT]``, or prefix of Megatron's
    ``.bin`` and ``.idx``."""

    weight: float = 1.0
    """Times the samples of this source appear in one pass; of a fraction, a part chosen by ``data.seed`` appears once more."""

    format: Format | None = None
    """Shape of the records, as ``data.format``."""

    pattern: str | None = None
    """Names of the files taken from folders, as ``data.pattern``."""

    split: str | None = None
    """Split of a ``datasets`` data set; unset: ``train``, or the only one."""

    text_key: str | None = None
    """Key of the text in a ``text`` record, as ``data.text_key``."""

    prompt_key: str | None = None
    """Key of the prompt in a ``completion`` record, as ``data.prompt_key``."""

    completion_key: str | None = None
    """Key of the completion in a ``completion`` record, as ``data.completion_key``."""

    messages_key: str | None = None
    """Key of the turns in a conversation, as ``data.messages_key``."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "name a file, folder, glob or data set")
        require(math.isfinite(self.weight) and self.weight > 0, "weight", self.weight, "be greater than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What the model learns from, which of its tokens are targets, and how samples share a row of ``seq_len`` tokens."""

    train: tuple[str | SourceConfig, ...]
    """Sources: paths (files, folders, globs, data sets), or mappings with a ``path`` and more: ``{path: …, weight: 2}``.
    Text files are one document each; JSONL, parquet and ``datasets`` hold one record a line or row."""

    format: Format = "auto"
    """Shape of the records: ``text``, ``completion`` (prompt, completion), ``alpaca`` (instruction, input, output),
    ``sharegpt`` (conversations of from, value), ``messages`` (role, content). ``auto`` looks at the first record's keys."""

    pattern: str = "*"
    """Names of the files taken from folders, at any depth, for example ``*.py``."""

    text_key: str = "text"
    """Key of the text in a ``text`` record."""

    prompt_key: str = "prompt"
    """Key of the prompt in a ``completion`` record."""

    completion_key: str = "completion"
    """Key of the completion in a ``completion`` record."""

    messages_key: str | None = None
    """Key of the turns in a conversation; unset: ``messages``, or ``conversations``."""

    chat_template: str | None = None
    """Jinja file that renders conversations, or one of ``chatml``, ``plain``, ``instruct``; unset: the tokenizer's own. It is
    saved with every checkpoint."""

    train_on: Literal["completion", "last", "all"] = "completion"
    """Targets: ``completion`` the turns of ``train_roles`` with the token that ends them, ``last`` only the last such turn,
    ``all`` every token. Text is always a target as a whole."""

    train_roles: tuple[str, ...] = ("assistant",)
    """Roles whose turns are targets."""

    seq_len: int = 512
    """Tokens of one row: what a model sees at once."""

    packing: Literal["auto", "join", "isolate", "none"] = "auto"
    """``join`` documents into one stream and cut it; ``isolate`` packs whole samples, each seeing only itself; ``none`` one
    sample a row, padded. ``auto``: ``join`` when all sources are text, else ``isolate``."""

    too_long: Literal["refuse", "cut", "drop"] = "refuse"
    """A conversation or completion longer than ``seq_len``: refuse it by file and line, keep its head, or leave it out."""

    eval: tuple[str | SourceConfig, ...] = ()
    """Sources for evaluation; empty: ``eval_fraction`` of the data is held out."""

    eval_fraction: float = 0.01
    """Share of the tokens held out for evaluation, whole documents chosen by ``seed``; 0 evaluates nothing."""

    seed: int = 0
    """Order of the samples, choice of the held-out documents and of parts by weight."""

    invalid_text: Literal["refuse", "skip"] = "refuse"
    """What happens to a file that is not UTF-8."""

    changed: Literal["refuse", "accept"] = "refuse"
    """What a resumed run does when its data are no longer those it was saved with, by content: ``refuse`` says what changed,
    ``accept`` goes on with the new ones, at the same number of samples. Data that were only moved or touched are the same."""

    invalid: Literal["refuse", "skip"] = "refuse"
    """What happens to a record that cannot be used: ``refuse`` the data by its file and line, or ``skip`` it, with a count and
    a list of what was left out (``left-out.jsonl`` beside the prepared data). ``too_long`` decides on long ones."""

    folder: str | None = None
    """Where prepared data is kept; unset: ``<run.output>/data``. Runs that name the same folder share it."""

    def __post_init__(self) -> None:
        require(bool(self.train) and all(self.train), "data.train", list(self.train), "name at least one file, folder or glob")
        require(self.seq_len >= 2, "data.seq_len", self.seq_len, "be at least 2")
        require(0.0 <= self.eval_fraction < 1.0, "data.eval_fraction", self.eval_fraction, "lie between 0 and 1, 1 excluded")
        require(self.seed >= 0, "data.seed", self.seed, "be 0 or more")
        roles = "name at least one of system, developer, user, assistant, tool"
        known = {"system", "developer", "user", "assistant", "tool"}
        good = bool(self.train_roles) and set(self.train_roles) <= known
        require(good, "data.train_roles", list(self.train_roles), roles)

    def sources(self, which: Literal["train", "eval"]) -> tuple[SourceConfig, ...]:
        """The entries of ``train`` or ``eval``, each as a mapping."""
        entries = self.train if which == "train" else self.eval
        return tuple(SourceConfig(path=entry) if isinstance(entry, str) else entry for entry in entries)

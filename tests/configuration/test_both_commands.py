"""Both commands tell the same kind of mistake in the same words, but for the keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from finetune.config.load import load_config
from finetune.errors import ConfigError as TrainingError
from serve.cli import resolve
from serve.errors import ConfigError as ServingError

TRAINING = "model: {path: m}\ndata: {train: t}\nrun: {output: o}\n"
SERVING = "model: {path: m}\n\n\n"


def told(folder: Path, training: str, serving: str) -> tuple[str, str]:
    """What each command says of its file, ``KEY`` for its key and ``RANGE`` for the keys that it allows."""
    file = folder / "same.yaml"
    file.write_text(TRAINING + training)
    with pytest.raises(TrainingError) as by_training:
        load_config(file)
    file.write_text(SERVING + serving)
    with pytest.raises(ServingError) as by_serving:
        resolve({"config": str(file)}, {})
    assert by_training.value.exit_code == by_serving.value.exit_code == 2
    return neutral(str(by_training.value)), neutral(str(by_serving.value))


def neutral(message: str) -> str:
    message = re.sub(r"\(allowed .*\)", "(allowed …)", message)
    return re.sub(r"\b(batch|rpc|optimizer|cache|log)\b(\.\w+)?", "KEY", message)


@pytest.mark.parametrize(
    ("training", "serving", "says"),
    [
        ("batch:\n  micro: many", "rpc:\n  port: many", "line 5: KEY is 'many'; it must be a whole number"),
        ("optimizer: {eps: fast}", "rpc: {drain_seconds: fast}", "line 4: KEY is 'fast'; it must be a number"),
        ("log: {plot: maybe}", "cache: {prefix_caching: maybe}", "line 4: KEY is 'maybe'; it must be true or false"),
        ("log: {wandb: [1]}", "rpc: {host: [1]}", "line 4: KEY is [1]; it must be text"),
        ("batch: {micro: 0}", "cache: {block_tokens: 0}", "line 4: KEY is 0; it must "),
        ("batch: {micr: 1}", "rpc: {prt: 1}", "line 4: unknown key KEY; did you mean KEY? (allowed …)"),
        ("batc: {micro: 1}", "rcp: {port: 1}", "line 4: unknown key "),
        ("batch: [1]", "rpc: [1]", "line 4: KEY is [1]; it must be a mapping of keys to values"),
        ("batch: {micro: 1, micro: 2}", "rpc: {port: 1, port: 2}", "line 4: KEY is set twice"),
        ("batch: {micro: 1", "rpc: {port: 1", "not valid YAML: while parsing a flow mapping, expected ',' or '}'"),
        ("1: 2", "1: 2", "line 4: key 1 is not text"),
    ],
)
def test_a_mistake_is_told_alike(tmp_path: Path, training: str, serving: str, says: str) -> None:
    for message in told(tmp_path, training, serving):
        assert message.startswith(str(tmp_path / "same.yaml"))
        assert says in message

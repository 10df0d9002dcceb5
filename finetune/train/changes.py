"""What a resumed run may change, and what it may not: settings that belong to the saved tensors, and those that steer the rest.

Moments and weights of another shape, or of another optimizer, cannot be gone on with; nor, unless it is asked for, the position
in other data. All else may change between two saves, and is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint.text.tokenizer_class import CLASS_WHATEVER_IS_NAMED
from finetune.config import TuneConfig
from finetune.data.prepared import TOKENIZER_CLASS, Prepared
from finetune.errors import ConfigError
from finetune.train.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TOLD = ("batch", "optimizer", "schedule", "zero", "offload", "pipeline", "activations")
"""Sections of which every key is told when it changes."""
_UNTOLD = ("offload.path",)
_SOFT = ("dropout", "pdrop", "token_id", "initializer_range", "_name_or_path", "output_", "return_dict", "use_return_dict")
"""Parts of the names of a model's settings that change none of its tensors."""
_LAID_OUT = ("rope_parameters", "layer_types", "attention_types", "attention_layers")
"""Settings of a model that are tables or lists, and without which its weights are another model."""
_OF_DATA = ("data", "data.seq_len", "data.seed")
Values = Mapping[str, Any]


def settings_of(config: TuneConfig, prepared: Prepared, hf_config: PretrainedConfig) -> dict[str, Any]:
    """What the tensors and the position of a resume state belong to: a resumed run must agree in it."""
    lora = None if config.lora is None else {**asdict(config.lora), "targets": list(config.lora.targets)}
    return {
        **({TOKENIZER_CLASS: CLASS_WHATEVER_IS_NAMED.get(hf_config.model_type, "")} if prepared.of_model else {}),
        "data": prepared.fingerprint,
        "data.seq_len": config.data.seq_len,
        "data.seed": config.data.seed,
        "model": {key: value for key, value in _plain_values(hf_config).items() if not _is_soft(key)},
        "optimizer": config.algorithm,
        "offload.zenflow": asdict(config.offload.zenflow) if config.algorithm == "zenflow" else None,
        "lora": lora,
    }


def course_of(config: TuneConfig, hf_config: PretrainedConfig, schedule: Schedule, precision: str) -> dict[str, Any]:
    """What else decides how a run goes on, by key: told when it changes, and never a reason to refuse."""
    sections = asdict(config)
    found: dict[str, Any] = {"samples of a step": config.step_samples, "steps in all": schedule.steps}
    for section in _TOLD:
        found.update(_flat(section, sections[section]))
    for key in _UNTOLD:
        found.pop(key, None)
    found |= {"run.precision": precision, "run.ranks": config.run.ranks, "run.seed": config.run.seed}
    if config.lora is not None:
        found["lora.dropout"] = config.lora.dropout
    dropouts = {key: value for key, value in _plain_values(hf_config).items() if "dropout" in key or "pdrop" in key}
    return {**found, **_flat("model", dropouts)}


def _plain_values(hf_config: PretrainedConfig) -> dict[str, Any]:
    said = hf_config.to_dict()
    values = {key: value for key, value in said.items() if isinstance(value, int | float | str | bool)}
    values |= {key: said[key] for key in _LAID_OUT if isinstance(said.get(key), Mapping | list)}
    for name in ("transformers_version", "use_cache", "dtype"):
        values.pop(name, None)
    return values


def _is_soft(key: str) -> bool:
    return any(part in key for part in _SOFT)


def _flat(prefix: str, values: Values) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        found.update(_flat(name, value) if isinstance(value, Mapping) else {name: _as_json(value)})
    return found


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def check_settings(path: Path, was: Values, now: Values, known_as: Sequence[str] = ()) -> None:
    """Refuse a save of another run.

    Args:
        path: of the save.
        was: what it remembers of its settings; what it does not remember is not compared.
        known_as: other names of the data: a save of these goes on with them, whatever layout they have.

    Raises:
        ConfigError: names every key that differs, with both values.
    """
    same_data = was.get("data") in known_as
    differing = [
        (key, *values)
        for name in now
        if name in was and not (same_data and name in _OF_DATA)
        for key, *values in _differences(name, was[name], now[name])
    ]
    if differing:
        what = ", ".join(f"{key} (was {before!r}, is {after!r})" for key, before, after in differing)
        remedy = "--data.changed accept goes on with other data; " if any(key in _OF_DATA for key, *_ in differing) else ""
        raise ConfigError(
            f"run.resume: {path} cannot be continued, since these differ: {what}; {remedy}name another run.output"
        )


def _differences(name: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Single keys that differ. A section that is there on one side only differs as a whole."""
    if not isinstance(was, Mapping) or not isinstance(now, Mapping):
        if was != now:
            yield name, was, now
        return
    for key in sorted({*was, *now}):
        soft = _is_soft(key) if name == "model" else (name, key) == ("lora", "dropout")
        known = key in was or key not in _LAID_OUT  # earlier saves do not remember those
        if was.get(key) != now.get(key) and known and not soft:
            yield f"{name}.{key}", was.get(key), now.get(key)


def changes_in_words(was: Values, now: Values) -> list[str]:
    """One line for each setting that is another one now; keys that only one side knows are left out."""
    return [f"changed: {key} {was[key]!s} -> {now[key]!s}" for key in now if key in was and was[key] != now[key]]

"""What to change so that a run fits: the configuration's own keys, tried in the order of what they cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import yaml

from finetune.config import LoraConfig, TuneConfig, ZenFlowConfig
from finetune.errors import ConfigError
from finetune.forecast.estimate import Forecast, forecast

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Change = tuple[tuple[str, Any], ...]
"""Dotted keys and their values, set together."""
_MOST: Final = 3
"""Combinations that are shown."""
_TRIES: Final = 60
"""Combinations that are worked out, at most."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Keys that make a run fit, and what it needs with them."""

    change: Change
    forecast: Forecast

    def as_yaml(self) -> str:
        """The keys as lines of the run's file."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.change:
            section, name = key.split(".", 1)
            sections.setdefault(section, {})[name] = value
        # Of a library, since a path may hold what means something to YAML. One line a section, however long.
        return yaml.safe_dump(sections, default_flow_style=None, sort_keys=False, width=math.inf, allow_unicode=True).rstrip()


def advise(
    config: TuneConfig, hf_config: PretrainedConfig, given: Forecast, *, precision: str, command: str = "tune"
) -> list[Advice]:
    """The first combinations of keys with which the run fits, cheapest first; empty if none was found.

    A combination that holds another one found before is left out.
    """
    found: list[Advice] = []
    for tries, change in enumerate(_combinations(config, given, command)):
        if len(found) == _MOST or tries == _TRIES:
            break
        if any(set(advice.change) <= set(change) for advice in found):
            continue
        changed = _with(config, change, command)
        if changed is None:
            continue
        trial = forecast(changed, hf_config, given.hardware, precision=precision, command=command)
        if not trial.shortages():
            found.append(Advice(change, trial))
    return found


def _combinations(config: TuneConfig, given: Forecast, command: str) -> Iterator[Change]:
    """Fewest changes first; of one kind at most one."""
    kinds = _kinds(config, given, command)
    for count in range(1, min(5, len(kinds)) + 1):
        for chosen in itertools.combinations(kinds, count):
            for parts in itertools.product(*chosen):
                yield tuple(itertools.chain.from_iterable(parts))


def _kinds(config: TuneConfig, given: Forecast, command: str) -> list[list[Change]]:
    """What could be changed, cheapest kind first; of each kind the milder value first."""
    kinds: list[list[Change]] = []
    micro, accumulation = config.batch.micro, config.accumulation
    smaller = [micro // part for part in (2, 4, 8, 16, 32) if micro % part == 0]
    if smaller:
        kinds.append([(("batch.micro", size), ("batch.accumulation", accumulation * micro // size)) for size in smaller])
    tuned = command == "tune"
    if config.activations.checkpoint == "none":
        kinds.append([(("activations.checkpoint", "device"),)])
    if config.run.ranks > 1:
        kinds.append([(("zero.stage", stage),) for stage in range(config.zero.stage + 1, 4 if tuned else 2)])
    on_gpu = given.hardware.device == "cuda"
    nvme = given.hardware.nvme_bytes is not None
    path = config.offload.path or "NVME_FOLDER"
    if config.offload.optimizer == "none" and on_gpu and tuned:
        kinds.append([(("offload.optimizer", "cpu"),)])
        kinds.append([(("zero.stage", 3), ("offload.optimizer", "cpu"), ("offload.parameters", "cpu"))])
    elif config.offload.parameters == "none" and on_gpu and tuned:
        kinds.append([(("zero.stage", 3), ("offload.parameters", "cpu"))])
    plain: Change = (("offload.method", "plain"),) if config.offload.method != "plain" else ()
    if plain:
        kinds.append([plain])
    if nvme and tuned:
        on_disk: Change = (("zero.stage", 3), ("offload.optimizer", "nvme"), ("offload.path", path), *plain)
        kinds.append([(*on_disk, ("offload.parameters", place)) for place in ("cpu", "nvme")])
    if config.lora is None and config.model.path is not None and tuned:
        kinds.append([(("lora.rank", 16),)])
    if given.hardware.disk_bytes is not None and given.disk_bytes > given.hardware.disk_bytes:
        kinds.insert(0, [(("save.keep", 1),), (("save.resume_state", False),)])
    return kinds


def _with(config: TuneConfig, change: Change, command: str) -> TuneConfig | None:
    """The configuration with the keys set; ``None`` when they break one of its rules, or set a key twice."""
    if len({key for key, _ in change}) < len(change):
        return None
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change:
        section, name = key.split(".", 1)
        sections.setdefault(section, {})[name] = value
    try:
        changed = dataclasses.replace(config, **{name: _section(config, name, values) for name, values in sections.items()})
        changed.check_command(command)
        return changed
    except ConfigError:
        return None


def _section(config: TuneConfig, name: str, values: dict[str, Any]) -> Any:
    section = getattr(config, name)
    if values.get("method") == "plain":
        values = {**values, "zenflow": ZenFlowConfig()}
    if section is not None:
        return dataclasses.replace(section, **values)
    assert name == "lora", "every other section has a value"
    return LoraConfig(**values)

"""A whole run's needs against what the machine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from checkpoint.text.tokenizer_files import TOKENIZER_FORMS
from finetune.config import SourceConfig, TuneConfig
from finetune.data.sources import find_files
from finetune.errors import ConfigError
from finetune.forecast.facts import ModelFacts, facts_of
from finetune.forecast.hardware import Hardware
from finetune.forecast.layout import Layout, layout_of
from finetune.forecast.memory import (
    SHARED_FILES_BYTES,
    WRITER_BYTES,
    Need,
    mean_in_flight,
    moment_elements,
    need_of,
)
from finetune.forecast.pace import Pace
from finetune.forecast.seconds import is_measurable, pace_of
from finetune.forecast.speeds import Measured
from finetune.model.dtypes import DTYPES
from finetune.output.folder import CHECKPOINTS, RESUME, step_folders
from finetune.units import in_gib

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SHARED_WITH_SUPEROFFLOAD: Final = 8
"""Bytes of an element: its weight and its gradient in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run will need, and what there is. Bytes everywhere."""

    facts: ModelFacts
    layout: Layout
    hardware: Hardware
    need: Need
    """Memory that the busiest rank needs."""
    host_bytes: int
    """Peak of all ranks together: each one's own pages, and pages of shared files once."""
    host_items: Mapping[str, int]
    """What ``host_bytes`` is made of, bytes by name."""
    checkpoint_bytes: int
    resume_bytes: int
    """One resume state; 0 if none is kept."""
    saves: int | None
    """Saves that lie on the disk together at most; ``None`` when unknown before the data is counted."""
    disk_bytes: int
    """What the run adds to the disk; with ``saves`` unknown, two saves."""
    shared_bytes: int
    """What lies in ``/dev/shm`` of the host memory: with SuperOffload, fp32 weights and gradients, which DeepSpeed hands to a
    process of its own there."""
    pace: Pace | None
    """Seconds of a step, if known."""
    flops_per_token: float

    @property
    def device_bytes(self) -> int:
        """Device memory that the busiest rank needs, in bytes; 0 on a CPU."""
        return self.need.device_bytes

    @property
    def nvme_bytes(self) -> int:
        """Space on the NVMe disk that all ranks together need, in bytes."""
        return self.need.nvme_bytes * self.layout.ranks

    def shortages(self) -> list[str]:
        """What does not fit, one sentence each; empty if all does."""
        found = []
        hardware = self.hardware
        if hardware.device == "cuda" and self.layout.ranks > hardware.gpus:
            found.append(f"run.ranks is {self.layout.ranks}; there are {hardware.gpus} GPUs")
        for what, needed, room in (
            ("device memory of one rank", self.device_bytes, hardware.gpu_bytes),
            ("host memory", self.host_bytes, hardware.ram_bytes),
            ("NVMe space", self.nvme_bytes, hardware.nvme_bytes),
            ("disk space", self.disk_bytes, hardware.disk_bytes),
            ("space in /dev/shm", self.shared_bytes, hardware.shared_bytes),
        ):
            if room is not None and needed > room:
                found.append(f"{what}: needs {in_gib(needed)} GiB of {in_gib(room)} GiB")
        return found

    def as_json(self) -> dict[str, Any]:
        """The forecast as plain values, for ``forecast.json`` and ``--json``."""
        values = asdict(self)
        for name in ("trace", "work"):
            values["facts"].pop(name)
        return {
            **values,
            "parameters": self.facts.total,
            "device_bytes": self.device_bytes,
            "activation_bytes": self.facts.activation_bytes,
            "nvme_bytes": self.nvme_bytes,
            "shortages": self.shortages(),
        }


def forecast(
    config: TuneConfig,
    hf_config: PretrainedConfig,
    hardware: Hardware,
    *,
    precision: str,
    command: str = "tune",
    pace: Pace | None = None,
    speeds: Measured | None = None,
    process_bytes: int = 0,
) -> Forecast:
    """Work out what ``config`` needs on ``hardware``.

    Args:
        hf_config: the transformers configuration of the run's model.
        precision: ``bf16``, ``fp16`` or ``fp32``, already decided.
        command: ``tune`` or ``pretrain``.
        pace: of an earlier run in the folder, which is believed before the speeds.
        speeds: of this machine, if measured; of hardware that is described they say nothing.
        process_bytes: host memory of one rank without a model, if measured; 0 takes the usual figure.
    """
    facts = facts_of(config, hf_config, precision, on_gpu=hardware.device == "cuda", command=command)
    layout = layout_of(config, device=hardware.device, precision=precision, command=command)
    need = need_of(facts, layout)
    if pace is None and speeds is not None and is_measurable(config, hardware.device) and not hardware.described:
        pace = pace_of(config, facts, layout, speeds)
    everyone = _of_all_ranks(need, layout, process_bytes)
    checkpoint, resume = _save_bytes(config, facts, layout, precision)
    saves = _saves(config)
    data = _data_bytes(config)
    return Forecast(
        facts=facts,
        layout=layout,
        hardware=hardware,
        need=need,
        host_bytes=sum(everyone.values()),
        host_items=everyone,
        checkpoint_bytes=checkpoint,
        resume_bytes=resume,
        saves=saves,
        disk_bytes=(2 if saves is None else max(0, saves - _kept_already(config))) * (checkpoint + resume) + data,
        shared_bytes=_SHARED_WITH_SUPEROFFLOAD * facts.trained if config.offload.method == "superoffload" else 0,
        pace=pace,
        flops_per_token=facts.flops_per_token(config.data.seq_len),
    )


def _of_all_ranks(need: Need, layout: Layout, process_bytes: int) -> dict[str, int]:
    """Host memory of all ranks together, by item; ``process_bytes``: see ``forecast``."""
    items = dict(need.host)
    if process_bytes:
        items["process"] = process_bytes
    everyone = {name: size * layout.ranks for name, size in items.items()}
    for name in ("activations", "heap gaps"):
        if name in everyone:
            everyone[name] = round(everyone[name] * mean_in_flight(layout))
    everyone["shared libraries"] = SHARED_FILES_BYTES[layout.device]
    everyone["writing and figures"] = WRITER_BYTES
    return everyone


def _save_bytes(config: TuneConfig, facts: ModelFacts, layout: Layout, precision: str) -> tuple[int, int]:
    """One served checkpoint, and one resume state."""
    elements = facts.trained if config.lora is not None else facts.total
    served = DTYPES[precision if config.save.dtype == "auto" else config.save.dtype].itemsize * elements
    small_files = 2 << 20  # tokenizer, manifest, headers
    moments = sum(moment_elements(facts, layout.algorithm))
    resume = 4 * (elements + moments) + small_files if config.save.resume_state else 0
    return served + small_files, resume


def _saves(config: TuneConfig) -> int | None:
    """The kept ones and the one being written."""
    if config.save.keep:
        return config.save.keep + 1
    if config.schedule.steps is None and config.save.every:
        return None
    return 1 if not config.save.every else -(-(config.schedule.steps or 1) // config.save.every)


def _kept_already(config: TuneConfig) -> int:
    """Saves of a resumed run that are on the disk now: they will be replaced, not added to."""
    if config.run.resume != "auto":
        return 0
    output = Path(config.run.output)
    return min(len(step_folders(output / CHECKPOINTS)), len(step_folders(output / RESUME)) or 1 << 30)


def _data_bytes(config: TuneConfig) -> int:
    """Token files still to be made: no larger than the text, since a token is about four bytes of it and two or four of ids."""
    folder = Path(config.run.output) / "data"
    if folder.is_dir() and any(folder.iterdir()):
        return 0
    return sum(_size_of(entry, config) for entry in (*config.data.train, *config.data.eval))


def _size_of(entry: str | SourceConfig, config: TuneConfig) -> int:
    """Bytes of a source's files; 0 for what is not there (a plan needs no data) or lies elsewhere."""
    path, pattern = (entry, None) if isinstance(entry, str) else (entry.path, entry.pattern)
    try:
        files = find_files([path], pattern or config.data.pattern, "data.train")
    except ConfigError:
        return 0
    return sum(file.stat().st_size for file in files if file.is_file())


# -- the model of a configuration, without its data


def model_config_of(config: TuneConfig, *, weights: bool = True) -> PretrainedConfig:
    """The transformers configuration of the run's model, from the configuration alone: the data need not exist.

    Args:
        weights: whether those of ``model.path`` must be there, and are looked at.

    Raises:
        ConfigError: there is no such model or tokenizer.
    """
    from checkpoint import CheckpointError
    from checkpoint.opening.prove import model_config
    from checkpoint.readers import peft
    from finetune.base_model.given import given_of
    from finetune.base_model.identity import at_fault, candidates
    from finetune.base_model.opened import open_base_model
    from finetune.model.build import check_new_config, config_from, config_of, new_config

    if config.model.path is not None:
        try:
            path, given = candidates(Path(config.model.path))[0], given_of(config)
            is_adapted = (
                given.adapter is not None or (path / peft.CONFIG).is_file()
            )  # of which the weights are looked at anyway
            if not weights and not is_adapted:
                return config_from(*model_config(path, given))
            with open_base_model(config) as checkpoint:
                return config_of(checkpoint)
        except CheckpointError as error:
            raise at_fault(config, error) from error
    assert config.model.new is not None, "ModelConfig holds exactly one of the two"
    check_new_config(config.model.new)
    return new_config(config.model.new, num_ids=_num_ids(config), seq_len=config.data.seq_len, end_of_text_id=0)


def _num_ids(config: TuneConfig) -> int:
    """Ids of the tokenizer: one that is still to be learned has as many as it is asked for."""
    if config.tokenizer.train is not None:
        return config.tokenizer.train.vocab_size
    assert config.tokenizer.path is not None, "TuneConfig refuses a new model without a tokenizer"
    from checkpoint import CheckpointError
    from checkpoint.readers.surroundings import tokenizer_at
    from checkpoint.text.tokenizer import read_tokenizer

    try:
        tokenizer = read_tokenizer(tokenizer_at(config.tokenizer.path))
    except CheckpointError as error:
        raise ConfigError(f"tokenizer.path: {config.tokenizer.path}: {error}") from error
    if tokenizer is None:
        raise ConfigError(f"tokenizer.path: {config.tokenizer.path} holds no {', '.join(TOKENIZER_FORMS)}")
    return tokenizer.num_ids


def precision_of(config: TuneConfig, device: str) -> str:
    """``bf16``, ``fp16`` or ``fp32``; a GPU that is only described has bf16."""
    if config.run.precision != "auto":
        return config.run.precision
    return "bf16" if device == "cuda" else "fp32"

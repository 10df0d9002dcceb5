"""What is done once, before any rank trains: the data tokenised, the disk measured, DeepSpeed's operations built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.text.tokenizer_class import CLASS_WHATEVER_IS_NAMED
from finetune.base_model.hub import on_hub
from finetune.config import TuneConfig
from finetune.data.prepared import TOKENIZER_CLASS, Prepared
from finetune.errors import ConfigError
from finetune.launch.instructions import Instructions
from finetune.machine import ops, pages
from finetune.machine.process import without_collection
from finetune.output.folder import CHECKPOINTS, RESUME, step_folders

Say = Callable[[str], None]


def settled(config: TuneConfig, say: Say) -> TuneConfig:
    """``config`` as all ranks are to have it: ``model.path`` names one checkpoint, whatever is saved beside it meanwhile.

    Args:
        say: told when it is another one than ``model.path`` means today.

    Raises:
        ConfigError: there is no such model, or it is not the one that this run began with and needs; or its tokenizer is lost.
    """
    if config.model.path is not None:
        with without_collection():
            from finetune.base_model.identity import settle_base

        config = settle_base(config, say)
    return _with_tokenizer(config, say)


def _with_tokenizer(config: TuneConfig, say: Say) -> TuneConfig:
    """``config``; of a resumed run whose tokenizer went with its base, or with the hub's cache, with the one it kept."""
    path, base, output = config.tokenizer.path, config.model.path, Path(config.run.output)
    went_with_base = base is not None and Path(base).parent == (output / RESUME).resolve()  # which holds no tokenizer
    if not (on_hub(path) or (went_with_base and path is None and config.tokenizer.train is None)):
        return config
    saves = _newest_saves(config)
    assert saves is not None, "a name of the hub is left as it is for runs that go on, and a base replaced for those"
    settings, kept = saves
    if kept is None:
        with without_collection():
            from finetune.data.prepare import data_folder
            from finetune.data.resumed import tokenizer_of

        kept = tokenizer_of(data_folder(config), str(settings.get("data")))
    if kept is None:
        what = f"tokenizer.path: {path}: is not to be had" if path else "tokenizer: lay beside the base model, which is gone"
        raise ConfigError(
            f"{what}, and {output} kept no copy that is known for it; name a folder that has it as tokenizer.path"
        )
    say(f"tokenizer: the run goes on with the one that it kept: {kept}")
    return replace(config, tokenizer=replace(config.tokenizer, path=str(kept)))


def make_ready(
    config: TuneConfig, say: Say, check: Callable[[], None] = lambda: None, *, swap: Path | None = None
) -> Instructions:
    """Prepare everything a rank needs; returns what the ranks are told.

    Args:
        say: told what takes time.
        check: called every so often; what it raises ends the work.
        swap: the run's folder on the disk, of ``machine.swap.claimed_swap``; needed when anything is offloaded to NVMe.

    Raises:
        FinetuneError: the data, the tokenizer or the disk is at fault.
    """
    from finetune.machine.nvme import prepare_disk

    try:
        prepared = _prepared(config, say, check)
    except OSError as error:
        raise ConfigError(f"run.output: {config.run.output}: the tokenised data cannot be written: {error}") from error
    check()
    assert swap is not None or not config.offload.on_disk, "nobody has claimed a folder for the swap files"
    disk = None if swap is None else prepare_disk(swap, say)
    built = built_ops(config, say)
    check()
    return Instructions(
        model_path=config.model.path, prepared=prepared, ops=built, disk=disk, swap=None if swap is None else str(swap)
    )


def _prepared(config: TuneConfig, say: Say, check: Callable[[], None]) -> Prepared:
    """The run's data; of a resumed run, those it was saved with or, if that is allowed, changed ones.

    A tokenizer that was learned stays what it was when the data change: the weights know its ids.
    """
    from finetune.data.prepare import prepare

    saved = _newest_saves(config) if config.run.resume == "auto" else None
    if saved is None:
        return prepare(config, say, check)
    from finetune.data.resumed import agreed_data, check_tokenizer
    from finetune.data.settings import model_type_of
    from finetune.data.tokenizer import is_served_alike

    settings, checkpoint = saved
    changeable = config.data.changed == "accept" and config.tokenizer.train is not None
    kept = checkpoint if changeable else None
    of_model = TOKENIZER_CLASS in settings
    prepared = prepare(config, say, check, kept_tokenizer=kept, of_model=of_model)
    if not of_model and not is_served_alike(prepared.tokenizer_folder, model_type := model_type_of(config)):
        how = CLASS_WHATEVER_IS_NAMED[model_type]
        say(
            "tokenizer: this run goes on with the ids that an earlier release began it with; a server reads the tokenizer of a "
            f"{model_type} model {f'as {how}' if how else 'as its tokenizer.json is written'}, which makes others of some texts"
        )
    prepared = agreed_data(config, prepared, settings, say)
    if config.data.changed == "accept":
        # The newest save may turn out to be damaged; the one before it may be of data before another change.
        names = {*prepared.known_as, *_data_of_saves(Path(config.run.output))} - {prepared.fingerprint}
        prepared = replace(prepared, known_as=tuple(sorted(names)))
    if checkpoint is not None:
        check_tokenizer(prepared, checkpoint)
    return prepared


def _newest_saves(config: TuneConfig) -> tuple[Mapping[str, Any], Path | None] | None:
    """What the newest save remembers of its settings, and the newest checkpoint with a tokenizer; ``None`` without any save."""
    output = Path(config.run.output)
    if not any(step_folders(output / root) for root in (RESUME, CHECKPOINTS)):
        return None
    with without_collection():
        from finetune.output.saves import newest_manifest, newest_whole

    manifest = newest_manifest(output)
    settings = {} if manifest is None else manifest.extra.get("settings", {})
    checkpoint = newest_whole(output / CHECKPOINTS)
    has_tokenizer = checkpoint is not None and (checkpoint / "tokenizer.json").is_file()
    return settings, checkpoint if has_tokenizer else None


def _data_of_saves(output: Path) -> set[str]:
    """The names of the data that any save of a run was made with."""
    from finetune.output.saves import manifest_of

    folders = [folder for root in (RESUME, CHECKPOINTS) for _, folder in step_folders(output / root)]
    settings = [manifest.extra.get("settings", {}) for manifest in map(manifest_of, folders) if manifest is not None]
    return {str(one["data"]) for one in settings if one.get("data") is not None}


def built_ops(config: TuneConfig, say: Say) -> dict[str, str]:
    """Libraries that a run loads on this machine, built if need be, by name.

    Raises:
        ConfigError: NVMe offload, and one cannot be built.
    """
    built: dict[str, str] = {}
    offload = config.offload
    wanted = [ops.PIN_MEMORY, ops.ASYNC_IO] if offload.on_disk else []
    if offload.optimizer != "none" and config.algorithm == "adamw":
        wanted.append(ops.CPU_ADAM)
    if config.run.device != "cuda" and pages.supported():
        wanted.append(ops.PAGES)
    for op in wanted:
        found = ops.ensure(op, say)
        if found.available:
            built[op] = str(ops.library_of(op))
        elif op == ops.PAGES:
            say(f"{found.reason}; every step on the CPU asks the system for memory anew, which makes it slower")
        elif op == ops.CPU_ADAM and offload.ratio < 1.0:
            raise ConfigError(f"offload.ratio: below 1 needs DeepSpeed's CPU Adam, but {found.reason}; or leave it at 1")
        elif op == ops.CPU_ADAM and not offload.on_disk:
            say(f"{found.reason}; training goes on with torch's AdamW on the CPU, which is slower and as exact")
        else:
            raise ConfigError(f"offload: nvme needs it, but {found.reason}; or offload to cpu")
    return built

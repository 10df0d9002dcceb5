"""Models of the Hugging Face hub by name: ``hf:ORG/NAME`` or ``hf:ORG/NAME@REVISION`` becomes a folder of the hub's own cache.

huggingface_hub downloads what is missing there, unless HF_HUB_OFFLINE says that nothing may be; it also knows where the cache
is (HF_HOME) and who asks (HF_TOKEN). Only the files that are needed are asked for, and code never is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from checkpoint.tokenizer_files import TOKENIZER_FILES
from finetune.config import TuneConfig
from finetune.errors import ConfigError
from finetune.output.folder import CHECKPOINTS, RESUME, step_folders

Need = Literal["config", "tokenizer", "model"]
"""``config.json`` alone; the tokenizer with it; the weights with both."""

HUB: Final = "hf:"
"""In front of the name of a model or a data set of the hub."""

_CONFIGS: Final = ("config.json", "generation_config.json")
_SAFETENSORS: Final = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
_OLD_WEIGHTS: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


def on_hub(name: str | Path | None) -> bool:
    """Whether this names a model of the hub rather than a folder."""
    return name is not None and str(name).startswith(HUB)


def hint_for(name: str | Path) -> str:
    """What to add to a message about a folder that is not there, if its name could be one of the hub."""
    text = str(name)
    if on_hub(text) or not _NAME.fullmatch(text) or Path(text).expanduser().exists():
        return ""
    return f"; a model of the Hugging Face hub is named {HUB}{text}"


def folder_of(name: str | Path, key: str, need: Need = "model") -> Path:
    """The folder that ``name`` stands for: itself, or for a name of the hub its snapshot in the local cache.

    Args:
        key: the option or command that was given the name, for messages.

    Raises:
        ConfigError: the name is not there; says what was looked for, where, and how to get it.
    """
    if not on_hub(name):
        folder = Path(name).expanduser()
        if hint := hint_for(name):
            raise ConfigError(f"{key}: {name}: there is no such folder{hint}")
        return folder
    repository, _, revision = str(name).removeprefix(HUB).partition("@")
    if not _NAME.fullmatch(str(name).removeprefix(HUB)):
        raise ConfigError(f"{key} is {str(name)!r}; a model of the hub is named {HUB}ORG/NAME or {HUB}ORG/NAME@REVISION")
    patterns = {"config": _CONFIGS, "tokenizer": (*_CONFIGS, *TOKENIZER_FILES)}.get(
        need, (*_CONFIGS, *TOKENIZER_FILES, *_SAFETENSORS)
    )
    folder = _snapshot(str(name), repository, revision or None, patterns, key)
    if need == "model" and not _holds(folder, _SAFETENSORS):
        folder = _snapshot(str(name), repository, revision or None, (*patterns, *_OLD_WEIGHTS), key)
        if not _holds(folder, _OLD_WEIGHTS):
            raise ConfigError(f"{key}: {name}: no weights (*.safetensors or *.bin) in {folder}{_remedy(repository)}")
    if need != "tokenizer" and not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: {name}: no config.json in {folder}; it is no model that transformers opens")
    return folder


def _has_saves(config: TuneConfig) -> bool:
    """Whether a run goes on from something."""
    output = Path(config.run.output)
    return config.run.resume == "auto" and any(step_folders(output / root) for root in (RESUME, CHECKPOINTS))


def _holds(folder: Path, patterns: Sequence[str]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _snapshot(name: str, repository: str, revision: str | None, patterns: Sequence[str], key: str) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        what = "the hub has no such model, or it is not open to you: check the name, or log in (hf auth login, or HF_TOKEN)"
        raise ConfigError(f"{key}: {name}: {what}") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{key}: {name}: the hub has no revision {revision!r} of {repository}") from error
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError) as error:
        whole = "not whole" if isinstance(error, errors.IncompleteSnapshotError) else "not"
        offline = huggingface_hub.is_offline_mode()
        why = "HF_HUB_OFFLINE is set, so the hub is not asked" if offline else "the hub cannot be reached"
        looked = f"revision {revision or 'main'} of {repository} is {whole} in the cache {constants.HF_HUB_CACHE}, and {why}"
        raise ConfigError(f"{key}: {name}: {looked}{_remedy(repository)}") from error
    except Exception as error:  # what httpx, the disk and the library itself raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{key}: {name}: cannot be fetched: {reason}{_remedy(repository)}") from error


def _remedy(repository: str) -> str:
    return f"; where there is a network, `hf download {repository}` fetches it; or give a folder"


def located(
    config: TuneConfig, say: Callable[[str], None] = lambda _: None, *, command: str = "tune", need: Need = "model"
) -> TuneConfig:
    """The configuration with folders in the place of names of the hub.

    Of a run that goes on a name is left as it is where the hub's snapshot is not to be had: the run's saves may do without.

    Args:
        say: told which folder a name of the hub is.
        need: what of ``model.path`` will be opened; less than the model where that is not trained.

    Raises:
        ConfigError: as ``folder_of``, or the model cannot be trained by ``command``.
    """
    given = config.model.path, config.tokenizer.path
    changes: dict[str, Path] = {}
    # A resumed run may go on where the folder it began with is no more.
    is_open = config.run.resume == "auto" and not on_hub(given[0])
    if given[0] is not None and not is_open:
        elsewhere = need == "tokenizer" and (given[1] is not None or config.tokenizer.train is not None)
        try:
            changes["model"] = folder_of(given[0], "model.path", "config" if elsewhere else need)
        except ConfigError as error:
            if need == "tokenizer" or not _has_saves(config):
                raise
            say(str(error))
    if given[1] is not None and need != "config":
        changes["tokenizer"] = folder_of(given[1], "tokenizer.path", "tokenizer")
    for name, folder in changes.items():
        section = getattr(config, name)
        if on_hub(section.path):
            say(f"{section.path} is {folder}")
            config = replace(config, **{name: replace(section, path=str(folder))})
    config.check_command(command)
    return config

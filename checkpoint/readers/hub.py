"""Models of the Hugging Face hub by name: ``ORG/NAME`` or ``ORG/NAME@REVISION`` becomes a folder of the hub's own cache.

huggingface_hub downloads what is missing there where it is asked to, unless HF_HUB_OFFLINE says that nothing may be; it also
knows where the cache is (HF_HOME) and who asks (HF_TOKEN). Only the files that are needed are asked for, and code never is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

from checkpoint.disk.manifest import MANIFEST
from checkpoint.errors import CheckpointError
from checkpoint.text.tokenizer_files import TOKENIZER_FILES

Need = Literal["config", "tokenizer", "model", "adapter"]
"""``config.json`` alone; the tokenizer with it; the weights with both; of peft's adapters all that is theirs."""

HUB: Final = "hf:"
"""In front of the name of a model or a data set of the hub."""

_ADAPTERS_CONFIG: Final = "adapter_config.json"
_CONFIGS: Final = ("config.json", "generation_config.json", _ADAPTERS_CONFIG)
_SAFETENSORS: Final = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
_OLD_WEIGHTS: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")
_ADAPTERS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_FILES: Final[Mapping[Need, tuple[str, ...]]] = {
    "config": _CONFIGS,
    "tokenizer": (*_CONFIGS, *TOKENIZER_FILES),
    "model": (*_CONFIGS, *TOKENIZER_FILES, *_SAFETENSORS),
    "adapter": (*_CONFIGS, *TOKENIZER_FILES, *_ADAPTERS, MANIFEST),
}
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


def could_be_on_hub(name: str) -> bool:
    """Whether the text, without ``hf:``, has the form of a name of the hub."""
    return _NAME.fullmatch(name) is not None


def find_on_hub(name: str, need: Need = "model", *, fetch: bool) -> Path:
    """The snapshot of a model of the hub in the local cache. One that holds an adapter alone is a model too.

    Args:
        name: with ``hf:`` before it or without.
        fetch: whether what is missing is downloaded, where HF_HUB_OFFLINE allows it.

    Raises:
        CheckpointError: it is not there; says what was looked for, where, and how to get it.
    """
    bare = name.removeprefix(HUB)
    if not could_be_on_hub(bare):
        raise CheckpointError(repr(name), f"a model of the hub is named {HUB}ORG/NAME or {HUB}ORG/NAME@REVISION")
    repository, _, revision = bare.partition("@")
    find = partial(_snapshot, name, repository, revision or None, fetch=fetch)
    patterns = _FILES[need]
    folder = find(patterns)
    if need == "adapter" or (need != "tokenizer" and _is_adapter_alone(folder)):
        folder = folder if need == "adapter" else find(_FILES["adapter"])
        if not ((folder / _ADAPTERS_CONFIG).is_file() and _holds(folder, _ADAPTERS)):
            raise CheckpointError(name, f"no adapter ({_ADAPTERS_CONFIG}, {_ADAPTERS[0]}) in {folder}{_remedy(repository)}")
        return folder
    if need == "model" and not _holds(folder, _SAFETENSORS):
        folder = find((*patterns, *_OLD_WEIGHTS))
        if not _holds(folder, _OLD_WEIGHTS):
            raise CheckpointError(name, f"no weights (*.safetensors or *.bin) in {folder}{_remedy(repository)}")
    if need != "tokenizer" and not (folder / "config.json").is_file():
        raise CheckpointError(name, f"no config.json in {folder}; it is no model that transformers opens")
    return folder


def _is_adapter_alone(folder: Path) -> bool:
    return (folder / _ADAPTERS_CONFIG).is_file() and not (folder / "config.json").is_file()


def _holds(folder: Path, patterns: Sequence[str]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _snapshot(name: str, repository: str, revision: str | None, patterns: Sequence[str], *, fetch: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        found = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), local_files_only=not fetch
        )
        return Path(found)
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        what = "the hub has no such model, or it is not open to you: check the name, or log in (hf auth login, or HF_TOKEN)"
        raise CheckpointError(name, what) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(name, f"the hub has no revision {revision!r} of {repository}") from error
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError) as error:
        whole = "not whole" if isinstance(error, errors.IncompleteSnapshotError) else "not"
        offline = huggingface_hub.is_offline_mode()
        why = "HF_HUB_OFFLINE is set, so the hub is not asked" if offline else "the hub cannot be reached"
        why = why if fetch else "nothing is downloaded here"
        looked = f"revision {revision or 'main'} of {repository} is {whole} in the cache {constants.HF_HUB_CACHE}, and {why}"
        raise CheckpointError(name, f"{looked}{_remedy(repository)}") from error
    except Exception as error:  # what httpx, the disk and the library itself raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(name, f"cannot be fetched: {reason}{_remedy(repository)}") from error


def _remedy(repository: str) -> str:
    return f"; where there is a network, `hf download {repository}` fetches it; or give a folder"

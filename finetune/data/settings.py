"""The tokenizer and the chat template of a run, found or learned, in a folder of their own."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from checkpoint import CheckpointError
from checkpoint.disk.folder import Folder
from checkpoint.model.config import CONFIG
from checkpoint.opening.prove import model_config, tokenizer_place
from checkpoint.readers.surroundings import tokenizer_at
from checkpoint.text.tokenizer_class import CLASS_WHATEVER_IS_NAMED
from checkpoint.text.tokenizer_files import ADDED_TOKENS, MERGES, SENTENCE_PIECE, TOKENIZER_FILES, TOKENIZER_JSON, VOCABULARY
from checkpoint.text.tokenizer_files import TEMPLATE as CHAT_TEMPLATE
from finetune.config import TuneConfig
from finetune.data.inputs import Inputs, digest, source_identity
from finetune.data.templates import named_template, own_template
from finetune.data.tokenizer import copy_tokenizer, set_class, train_tokenizer, usual_folder
from finetune.data.workers import Encoding
from finetune.errors import ConfigError

Say = Callable[[str], None]
_NO_TEMPLATE = (
    "data.chat_template is not set; the data holds conversations and the tokenizer has no template for them: "
    "name a Jinja file, or one of chatml, plain, instruct"
)


def prepare_encoding(
    config: TuneConfig,
    inputs: Inputs,
    root: Path,
    say: Say,
    *,
    kept: Path | None = None,
    skip_faults: bool = False,
    of_model: bool = True,
) -> Encoding:
    """The tokenizer and the chat template of a run, in a folder of their own below ``root``.

    Args:
        kept: folder of a tokenizer that was learned before, to be taken instead of learning one from these data.
        skip_faults: learn a tokenizer from what can be read, and leave faults to who reads next.
        of_model: give the tokenizer the class that the model's checkpoints are read with. Runs of earlier releases did not.

    Raises:
        ConfigError: one of them is at fault, or a conversation has no template.
    """
    named = config.data.chat_template
    given = named_template(named) if named else None
    conversations = any(source.format in ("alpaca", "sharegpt", "messages") for source in inputs.sources)
    if conversations and given is None and config.tokenizer.train is not None:
        raise ConfigError(_NO_TEMPLATE)  # a new tokenizer brings none: said before it is learned
    learns = config.tokenizer.train is not None and kept is None
    types = _model_types(config) if kept is None and of_model else ("", "")
    class_name = CLASS_WHATEVER_IS_NAMED.get(types[0], "")
    identity = _tokenizer_identity(config, inputs, types) if kept is None else files_digest(kept)
    if class_name and (learns or config.tokenizer.path is not None):
        say(f"tokenizer: read as {class_name} whatever its files say, as that of every model of model_type {types[0]} is")
    fingerprint = digest(identity, given[0] if given else None)
    folder = root / fingerprint
    if not (folder / "tokenizer.json").is_file():
        work = root / f"tmp-{fingerprint}-{os.getpid()}"
        try:
            if learns:
                _learn(config, inputs, work, class_name, say, skip_faults=skip_faults)
            elif kept is not None:
                shutil.copytree(kept, work, ignore=lambda _, names: set(names) - set(TOKENIZER_FILES))
            else:
                _copy(config, work, types)
            if given:
                (work / CHAT_TEMPLATE).write_text(given[0], encoding="utf-8")
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    template = given or own_template(folder)
    if template is None and conversations:
        raise ConfigError(_NO_TEMPLATE)
    return Encoding(
        tokenizer=folder,
        template=template[0] if template else None,
        template_place=template[1] if template else "",
        now=datetime.now().isoformat(timespec="seconds"),
        train_on=config.data.train_on,
        roles=config.data.train_roles,
    )


def _learn(config: TuneConfig, inputs: Inputs, folder: Path, class_name: str, say: Say, *, skip_faults: bool) -> None:
    assert config.tokenizer.train is not None
    files = sum(len(source.files) for source in inputs.train)
    say(f"learning a tokenizer of {config.tokenizer.train.vocab_size} ids from {files} files")
    pieces = (piece for source in inputs.train for piece in source.pieces(skip_faults=skip_faults))
    train_tokenizer(pieces, config.tokenizer.train, folder, class_name)


def _copy(config: TuneConfig, folder: Path, types: tuple[str, str]) -> None:
    source, key = _tokenizer_source(config)
    copy_tokenizer(source, folder, key)
    for one in reversed(types):  # first the ids that it gave beside its own model, then those beside the run's
        set_class(folder, one, key)


def _tokenizer_identity(config: TuneConfig, inputs: Inputs, types: tuple[str, str]) -> object:
    if config.tokenizer.train is not None:
        identity: list[object] = [asdict(config.tokenizer.train), [source_identity(source) for source in inputs.train]]
    else:
        identity = [*files_digest(_tokenizer_source(config)[0])]
    if any(one in CLASS_WHATEVER_IS_NAMED for one in types):
        return [identity, *map(CLASS_WHATEVER_IS_NAMED.get, types)]
    return identity


def files_digest(folder: Path) -> list[str]:
    """What tells the tokenizer in ``folder`` from others, wherever it lies: hashes of the files that make its ids."""
    names: tuple[str, ...] = (TOKENIZER_JSON, "tokenizer_config.json", "special_tokens_map.json", CHAT_TEMPLATE)
    if not (folder / TOKENIZER_JSON).is_file():
        names = (*names, VOCABULARY, MERGES, SENTENCE_PIECE, ADDED_TOKENS)  # of which one is made
    files = [folder / name for name in names if (folder / name).is_file()]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def _tokenizer_source(config: TuneConfig) -> tuple[Path, str]:
    if config.tokenizer.path is not None:
        given = Path(config.tokenizer.path).expanduser()
        if not given.is_file():
            return given, "tokenizer.path"
        try:
            return usual_folder(tokenizer_at(str(given)), "tokenizer.path"), "tokenizer.path"
        except CheckpointError as error:
            raise ConfigError(f"tokenizer.path: {error}") from error
    assert config.model.path is not None, "TuneConfig refuses a new model without a tokenizer"
    from finetune.base_model.given import given_of

    try:
        return usual_folder(tokenizer_place(_model_folder(config.model.path), given_of(config)), "model.path"), "model.path"
    except CheckpointError as error:
        raise ConfigError(f"model.path: {config.model.path}: {error}") from error


def model_type_of(config: TuneConfig) -> str:
    """The ``model_type`` of the model that is trained; empty where its folder does not tell.

    Raises:
        ConfigError: the folder is not there.
    """
    if config.model.new is not None:
        return str(config.model.new["model_type"])
    assert config.model.path is not None, "ModelConfig holds exactly one of the two"
    from finetune.base_model.given import given_of

    try:
        return str(model_config(_model_folder(config.model.path), given_of(config))[0]["model_type"])
    except CheckpointError:
        return ""


def _model_types(config: TuneConfig) -> tuple[str, str]:
    """The types of the model that is trained and of the one that ``tokenizer.path`` belongs to; empty where nothing tells."""
    other = ""
    if config.tokenizer.path is not None:
        folder = Folder(Path(config.tokenizer.path).expanduser())
        with suppress(CheckpointError):
            other = str(folder.read_object(CONFIG).get("model_type") or "") if folder.has(CONFIG) else ""
    return model_type_of(config), other


def _model_folder(given: str) -> Path:
    path = Path(given).expanduser()
    if (path / CONFIG).is_file():
        return path
    from finetune.base_model.identity import candidates

    try:
        return candidates(path)[0]
    except CheckpointError as error:
        raise ConfigError(f"model.path: {given}: {error}") from error

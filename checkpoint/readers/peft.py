"""Reads adapters of peft: LoRA, rsLoRA and DoRA, added to their base model as its tensors are read.

``adapter_config.json`` says how the factors scale; ``adapter_model.safetensors`` (or ``.bin``) holds them by the names of the
modules they belong to, below ``base_model.model.``, and beside them whole tensors that were trained with them.
Source of the method: peft/tuners/lora, 0.19.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from checkpoint.disk.folder import Folder
from checkpoint.errors import CheckpointError, shown
from checkpoint.given import NOTHING_GIVEN, Given
from checkpoint.layout import LowRank, Stored, whole
from checkpoint.model.names import find_stored
from checkpoint.readers import hf
from checkpoint.readers.deepspeed import saves
from checkpoint.readers.embedding_and_head import Vocabulary, may_replace, same_bytes
from checkpoint.readers.files.safetensors import index_safetensors
from checkpoint.readers.files.torch_zip import index_torch_zip
from checkpoint.readers.lora_patterns import alpha_of, is_pattern
from checkpoint.readers.weights import Weights

NAME = "PEFT adapter"
LOOKS_LIKE = "adapter_config.json and adapter_model.safetensors"

CONFIG = "adapter_config.json"
_READERS = {"adapter_model.safetensors": index_safetensors, "adapter_model.bin": index_torch_zip}
_PREFIX = "base_model.model."
_FACTORS = re.compile(
    r"(?P<module>.+?)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
)

_ROUTER = (".mlp.gate.", ".block_sparse_moe.gate.")
"""Mixtral's, by transformers' name and by the stored one."""

_CONV1D = frozenset(("c_attn", "c_fc", "c_proj"))
"""Modules of GPT-2 whose weight is stored as [in, out]."""

_TORCHTUNES = "adapter_model.pt"
"""What torchtune writes beside the adapter in peft's form, by its own names."""

_USED = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights", "peft_type")
_WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_dtype",
    "lora_ga_config", "lorap_emb_lr", "lorap_lr_ratio", "megatron_core", "merge_weights", "modules_to_save", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "velora_config",
)  # fmt: skip
"""Settings of training, of what is adapted (the tensors' names tell it) and of beginnings (``init_lora_weights`` says which).
Adapters of any other setting are more than a product of two factors beside each weight, or may be."""

_SINCE_10 = "layer_replication"
"""A setting that descriptions have since peft 0.10."""

_PLAIN = re.compile(r"[\w.-]+")

_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base model as it is."""


_BY_PEFT = "the release of peft that trained it merges it with its base (merge_and_unload), and that is read"


def recognises(folder: Folder) -> bool:
    """Whether the folder has an adapter's description, and an adapter or nothing else: no whole model, and no save of
    DeepSpeed, in which the adapter may be.

    Raises:
        CheckpointError: it also has the weights of a whole model, so that it cannot be told which is meant.
    """
    if not folder.has(CONFIG):
        return False
    held = [name for name in _READERS if folder.has(name)]
    if not hf.recognises(folder):
        return bool(held) or not saves.has_saves(folder)
    if folder.has(_TORCHTUNES):
        return False  # which is merged in the model beside it
    if held:
        rule = "stands beside the weights of a whole model; which is meant cannot be told: move one of them elsewhere"
        raise CheckpointError(held[0], f"{rule}, and name the adapter's model with --base")
    return False


def newest_below(_: Folder) -> str | None:
    """``None``: where trainers keep their adapters is known by the folders of other layouts."""
    return None


def read_config(folder: Folder) -> dict[str, Any]:
    """``adapter_config.json``, of a kind that is added to its base.

    Raises:
        CheckpointError: it is of another kind, by its name.
    """
    config = folder.read_object(CONFIG)
    reason = _why_not_added(config)
    if reason is not None:
        raise CheckpointError(CONFIG, reason)
    _check_task(config)
    for key in ("use_rslora", "use_dora", "fan_in_fan_out"):
        if not isinstance(config.get(key), bool | None):
            raise CheckpointError(CONFIG, f"{key} is {config[key]!r}; it must be true or false")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(is_pattern(pattern) for pattern in patterns):
            meant = next((name for name in patterns if not is_pattern(name)), None) if isinstance(patterns, dict) else None
            rule = f"{key} must be an object whose keys are names of modules, or simple patterns of them"
            raise CheckpointError(CONFIG, rule if meant is None else f"{rule}; it has {shown(meant)}")
    return config


def _why_not_added(config: Mapping[str, Any]) -> str | None:
    """Why an adapter of this description is more than a sum with its base's weights, or another one; ``None`` where it is not.

    Args:
        config: ``adapter_config.json``, of which no value was checked.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        return f"peft_type is {shown(kind)}; adapters of LORA are read (with use_rslora and use_dora), no others; {_BY_PEFT}"
    for key, value in config.items():
        if value and key not in _USED and key not in _WITHOUT_EFFECT:
            return f"{key} is set; such an adapter is not read; {_BY_PEFT}"
    begun = config.get("init_lora_weights", True)
    if begun not in _PLAIN_BEGINNINGS:
        rule = "changes the base model, which the adapter's folder does not hold; save it converted to plain LoRA"
        return f"init_lora_weights is {shown(begun)}, which {rule}"
    return None


def _check_task(config: Mapping[str, Any]) -> None:
    """Refuse an adapter of a model that gives no tokens: its weights would fit a language model's."""
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise CheckpointError(CONFIG, f"task_type is {shown(task)}; an adapter of CAUSAL_LM, or of none, is served and trained")
    mapping = config.get("auto_mapping")
    trained = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    if isinstance(trained, str) and "For" in trained and not trained.endswith("ForCausalLM"):
        rule = f"auto_mapping says that it was trained on {shown(trained)}; adapters of causal language models are read"
        raise CheckpointError(CONFIG, rule)


def open_weights(folder: Folder, _: Given = NOTHING_GIVEN) -> Weights:
    """The adapter's own tensors, by the names in its file.

    Raises:
        CheckpointError: it is of another kind, or its file is missing or not sound.
    """
    config = read_config(folder)
    for name, read in _READERS.items():
        if folder.has(name):
            fd = folder.open(name)
            facts = {"rank": config.get("r"), "base": config.get("base_model_name_or_path")}
            writer = {"writer": "torchtune"} if folder.has(_TORCHTUNES) else {}
            weights = Weights({name: fd}, {}, name, facts=facts | writer)
            try:
                weights.places.update((tensor, whole(name, extent)) for tensor, extent in read(fd, name).items())
            except CheckpointError as error:
                weights.close()
                if "holds no element" not in error.rule or not saves.has_saves(folder):
                    raise
                rule = f"{error.rule}; or name DeepSpeed's save in this folder, which has them (global_stepN)"
                raise CheckpointError(error.file, rule) from error
            except BaseException:
                weights.close()
                raise
            return weights
    raise CheckpointError("adapter_model.safetensors", "is missing")


def merged(base: Weights, adapter: Weights, config: Mapping[str, Any], model: Mapping[str, Any]) -> Weights:
    """The base model's tensors with the adapter added. Holds the files of both.

    Args:
        config: ``adapter_config.json``.
        model: ``config.json`` of the base, as far as it is known. GPT-2 stores the weights of its layers as [in, out], whatever
            ``fan_in_fan_out`` says.

    Raises:
        CheckpointError: the adapter is of another model: it names a tensor the base lacks, or has another shape.
    """
    adapter = adapter.beside(base)
    whole_tensors, factors = _parts(adapter)
    _check_order(adapter, factors, model)
    _check_targets(base.places, [*whole_tensors, *(f"{module}.weight" for module in factors)], config, adapter.table)
    named = [*whole_tensors, *(f"{module}.weight" for module in factors)]
    vocabulary = Vocabulary.of(base.places, model, named)
    vocabulary.check_bias(base.places, config, whole_tensors, CONFIG)
    places = vocabulary.apart(base.places)
    changed: list[str] = []
    # What is the base's own first: a head that was trained whole is not the embedding below factors, which ties would make it.
    for name, (stored, is_own) in sorted(whole_tensors.items(), key=lambda item: not item[1][1]):
        target = find_stored(name, places) or find_stored(name.replace(*_ROUTER), places)
        if target is None or not may_replace(target, stored, places[target]):
            there = "lacks" if target is None else f"has in shape {list(places[target].shape)}"
            raise CheckpointError(
                adapter.table, f"holds tensor {name!r} of shape {list(stored.shape)}, which the base model {there}"
            )
        if target in changed:
            raise CheckpointError(adapter.table, f"holds {name!r} and another tensor that is the base model's {target!r}")
        places |= dict.fromkeys(vocabulary.holders(target) if is_own else (target,), stored)
        changed.append(target)
    for module, parts in factors.items():
        target = find_stored(f"{module}.weight", places)
        if target is None:
            raise CheckpointError(adapter.table, f"adapts {module!r}, whose weight the base model does not have")
        conv1d = module.rpartition(".")[2] in _CONV1D
        turned = conv1d and model.get("model_type") == "gpt2"
        try:
            added = _low_rank(module, parts, config, places[target].shape, adapter.table, turned=turned)
        except CheckpointError as error:
            if not conv1d or "model_type" in model:
                raise
            rule = f"{error.rule}. GPT-2 stores it the other way; of which family this is must be said (--model-config)"
            raise CheckpointError(error.file, rule) from error
        if places[target].added is not None:
            rule = f"adapts {module!r}, which another adapter in the base model's own files adapts already"
            raise CheckpointError(adapter.table, f"{rule}; write the base as a whole model (`tessera-finetune export`) first")
        places[target] = dataclasses.replace(places[target], added=added)
        changed.append(target)
    files = {**base.files, **adapter.files}
    return dataclasses.replace(
        base,
        files=files,
        places=places,
        step=adapter.step,
        facts={**base.facts, "adapter": dict(adapter.facts)},
        changes=vocabulary.settled(places, base.places, changed, files, adapter.table),
    )


def check_biases(base: Weights, adapter: Weights, config: Mapping[str, Any]) -> None:
    """Refuse an adapter without the biases that were trained with it: peft 0.10 to 0.18 did not save those of ``lora_only``.

    Releases before 0.10 saved what they had trained.

    Args:
        base: the model that the adapter is joined with, from other files.
        config: ``adapter_config.json``.

    Raises:
        CheckpointError: an adapted module has a bias in the base and none in the adapter.
    """
    if config.get("bias", "none") == "none" or _SINCE_10 not in config:
        return
    whole_tensors, factors = _parts(adapter)
    for module in factors:
        if f"{module}.bias" not in whole_tensors and find_stored(f"{module}.bias", base.places) is not None:
            rule = f"bias is {shown(config['bias'])}, and {adapter.table} lacks the bias of {module!r} that was trained"
            raise CheckpointError(CONFIG, f"{rule}; peft 0.10 to 0.18 did not save it. Set bias to none to take the base's")


def _check_targets(base: Mapping[str, Stored], held: Iterable[str], config: Mapping[str, Any], table: str) -> None:
    """Refuse an adapter without some of the modules of one name that it was trained for: part of its file is lost.

    Only of plain names without any setting that leaves modules out it is known which were trained. Experts, which are modules
    of their own in files alone, are left out.

    Args:
        held: the names of what the adapter has, as weights of the base.
    """
    targets = config.get("target_modules")
    if not isinstance(targets, list) or config.get("exclude_modules") or config.get("layers_to_transform") is not None:
        return
    if config.get("init_lora_weights") == "eva":  # it may leave nothing for some of them, and shortens the names of the others
        return
    adapted = {find_stored(name, base) for name in held}
    for target in filter(_PLAIN.fullmatch, map(str, targets)):
        named = [
            name
            for name, stored in base.items()
            if f".{name}".endswith(f".{target}.weight") and len(stored.shape) == 2 and ".experts." not in name
        ]
        lost = [name for name in named if name not in adapted]
        if lost and len(lost) < len(named):
            rule = f"has nothing for {lost[0].removesuffix('.weight')!r}, one of the {target!r} of target_modules"
            raise CheckpointError(table, f"{rule}, and for others: a part of it is missing")


def _check_order(adapter: Weights, factors: Iterable[str], model: Mapping[str, Any]) -> None:
    """Refuse torchtune's adapters of Qwen2's queries and keys: it turns their rows as it must for Llama, not for this family.

    Source: torchtune 0.6.1, models/convert_weights.py; peft computes with them what was not trained.
    """
    turned = next((module for module in factors if module.endswith((".q_proj", ".k_proj"))), None)
    if adapter.facts.get("writer") == "torchtune" and model.get("model_type") == "qwen2" and turned is not None:
        rule = f"adapts {turned!r} of Qwen2, whose rows torchtune writes in the wrong order"
        raise CheckpointError(adapter.table, f"{rule}; use the merged model that it saves")


def _parts(adapter: Weights) -> tuple[dict[str, tuple[Stored, bool]], dict[str, dict[str, Stored]]]:
    """The adapter's whole tensors by the model's names, each with whether it is the base's own below the factors; and the
    factors by module and kind.

    What was replaced by a module that was trained whole (``original_module``) is left out; peft saves it of resized embeddings.
    """
    whole_tensors: dict[str, tuple[Stored, bool]] = {}
    factors: dict[str, dict[str, Stored]] = {}
    names: dict[str, str] = {}
    for name in adapter.places:
        short = name.removeprefix(_PREFIX)
        if short in names:
            raise CheckpointError(adapter.table, f"holds {names[short]!r} and {name!r}, which are both the adapter's {short!r}")
        names[short] = name
    for short, name in names.items():
        stored = adapter.places[name]
        if ".original_module." in short and short.replace(".original_module.", ".modules_to_save.") in names:
            continue
        plain = short.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        match = _FACTORS.fullmatch(plain)
        if match:
            parts = factors.setdefault(match["module"], {})
            if match["kind"] in parts and not same_bytes(parts[match["kind"]], stored, adapter.files):
                raise CheckpointError(adapter.table, f"holds {match['kind']} of {match['module']!r} twice, by two names")
            parts[match["kind"]] = stored
        elif plain == short or plain not in names:
            whole_tensors[plain] = (stored, ".base_layer." in short)
    return whole_tensors, factors


def _low_rank(
    module: str,
    parts: Mapping[str, Stored],
    config: Mapping[str, Any],
    shape: tuple[int, ...],
    table: str,
    *,
    turned: bool,
) -> LowRank:
    embedding = "lora_embedding_A" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    down, up, magnitude = parts.get(names[0]), parts.get(names[1]), parts.get("lora_magnitude_vector")
    if down is None or up is None or not set(parts) <= {*names, "lora_magnitude_vector"}:
        raise CheckpointError(table, f"does not hold one pair of factors for {module!r}: it has {', '.join(sorted(parts))}")
    turned = turned or embedding
    rows, columns = (shape[::-1] if turned else shape) if len(shape) == 2 else (0, 0)
    rank = down.shape[0] if down.shape else 0
    if down.shape != (rank, columns) or up.shape != (rows, rank):
        rule = f"adapts {module!r} by factors of {list(up.shape)} and {list(down.shape)}; the base's weight is {list(shape)}"
        raise CheckpointError(table, rule)
    if bool(config.get("use_dora")) != (magnitude is not None):
        raise CheckpointError(table, f"has {'a' if magnitude else 'no'} magnitude of {module!r}, and use_dora says otherwise")
    if magnitude is not None and math.prod(magnitude.shape) != rows:
        raise CheckpointError(table, f"has a magnitude of {list(magnitude.shape)} for {module!r}, which has {rows} outputs")
    alpha = alpha_of(config, module, rank, CONFIG)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -1e30 < alpha < 1e30:
        raise CheckpointError(CONFIG, f"gives {module!r} the lora_alpha {alpha!r}; it must be a number")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    left, right = (_turned(down), _turned(up)) if turned else (up, down)
    return LowRank(left, right, scale, magnitude, 1 if turned else 0)


def _turned(stored: Stored) -> Stored:
    pieces = tuple(
        dataclasses.replace(piece, extent=piece.extent.transposed(), start=piece.start[::-1]) for piece in stored.pieces
    )
    return dataclasses.replace(stored, shape=stored.shape[::-1], pieces=pieces)

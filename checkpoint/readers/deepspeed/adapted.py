"""The save of a training with peft's adapter in the model: the base and the factors beside it, joined as they are read.

Such a save names every tensor below ``base_model.model.``; an adapted layer has its own weight at ``base_layer`` and factors by
the adapter's name. How they are scaled it does not say: that is in the adapter's description, ``adapter_config.json``.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from checkpoint.disk.folder import Folder, Renamed
from checkpoint.errors import CheckpointError
from checkpoint.given import Given
from checkpoint.layout import Stored
from checkpoint.readers import peft
from checkpoint.readers.embedding_and_head import one_for_both
from checkpoint.readers.prefixes import without_prefix
from checkpoint.readers.surroundings import find_configs
from checkpoint.readers.weights import Weights

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|modules_to_save)"
    r"\.(?P<adapter>[^.]+)(?P<rest>(?:\..+)?)"
)
_BASE_LAYER, _ORIGINAL = ".base_layer.", ".original_module."


def of_model(weights: Weights, folder: Folder, given: Given) -> Weights:
    """The weights of a save by the names of the model in it, whatever wraps that, with its adapter joined.

    Raises:
        CheckpointError: no name begins with the prefix that was given; or as ``with_adapter``.
    """
    places = without_prefix(weights.places, given.prefix, weights.table)
    return with_adapter(dataclasses.replace(weights, places=places), folder, given)


def with_adapter(weights: Weights, folder: Folder, given: Given) -> Weights:
    """The weights of a save with its adapter joined; as they are where there is none in them.

    Of a save without the frozen base (``exclude_frozen_parameters``) the adapter alone, which says so.

    Raises:
        CheckpointError: some of the base's weights are in the save and some not; what describes the adapter is missing or of
            another one; there are several adapters, or one of another kind than LoRA.
    """
    if not any(name.startswith(_PREFIX) or _BASE_LAYER in name or _PART.fullmatch(name) for name in weights.places):
        return weights
    base: dict[str, Stored] = {}
    parts: dict[str, Stored] = {}
    adapters: set[str] = set()
    for name, stored in weights.places.items():
        short = name.removeprefix(_PREFIX)
        match = _PART.fullmatch(short)
        if match is None and re.search(r"(^|\.)lora_\w+(\.|$)", short):
            raise CheckpointError(weights.table, f"holds tensor {short!r}, which no adapter of LoRA has that is read")
        if match is None:
            base[short.replace(_BASE_LAYER, ".").replace(_ORIGINAL, ".")] = stored
            continue
        adapters.add(match["adapter"])
        kind = "" if match["kind"] == "modules_to_save" else f".{match['kind']}"
        parts[f"{match['module']}{kind}{match['rest']}"] = stored
    has_base = _check_parts(weights, parts, adapters)
    config = _described(weights, folder, given)
    if not has_base:
        return dataclasses.replace(weights, places={**base, **parts}, adapter=config, facts=_facts(weights, config))
    configs = find_configs(folder, given, above=True)
    told = weights.config if configs is None else configs[0]
    adapter = dataclasses.replace(weights, places=parts, facts={"rank": config.get("r"), "base": "in the same save"})
    return peft.merged(dataclasses.replace(weights, places=base), adapter, config, told or {})


def _facts(weights: Weights, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**weights.facts, "rank": config.get("r"), "base": config.get("base_model_name_or_path")}


def _check_parts(weights: Weights, parts: Mapping[str, Stored], adapters: Set[str]) -> bool:
    """One adapter of LoRA, beside its base or alone; each layer that was given a base layer has factors.

    Returns:
        Whether the base is there.
    """
    if len(adapters) > 1:
        names = ", ".join(sorted(adapters))
        raise CheckpointError(weights.table, f"holds the adapters {names}; a save with one of them is read")
    weight = f"{_BASE_LAYER}weight"
    layers = {name.removeprefix(_PREFIX).removesuffix(weight) for name in weights.places if name.endswith(weight)}
    adapted = {name.rpartition(".lora_")[0] for name in parts if ".lora_" in name}
    plain = next(iter(sorted(layers - adapted)), None)
    if plain is not None:
        raise CheckpointError(weights.table, f"adapts {plain!r} by other means than LoRA, which are not read")
    plain_names = [name.removeprefix(_PREFIX).replace(_BASE_LAYER, ".").replace(_ORIGINAL, ".") for name in weights.places]
    lacking = next((module for module in sorted(adapted - layers) if not one_for_both(module, plain_names)), None)
    if lacking is not None and layers:
        rule = f"holds an adapter of {lacking!r} and not the base model's weight of it, and those of other layers"
        raise CheckpointError(weights.table, f"{rule}; a save that has all of them or none is read")
    return lacking is None


def adapter_config(folder: Folder, given: Given) -> dict[str, Any] | None:
    """The adapter's description: the one that was given, or beside the save, or above it; ``None`` where there is none.

    Raises:
        CheckpointError: the one that was given is not there, or it is of another kind of adapter.
    """
    if given.adapter_config is not None:
        path = Path(os.path.expanduser(given.adapter_config))
        if path.is_dir():
            return peft.read_config(Folder(path))
        if not path.is_file():
            raise CheckpointError(given.adapter_config, "there is no such file or folder")
        return peft.read_config(Renamed(path.parent, {peft.CONFIG: path.name}))
    return next((peft.read_config(place) for place in _places(folder) if place.has(peft.CONFIG)), None)


def _places(folder: Folder) -> tuple[Folder, Folder]:
    return folder, Folder(folder.path.parent)


def _described(weights: Weights, folder: Folder, given: Given) -> dict[str, Any]:
    """The adapter's description, which must be there."""
    config = adapter_config(folder, given)
    if config is not None:
        return config
    looked = ", ".join(str(place.path / peft.CONFIG) for place in _places(folder))
    rule = (
        "holds an adapter, and nothing in it says how the adapter is scaled (r, lora_alpha, use_rslora); "
        f"there is no {looked}: name the adapter's {peft.CONFIG} (--adapter-config)"
    )
    raise CheckpointError(weights.table, rule)

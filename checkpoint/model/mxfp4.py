"""Recognises the experts of GPT-OSS as they are released: numbers of four bits that share a scale by thirty-two (MXFP4).

Other quantised weights are refused: they are made from a model that is to be had, and these are the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from checkpoint.errors import CheckpointError
from checkpoint.layout import Coded, Stored
from checkpoint.model.quantised import method_said

_FAMILY: Final = "gpt_oss"
_CODES, _SCALES = "_blocks", "_scales"
_BYTES: Final = 16
"""Bytes of one group of thirty-two numbers."""


def without_mxfp4(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` of GPT-OSS without the word that its experts are of MXFP4: they are read as what they decode to."""
    kept = dict(config)
    if config.get("model_type") == _FAMILY and method_said(config) == "mxfp4":
        kept.pop("quantization_config", None)
    return kept


def decoded(places: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """A model's tensors with those of MXFP4 under the names, and in the shapes, of what they decode to.

    Raises:
        CheckpointError: numbers and scales do not belong together.
    """
    kept = dict(places)
    if config.get("model_type") != _FAMILY:
        return kept
    for name in [name for name in places if name.endswith(_CODES)]:
        base = name.removesuffix(_CODES)
        codes, scales = kept.pop(name), kept.pop(base + _SCALES, None)
        if scales is None:
            raise CheckpointError(codes.file, f"holds tensor {name!r} without the {base + _SCALES!r} that belongs to it")
        shape = codes.shape
        if len(shape) != 4 or shape[3] != _BYTES or scales.shape != shape[:3] or {codes.dtype, scales.dtype} != {"U8"}:
            rule = f"{codes.dtype} {list(shape)} with scales {scales.dtype} {list(scales.shape)}"
            need = "they must be bytes, [experts, outputs, groups, 16] with a scale for each group"
            raise CheckpointError(codes.file, f"tensor {name!r} is {rule}; {need}")
        if base in kept:
            raise CheckpointError(codes.file, f"holds tensor {name!r} beside the {base!r} that it decodes to")
        experts, outputs, groups, _ = shape
        kept[base] = Stored("BF16", (experts, groups * 2 * _BYTES, outputs), codes.pieces, coded=Coded(codes, scales))
    return kept

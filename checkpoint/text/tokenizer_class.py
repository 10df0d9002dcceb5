"""Which normalizer, pre-tokenizer and decoder a tokenizer class of transformers puts in place of those in ``tokenizer.json``.

transformers takes vocabulary, merges and post-processor from the file, but most classes of its fifth version build the rest
themselves. Equal ids need the same replacement here. Classes that are not in the table use the file as it is.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

CLASS_OF_MODEL: Final = {
    "gpt2": "GPT2Tokenizer",
    "gpt_neo": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "gptj": "GPT2Tokenizer",
    "codegen": "GPT2Tokenizer",
    "opt": "GPT2Tokenizer",
    "phi": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
}
"""The class transformers uses for a ``model_type`` where the files name none. Others use the file as it is."""

CLASS_WHATEVER_IS_NAMED: Final = {
    "qwen2": "Qwen2Tokenizer",
    **dict.fromkeys(("gpt_bigcode", "mistral", "mixtral", "olmo2", "phi3", "stablelm"), ""),
}
"""The class that a ``model_type`` is read with even where the files name another, empty for the file as it is: transformers
does not trust the name in such folders, or has no class of the family's own."""

_BYTE_LEVEL: Final = ("GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer")
_REBUILDING: Final = (*_BYTE_LEVEL, "Qwen2Tokenizer", "LlamaTokenizer")

_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2's vocabulary was cut into words; part of the model, like its merges."""


def tokenizer_class(tokenizer_config: dict[str, Any], model_config: dict[str, Any], backend: Tokenizer) -> str:
    """Name of the class that ``AutoTokenizer`` would build, without ``Fast``; empty when it would use the file as it is."""
    model_type = str(model_config.get("model_type") or "")
    registered = CLASS_OF_MODEL.get(model_type, "")
    named = str(tokenizer_config.get("tokenizer_class") or model_config.get("tokenizer_class") or "").removesuffix("Fast")
    if named == "LlamaTokenizer" and _is_byte_level(backend):
        return ""  # Llama 3 and others name the old class though their file is of another kind
    if model_type in CLASS_WHATEVER_IS_NAMED:
        return CLASS_WHATEVER_IS_NAMED[model_type]
    chosen = named or registered
    return chosen if chosen in _REBUILDING else ""


def apply_class_pipeline(backend: Tokenizer, class_name: str, config: dict[str, Any], *, rebuilt: bool) -> None:
    """Replace what the class replaces, in place.

    Args:
        rebuilt: there is no ``tokenizer.json``, so no post-processor either, and the configuration decides on BOS and EOS.
    """
    prefix_space = config.get("add_prefix_space")
    if class_name in _BYTE_LEVEL:
        backend.normalizer = normalizers.NFC() if class_name == "GPTNeoXTokenizer" else None
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix_space))
        backend.decoder = decoders.ByteLevel()
    elif class_name == "Qwen2Tokenizer":
        backend.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated", invert=False)
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix_space), use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
        backend.decoder = decoders.ByteLevel()
    elif class_name == "LlamaTokenizer":
        _apply_llama(backend, prefix_space is not False, bool(config.get("legacy", False)))
    if class_name == "GPTNeoXTokenizer" or rebuilt:
        # GPT-NeoX ignores the file's post-processor, and drops add_bos_token when there is a file.
        _set_bos_and_eos(backend, config if rebuilt else {})


def _apply_llama(backend: Tokenizer, prefix_space: bool, legacy: bool) -> None:
    scheme = ("always" if legacy else "first") if prefix_space else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix_space else steps)


def _set_bos_and_eos(backend: Tokenizer, config: dict[str, Any]) -> None:
    special: list[tuple[str, int]] = []
    names = {}
    for kind in ("bos", "eos"):
        value = config.get(f"{kind}_token", "<|endoftext|>")
        token = value.get("content") if isinstance(value, dict) else value
        token_id = backend.token_to_id(token) if isinstance(token, str) else None
        if config.get(f"add_{kind}_token") and token_id is not None:
            names[kind] = f"{token}:0"
            special.append((str(token), token_id))
    single = " ".join(part for part in (names.get("bos"), "$A:0", names.get("eos")) if part)
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1", special_tokens=list(dict.fromkeys(special))
    )


def _is_byte_level(backend: Tokenizer) -> bool:
    steps = json.loads(backend.to_str()).get("pre_tokenizer") or {}
    return any(step.get("type") == "ByteLevel" for step in steps.get("pretokenizers", [steps]))

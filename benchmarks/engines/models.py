"""Checkpoints with seeded random weights: ``python -m benchmarks.engines.models SHAPE FOLDER``.

The weights are numbers that bf16 has, kept as fp32, so that every precision of every engine begins from the same ones. Beside
the folder that is served lies one for the exporters, whose transformers reads older names in ``config.json``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.engines.cells import SHAPES, VOCABULARY
from finetune.model.pretrained import new_model

END: Final = "<|endoftext|>"


def tokenizer(size: int) -> Tokenizer:
    """Byte-level pairs up to a size, which nobody trained: the exporters ask for a tokenizer, nothing here is text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(itertools.product(letters, letters), size - 1 - len(letters)))
    words = [END, *letters, *(first + second for first, second in merges)]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    return made


def write(shape: str, folder: Path) -> None:
    """The folder that is served, and ``FOLDER-old`` beside it; each is there whole or not at all."""
    torch.manual_seed(0)
    values = dict(SHAPES[shape])
    config = transformers.AutoConfig.for_model(
        values.pop("model_type"), **values, vocab_size=VOCABULARY[shape], bos_token_id=0, eos_token_id=0
    )
    model = new_model(config, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    model.save_pretrained(unfinished)
    wrapped = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        tokenizer_object=tokenizer(VOCABULARY[shape]), bos_token=END, eos_token=END, unk_token=END
    )
    wrapped.save_pretrained(unfinished)
    unfinished.rename(folder)
    _write_old(folder, folder.with_name(f"{folder.name}-old"))


def _write_old(folder: Path, old: Path) -> None:
    """The same weights with the names that transformers 4 knows."""
    old.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name not in ("config.json", "tokenizer_config.json"):
            (old / file.name).unlink(missing_ok=True)
            os.link(file, old / file.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters", {})
    config["rope_theta"] = config["rotary_emb_base"] = rope.get("rope_theta", 10_000.0)
    config["rotary_pct"] = rope.get("partial_rotary_factor", 1.0)
    config["torch_dtype"] = config.pop("dtype", "float32")
    (old / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "unk_token": END}
    (old / "tokenizer_config.json").write_text(json.dumps(told, indent=2), encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))

"""``tessera-finetune predict``: complete every prompt of a file with a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from finetune.base_model.hub import folder_of
from finetune.commands.parser import DTYPES, CommandParser, add_given, given_of, require_option
from finetune.errors import ConfigError
from finetune.machine import inventory
from finetune.machine.process import without_collection


def add_arguments(parser: CommandParser) -> None:
    """What the command takes."""
    parser.description = (
        "Complete every prompt of a file with a checkpoint. A file named .jsonl has objects with prompt, text or messages (a "
        "chat, rendered by the checkpoint's template); any other one prompt a line."
    )
    parser.add_argument("checkpoint", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write; unset: standard output")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each completion, at most (64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of the likelihood that is sampled from (1)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (0)")
    parser.add_argument("--batch", type=int, default=8, help="prompts completed at once (8)")
    parser.add_argument("--dtype", choices=DTYPES, help="to compute in; unset: float32, bfloat16 on a GPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda where there is one (auto)")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt instead of text")
    add_given(parser)


def run(options: argparse.Namespace) -> int:
    """Read the prompts, load the checkpoint, write the completions as they come.

    Raises:
        ConfigError: an option, the prompts, the checkpoint or the place to write to is at fault.
    """
    for name, least in (("max_new_tokens", 1), ("batch", 1), ("seed", 0)):
        require_option(getattr(options, name) >= least, name, getattr(options, name), f"be at least {least}")
    require_option(0 <= options.temperature <= 100, "temperature", options.temperature, "be 0 or more")
    require_option(0 < options.top_p <= 1, "top_p", options.top_p, "lie between 0 and 1, 0 excluded")
    checkpoint = folder_of(options.checkpoint, "predict")
    if not checkpoint.exists():
        raise ConfigError(f"{options.checkpoint}: there is no such checkpoint")
    with without_collection():
        import torch

        from checkpoint.dtypes import FLOAT_TYPES
        from finetune.machine.quiet import quiet
        from finetune.trained.generate import Completer, Sampling, read_prompts

    prompts = read_prompts(options.prompts)
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise ConfigError("--device is cuda; torch sees no GPU")
    device = "cuda" if options.device != "cpu" and has_gpu else "cpu"
    dtype = FLOAT_TYPES[options.dtype or ("bfloat16" if device == "cuda" else "float32")]
    torch.set_num_threads(inventory.usable_cores())
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
    )
    with quiet(), _target(options.out) as out:
        completer = Completer(checkpoint, device=device, dtype=dtype, given=given_of(options))
        for prompt, text in zip(prompts, completer.complete(prompts, sampling, batch=options.batch), strict=True):
            if options.json:
                given = {"prompt": prompt.text} if prompt.text is not None else {"messages": list(prompt.messages or ())}
                out.write(json.dumps({**given, "completion": text}, ensure_ascii=False) + "\n")
            else:
                out.write(f">>> {prompt.shown}\n{text}\n\n")
            out.flush()
    return 0


@contextmanager
def _target(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        out = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {path}: cannot be written: {error.strerror}") from error
    with out:
        yield out

"""The argument parsers of the commands, and what several commands take alike."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError

if TYPE_CHECKING:
    from checkpoint.given import Given

DTYPES = ("float32", "bfloat16", "float16")
"""Types that weights are written in, by the names that ``--dtype`` takes."""


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: filled when the command is named, and taking keys of the configuration as options."""

    def __init__(self, *, fill: Callable[[CommandParser], None] | None = None, **options: Any) -> None:
        """``fill`` adds the command's arguments; the other options are argparse's own."""
        super().__init__(allow_abbrev=False, **options)
        self._fill = fill
        self._top_level: tuple[str, ...] | None = None
        self._more_help: Callable[[], str] | None = None

    def take_keys(self, top_level: Sequence[str], more_help: Callable[[], str]) -> None:
        """Take every ``--SECTION.KEY VALUE``, and ``--NAME VALUE`` of the names in ``top_level``, as ``overrides``.

        ``more_help`` makes the end of the help text, which alone needs the meaning of every key.
        """
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self._top_level, self._more_help = tuple(top_level), more_help

    def format_help(self) -> str:
        """The whole help text, with the meaning of every key where the command takes keys."""
        if self._more_help is not None:
            self.epilog = self._more_help()
        return super().format_help()

    def parse_known_args(  # type: ignore[override]  # its overloads take a namespace of any class
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse what argparse knows; the result also has ``words``, the arguments as they were given.

        argparse calls this for a command's own parser too.
        """
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        words = list(sys.argv[1:] if args is None else args)
        overrides, rest = ([], words) if self._top_level is None else _split(words, self._top_level)
        options, unknown = super().parse_known_args(rest, namespace)
        if unknown:  # told with this command's usage
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if self._top_level is not None:
            options.overrides, options.words = overrides, words
        return options, unknown


def _split(words: Sequence[str], top_level: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    from finetune.config.load import READER  # here and below, so that the list of commands needs nothing of the configuration

    return READER.split(words, top_level)


def add_config(parser: CommandParser) -> None:
    """A run's file, and every key of it as an option."""
    from finetune.config import TuneConfig

    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.take_keys(list(TuneConfig.__dataclass_fields__), _all_keys)


def _all_keys() -> str:
    from configuration import keys_of
    from finetune.config import TuneConfig

    keys = "\n".join(f"  --{key.name} ({key.shown_default})\n      {key.meaning}" for key in keys_of(TuneConfig))
    return f"Every key of the file can be given as an option, its value read as YAML:\n\n{keys}"


def require_option(condition: bool, name: str, value: object, rule: str) -> None:
    """Refuse the option that argparse calls ``name``.

    Raises:
        ConfigError: ``condition`` does not hold.
    """
    if not condition:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must {rule}")


def add_given(parser: CommandParser, *, adapter: bool = True) -> None:
    """What a user may say of a checkpoint that its files leave open; ``given_of`` reads it.

    Args:
        adapter: whether one may be added to the checkpoint.
    """
    parser.add_argument("--model-config", metavar="PATH", help="config.json, for a checkpoint with none beside, above or in it")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="the tokenizer's folder, for a checkpoint with none beside, above or in it"
    )
    parser.add_argument(
        "--weights-prefix", metavar="TEXT", help="what the weights' names begin with, where files hold several things"
    )
    parser.add_argument("--base", metavar="PATH", help="the base model's folder, for an adapter that does not say where it is")
    parser.add_argument(
        "--base-changed",
        choices=("refuse", "accept"),
        default="refuse",
        help="what happens to a base that is not the one an adapter of Tessera was trained beside (refuse)",
    )
    if adapter:
        parser.add_argument("--adapter", metavar="PATH", help="a LoRA adapter to add to the model")
    parser.add_argument(
        "--adapter-config", metavar="PATH", help="adapter_config.json, of a DeepSpeed save with an adapter in it"
    )
    parser.add_argument("--master-weights", action="store_true", help="of ZeRO-0, 1 or 2, the optimizer's fp32 weights")
    parser.add_argument("--layer-map", metavar="PATH", help="of a pipeline's layer files, which tensors of the model each has")
    parser.add_argument(
        "--neox-qkv-layout",
        choices=("blocks", "per-head"),
        default="blocks",
        help="how GPT-NeoX packed heads that share keys: per-head before November 2024 (blocks)",
    )


def given_of(options: argparse.Namespace) -> Given:
    """What the options of ``add_given`` say."""
    from checkpoint.given import Given  # here, so that the help needs nothing of the readers

    return Given(
        config=options.model_config,
        tokenizer=options.tokenizer,
        prefix=options.weights_prefix,
        base=options.base,
        adapter=options.adapter,
        any_base=options.base_changed == "accept",
        adapter_config=options.adapter_config,
        master_weights=options.master_weights,
        layer_map=options.layer_map,
        neox_qkv_layout=options.neox_qkv_layout,
    )

"""``tessera-finetune``: train, prepare, evaluate, export. Exit codes: 0 done, 2 usage or bad configuration, 1 anything else."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from finetune.commands.tables import table_console
from finetune.config import TuneConfig
from finetune.config.learning_rate import with_rate
from finetune.config.read import apply_overrides, build, describe, read_yaml, split_overrides
from finetune.errors import ConfigError, FinetuneError, RunError
from finetune.machine.process import without_collection
from finetune.machine.swap import claimed_swap
from finetune.output.folder import claimed_output

DTYPES = ("float32", "bfloat16", "float16")
_COMMANDS = {
    "tune": "train a new or existing model from text",
    "pretrain": "train a GPT-NeoX, GPT-2 or Llama through a pipeline of stages",
    "prepare": "tokenise the data of a run ahead of it",
    "data": "check: list every faulty record; show: print a row with its targets",
    "export": "write a checkpoint elsewhere, in any dtype",
    "merge": "join a LoRA adapter with its base model",
    "plan": "what a run will need against what there is, without running it",
    "evaluate": "loss and perplexity of a checkpoint on text",
    "predict": "complete a file of prompts with a checkpoint",
    "doctor": "what this machine has and what is missing",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    errors = Console(stderr=True)
    try:
        try:
            code = _run(words)
        except SystemExit as end:  # argparse: 0 after --help, 2 after a usage error
            code = end.code if isinstance(end.code, int) else 2
        _flush_output()
        return code
    except FinetuneError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print("interrupted")
        return 1
    except BrokenPipeError:
        return 1


def _flush_output() -> None:
    """Write what is still buffered: here a failure is an error, at the process's end nobody would take notice.

    Raises:
        RunError: it cannot be written.
    """
    if sys.stdout is None:  # closed by whoever started this
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"standard output cannot be written: {error}") from error


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tessera-finetune", allow_abbrev=False, description="Train GPT checkpoints.")
    parser.add_argument(
        "command", metavar="{" + ",".join(_COMMANDS) + "}", help="; ".join(f"{k}: {v}" for k, v in _COMMANDS.items())
    )
    if not words or words[0] in ("-h", "--help"):
        parser.print_help(sys.stdout if words else sys.stderr)
        return 0 if words else 2
    command, rest = words[0], words[1:]
    runners = {
        "tune": _tune,
        "pretrain": _pretrain,
        "prepare": _prepare,
        "data": _data,
        "export": _export,
        "merge": _merge,
        "plan": _plan,
        "evaluate": _evaluate,
        "predict": _predict,
        "doctor": _doctor,
    }
    if command not in ("tune", "pretrain"):  # their ranks choose for themselves
        # transformers imports DeepSpeed, which otherwise looks for devices and says so among what these commands print.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if command not in runners:
        parser.error(f"unknown command {command!r}; there are {', '.join(_COMMANDS)}")
    return runners[command](rest)


def _parser(command: str, **options: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"tessera-finetune {command}", description=_COMMANDS[command], allow_abbrev=False, **options
    )


# -- tune


def load_config(path: Path, overrides: Sequence[tuple[str, str]] = (), *, command: str = "tune") -> TuneConfig:
    """Read the YAML file of a run of ``command``, with ``overrides`` on top.

    Raises:
        ConfigError: names the file and line, or the option, the key and the rule.
    """
    tree, places = read_yaml(path)
    apply_overrides(tree, places, overrides)
    if command == "pretrain" and isinstance(tree.setdefault("zero", {}), dict):
        tree["zero"].setdefault("stage", 1)
    try:
        config = build(TuneConfig, tree, places)
        config.check_command(command)
        return config
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith((str(path), "command line")) else f"{path}: {message}") from None


def _tune(words: list[str]) -> int:
    return _train("tune", words)


def _pretrain(words: list[str]) -> int:
    return _train("pretrain", words)


def _train(command: str, words: list[str]) -> int:
    keys = "\n".join(f"  --{name} ({default})\n      {meaning}" for name, default, meaning in describe(TuneConfig))
    parser = _parser(
        command,
        epilog=f"Every key of the file can be given as an option, its value read as YAML:\n\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("--resume", action="store_true", help="go on from the newest save; short for --run.resume auto")
    parser.add_argument("--anyway", action="store_true", help="start a run that the forecast says cannot fit")
    parser.add_argument("--print-config", action="store_true", help="show the whole configuration and stop")
    parser.add_argument("--hostfile", type=Path, help="start the ranks on the nodes of this file, by DeepSpeed's launcher")
    overrides, rest = split_overrides(words, [field.name for field in fields(TuneConfig)])
    options = parser.parse_args(rest)
    if options.resume:
        overrides.append(("run.resume", "auto"))
    from finetune.launch.local import external

    if external.started_by_launcher():
        overrides.append(("run.ranks", str(external.world_size())))
    elif options.hostfile is not None:
        at = words.index("--hostfile") if "--hostfile" in words else None
        external.hand_over(options.hostfile, [command, *(words if at is None else words[:at] + words[at + 2 :])])
    config = load_config(options.config, overrides, command=command)
    if options.print_config:
        yaml.safe_dump(_plain(asdict(with_rate(config)[0])), sys.stdout, sort_keys=False, allow_unicode=True)
        return 0
    return tune(config, Console(), command=command, anyway=options.anyway)


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML and JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def tune(config: TuneConfig, console: Console, *, command: str = "tune", anyway: bool = False) -> int:
    """Prepare the data, start the ranks, and wait for them.

    The ranks import what is slow while the data is tokenised here; rank 0 refuses what cannot fit, unless ``anyway``.

    Raises:
        FinetuneError: what was wrong; no process is left.
    """
    from finetune.base_model.hub import located
    from finetune.forecast.least import check_least
    from finetune.launch.local import Ranks, external
    from finetune.launch.prerequisites import make_ready, settled
    from finetune.observe.outside import observed
    from finetune.observe.sinks import check_sinks

    check_sinks(config)

    def say(text: str) -> None:
        console.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)

    if not anyway and not external.started_by_launcher():  # several nodes have more memory than this one
        check_least(located(config, command=command, need="config"))
    config = located(config, say if os.environ.get("RANK", "0") == "0" else lambda _: None, command=command)
    if external.started_by_launcher():
        external.train(config, _plain(asdict(config)), console, command=command, anyway=anyway)
    with ExitStack() as stack:
        output = stack.enter_context(claimed_output(config))
        config = settled(config, say)
        settings = _plain(asdict(config))
        # The swap files go once no rank is left that could use them.
        swap = stack.enter_context(claimed_swap(config, say))
        run = {"config": settings, "command": command, "anyway": anyway}
        ranks = stack.enter_context(Ranks(output, run, ranks=config.run.ranks, threads=config.run.threads))
        (output / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
        ranks.go(make_ready(config, say, ranks.check, swap=swap))
        with observed(config, ranks.process_ids, console):
            ranks.wait()
        return 1 if ranks.interrupted is signal.SIGINT else 0


# -- the others


def _prepare(words: list[str]) -> int:
    from finetune.commands.data import prepare

    return prepare(words)


def _data(words: list[str]) -> int:
    from finetune.commands.data import data

    return data(words)


def _plan(words: list[str]) -> int:
    from finetune.commands.plan import main

    return main(words)


def _predict(words: list[str]) -> int:
    from finetune.commands.predict import main

    return main(words)


def _export(words: list[str]) -> int:
    parser = _parser("export")
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights; unset: as stored")
    parser.add_argument("--step", type=int, help="which checkpoint of a run; unset: the latest")
    parser.add_argument("--max-shard-mib", type=int, default=2048, help="largest file of weights (2048)")
    options = parser.parse_args(words)
    if options.max_shard_mib < 1:
        parser.error("--max-shard-mib must be at least 1")
    with without_collection():
        import torch

        from finetune.trained.export import export

    dtype = getattr(torch, options.dtype) if options.dtype else None
    path = export(options.source, options.out, dtype=dtype, step=options.step, max_shard_bytes=options.max_shard_mib << 20)
    sys.stdout.write(f"{path}\n")
    return 0


def _merge(words: list[str]) -> int:
    parser = _parser("merge")
    parser.add_argument("adapter", type=Path, metavar="RUN_OR_ADAPTER")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--base", type=Path, help="folder of the base model; unset: the one the adapter names")
    parser.add_argument(
        "--base-changed",
        choices=("refuse", "accept"),
        default="refuse",
        help="what happens to a base that is not the one the adapter was trained beside (refuse)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the written weights; unset: the base model's")
    parser.add_argument("--max-shard-mib", type=int, default=2048, help="largest file of weights (2048)")
    options = parser.parse_args(words)
    if options.max_shard_mib < 1:
        parser.error(f"--max-shard-mib is {options.max_shard_mib}; it must be at least 1")
    with without_collection():
        import torch

        from finetune.model.adapters import merge

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    out = merge(
        options.adapter,
        options.out,
        base=options.base,
        any_base=options.base_changed == "accept",
        dtype=dtype,
        max_shard_bytes=options.max_shard_mib << 20,
    )
    Console().print(str(out), highlight=False, soft_wrap=True)
    return 0


def _evaluate(words: list[str]) -> int:
    from finetune.commands.evaluate import main

    return main(words)


def _doctor(words: list[str]) -> int:
    parser = _parser("doctor")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(words)
    from finetune.commands import doctor

    findings = doctor.examine()
    if options.json:
        sys.stdout.write(json.dumps(doctor.as_json(findings), indent=2) + "\n")
    else:
        doctor.show(findings, table_console())
    return doctor.exit_code(findings)

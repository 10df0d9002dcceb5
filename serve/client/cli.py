"""``tessera-generate``: a prompt in, text streamed to the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TextIO

from serve.client.calls import DEFAULT_TIMEOUT_SECONDS
from serve.client.connection import add_arguments, connecting_of
from serve.client.errors import TesseraError
from serve.client.offline.command import add_batch_arguments, run_batch
from serve.client.request import ChatMessage, Options, Prompt
from serve.client.results import Delta, Finish, Generated, PromptInfo
from serve.client.sync import Client

OK, FAILED, USAGE = 0, 1, 2
USAGE_CODES: Final = ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ALREADY_EXISTS")
"""Statuses that say the command itself must be changed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 when everything was generated, 2 for usage or a request that the server refuses as wrong, 1 for anything else, a line
        of a batch that failed among them.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
        is_batch = arguments.batch is not None or arguments.out is not None
        prompt = "" if is_batch else _prompt(arguments)
    except SystemExit as end:  # argparse has said what is wrong
        return int(end.code or 0)
    except ValueError as error:
        return _fail(str(error), USAGE)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        if is_batch:
            return OK if run_batch(arguments, _options(arguments)) else FAILED
        reached = connecting_of(arguments)
        with Client(arguments.address, timeout=arguments.timeout, retries=arguments.retries, **reached) as client:
            return _run(client, prompt, _options(arguments), arguments)
    except TesseraError as error:
        return _fail(str(error), USAGE if error.code in USAGE_CODES else FAILED)
    except (TypeError, ValueError) as error:
        return _fail(str(error), USAGE)
    except KeyboardInterrupt:
        kept = "; the same command goes on from here" if is_batch else "; the request was cancelled"
        return _fail("interrupted" + kept, FAILED)
    except BrokenPipeError:
        # Whoever read the output has gone; leave nothing that Python would try to flush into the void.
        sys.stdout = None
        return FAILED
    except OSError as error:
        return _fail(str(error), FAILED)


def _run(client: Client, prompt: Prompt, options: Options, arguments: argparse.Namespace) -> int:
    if arguments.no_stream or (options.get("num_sequences", 1) > 1 and not arguments.json):
        generated = client.generate(prompt, **options)
        _print_whole(generated, arguments)
        return OK
    with client.stream(prompt, **options) as events:
        last: Finish | None = None
        for event in events:
            if arguments.json:
                _print_json({"event": _EVENT_NAMES[type(event)], "request_id": events.request_id, **dataclasses.asdict(event)})
            elif isinstance(event, PromptInfo | Delta):
                _write(event.text)
            last = event if isinstance(event, Finish) else last
    if not arguments.json:
        _write("\n")
    if arguments.stats and last is not None:
        _print_stats(last)
    return OK


_EVENT_NAMES: Final = {PromptInfo: "prompt", Delta: "delta", Finish: "finish"}


def _print_whole(generated: Generated, arguments: argparse.Namespace) -> None:
    if arguments.json:
        _print_json(dataclasses.asdict(generated))
    else:
        for completion in generated.completions:
            if len(generated.completions) > 1:
                _write(f"── {completion.index + 1} of {len(generated.completions)} ──\n")
            _write(generated.prompt.text + completion.text + "\n")
    if arguments.stats:
        for each in generated.completions:
            _print_stats(each.finish)


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _write(text: str) -> None:
    sys.stdout.write(_harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _harmless(text: str) -> str:
    """Control characters made visible: a model may write any of them, and terminals obey."""
    return "".join(c if c in "\n\t" or not (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0) else "\ufffd" for c in text)


def _print_stats(finish: Finish) -> None:
    usage, timings = finish.usage, finish.timings
    decoding = timings.total_seconds - timings.first_token_seconds
    speed = f", {(usage.completion_tokens - 1) / decoding:.1f} tokens/s" if usage.completion_tokens > 1 and decoding > 0 else ""
    print(
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated, "
        f"ended by {finish.reason}; first token after {timings.first_token_seconds * 1000:.0f} ms{speed}; seed {finish.seed}",
        file=sys.stderr,
    )


def _fail(message: str, code: int) -> int:
    print(f"tessera-generate: {message}", file=sys.stderr)
    return code


def _prompt(arguments: argparse.Namespace) -> Prompt:
    """
    Raises:
        ValueError: there is none, or two, or standard input is not UTF-8.
    """
    if arguments.prompt_ids is not None:
        if arguments.prompt is not None:
            raise ValueError("give a prompt or --prompt-ids, not both")
        return list(arguments.prompt_ids)
    text = arguments.prompt if arguments.prompt not in (None, "-") else _read_stdin(sys.stdin)
    if not arguments.chat and arguments.system is None:
        return str(text)
    turns: list[ChatMessage] = [{"role": "user", "content": str(text)}]
    if arguments.system is not None:
        turns.insert(0, {"role": "system", "content": arguments.system})
    return turns


def _read_stdin(stdin: TextIO) -> str:
    if stdin.isatty():
        print("tessera-generate: reading the prompt from the terminal; end it with Ctrl-D", file=sys.stderr)
    data = stdin.buffer.read() if hasattr(stdin, "buffer") else stdin.read().encode()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: byte {error.start}") from error
    # The line break that echo and editors put at the end is not part of what was meant.
    return text.removesuffix("\n")


_OPTIONS: Final[tuple[tuple[str, Callable[[str], Any], str], ...]] = (
    ("temperature", float, "divides the logits; 0 is greedy"),
    ("top_k", int, "keep the K likeliest tokens"),
    ("top_p", float, "keep the likeliest tokens up to this probability"),
    ("min_p", float, "keep tokens at least this fraction as likely as the likeliest"),
    ("typical_p", float, "locally typical sampling: probability mass kept"),
    ("seed", int, "the same seed gives the same tokens"),
    ("repetition_penalty", float, "above 1 makes tokens already seen less likely"),
    ("presence_penalty", float, "subtracted once from the logit of each token already in the output"),
    ("frequency_penalty", float, "subtracted from a token's logit for each time it is in the output"),
    ("num_sequences", int, "independent continuations; above 1 they are shown when all have ended"),
    ("max_new_tokens", int, "tokens to generate at most; as many as fit by default"),
    ("min_new_tokens", int, "tokens to generate at least"),
    ("logprobs", int, "with --json: log probabilities of each token and of the K likeliest"),
    ("prompt_logprobs", int, "the same for the prompt's tokens"),
    ("priority", int, "larger goes first among waiting requests"),
    ("cache_salt", str, "share cached prompt prefixes only with requests of the same salt"),
    ("speculative_tokens", int, "tokens guessed at most for one step; 0 for none"),
    ("model", str, "name of the model; the served one by default"),
    ("request_id", str, "a name of your own for the request"),
)
_LISTS: Final[tuple[tuple[str, str, Callable[[str], Any], str], ...]] = (
    ("--stop", "stop_strings", str, "end when this text appears; may be repeated"),
    ("--stop-id", "stop_ids", int, "end when this token id is generated; may be repeated"),
    ("--allow-id", "allowed_ids", int, "generate only such ids; may be repeated"),
    ("--ban-id", "banned_ids", int, "never generate this id; may be repeated"),
)
_SWITCHES: Final = (
    ("include_stop", "keep the matched stop string in the text"),
    ("ignore_eos", "go on after the model's end-of-text token"),
    ("echo", "show the prompt too"),
    ("pin_weights", "have one checkpoint make all tokens, also where the server takes newer weights meanwhile"),
)


def _options(arguments: argparse.Namespace) -> Options:
    given: dict[str, Any] = {name: getattr(arguments, name) for name, _, _ in _OPTIONS}
    given |= {name: getattr(arguments, name) for _, name, _, _ in _LISTS}
    given |= {name: True if getattr(arguments, name) else None for name, _ in _SWITCHES}
    given["logit_bias"] = dict(arguments.logit_bias) or None
    given["special_tokens"] = False if arguments.no_special_tokens else None
    options = Options()
    chosen = {name: value for name, value in given.items() if value not in (None, [])}
    options.update(chosen)  # type: ignore[typeddict-item]  # the tables above hold names of Options and their types
    return options


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; it must be 0 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-generate",
        description="Generate text with a running tessera-serve and stream it to the terminal.",
        epilog="Exit codes: 0 done, 2 usage or a request the server refuses, 1 anything else.",
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; read from standard input when it is left out or -")
    parser.add_argument("--prompt-ids", type=_ids, metavar="ID,ID", help="token ids instead of a text")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is what a user says; needs a model with a chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="what a system message says before it; implies --chat")
    parser.add_argument("--no-special-tokens", action="store_true", help="do not add the tokenizer's special tokens")
    parser.add_argument(
        "--timeout", type=_seconds, default=DEFAULT_TIMEOUT_SECONDS, help="seconds for the whole call (%(default)g)"
    )
    parser.add_argument(
        "--retries", type=_count, default=3, help="further attempts when the server is not available (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per event; with --no-stream, one in all")
    parser.add_argument("--no-stream", action="store_true", help="print nothing before everything is generated")
    parser.add_argument("--stats", action="store_true", help="print token counts and times on standard error")
    sampling = parser.add_argument_group("generation", "What is left out, the server decides.")
    for name, kind, help_ in _OPTIONS:
        sampling.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, help=help_)
    for flag, name, kind, help_ in _LISTS:
        sampling.add_argument(flag, dest=name, type=kind, action="append", default=[], help=help_)
    for name, help_ in _SWITCHES:
        sampling.add_argument("--" + name.replace("_", "-"), dest=name, action="store_true", help=help_)
    bias_help = "add VALUE to the logit of token ID; may be repeated"
    sampling.add_argument("--logit-bias", type=_bias, action="append", default=[], metavar="ID=VALUE", help=bias_help)
    add_batch_arguments(parser)
    add_arguments(parser)
    return parser


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 12,7,99") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, for example 42=-5") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value

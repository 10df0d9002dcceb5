"""``tessera-serve``: arguments, environment and a YAML file become a ``ServerConfig``, and a server runs with it.

No other module of the server reads its options from the environment: the client and agents read theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING

from serve import logs
from serve.config import ServerConfig
from serve.errors import ConfigError
from serve.model.kernels import ahead
from serve.model.kernels.compiler import KernelUnavailable
from serve.options import ENVIRONMENT_PREFIX, Option, all_options, build_config, to_yaml

if TYPE_CHECKING:
    from serve.runtime.service_manager import ServiceManager
    from serve.worker.rank_process import ForkStarter

BUILD_KERNELS = "build-kernels"
LOG_LEVELS = ("debug", "info", "warning", "error")
CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
LOG_LEVEL_VARIABLE = f"{ENVIRONMENT_PREFIX}LOG_LEVEL"
LOG_FORMAT_VARIABLE = f"{ENVIRONMENT_PREFIX}LOG_FORMAT"
LOG_FILE_VARIABLE = f"{ENVIRONMENT_PREFIX}LOG_FILE"
_LOG_DEFAULTS = {LOG_LEVEL_VARIABLE: "info", LOG_FORMAT_VARIABLE: "text"}
_LOG_VARIABLES = {LOG_LEVEL_VARIABLE, LOG_FORMAT_VARIABLE, LOG_FILE_VARIABLE}

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``tessera-serve``.

    Args:
        arguments: without the program's name; ``None`` takes the process's own.

    Returns:
        The exit code: 0 done, 2 usage or configuration, 1 anything else.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # By hand: argparse's sub-commands would be in the usage line, be taken after options too, and tell a stray word otherwise.
    if words[:1] == [BUILD_KERNELS]:
        return _build_kernels(words[1:])
    if words[:1] == ["token"]:
        from serve.rpc import token_command

        return token_command.main(words[1:])
    if words[:1] == ["agent"]:
        from serve.worker import agent

        return agent.main(words[1:])
    given = _parser().parse_args(words)
    try:
        level = _one_of(LOG_LEVELS, given.log_level, LOG_LEVEL_VARIABLE, os.environ)
        form = _one_of(logs.FORMATS, given.log_format, LOG_FORMAT_VARIABLE, os.environ)
        file = given.log_file or os.environ.get(LOG_FILE_VARIABLE)
        config = resolve(vars(given), os.environ)
    except ConfigError as error:
        print(f"tessera-serve: {error}", file=sys.stderr)
        return error.exit_code
    if given.print_config:
        sys.stdout.write(to_yaml(config))
        return 0
    try:
        logs.set_up(level, form=form, file=file)
    except OSError as error:
        print(f"tessera-serve: --log-file is {file!r}; it cannot be written: {error.strerror}", file=sys.stderr)
        return ConfigError.exit_code
    _warn_of_strange_variables(os.environ)
    from serve.runtime.service_manager import ServiceManager

    manager = ServiceManager.named_in(os.environ)  # before ranks are forked, which are not to speak for the server
    from serve.worker.rank_process import rank_starter  # here, so that --help and --print-config need no ranks and no gRPC

    with rank_starter(config) as starter:
        from serve import app

        if config.nodes.count == 1:
            return app.run(config, version=package_version(), starter=starter, manager=manager)
        return _serve_on_nodes(config, starter, manager)


def _serve_on_nodes(config: ServerConfig, starter: ForkStarter | None, manager: ServiceManager) -> int:
    from serve import app
    from serve.worker.executor import RankExecutor
    from serve.worker.nodes import NodeStarter

    try:
        with NodeStarter(config, starter) as nodes:
            return app.run(
                config,
                version=package_version(),
                starter=starter,
                manager=manager,
                make_group=lambda served: RankExecutor(served, nodes),
            )
    except ConfigError as error:
        print(f"tessera-serve: {error}", file=sys.stderr)
        return error.exit_code


def resolve(arguments: Mapping[str, object], environment: Mapping[str, str]) -> ServerConfig:
    """The configuration: argument before environment before file before default.

    Args:
        arguments: dotted key -> what the flag was given, absent or ``None`` where it was not; and ``config``, a file's path.
        environment: the process's variables.

    Raises:
        ConfigError: a value does not read as its type or breaks its rule, or the file is at fault.
    """
    path = arguments.get("config") or environment.get(CONFIG_VARIABLE)
    given: dict[str, tuple[object, str]] = {}
    for option in all_options():
        for place, value in (
            (option.variable, _from_environment(option, environment)),
            (option.flag, arguments.get(option.key)),
        ):
            if value is not None:
                given[option.key] = value, place
    return build_config(str(path) if path else None, given)


def package_version() -> str:
    """The version of the installed distribution; a word instead in a source tree that was never installed."""
    try:
        return installed_version("tessera")
    except PackageNotFoundError:
        return "0+unknown"


def _build_kernels(arguments: Sequence[str]) -> int:
    """Compile the CPU kernels into the package, for processors of other machines too."""
    levels = _kernels_parser().parse_args(arguments).levels.split(",")
    known = [level.name for level in ahead.LEVELS]
    if unknown := [level for level in levels if level not in known]:
        print(f"tessera-serve: --for has {unknown[0]!r}, which is none of {', '.join(known)}", file=sys.stderr)
        return 2
    try:
        print(*ahead.build_ahead(levels, ahead.FOLDER), sep="\n")
    except (KernelUnavailable, OSError) as error:
        print(f"tessera-serve: the kernels were not built into {ahead.FOLDER}: {error}", file=sys.stderr)
        return 1
    return 0


def _kernels_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tessera-serve {BUILD_KERNELS}",
        description="Compile the CPU kernels ahead into a folder of the package, where a server finds them without a compiler.",
        allow_abbrev=False,
    )
    levels = ",".join(level.name for level in ahead.LEVELS)
    parser.add_argument(
        "--for",
        dest="levels",
        default=levels,
        metavar="LEVEL,...",
        help="kinds of processors (default: %(default)s)",
    )
    return parser


def _from_environment(option: Option, environment: Mapping[str, str]) -> str | None:
    value = environment.get(option.variable)
    if value is not None and _is_kubernetes_link(value):
        return None
    return value


def _is_kubernetes_link(value: str) -> bool:
    """Kubernetes gives every pod ``TESSERA_PORT=tcp://10.0.0.1:50051`` where a Service is called ``tessera``."""
    return value.startswith(("tcp://", "udp://", "sctp://"))


def _warn_of_strange_variables(environment: Mapping[str, str]) -> None:
    known = {option.variable for option in all_options()} | {CONFIG_VARIABLE, *_LOG_VARIABLES}
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known and not _is_kubernetes_link(value):
            _log.warning("the environment variable %s is no option of tessera-serve; it is ignored", name)


def _one_of(words: Sequence[str], given: str | None, variable: str, environment: Mapping[str, str]) -> str:
    """What an option of the log was given, or its variable, or its default."""
    word = given or environment.get(variable, _LOG_DEFAULTS[variable]).lower()
    if word not in words:
        raise ConfigError(f"{variable} is {word!r}; it must be one of {', '.join(words)}")
    return word


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-serve",
        description="Serve a sharded GPT checkpoint over gRPC. "
        "`tessera-serve token NAME --file FILE` makes a token for --tokens, "
        "`tessera-serve agent --join HOST:PORT --key-file FILE` has a further machine's ranks for --nodes.",
        epilog=f"Every option is also an environment variable ({ENVIRONMENT_PREFIX}PORT for --port) and a key of --config. "
        f"`tessera-serve {BUILD_KERNELS} --help` tells how the CPU kernels are compiled ahead. "
        "An argument goes before the environment, the environment before the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file laid out as --print-config writes it.")
    parser.add_argument("--print-config", action="store_true", help="Print the whole configuration as YAML, and exit.")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="How much goes to standard error. (default: info)")
    parser.add_argument("--log-format", choices=logs.FORMATS, help="How lines of the log are written. (default: text)")
    parser.add_argument(
        "--log-file", metavar="FILE", help="Where the log goes instead of standard error; may be moved away at any time."
    )
    parser.add_argument("--version", action="version", version=f"tessera {package_version()}")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in all_options():
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        _add_flag(groups[option.section], option)
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    """Values stay text: one parser reads flags, variables and files, so that all three are refused in the same words."""
    default = "" if option.default is dataclasses.MISSING else f" (default: {_shown(option.default)})"
    help_ = (option.help + default).replace("%", "%%").replace("``", "").strip()
    if option.kind is bool:
        group.add_argument(option.flag, dest=option.key, action=argparse.BooleanOptionalAction, default=None, help=help_)
    else:
        metavar = f"{{{','.join(option.choices)}}}" if option.choices else {int: "N", float: "X", str: "TEXT"}[option.kind]
        group.add_argument(option.flag, dest=option.key, metavar=metavar, help=help_)


def _shown(default: object) -> str:
    return str(default).lower() if default is None or isinstance(default, bool) else str(default) or "''"

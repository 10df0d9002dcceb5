"""Options: where they come from, which one counts, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve import cli
from serve.config import ServerConfig
from serve.errors import ConfigError
from serve.options import all_options, to_yaml


def resolved(arguments: list[str], environment: dict[str, str] | None = None) -> ServerConfig:
    return cli.resolve(vars(cli._parser().parse_args(["--model", "/m", *arguments])), environment or {})


def written(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_field_has_a_flag_of_its_own_and_a_help_text() -> None:
    options = all_options()
    assert len({option.flag for option in options}) == len(options)
    assert len(options) == sum(len(dataclasses.fields(section)) for section in _sections())
    assert [option.key for option in options if not option.help] == []


def _sections() -> list[type]:
    config = resolved([])
    return [type(getattr(config, field.name)) for field in dataclasses.fields(config)]


@pytest.mark.parametrize(
    "flag",
    [
        "--model", "--tensor-parallel-size", "--dtype", "--device", "--host", "--port", "--metrics-port", "--max-num-seqs",
        "--max-step-tokens", "--kv-cache-gib", "--max-model-len", "--max-queued-requests", "--max-queued-tokens",
        "--drain-seconds", "--config", "--print-config", "--version", "--log-level",
    ],
)  # fmt: skip
def test_the_flags_of_the_contract_exist(flag: str) -> None:
    assert flag in cli._parser()._option_string_actions


def test_argument_goes_before_environment_before_file_before_default(tmp_path: Path) -> None:
    file = written(tmp_path, "rpc:\n  port: 1\n  metrics_port: 1\n  host: 127.0.0.1\nscheduler: {max_num_seqs: 1}\n")
    environment = {"TESSERA_CONFIG": file, "TESSERA_PORT": "2", "TESSERA_METRICS_PORT": "2"}
    config = resolved(["--port", "3"], environment)
    assert (config.rpc.port, config.rpc.metrics_port, config.scheduler.max_num_seqs) == (3, 2, 1)
    assert config.scheduler.max_step_tokens == 512


def test_an_argument_names_another_file_than_the_environment(tmp_path: Path) -> None:
    file = written(tmp_path, "rpc: {port: 7}")
    assert resolved(["--config", file], {"TESSERA_CONFIG": "/nowhere.yaml"}).rpc.port == 7


def test_values_are_read_as_their_types() -> None:
    config = resolved(
        ["--kv-cache-gib", "0.5", "--no-prefix-caching", "--max-model-len", "none"],
        {"TESSERA_INSECURE_PUBLIC": "yes", "TESSERA_HOST": "0.0.0.0", "TESSERA_MAX_MODEL_LEN": "64"},
    )
    assert config.cache.kv_cache_gib == 0.5
    assert config.cache.prefix_caching is False
    assert config.rpc.insecure_public is True
    assert config.model.max_model_len is None


def test_what_is_printed_reads_back_the_same(tmp_path: Path) -> None:
    config = resolved(["--admin-address", "off", "--reflection", "on", "--max-model-len", "128", "--model-name", "007"])
    file = written(tmp_path, to_yaml(config))
    assert cli.resolve({"config": file}, {}) == config


def test_off_in_a_file_is_a_word(tmp_path: Path) -> None:
    file = written(tmp_path, "rpc:\n  admin_address: off\n  reflection: off\n  insecure_public: true\n")
    config = resolved(["--config", file])
    assert (config.rpc.admin_address, config.rpc.reflection, config.rpc.insecure_public) == ("off", "off", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cache:\nrpc:\n  prot: 1",
            r"serve.yaml, line 3: unknown key rpc.prot; did you mean rpc.port\? \(allowed under rpc: host, port, metrics_port",
        ),
        (
            "rcp: {port: 1}",
            r"serve.yaml, line 1: unknown key rcp; did you mean rpc\? \(allowed at the top: model, cache, sched",
        ),
        ("\nrpc: {port: many}", r"serve.yaml, line 2: rpc.port is 'many'; it must be a whole number"),
        ("rpc: {port: true}", r"serve.yaml, line 1: rpc.port is True; it must be a whole number"),
        ("rpc: {port: 1.5}", r"serve.yaml, line 1: rpc.port is 1.5; it must be a whole number"),
        ("rpc: {port: 70000}", r"serve.yaml, line 1: rpc.port is 70000; it must lie between 0 and 65535"),
        ("cache: {prefix_caching: maybe}", r"cache.prefix_caching is 'maybe'; it must be true or false"),
        ("cache: {kv_cache_gib: much}", r"cache.kv_cache_gib is 'much'; it must be a number or none"),
        ("rpc: {port: 1, port: 2}", r"serve.yaml, line 1: rpc.port is set twice"),
        ("rpc: [port]", r"serve.yaml, line 1: rpc is \['port'\]; it must be a mapping"),
        ("rpc: {port: 1", r"serve.yaml, line 1: not valid YAML: .*expected ',' or '}'"),
        ("1: {port: 1}", r"serve.yaml, line 1: key 1 is not text"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(["--config", written(tmp_path, text)])


def test_a_missing_file_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere.yaml: cannot be read: No such file"):
        resolved(["--config", "/nowhere.yaml"])


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^TESSERA_PORT: rpc.port is 'abc'; it must be a whole number$"):
        resolved([], {"TESSERA_PORT": "abc"})
    with pytest.raises(ConfigError, match=r"^TESSERA_DTYPE: model.dtype is 'int4'; it must be one of"):
        resolved([], {"TESSERA_DTYPE": "int4"})


@pytest.mark.parametrize("key", ["model.dtype", "model.device", "model.verify", "rpc.reflection"])
def test_a_word_that_is_none_of_those_allowed_is_refused_in_the_same_words_wherever_it_stands(tmp_path: Path, key: str) -> None:
    (option,) = [option for option in all_options() if option.key == key]
    rule = f"{key} is 'x'; it must be one of {', '.join(option.choices)}$"
    section, name = key.split(".")
    for place, arguments, environment in (
        (option.flag, [option.flag, "x"], {}),
        (option.variable, [], {option.variable: "x"}),
        ("line 1", ["--config", written(tmp_path, f"{section}: {{{name}: x}}")], {}),
    ):
        with pytest.raises(ConfigError, match=f"{place}: {rule}"):
            resolved(arguments, environment)
    assert f"{option.flag} {{{','.join(option.choices)}}}" in cli._parser().format_help()


def test_the_links_kubernetes_sets_for_a_service_called_tessera_are_no_options() -> None:
    assert resolved([], {"TESSERA_PORT": "tcp://10.0.0.7:50051"}).rpc.port == 50051


def test_a_public_host_must_be_meant() -> None:
    with pytest.raises(ConfigError, match=r"--host: rpc.host is '0.0.0.0'; it must be a loopback address unless"):
        resolved(["--host", "0.0.0.0"])


def tessera_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    return subprocess.run(
        [sys.executable, "-m", "serve", *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False
    )


def test_print_config_ends_with_0_and_touches_nothing_else() -> None:
    done = tessera_serve("--model", "/no/such/model", "--port", "0", "--print-config")
    assert done.returncode == 0, done.stderr
    assert "path: /no/such/model" in done.stdout
    assert "port: 0" in done.stdout


def test_a_wrong_option_ends_with_2_and_one_line() -> None:
    done = tessera_serve("--model", "/m", "--max-num-seqs", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "tessera-serve: --max-num-seqs: scheduler.max_num_seqs is 0; it must be at least 1\n"


def test_a_missing_model_ends_with_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TESSERA_")]:
        monkeypatch.delenv(name)
    assert cli.main(["--print-config"]) == 2
    assert "model.path is missing: give --model, TESSERA_MODEL, or the key in --config" in capsys.readouterr().err

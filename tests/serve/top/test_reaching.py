"""A guarded metrics port in a terminal: TLS, certificates and tokens, given as to the clients."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.config import RpcConfig
from serve.metrics import Metrics
from serve.rpc.identity import Identities
from serve.rpc.token_command import main as token_command
from serve.top import cli
from serve.top.reaching import Place, add_arguments
from tests.serve.rpc.test_certificates import make_pair
from tests.serve.rpc.test_scraping import served

VARIABLES = ("TESSERA_CA", "TESSERA_CLIENT_CERT", "TESSERA_CLIENT_KEY", "TESSERA_SERVER_NAME", "TESSERA_TOKEN")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1", num_ranks=1, model_name="mine")


class Guarded:
    """A metrics port with a certificate, which asks for one and for a token."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = make_pair(folder, "server")
        self.friend, self.friend_key = make_pair(folder, "friend")
        self.token_file = folder / "token"
        self.port = 0

    @property
    def options(self) -> dict[str, str]:
        return {
            "--ca": str(self.certificate), "--cert": str(self.friend), "--key": str(self.friend_key),
            "--token-file": str(self.token_file),
        }  # fmt: skip

    def ask(self, *more: str, without: str = "", host: str = "localhost") -> int:
        options = [word for name, value in self.options.items() if name != without for word in (name, value)]
        return cli.main([f"{host}:{self.port}", "--once", "--interval", "0.1", *options, *more])


@pytest.fixture
def guarded(metrics: Metrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Guarded]:
    made, file = Guarded(tmp_path), tmp_path / "tokens.json"
    assert token_command(["operator", "--file", str(file), "--scopes", "metrics"]) == 0
    made.token_file.write_text(capsys.readouterr().out.split()[-1] + "\n")
    rpc = RpcConfig(tls_cert=str(made.certificate), tls_key=str(made.key), tls_client_ca=str(made.friend))
    with served(metrics, rpc, Identities(str(file))) as made.port:
        yield made


def test_a_guarded_port_is_shown_to_who_may_see_it(guarded: Guarded, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded.ask() == 0
    assert "no model yet" in capsys.readouterr().out
    for missing, words in (("--token-file", "401"), ("--cert", "given together")):
        assert guarded.ask(without=missing) in (1, 2)
        assert words in capsys.readouterr().err
    assert cli.main([f"https://localhost:{guarded.port}", "--once"]) == 1
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err


def test_the_environment_says_what_the_options_do_not(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token = guarded.token_file.read_text().strip()
    values = (str(guarded.certificate), str(guarded.friend), str(guarded.friend_key), "", token)
    for variable, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(variable, value)
    where = f"localhost:{guarded.port}"
    assert cli.main([where, "--once", "--interval", "0.1"]) == 0
    assert "no model yet" in capsys.readouterr().out
    assert cli.main([where, "--once", "--plain"]) == 1
    assert f"http://{where}/metrics does not answer" in capsys.readouterr().err


def test_the_certificate_may_have_another_name_than_the_address(guarded: Guarded, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded.ask("--server-name", "localhost", host="127.0.0.1") == 0
    assert guarded.ask("--server-name", "elsewhere") == 1
    assert "elsewhere" in capsys.readouterr().err


def place(*words: str) -> Place:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Place.of(parser.parse_args(words), {})


def test_a_token_does_not_leave_the_machine_in_the_open_unless_told_to(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    with pytest.raises(ValueError, match=r"a token would go to metrics\.example:9400 without TLS"):
        place("metrics.example:9400", "--token-file", str(file))
    sent = place("metrics.example:9400", "--token-file", str(file), "--plain-token")
    assert sent.headers == {"Authorization": "Bearer secret"}
    assert "secret" not in repr(sent)
    for local in ("127.0.0.1:9400", "localhost", "[::1]:9400"):
        assert place(local, "--token-file", str(file)).url == f"http://{local}/metrics"
    assert place("https://metrics.example", "--token-file", str(file)).tls is not None
    file.write_text("two words")
    with pytest.raises(ValueError, match="must be visible ASCII") as wrong:
        place("127.0.0.1:9400", "--token-file", str(file))
    assert "two words" not in str(wrong.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("x:1", "--plain", "--ca", "system"), "--plain and --ca"),
        (("https://x:1", "--plain"), "exclude each other"),
        (("http://x:1", "--ca", "system"), "is without TLS"),
        (("x:1", "--server-name", "y"), "needs TLS: give --ca"),
        (("x:1", "--ca", "nothing.pem"), r"nothing\.pem cannot be read: No such file"),
        (("x:1", "--token-file", "nothing"), "nothing cannot be read: No such file"),
    ],
)
def test_options_that_cannot_be_are_told_by_name(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(*words)


def test_a_place_is_plain_unless_files_or_the_address_say_otherwise() -> None:
    assert place().url == "http://127.0.0.1:9400/metrics"
    assert place("--ca", "system").url == "https://127.0.0.1:9400/metrics"
    assert place("https://x:1/m?a=b").target == "/m?a=b"

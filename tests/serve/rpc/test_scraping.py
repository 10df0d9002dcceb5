"""The metrics port with the server's certificates and tokens."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from wsgiref.types import WSGIApplication

import pytest
from cryptography import x509

from host.endpoint import MAX_CONNECTIONS
from serve.config import RpcConfig
from serve.metrics import Metrics
from serve.rpc.certificates import Certificates, _Port
from serve.rpc.identity import Identities
from serve.rpc.scraping import guarded
from serve.rpc.token_command import main as token_command
from tests.serve.rpc.test_certificates import make_pair


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1", num_ranks=1, model_name="m")


@contextlib.contextmanager
def served(metrics: Metrics, rpc: RpcConfig, identities: Identities | None = None) -> Iterator[int]:
    """The port of an endpoint on loopback."""
    certificates = None
    if rpc.tls_cert:
        certificates = Certificates(rpc, served=metrics.guard.certificate_served, refused=metrics.guard.certificate_refused)

    def guard(app: WSGIApplication) -> WSGIApplication:
        return app if identities is None else guarded(app, identities)

    endpoint = metrics.listen("127.0.0.1", 0, wrap=certificates.wrap if certificates else None, guard=guard)
    with contextlib.closing(endpoint):
        yield int(endpoint.address.rpartition(":")[2])


def read(port: int, roots: Path | None = None, client: tuple[Path, Path] | None = None, token: str = "") -> str:
    context = None
    if roots is not None:
        context = ssl.create_default_context(cafile=str(roots))
        if client is not None:
            context.load_cert_chain(*client)
    scheme = "http" if context is None else "https"
    request = urllib.request.Request(f"{scheme}://localhost:{port}/metrics")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=20, context=context) as response:
        text: str = response.read().decode()
        return text


def value(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"tessera_{name}")


def test_the_port_speaks_tls_with_the_files_of_now_and_tells_when_they_end(metrics: Metrics, tmp_path: Path) -> None:
    certificate, key = make_pair(tmp_path, "server", days=3)
    second, second_key = make_pair(tmp_path, "second", days=30)
    old = tmp_path / "old.pem"
    old.write_bytes(certificate.read_bytes())
    assert value(metrics, "certificate_expiry_timestamp_seconds") == 0
    with served(metrics, RpcConfig(tls_cert=str(certificate), tls_key=str(key))) as port:
        assert "tessera_engine_up" in read(port, old)
        assert value(metrics, "certificate_expiry_timestamp_seconds") == ends(certificate)
        certificate.write_bytes(second.read_bytes())  # with the key of the one before
        for _ in range(2):
            assert "tessera_engine_up" in read(port, old)
        assert value(metrics, "certificate_reloads_refused_total") == 1
        key.write_bytes(second_key.read_bytes())
        assert "tessera_engine_up" in read(port, second)
        assert value(metrics, "certificate_expiry_timestamp_seconds") == ends(second)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            read(port, old)


def test_each_port_hears_of_new_files_whichever_asks_first(tmp_path: Path) -> None:
    certificate, key = make_pair(tmp_path, "server")
    second, second_key = make_pair(tmp_path, "second")
    told: list[float] = []
    both = Certificates(RpcConfig(tls_cert=str(certificate), tls_key=str(key)), served=told.append)
    ports = [_Port(both._now, both._now()) for _ in range(2)]
    assert not any(port.changed() for port in ports)
    certificate.write_bytes(second.read_bytes())
    key.write_bytes(second_key.read_bytes())
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(both.wrap(ours)):
        assert len(told) == 2
    assert all(port.changed() for port in ports)
    assert not any(port.changed() for port in ports)


def ends(certificate: Path) -> float:
    moment: datetime.datetime = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    return moment.timestamp()


def test_only_clients_with_a_certificate_of_the_client_ca_are_answered(metrics: Metrics, tmp_path: Path) -> None:
    certificate, key = make_pair(tmp_path, "server")
    friend, stranger = make_pair(tmp_path, "friend"), make_pair(tmp_path, "stranger")
    with served(metrics, RpcConfig(tls_cert=str(certificate), tls_key=str(key), tls_client_ca=str(friend[0]))) as port:
        assert "tessera_engine_up" in read(port, certificate, friend)
        for client in (None, stranger):
            with pytest.raises(OSError):
                read(port, certificate, client)


def test_connections_that_never_shake_hands_keep_nobody_out(metrics: Metrics, tmp_path: Path) -> None:
    certificate, key = make_pair(tmp_path, "server")
    with served(metrics, RpcConfig(tls_cert=str(certificate), tls_key=str(key))) as port, contextlib.ExitStack() as silent:
        for number in range(2 * MAX_CONNECTIONS):
            connection = silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            if number % 2:
                connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert "tessera_engine_up" in read(port, certificate)


def test_with_tokens_one_of_the_scope_metrics_is_asked_for(
    metrics: Metrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, tokens = tmp_path / "tokens.json", {}
    for name, scope in (("prometheus", "metrics"), ("team", "generate")):
        assert token_command([name, "--file", str(file), "--scopes", scope]) == 0
        tokens[name] = capsys.readouterr().out.split()[-1]
    with served(metrics, RpcConfig(), Identities(str(file))) as port:
        ask = partial(read, port)
        assert "tessera_engine_up" in ask(token=tokens["prometheus"])
        for token, status, words in (
            ("", 401, "no valid token"),
            ("x" * 40, 401, "no valid token"),
            (tokens["team"], 403, "team"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(token=token)
            with refused.value as answer:
                assert answer.code == status
                assert words in answer.read().decode()

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from serve import errors
from serve.rpc import status


def family(root: type[errors.RequestError]) -> Iterator[type[errors.RequestError]]:
    yield root
    for child in root.__subclasses__():
        yield from family(child)


def test_every_request_error_has_a_status() -> None:
    kinds = set(family(errors.RequestError)) - {errors.RequestError}
    assert kinds == set(status.STATUS_OF)


@pytest.mark.parametrize("kind", status.STATUS_OF)
def test_the_tree_drawn_in_the_errors_module_tells_the_same_codes(kind: type[errors.RequestError]) -> None:
    assert errors.__doc__ is not None
    drawn = next(line for line in errors.__doc__.splitlines() if kind.__name__ in line.split())
    word = drawn.split()[-1]
    if word in StatusCode.__members__:
        assert status.STATUS_OF[kind] is StatusCode[word]
    else:  # a child drawn without a code has its parent's
        assert status.STATUS_OF[kind] is status.STATUS_OF[errors.Unavailable]


def rich(error: errors.RequestError) -> status_pb2.Status:
    trailers = dict(status.rpc_status(error).trailers)
    return status_pb2.Status.FromString(trailers[status.DETAILS_KEY])


def test_violations_travel_as_bad_request() -> None:
    error = errors.InvalidRequest([errors.Violation("a.b", "is 1"), errors.Violation("c", "is 2")])
    bad = error_details_pb2.BadRequest()
    details = rich(error)
    assert details.code == 3
    assert details.details[1].Unpack(bad)
    assert [(v.field, v.description) for v in bad.field_violations] == [("a.b", "is 1"), ("c", "is 2")]


def test_every_error_says_its_reason_in_one_word() -> None:
    info = error_details_pb2.ErrorInfo()
    assert rich(errors.EngineDown("x")).details[0].Unpack(info)
    assert (info.reason, info.domain) == ("ENGINE_DOWN", "tessera")


def test_a_full_queue_says_when_to_come_back() -> None:
    error = errors.QueueFull("full", reason="tokens", retry_after_seconds=1.5)
    retry = error_details_pb2.RetryInfo()
    assert rich(error).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert (status.PUSHBACK_KEY, "1500") in status.rpc_status(error).trailers


def test_trailers_stay_small_however_much_is_wrong() -> None:
    error = errors.InvalidRequest([errors.Violation("f" * 500, "r" * 5000)] * 1000)
    ended = status.rpc_status(error)
    sizes = [len(key) + len(value) * (4 / 3 if key.endswith("-bin") else 1) for key, value in ended.trailers]
    assert len(ended.message) + sum(sizes) < 7000

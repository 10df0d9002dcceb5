"""Requests of one batch can be told apart, or are refused before anything is sent."""

from __future__ import annotations

import pytest

from serve.client.errors import TesseraError
from serve.client.request import Request, named_messages


def test_two_requests_of_one_name_are_refused() -> None:
    with pytest.raises(TesseraError, match="two requests of one batch have the request_id 'd'"):
        named_messages([Request("a", {"request_id": "d"}), Request("b", {"request_id": "d"})])


def test_unnamed_requests_get_names_of_their_own() -> None:
    names = {message.request_id for message in named_messages(["a", "b", Request("c", {"request_id": "mine"})])}
    assert len(names) == 3
    assert "mine" in names

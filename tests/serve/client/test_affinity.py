"""Which calls belong together, as the servers' side sees it."""

from __future__ import annotations

from typing import Any

import pytest

from serve.client import AsyncClient, TesseraError
from serve.client.affinity import affinity_of
from serve.client.request import generate_message
from tests.serve.rpc.running import serving

LONG = "You answer in one sentence. " * 20


def value(prompt: Any, session: str = "", **options: Any) -> str:
    ((name, said),) = affinity_of(generate_message(prompt, options), session, by_prompt=True)
    assert name == "x-tessera-affinity"
    return said


def test_prompts_that_begin_alike_belong_together() -> None:
    assert value(LONG + "Why?") == value(LONG + "How?") != value("And so. " + LONG)
    system = {"role": "system", "content": LONG}
    assert value([system, {"role": "user", "content": "a"}]) == value([system, {"role": "user", "content": "b"}])
    assert value([*range(64), 1]) == value([*range(64), 2]) != value([*range(63), 1])
    assert value(LONG) != value(LONG, cache_salt="theirs"), "they share no cache"


def test_a_session_goes_before_the_prompt_and_must_fit_into_a_header() -> None:
    assert value("a", session="user-7") == "user-7"
    assert affinity_of(generate_message("a", {}), "", by_prompt=False) == ()
    with pytest.raises(TesseraError, match="session is 'a b'"):
        value("a", session="a b")


async def test_calls_carry_it_beside_other_metadata() -> None:
    async with serving() as server, AsyncClient(server.address, affinity=True, metadata={"x-more": "1"}) as client:
        seen: list[dict[str, Any]] = []
        real = client._inference.Generate
        client._inference.Generate = lambda *given, **with_: (seen.append(dict(with_["metadata"])), real(*given, **with_))[1]
        await client.generate("a", max_new_tokens=2)
        await client.generate("a", max_new_tokens=2, session="s")
    assert [told["x-more"] for told in seen] == ["1", "1"]
    assert len(seen[0]["x-tessera-affinity"]) == 16
    assert seen[1]["x-tessera-affinity"] == "s"

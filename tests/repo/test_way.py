"""README's list of the files that a call goes through is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serve.v1 import inference_pb2
from tests.support import followed
from tests.support.models import save
from tests.support.server import serving, until

ROOT = Path(__file__).resolve().parents[2]


def way() -> set[str]:
    """The files that README names as the way of a prompt; a bare name is beside the file that was named before it."""
    [section] = re.findall(r"^## Read the code\n(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    named, folder = set[str](), Path()
    for name in re.findall(r"`([\w/]+\.py)`", section):
        if "/" in name:
            folder = Path(name).parent
        named.add(name if "/" in name else str(folder / name))
    return named


def test_every_file_of_the_way_is_there() -> None:
    assert [name for name in sorted(way()) if not (ROOT / name).is_file()] == []


def test_a_call_goes_through_no_file_that_the_list_does_not_name(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    request = inference_pb2.GenerateRequest(text="hello world")
    request.stopping.max_new_tokens = 12
    request.stopping.ignore_eos = True
    with serving(save("gpt_neox", tmp_path / "model"), under=followed.prepare(notes, ROOT)) as server:
        for on in (False, True):  # what is done once, at the first call, is not on the way
            followed.switch(notes, on=on)
            assert sum(event.WhichOneof("event") == "delta" for event in server.inference.GenerateStream(request)) > 1
        until(lambda: "serve/rpc/orca.py" in followed.noted(notes))  # the end of a call is told after the caller has it
        followed.switch(notes, on=False)
        assert server.stop() == 0
    found = {name for name in followed.noted(notes) if name.startswith(("serve/", "checkpoint/"))}
    if not any(name.startswith("serve/worker/sampling") for name in found):
        pytest.fail(f"the ranks were not followed: {sorted(found)}")
    assert sorted(found - way()) == []

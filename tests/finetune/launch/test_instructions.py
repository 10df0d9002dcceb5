"""What ranks are told arrives as it was sent, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from finetune.config.load import load_config
from finetune.data.prepared import Prepared
from finetune.errors import RunError
from finetune.launch.instructions import Instructions, Refused, RunFile, decoded, encoded
from finetune.machine.nvme import Disk
from tests.finetune.support import small_run, write_config

NUMBERS: dict[str, Any] = {
    "num_train_shards": 1, "num_ids": 300, "end_of_text_id": 0, "seq_len": 32, "train_tokens": 64, "train_rows": 2,
    "eval_tokens": 32, "eval_rows": 1, "documents": 3, "tokens": 90, "targets": 80, "dropped": 0, "text_bytes": 400,
}  # fmt: skip
PREPARED = Prepared(
    folder="/r/layout", tokenizer="/r/tok", shards=("/r/a", "/r/b"), dtype="uint16", fingerprint="f", stop_ids=(7,),
    packing="join", known_as=("older",), **NUMBERS,
)  # fmt: skip
DISK = Disk(block_bytes=1 << 20, queue_depth=8, threads=1, read_gib_s=2.5, write_gib_s=0.1)
TOLD = Instructions(model_path="/m/step-1", prepared=PREPARED, ops={"cpu_adam": "/x.so"}, disk=DISK, swap="/disk/tessera-run-1")


@pytest.mark.parametrize("told", [TOLD, Refused(message="no “room”", exit_code=2)], ids=["to train", "to end"])
def test_what_is_told_arrives_as_it_was_sent_on_one_line(told: Instructions | Refused) -> None:
    assert b"\n" not in encoded(told)
    assert decoded(encoded(told)) == told


def test_a_whole_configuration_arrives_as_it_was_read(tmp_path: Path) -> None:
    sections = {"lora": {"rank": 4}, "data": {"train": [str(tmp_path), {"path": "x.jsonl", "weight": 2}]}}
    tree = small_run(tmp_path, tmp_path / "run", **sections)
    tree["model"] = {"path": "somewhere"}
    run = RunFile(config=load_config(write_config(tree, tmp_path / "run.yaml")), command="tune", anyway=True)
    run.write(tmp_path / "run.json")
    assert RunFile.read(tmp_path / "run.json") == run


@pytest.mark.parametrize("line", [b'{"train": {"ops": 1}}', b'{"refused": {"message": 3, "exit_code": 1}}', b"[]"])
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoded(line)


def test_keys_that_another_release_has_or_lacks_are_refused(tmp_path: Path) -> None:
    told = msgspec.json.decode(encoded(TOLD))
    run = RunFile(config=load_config(write_config(small_run(tmp_path, tmp_path / "run"), tmp_path / "run.yaml")))
    run.write(tmp_path / "run.json")
    written = msgspec.json.decode((tmp_path / "run.json").read_bytes())
    fewer = {key: value for key, value in written["config"].items() if key != "eval"}
    for train in ({**told["train"], "seed": 1}, {**told["train"], "prepared": {**told["train"]["prepared"], "seed": 1}}):
        with pytest.raises(RunError, match="another release of Tessera; all nodes need the same"):
            decoded(msgspec.json.encode({"train": train}))
    for other in ({**written, "seed": 1}, {**written, "config": fewer}):
        (tmp_path / "run.json").write_bytes(msgspec.json.encode(other))
        with pytest.raises(RunError, match="another release"):
            RunFile.read(tmp_path / "run.json")

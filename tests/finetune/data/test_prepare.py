"""``prepare`` and ``data``: the same shards whoever makes them, in one go or several; every fault listed; a row to look at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.cli import main
from finetune.config.load import load_config
from finetune.data import prepare as preparing
from finetune.data import workers
from finetune.data.prepare import Prepared, prepare
from finetune.data.readers.megatron import open_index
from finetune.data.rows import open_rows
from finetune.data.tokenizer import open_tokenizer
from finetune.errors import DataError, RunError
from tests.finetune.support import small_run, write_config

TEMPLATE = """\
{%- for message in messages -%}{{ message.role | upper + ': ' + message.content + eos_token + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}"""


def conversation(number: int) -> dict[str, Any]:
    turns = [("user", f"How much is {number} and {number}?"), ("assistant", f"It is {2 * number}.")]
    turns += [("user", "Sure?"), ("assistant", "Yes, very." * (number % 4 + 1))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(conversation(number)) + "\n" for number in range(120)), encoding="utf-8")
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    return file


def config_file(tmp_path: Path, chats: Path, output: str = "run", **data: Any) -> Path:
    settings = {"train": str(chats), "pattern": "*", "seq_len": 128, "chat_template": str(tmp_path / "mine.jinja"), **data}
    return write_config(small_run(chats, tmp_path / output, data=settings), tmp_path / f"{output}.yaml")


def content_of(made: Prepared) -> dict[str, bytes]:
    """Every file of the data but those that tell the time and the folder."""
    folders = [made.folder, *made.shards]
    files = [file for number, folder in enumerate(folders) for file in sorted(Path(folder).iterdir())]
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


def test_the_shards_do_not_depend_on_who_makes_them(tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "UNIT_BYTES", 3000)
    alone = prepare(load_config(config_file(tmp_path, chats, "alone")), lambda _: None)
    shared = prepare(load_config(config_file(tmp_path, chats, "shared")), lambda _: None, workers=2)
    assert len(alone.shards) >= 8
    assert content_of(alone) == content_of(shared)
    monkeypatch.setattr(preparing, "UNIT_BYTES", 1 << 20)
    whole = prepare(load_config(config_file(tmp_path, chats, "whole")), lambda _: None)
    assert len(whole.shards) == 1
    rows = [open_rows(made, "train") for made in (alone, whole)]
    for ours, theirs in zip(*(some.rows(np.arange(some.num_samples)) for some in rows), strict=True):
        assert (ours == theirs).all(), "nor do the rows depend on how the file was cut"


def test_sources_that_hold_the_same_are_tokenised_once(tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = workers.make_shard
    monkeypatch.setattr(workers, "make_shard", lambda job, check: (made.append(job.folder), make(job, check)))
    (tmp_path / "copy.jsonl").write_bytes(chats.read_bytes())
    both = prepare(load_config(config_file(tmp_path, chats, train=[str(chats), str(tmp_path / "copy.jsonl")])), lambda _: None)
    assert len(made) == len(set(made))
    assert both.documents == 2 * 120


def test_an_interrupted_preparation_goes_on_where_it_was(tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "UNIT_BYTES", 3000)
    config = load_config(config_file(tmp_path, chats))
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise RunError("stopped")

    with pytest.raises(RunError):
        prepare(config, lambda _: None, check)
    tokens = tmp_path / "run" / "data" / "tokens"
    made = sorted(tokens.glob("*/0*"))
    assert 0 < len(made) < 8
    stamps = [(shard / "ids.bin").stat().st_mtime_ns for shard in made]
    (made[0].parent / "tmp-00005-1").mkdir()  # as a killed process leaves behind
    said: list[str] = []
    whole = prepare(config, said.append)
    assert [(shard / "ids.bin").stat().st_mtime_ns for shard in made] == stamps
    assert any(f"in {len(whole.shards) - len(made)} units of work" in text for text in said)
    assert not list(tokens.rglob("tmp-*"))
    fresh = prepare(load_config(config_file(tmp_path, chats, "fresh")), lambda _: None)
    assert content_of(whole) == content_of(fresh)


def test_all_faults_are_listed_with_their_places(tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chats.open("a") as out:
        out.write('\n{"messages": [{"role": "usr", "content": "x"}]}\n{"messages"\n')
        out.write(json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
        out.write(
            json.dumps({"messages": [{"role": "user", "content": "x " * 300}, {"role": "assistant", "content": "y"}]}) + "\n"
        )
    config = config_file(tmp_path, chats)
    assert main(["data", "check", str(config)]) == 2
    shown = capsys.readouterr().out
    for line, what in (
        (122, "role is 'usr'"),
        (123, "not valid JSON"),
        (124, "no turn of assistant"),
        (125, "tokens; at most 129 fit: the 128 that a row holds"),
    ):
        assert f"{chats}, line {line}: " in shown
        assert what in shown
    assert "4 faults" in shown
    assert main(["data", "check", str(config), "--limit", "1", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (len(report["faults"]), report["num_faults"], report["sources"][0]["documents"]) == (1, 4, 121)
    assert main(["prepare", str(config), "--workers", "1"]) == 2
    assert f"{chats}, line 122: turn 1: role is 'usr'" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_check_counts_what_training_will_see(tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_file(tmp_path, chats, eval_fraction=0)
    assert main(["data", "check", str(config), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    made = prepare(load_config(config), lambda _: None)
    (source,) = report["sources"]
    assert (source["documents"], source["tokens"], source["targets"]) == (made.documents, made.tokens, made.targets)
    assert source["longest_place"].startswith(str(chats))
    assert abs(report["rows"] - made.train_rows) <= 1, "packing sees the samples in another order"
    assert 0.8 < report["fill"] <= 1


def test_a_row_is_shown_with_its_targets(tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_file(tmp_path, chats)
    assert main(["data", "show", str(config), "--row", "1"]) == 0
    shown = capsys.readouterr().out
    assert "row 1 of" in shown
    assert "targets are between ⟦ and ⟧" in shown
    assert f"── {chats}, line " in shown
    assert "USER: Sure?<|endoftext|>\nASSISTANT:⟦ Yes, very." in shown
    assert shown.count("⟦") - 1 == 2 * shown.count("── /")
    assert main(["data", "show", str(config), "--row", "99999"]) == 2
    assert "--row is 99999; it must be from 0 to" in capsys.readouterr().err


def test_prepared_data_can_be_written_for_megatron_and_read_back(tmp_path: Path, chats: Path) -> None:
    assert main(["prepare", str(config_file(tmp_path, chats)), "--megatron", str(tmp_path / "out" / "chats")]) == 0
    made = prepare(load_config(config_file(tmp_path, chats)), lambda _: None)
    index, labels = open_index(tmp_path / "out" / "chats.idx"), open_index(tmp_path / "out" / "chats_label.idx")
    assert index.num_documents == labels.num_documents == 120
    text = open_tokenizer(made.tokenizer_folder).decode(index.document(3).tolist(), skip_special_tokens=False)
    assert text.startswith("USER: How much is 3 and 3?<|endoftext|>\nASSISTANT: It is 6.<|endoftext|>")
    assert int((labels.document(3) != -100).sum()) == int(sum(labels.document(3) == index.document(3)))
    shutil.rmtree(tmp_path / "tokenizer", ignore_errors=True)
    shutil.copytree(made.tokenizer_folder, tmp_path / "tokenizer")
    tree = small_run(chats, tmp_path / "again", data={"train": str(tmp_path / "out" / "chats"), "seq_len": 128})
    tree["tokenizer"] = {"path": str(tmp_path / "tokenizer")}
    again = prepare(load_config(write_config(tree, tmp_path / "again.yaml")), lambda _: None)
    assert (again.documents, again.tokens, again.targets) == (made.documents, made.tokens, made.targets)
    assert again.packing == "isolate", "labels beside the tokens say that these are samples"


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from finetune.data.readers.megatron import write_megatron

    prepare(load_config(config_file(tmp_path, chats)), lambda _: None)
    (folder,) = (tmp_path / "run" / "data" / "tokenizers").iterdir()
    write_megatron(tmp_path / "big", [np.asarray([1, 2]), np.asarray([1, 40_000])], dtype="uint16")
    tree = small_run(chats, tmp_path / "again", data={"train": str(tmp_path / "big")})
    tree["tokenizer"] = {"path": str(folder)}
    assert main(["data", "check", str(write_config(tree, tmp_path / "again.yaml"))]) == 2
    assert "big.bin, document 2: holds id 40000; the tokenizer's ids are 0 to" in capsys.readouterr().out


def test_a_conversation_without_a_template_is_refused_before_anything_is_made(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(config_file(tmp_path, chats, chat_template=None))]) == 2
    assert "data.chat_template is not set" in capsys.readouterr().err
    assert not list((tmp_path / "run" / "data").rglob("tokenizer.json"))
    assert main(["prepare", str(config_file(tmp_path, chats, chat_template="nowhere.jinja"))]) == 2
    assert "nowhere.jinja cannot be read" in capsys.readouterr().err


def test_the_template_travels_with_the_tokenizer(tmp_path: Path, chats: Path) -> None:
    made = prepare(load_config(config_file(tmp_path, chats)), lambda _: None)
    assert (made.tokenizer_folder / "chat_template.jinja").read_text() == TEMPLATE


def bad_lines(chats: Path) -> None:
    """Three records that cannot be used, in lines 2, 5 and 123."""
    lines = chats.read_text().splitlines()
    lines[1:1] = ['{"messages": [{"role": "usr", "content": "x"}]}']
    lines[4:4] = ['{"messages"']
    chats.write_text("\n".join([*lines, json.dumps({"messages": [{"role": "user", "content": "é"}]})]) + "\n", encoding="utf-8")


def test_records_that_cannot_be_used_are_left_out_when_asked_for(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = prepare(load_config(config_file(tmp_path, chats, "clean")), lambda _: None)
    bad_lines(chats)
    monkeypatch.setattr(preparing, "UNIT_BYTES", 3000)
    assert main(["prepare", str(config_file(tmp_path, chats)), "--workers", "1"]) == 2
    assert f"{chats}, line 2: turn 1: role is 'usr'" in capsys.readouterr().err
    config = config_file(tmp_path, chats, invalid="skip")
    said: list[str] = []
    made = prepare(load_config(config), said.append)
    assert (made.documents, made.tokens, made.targets) == (clean.documents, clean.tokens, clean.targets)
    assert made.left_out == 3
    listed = Path(made.folder) / "left-out.jsonl"
    assert f"left out 3 records that cannot be used (data.invalid: skip); they are listed in {listed}" in said
    rows = [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines()]
    assert [row["place"] for row in rows] == [f"{chats}, line {number}" for number in (2, 5, 123)]
    assert [row["file"] for row in rows] == [str(chats)] * 3
    assert "role is 'usr'" in rows[0]["reason"]
    assert main(["data", "check", str(config)]) == 0
    assert "3 faults, 3 of them left out (data.invalid: skip)" in capsys.readouterr().out
    assert prepare(load_config(config), lambda _: None) == made, "found again, with its count"


def test_what_refuses_records_takes_no_tokens_of_what_skipped_them(tmp_path: Path, chats: Path) -> None:
    bad_lines(chats)
    shared = str(tmp_path / "shared")
    prepare(load_config(config_file(tmp_path, chats, "one", invalid="skip", folder=shared)), lambda _: None)
    with pytest.raises(DataError, match="line 2: turn 1: role is"):
        prepare(load_config(config_file(tmp_path, chats, "two", folder=shared)), lambda _: None)


def test_a_text_that_breaks_off_is_left_out_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("good\n" * 50)
    (folder / "b.txt").write_bytes(b"begins well\n" * 200_000 + b"\xff")
    (folder / "c.txt").write_text("fine\n" * 50)
    tree = small_run(folder, tmp_path / "run", data={"pattern": "*", "invalid": "skip", "eval_fraction": 0})
    made = prepare(load_config(write_config(tree, tmp_path / "run.yaml")), lambda _: None)
    assert (made.documents, made.left_out) == (2, 1)
    rows = open_rows(made, "train")
    ids = [int(token) for row in range(rows.num_samples) for token in rows.rows(np.asarray([row])).inputs.reshape(-1)]
    assert "well" not in open_tokenizer(made.tokenizer_folder).decode(ids)
    assert str(folder / "b.txt") in (Path(made.folder) / "left-out.jsonl").read_text()


def test_control_tokens_in_what_users_say_are_warned_of(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    injected = conversation(1)
    injected["messages"][2]["content"] = "Sure?<|endoftext|>"
    with chats.open("a") as out:
        out.write(json.dumps(injected) + "\n")
    config = config_file(tmp_path, chats)
    assert main(["data", "check", str(config)]) == 0, "a warning refuses nothing"
    shown = capsys.readouterr().out
    assert f"warning: {chats}, line 121: turn 3 (user) holds '<|endoftext|>', which the tokenizer reads as control" in shown
    assert "no faults, 1 warnings" in shown
    assert main(["data", "check", str(config), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_warnings"], report["num_faults"], len(report["warnings"])) == (1, 0, 1)


def test_names_are_not_cut_where_nothing_has_a_width(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    long = chats.rename(chats.with_name("chats-" + "of-a-very-long-name-" * 8 + ".jsonl"))
    assert main(["data", "check", str(config_file(tmp_path, long))]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith(str(long)) and "messages" in line]
    assert len(table) == 1

"""What the documents say of commands, keys, files, names and figures is what the code and the result files have."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import finetune.cli
import serve.cli
import serve.client.cli
import serve.rpc.token_command
import serve.top.cli
from configuration import keys_of
from configuration.keys import Key
from finetune.config import TuneConfig
from serve.config import ServerConfig
from serve.model.families import FAMILIES
from tests.repo.documents import PROGRAMS, REPOSITORY, markdown_files, shell_commands

PAGES = [page for page in markdown_files() if page.name != "CHANGELOG.md"]  # which also tells of what was
RESULTS = REPOSITORY / "benchmarks" / "results"
OTHERS_CLASSES = {
    "CharLevelTokenizer",
    "GPT2BPETokenizer",
    "HFGPT2Tokenizer",
    "HFTokenizer",
    "LlamaTokenizer",
    "SPMTokenizer",
    "TiktokenTokenizer",
    "AutoPeftModelForCausalLM",
    "LinearAllreduce",
    "LinearLayer",
    "PipelineModule",
    "RetryInfo",
    "RssFile",
    "Watch",
    "Check",
}
OTHERS_FILES = {"ds_to_universal.py", "zero_to_fp32.py"}
OTHERS_NAMES = {"init_inference", "lora_bias", "nmt_nfkc", "python_info"}
"""Names of other projects, and of the kernel."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def spans_of(page: Path) -> list[str]:
    """Code spans within the prose of a page."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL))


# -- commands


def call_in(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Which program of ours a command starts, itself or through a launcher, and its arguments, also those in brackets."""
    words = [word.removeprefix("[").removesuffix("]") for word in words]
    for place, word in enumerate(words):
        if Path(word).name in PROGRAMS:
            return PROGRAMS[Path(word).name], list(words[place + 1 :])
        if word == "-m" and words[place + 1] in PROGRAMS.values():
            return words[place + 1], list(words[place + 2 :])
    return None


def calls_of(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Every call of our programs that a page shows, in a block or, whole, in its prose."""
    shown = [shlex.split(span) for span in spans_of(page) if re.match(r"tessera-[a-z]+ [^.]*$", span) and "…" not in span]
    for words in [*shell_commands(text_of(page)), *(words for words in shown if len(words) > 2)]:
        if (call := call_in(words)) is not None:
            yield call


@each_page
def test_a_command_that_is_shown_is_taken_by_its_program(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program, words in calls_of(page):
        clis = {"serve": serve.cli, "serve.client": serve.client.cli, "serve.top": serve.top.cli, "finetune": finetune.cli}
        parser = clis[program]._parser()
        if (program, words[:1]) == ("serve", [serve.cli.BUILD_KERNELS]):
            parser, words = serve.cli._kernels_parser(), words[1:]
        if (program, words[:1]) == ("serve", ["token"]):
            parser, words = serve.rpc.token_command._parser(), words[1:]
        refused, options = 0, argparse.Namespace()
        try:
            options = parser.parse_args(words)
        except SystemExit as end:  # 0 after --help
            refused = int(end.code or 0)
        assert not refused, f"{program} {words}: {capsys.readouterr().err}"
        overridden = {key for key, _ in getattr(options, "overrides", ())}
        assert overridden <= keys().keys() | {"model.new"}, words


def test_blocks_that_show_our_commands_are_marked_as_such() -> None:
    for page in PAGES:
        unmarked = re.findall(r"^```\n((?:torchrun|tessera-).*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
        assert unmarked == [], f"{page}: write ```sh, so that the commands are tested"


# -- keys


@cache
def keys() -> Mapping[str, Key]:
    """Every key of both commands' files."""
    return {key.name: key for config in (TuneConfig, ServerConfig) for key in keys_of(config)}


@each_page
def test_a_key_that_is_named_exists_and_takes_the_value_that_is_shown(page: Path) -> None:
    known = keys()
    sections = {name.rsplit(".", parts)[0] for name in known for parts in range(1, name.count(".") + 1)}
    for span in spans_of(page):
        found = re.match(r"(?:--)?([a-z_]+(?:\.[a-z_0-9]+)+)(?:(?:: | )(.*))?$", span)
        if (
            not found
            or found[1].split(".")[0] not in sections
            or found[1].endswith((".py", ".jsonl", ".json", ".safetensors", ".pt"))
            or found[1] == "tokenizer.model"  # a file's name
        ):
            continue
        name, value = found[1], found[2]
        assert name in known or name in sections, f"{page.name}: `{span}`"
        if value and name in known and typing.get_origin(known[name].hint) is typing.Literal:
            assert yaml.safe_load(value) in typing.get_args(known[name].hint), f"{page.name}: `{span}`"


SHOWN_DEFAULT = re.compile(r"`([a-z_]+\.[a-z_.]+)`(?: \(|: )([0-9][0-9,]*)( s| KiB| MiB)?\b")
UNITS = {"": 1, " s": 1, " KiB": 1 << 10, " MiB": 1 << 20}


def test_a_number_that_is_shown_beside_a_key_is_its_default() -> None:
    shown = [found for page in PAGES for found in SHOWN_DEFAULT.findall(text_of(page)) if found[0] in keys()]
    defaults = {name: keys()[name].default for name, _, _ in shown}
    assert {name: int(number.replace(",", "")) * UNITS[unit] for name, number, unit in shown} == defaults
    assert len(defaults) >= 10, "the pages show them"


# -- files and names


@cache
def python_files() -> tuple[str, ...]:
    rooms = (
        "benchmarks",
        "checkpoint",
        "configuration",
        "deploy",
        "docs",
        "examples",
        "finetune",
        "host",
        "protos",
        "serve",
        "tessera",
        "tests",
    )
    return tuple(file.relative_to(REPOSITORY).as_posix() for room in rooms for file in (REPOSITORY / room).rglob("*.py"))


@each_page
def test_a_python_file_that_is_named_exists(page: Path) -> None:
    named = {span for span in spans_of(page) if re.fullmatch(r"[\w./-]+\.py", span)} - OTHERS_FILES
    assert {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in python_files())} == set()


@cache
def members_of(name: str) -> set[str] | None:
    """Methods and fields of a class of ours; ``None`` if there is no such class."""
    for file in python_files():
        text = text_of(REPOSITORY / file)
        if re.search(rf"^class {name}\b", text, re.MULTILINE):
            (owner,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
            parts = (part.target if isinstance(part, ast.AnnAssign) else part for part in owner.body)
            return {getattr(part, "id", None) or getattr(part, "name", "") for part in parts}
    return None


@cache
def protocol() -> str:
    return "\n".join(file.read_text() for file in sorted((REPOSITORY / "protos").rglob("*.proto")))


@each_page
def test_a_class_that_is_named_exists_and_has_what_is_named_of_it(page: Path) -> None:
    for span in spans_of(page):
        found = re.fullmatch(r"([A-Z][A-Za-z]*[a-z][A-Za-z]*)(?:\.(\w+))?(?:\(\))?", span)
        if found is None or found[1] in OTHERS_CLASSES or re.search(rf"\b(rpc|message|service) {found[1]}\b", protocol()):
            continue
        members = members_of(found[1])
        assert members is not None, f"{page.name}: `{span}`"
        assert found[2] is None or found[2] in members, f"{page.name}: `{span}`"


@cache
def words_of_the_code() -> set[str]:
    files = [*(REPOSITORY / file for file in python_files()), *REPOSITORY.glob("serve/model/kernels/*")]
    return {word for file in files if file.is_file() for word in re.findall(r"\w+", text_of(file))}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "adr"], ids=lambda page: page.name)
def test_a_name_of_functions_fields_or_metrics_that_is_named_stands_in_the_code(page: Path) -> None:
    named = {span.removesuffix("()") for span in spans_of(page) if re.fullmatch(r"[a-z]+(?:_[a-z0-9]+)+(?:\(\))?", span)}
    ours = {name for name in named if not name.startswith("tessera_")}  # metrics: see test_deploy.py
    assert ours - words_of_the_code() - set(re.findall(r"\w+", protocol())) - OTHERS_NAMES == set()


@pytest.mark.parametrize("package", ["serve", "checkpoint", "configuration", "finetune"])
def test_the_table_of_a_packages_rooms_names_what_is_there_and_every_folder(package: str) -> None:
    """By the name of a folder, a file, or what the package itself hands out."""
    _, _, rest = text_of(REPOSITORY / "docs/architecture.md").partition(f"## The rooms of `{package}/`")
    rows = re.findall(r"^\| (`[^|]*) \|", rest.partition("\n## ")[0], re.MULTILINE)
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    folder = REPOSITORY / package
    unknown = {name for name in named if not ((folder / name).exists() or (folder / f"{name}.py").is_file())}
    assert {name for name in unknown if not hasattr(importlib.import_module(package), name)} == set()
    assert {room.name for room in folder.iterdir() if (room / "__init__.py").is_file()} - named == set()


def test_the_readme_names_every_family_that_is_served() -> None:
    said = re.sub(r"[^a-z0-9]", "", text_of(REPOSITORY / "README.md").lower())
    assert {family for family in FAMILIES if family.replace("_", "") not in said} == set()


# -- three hops


def source_of(file: str, function: str) -> str:
    """The body of ``Class.method`` or of a function."""
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    owner: Any = ast.parse(text)
    for name in function.split("."):
        owner = next(node for node in owner.body if getattr(node, "name", None) == name)
    return ast.get_source_segment(text, owner) or ""


@pytest.mark.parametrize(
    ("hops", "line"),
    [
        (
            [
                ("finetune/engines/base.py", "EngineBase._end_step"),
                ("finetune/engines/zero/optimizer.py", "ZeroOptimizer.update"),
            ],
            "self._engine.step()",
        ),
        (
            [("serve/worker/runner.py", ""), ("serve/worker/sampling/sampler.py", "launch_sampling")],
            "backend.choose(logits_RV, params, uniform, seen, unread_R)",
        ),
    ],
    ids=["an optimizer step", "a token"],
)
def test_from_the_readme_it_is_three_hops_to_the_line(hops: list[tuple[str, str]], line: str) -> None:
    """README names the files and functions; the first leads to the last, which holds the line."""
    readme = text_of(REPOSITORY / "README.md")
    for file, function in hops:
        assert f"`{file}`" in readme
        assert not function or f"`{function}`" in readme
    (first, within), (last, function) = hops
    assert re.search(
        rf"\b{function.split('.')[-1]}\(", source_of(first, within) if within else (REPOSITORY / first).read_text()
    )
    assert line in source_of(last, function)


# -- figures


def newest(pattern: str) -> dict[str, Any]:
    file = sorted(RESULTS.glob(pattern))[-1]
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def said_in(page: str, sentence: str) -> bool:
    return sentence in " ".join(text_of(REPOSITORY / page).split())


def percent(share: float, digits: int = 0) -> str:
    return f"{abs(100 * share):.{digits}f}"


MEMORY = "docs/training/memory.md"


def test_the_figures_of_serving_ranks_are_those_of_the_result_file() -> None:
    cells = newest("load-memory-cpu-*.json")["cells"].values()
    beside, read = (max(max(cell[what]) for cell in cells) for what in ("beside_mib", "read_to_stored"))
    assert said_in("docs/checkpoints.md", f"at most {beside:.0f} MiB beside the rank's weights and its KV cache")
    assert said_in("docs/checkpoints.md", f"at most {percent(read - 1, 2)} % more bytes than the slices take in the files")


def test_the_figures_of_starts_are_those_of_the_result_file() -> None:
    cells = newest("load-cpu-*.json")["cells"]
    folder, save, cut = (
        cells[name]["times as fast"] for name in ("Hugging Face folder", "ZeRO-3 to the first token", "cut for two ranks")
    )
    assert said_in("docs/operations.md", f"the first token comes {folder['answer']:.2f} times as fast as by `from_pretrained`")
    assert said_in("docs/operations.md", f"and a ZeRO-3 save's {save['total']:.2f} times as fast as by `zero_to_fp32.py`")
    assert said_in("docs/operations.md", f"are read {cut['read']:.2f} times as fast as whole ones")


def test_the_figures_of_two_ranks_are_those_of_the_result_file() -> None:
    found = newest("tensor-parallel-cpu-*.json")["share"]
    shares = [[f"{of[count]:.2f}" for count in ("1", "8", "32")] for of in found.values()]
    fp32, bf16 = (f"{one}, {eight} and {many}" for one, eight, many in shares)
    said = f"at {fp32} of the speed of one rank of two threads in fp32 with 1, 8 and 32 sequences and at {bf16} in bf16"
    assert said_in("docs/operations.md", said)


def test_the_figures_of_training_are_those_of_the_result_file() -> None:
    found = newest("training-cpu-*.json")
    ratios = [
        f"{found['steps'][engine][f'tessera / {peer}']:.2f}"
        for engine in ("ZeRO-3, all offloaded", "ZeRO-2")
        for peer in ("deepspeed", "trainer")
    ]
    offloaded = "a step takes {} of a bare DeepSpeed loop's time and {} of HF Trainer's with ZeRO-3 and everything offloaded"
    assert said_in(MEMORY, (offloaded + ", {} and {} with ZeRO-2").format(*ratios))
    assert said_in(MEMORY, f"take {percent(found['loss']['chunked memory / whole logits'])} % of the memory of whole logits")


def test_the_figures_of_quantization_are_those_of_the_result_file() -> None:
    ways = newest("quantization-cpu-*.json")["ways"]
    more = {name: way["more than bf16, percent"] for name, way in ways.items()}
    groups = [f"{more[f'int4, groups of {size}']:.2f} %" for size in (32, 64, 128)]
    rounded = f"is {-more['int8']:.3f} % lower with `int8`, and {groups[0]} higher with `int4` in groups of 32"
    assert said_in("docs/operations.md", f"{rounded}, {groups[1]} of 64, {groups[2]} of 128")
    assert abs(more["bf16, KV cache in int8"]) < 0.01, "as that page says"


def test_the_figures_of_zenflow_are_those_of_the_result_file() -> None:
    short, long = (f"{row['zenflow_to']['deepspeed']:.2f}" for row in newest("stall-cpu-*.json")["rows"])
    assert said_in(
        MEMORY, f"a step waited {long} as long as for DeepSpeed's CPU Adam where the host was otherwise idle for four times"
    )
    assert said_in(MEMORY, f"{short} where for as long")


def test_the_figures_of_the_forecast_are_those_of_the_result_files() -> None:
    memory = sorted(row["difference"] for row in newest("forecast-random-cpu-*.json")["rows"])
    within = sum(abs(difference) <= 0.1 for difference in memory)
    assert said_in(MEMORY, f"{within} of the {len(memory)} drawn runs that were measured are within it")
    assert said_in(MEMORY, f"all lie from {percent(memory[0], 1)} % too low to {percent(memory[-1], 1)} % too high")
    seconds = sorted(row["difference"] for row in newest("pace-random-cpu-*.json")["rows"])
    good = [difference for difference in seconds if abs(difference) <= 0.3]
    said = (
        f"{len(good)} of {len(seconds)} drawn runs are within it, from {percent(good[0])} % too little to {percent(good[-1])} %"
    )
    assert said_in(MEMORY, f"{said} too much")
    for difference in (difference for difference in seconds if difference not in good):
        assert said_in(MEMORY, f"forecast {percent(difference)} % too {'long' if difference > 0 else 'short'}")

"""What is advised makes a run fit, costs least first, and is written as lines of the run's file; no machine is needed."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from finetune.config import (
    ActivationConfig,
    BatchConfig,
    LoraConfig,
    ModelConfig,
    OffloadConfig,
    RunConfig,
    SaveConfig,
    TuneConfig,
    ZenFlowConfig,
    ZeroConfig,
)
from finetune.forecast import advice
from finetune.forecast.advice import Advice, advise
from finetune.forecast.estimate import Forecast, forecast, model_config_of, precision_of
from finetune.forecast.hardware import Hardware
from finetune.forecast.pace import Pace
from finetune.forecast.show import show_advice, show_plan, summary
from tests.finetune.forecast.support import GIB, config_of, forecast_of, hardware

Rule = Callable[[TuneConfig], bool]
GPU = hardware(device="cuda", gpus=2, gpu_bytes=8 * GIB)
BASE = replace(config_of(), model=ModelConfig(path="base"), batch=BatchConfig(micro=8), run=RunConfig(output="x", ranks=2))


def advised(
    monkeypatch: pytest.MonkeyPatch,
    config: TuneConfig,
    fits: Rule,
    *,
    room: Hardware = GPU,
    disk_bytes: int = 0,
    command: str = "tune",
) -> list[dict[str, Any]]:
    """The changes advised where a run fits as ``fits`` says, each as its keys and values."""
    tried: list[TuneConfig] = []

    def pretended(changed: TuneConfig, *_: Any, **__: Any) -> Any:
        tried.append(changed)
        return SimpleNamespace(shortages=lambda: [] if fits(changed) else ["host memory"])

    monkeypatch.setattr(advice, "forecast", pretended)
    given: Any = SimpleNamespace(hardware=room, disk_bytes=disk_bytes)
    nothing: Any = None
    found = advise(config, nothing, given, precision="bf16", command=command)
    assert len(tried) <= 60
    return [dict(option.change) for option in found]


def test_the_mildest_change_that_is_enough_comes_first_and_others_stand_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = advised(monkeypatch, BASE, lambda changed: changed.batch.micro <= 4 or changed.lora is not None)
    assert first == {"batch.micro": 4, "batch.accumulation": 2}
    assert second == {"batch.micro": 2, "batch.accumulation": 4}
    assert third == {"batch.micro": 1, "batch.accumulation": 8}
    adapters = advised(monkeypatch, BASE, lambda changed: changed.lora is not None)
    assert adapters == [{"lora.rank": 16}], "whatever else comes with it is more than is needed"


def test_changes_are_joined_only_where_none_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(changed: TuneConfig) -> bool:
        return changed.activations.checkpoint == "device" and changed.offload.optimizer == "cpu"

    found = advised(monkeypatch, BASE, fits)
    assert found[0] == {"activations.checkpoint": "device", "offload.optimizer": "cpu"}
    assert all(set(found[0].items()) - set(other.items()) for other in found[1:]), "what holds another one is left out"


def test_a_step_keeps_its_samples_whatever_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(BASE, batch=BatchConfig(micro=12, accumulation=3))
    kept: list[TuneConfig] = []
    advised(monkeypatch, odd, lambda changed: kept.append(changed) is not None)
    assert {changed.batch.micro for changed in kept} == {12, 6, 3}, "12 has no quarter of a quarter"
    assert {changed.step_samples for changed in kept} == {odd.step_samples}
    one = replace(BASE, batch=BatchConfig(micro=1))
    assert advised(monkeypatch, one, lambda changed: changed.batch.micro == 1)[0] == {"activations.checkpoint": "device"}
    total = replace(BASE, batch=BatchConfig(micro=8, total=32))
    assert advised(monkeypatch, total, lambda changed: changed.batch.micro < 8)[0] == {
        "batch.micro": 4,
        "batch.accumulation": 4,
    }


@pytest.mark.parametrize(
    ("config", "room", "command", "offered", "never"),
    [
        (
            BASE,
            GPU,
            "tune",
            {"offload.optimizer", "offload.parameters", "lora.rank", "batch.micro"},
            {"offload.path", "save.keep"},
        ),
        (BASE, hardware(nvme_bytes=GIB), "tune", {"offload.path", "lora.rank"}, {"save.keep"}),
        (BASE, hardware(), "tune", {"batch.micro", "lora.rank"}, {"offload.optimizer", "offload.parameters"}),
        (
            replace(BASE, zero=ZeroConfig(stage=0), pipeline=BASE.pipeline),
            replace(GPU, nvme_bytes=GIB),
            "pretrain",
            {"batch.micro", "zero.stage", "activations.checkpoint"},
            {"offload.optimizer", "offload.parameters", "offload.path", "lora.rank"},
        ),
        (
            replace(BASE, lora=LoraConfig(), activations=ActivationConfig(checkpoint="cpu")),
            GPU,
            "tune",
            {"offload.optimizer"},
            {"lora.rank", "activations.checkpoint"},
        ),
    ],
    ids=["a GPU", "a disk", "a CPU", "pretrain", "adapters already"],
)
def test_only_what_the_machine_and_the_command_have_is_tried(
    config: TuneConfig, room: Hardware, command: str, offered: set[str], never: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "pretrain":
        config = replace(config, model=ModelConfig(new={"model_type": "gpt2"}))
    tried = set()
    for kinds in (advice._kinds(config, SimpleNamespace(hardware=room, disk_bytes=0), command),):  # type: ignore[arg-type]
        tried = {key for kind in kinds for change in kind for key, _ in change}
    assert offered <= tried
    assert not never & tried
    changes = advised(monkeypatch, config, lambda _: True, room=room, command=command)
    assert len(changes) == 3, "three are shown, however many there are"


def test_where_the_disk_is_full_fewer_saves_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    full = replace(GPU, disk_bytes=GIB)
    found = advised(
        monkeypatch,
        replace(BASE, save=SaveConfig(keep=3)),
        lambda changed: changed.save.keep == 1 or not changed.save.resume_state,
        room=full,
        disk_bytes=2 * GIB,
    )
    assert found[:2] == [{"save.keep": 1}, {"save.resume_state": False}]
    enough = advised(monkeypatch, BASE, lambda changed: changed.save.keep == 1, room=full, disk_bytes=GIB)
    assert enough == [], "a disk that is exactly large enough is not full"


def test_zenflow_gives_way_to_the_plain_method_with_the_paces_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    zenflow = OffloadConfig(optimizer="cpu", method="zenflow", zenflow=ZenFlowConfig(share=0.5))
    (plain, *_) = advised(
        monkeypatch, replace(BASE, offload=zenflow), lambda changed: changed.offload.method == "plain"
    )  # a rule refuses paces without their method: they must go with it
    assert plain == {"offload.method": "plain"}


def test_a_folder_on_a_disk_is_named_as_it_was_or_to_be_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    room = replace(GPU, nvme_bytes=GIB)
    (first, second, *_) = advised(monkeypatch, BASE, lambda changed: changed.offload.optimizer == "nvme", room=room)
    assert first["offload.path"] == "NVME_FOLDER"
    assert [change["offload.parameters"] for change in (first, second)] == ["cpu", "nvme"], "the milder one first"
    named = replace(BASE, offload=OffloadConfig(parameters="nvme", path="/fast"))
    (first, *_) = advised(monkeypatch, named, lambda changed: changed.offload.optimizer == "nvme", room=room)
    assert first["offload.path"] == "/fast"


def test_nothing_is_advised_where_nothing_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advised(monkeypatch, BASE, lambda _: False) == []


# -- with a real forecast


@pytest.fixture(scope="module")
def found() -> Forecast:
    return forecast_of(config_of())


def test_what_is_advised_fits_by_the_forecast_itself(found: Forecast) -> None:
    config = replace(config_of(), batch=BatchConfig(micro=16), zero=ZeroConfig(stage=1))
    hf_config, precision = model_config_of(config), precision_of(config, "cpu")
    whole = forecast(config, hf_config, hardware(), precision=precision)
    small = forecast(replace(config, batch=BatchConfig(micro=1, accumulation=16)), hf_config, hardware(), precision=precision)
    assert small.host_bytes < whole.host_bytes
    tight = hardware(ram_bytes=(small.host_bytes + whole.host_bytes) // 2)
    given = forecast(config, hf_config, tight, precision=precision)
    assert given.shortages()
    options = advise(config, hf_config, given, precision=precision)
    assert options
    for option in options:
        assert option.forecast.shortages() == []
        assert option.forecast.host_bytes <= tight.ram_bytes
        sections = yaml.safe_load(option.as_yaml())
        assert {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()} == dict(
            option.change
        )


def test_lines_of_a_file_gather_the_keys_of_a_section(found: Forecast) -> None:
    change = (("batch.micro", 4), ("zero.stage", 3), ("batch.accumulation", 2), ("save.resume_state", False))
    lines = Advice(change, found).as_yaml().splitlines()
    assert lines == ["batch: {micro: 4, accumulation: 2}", "zero: {stage: 3}", "save: {resume_state: false}"]


@pytest.mark.parametrize("path", ["/a disk", "/[b], {c}", "/d: e # f", "/é'\"", "/" + "long/" * 60, "7", "true"])
def test_any_folder_s_name_is_a_line_that_is_read_back(found: Forecast, path: str) -> None:
    (line,) = Advice((("offload.path", path), ("zero.stage", 3)), found).as_yaml().splitlines()[:1]
    assert yaml.safe_load(line) == {"offload": {"path": path}}


def shown(show: Callable[[Console], None]) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_summary_says_only_what_there_is(found: Forecast) -> None:
    memory, disk = summary(found)
    assert "of 64.0 GiB host memory (2 ranks, " in memory
    assert "device memory" not in memory
    assert "on the disk for 3 saves and the data" in disk
    assert ", resume states of " in disk
    one = replace(found, layout=replace(found.layout, ranks=1), saves=1, resume_bytes=0, disk_bytes=GIB)
    memory, disk = summary(replace(one, hardware=replace(one.hardware, disk_bytes=None)))
    assert "(1 rank, " in memory
    assert disk.startswith("needs 1.00 of ? GiB on the disk for 1 save and the data")
    assert disk.endswith(", no resume states")
    assert "for two saves and the data" in summary(replace(found, saves=None))[1]
    unknown = replace(found, need=replace(found.need, device={"weights": 3 * GIB}, device_phase="update", nvme_bytes=GIB))
    memory, swap, _, pace = summary(replace(unknown, pace=Pace(step_seconds=1.25, tokens_per_second=12345.6, source="a test")))
    assert memory.endswith(", 3.00 of an unknown amount of device memory a rank (update)")
    assert swap == "needs 2.00 of ? GiB on the NVMe path"
    assert pace == "about 1.25 s a step, 12,346 tokens/s (a test)"


def test_a_plan_ends_in_what_does_not_fit_and_what_to_change(found: Forecast) -> None:
    config = config_of()
    fits = shown(lambda console: show_plan(found, config, [], console))
    assert fits.rstrip().endswith("fits")
    assert "seconds a step: not calibrated; plan --measure measures this machine" in fits
    for name, size in found.host_items.items():
        assert name in fits, (name, size)
    short = replace(found, hardware=hardware(ram_bytes=GIB // 8, described=True))
    said = shown(lambda console: show_plan(short, config, [], console))
    assert "--measure" not in said, "a machine that is described cannot be measured"
    assert "does not fit: host memory: needs " in said
    assert "no change of this run's settings makes it fit" in said
    option = Advice((("offload.path", "/[disk]"),), replace(found, need=replace(found.need, device={"weights": 2 * GIB})))
    said = shown(lambda console: show_advice([option], console))
    assert "offload: {path: '/[disk]'}" in said, "shown whole, whatever it holds"
    assert "# then 2.00 GiB device memory a rank, " in said
    assert said.rstrip().endswith("GiB host memory")

"""Muon and Adafactor learn, on ZeRO's pieces of matrices, what torch's own learn on whole ones."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from checkpoint import open_checkpoint
from finetune.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
    SaveConfig,
    TuneConfig,
)
from finetune.distributed import Peers
from finetune.errors import ConfigError
from finetune.optimizers.algorithms.adafactor import in_rows
from finetune.optimizers.algorithms.muon import orthogonal, turns_of
from finetune.optimizers.fragments import Fragment, Fragments, all_of, fragments_of
from finetune.optimizers.state import groups_of, matrices_of, state_of, whole_state_of
from tests.finetune.optimizers.optimizer_worker import CASES, OPTIMIZERS, hf_config
from tests.finetune.support import run_command, run_ranks, small_run, write_config
from tests.finetune.train.test_tune import losses_of

pytestmark = pytest.mark.slow

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimizers")


@pytest.fixture(scope="module")
def two(out: Path) -> Reports:
    """What two ranks saw, by rank."""
    run_ranks("tests.finetune.optimizers.optimizer_worker", 2, out)
    return [json.loads((out / f"2-rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def one(two: Reports, out: Path) -> dict[str, Any]:
    """What one rank saw, which went on from the two ranks' save."""
    run_ranks("tests.finetune.optimizers.optimizer_worker", 1, out)
    report: dict[str, Any] = json.loads((out / "1-rank-0.json").read_text())
    return report


@pytest.mark.parametrize("case", [*CASES, "zero3 in sub-groups"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_learn_what_torch_learns(two: Reports, name: str, case: str) -> None:
    report = two[0][name]
    seen = report["parity"][case]
    assert seen["losses"] == pytest.approx(report["reference"], abs=1e-5)
    assert seen["difference"] < 1e-5
    assert seen["losses"][-1] < seen["losses"][0] - 0.1


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_learns_what_torch_learns(one: dict[str, Any], name: str, case: str) -> None:
    report = one[name]
    assert report["parity"][case]["losses"] == pytest.approx(report["reference"], abs=1e-5)
    assert report["parity"][case]["difference"] < 1e-5


@pytest.mark.parametrize("case", ["zero2", "zero3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_transposed_and_tied_weights_are_learned_as_torch_does(two: Reports, name: str, case: str) -> None:
    report = two[0][name]
    assert report["gpt2"][case]["losses"] == pytest.approx(report["reference of gpt2"], abs=1e-5)


@pytest.mark.parametrize("case", ["zero1-fp32", "zero2-offload-bf16", "zero3-bf16", "zero3-offload-fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_finite_reaches_neither_weights_nor_state(two: Reports, name: str, case: str) -> None:
    for report in two:
        seen = report[name]["not_finite"][case]
        assert seen["skipped"] == [None, "gradient", "loss", None]
        assert seen["untouched"]
        assert seen["moved_on"]
        assert seen["finite"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(two: Reports, name: str) -> None:
    seen = two[0][name]["resumed"]
    assert seen["losses"]["zero3-offload"] == seen["losses"]["uninterrupted"]
    assert seen["bitwise"]


@pytest.mark.parametrize("case", ["zero3", "zero2-offload", "zero1"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_can_be_resumed_in_another_stage(two: Reports, name: str, case: str) -> None:
    seen = two[0][name]["resumed"]["losses"]
    assert seen[case] == pytest.approx(seen["uninterrupted"], abs=1e-5)


@pytest.mark.parametrize("case", ["zero3", "zero1"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_of_two_ranks_can_be_resumed_on_one(two: Reports, one: dict[str, Any], name: str, case: str) -> None:
    assert one[name]["resumed"][case] == pytest.approx(two[0][name]["resumed"]["losses"]["uninterrupted"], abs=1e-5)


def test_the_state_has_whole_tensors_under_the_names_of_the_parameters(two: Reports) -> None:
    shapes = {name: two[0][name]["resumed"]["state"] for name in OPTIMIZERS}
    query, norm = "gpt_neox.layers.0.attention.query_key_value.weight", "gpt_neox.final_layer_norm.weight"
    table = "gpt_neox.embed_in.weight"

    def kept(name: str, parameter: str) -> dict[str, list[int]]:
        ends = {key: shape for key, shape in shapes[name].items() if key.endswith(f".{parameter}")}
        names = {key.removesuffix(f".{parameter}"): shape for key, shape in ends.items()}
        return {key: shape for key, shape in names.items() if key not in ("exact", "computing")}

    assert kept("muon", query) == {"momentum": [108, 36]}
    assert kept("muon", table) == {"exp_avg": [61, 36], "exp_avg_sq": [61, 36]}
    assert kept("muon", norm) == {"exp_avg": [36], "exp_avg_sq": [36]}
    assert kept("adafactor", query) == {"exp_avg_sq_row": [108], "exp_avg_sq_col": [36]}
    assert kept("adafactor", table) == {"exp_avg_sq_row": [61], "exp_avg_sq_col": [36]}
    assert kept("adafactor", norm) == {"exp_avg_sq": [36]}


@pytest.mark.parametrize(("name", "keys"), [("muon", ["momentum"]), ("adafactor", ["exp_avg_sq_col", "exp_avg_sq_row"])])
def test_adapters_are_matrices(two: Reports, name: str, keys: list[str]) -> None:
    seen = two[0][name]["adapters"]
    assert seen["zero1"]["keys"] == seen["zero3"]["keys"] == keys
    assert seen["zero1"]["losses"] == pytest.approx(seen["zero3"]["losses"], abs=1e-5)
    assert seen["zero1"]["losses"][-1] < seen["zero1"]["losses"][0]


# -- without ranks


def gpt2() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(hf_config("gpt2"))
    return model


def test_every_parameter_is_in_one_group_with_its_like() -> None:
    model = gpt2()
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in ("adamw", "lion", "muon", "adafactor"):
        groups = [[names[parameter] for parameter in group["params"]] for group in groups_of(model, optimizer, 0.1)]
        assert sorted(name for group in groups for name in group) == sorted(names.values())
        keys = state_of(model, optimizer)
        assert all(len({keys[name] for name in group}) == 1 for group in groups)
    assert matrices_of(model, "adamw") == matrices_of(model, "lion") == frozenset()
    blocks = {f"transformer.h.0.{end}.weight" for end in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert matrices_of(model, "muon") == blocks
    assert matrices_of(model, "adafactor") == blocks | {"transformer.wte.weight", "transformer.wpe.weight"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_groups_can_be_of_some_parameters(optimizer: str) -> None:
    model = gpt2()
    wanted = {name: parameter for name, parameter in model.named_parameters() if ".mlp." in name}
    found = [parameter for group in groups_of(model, optimizer, 0.1, only=wanted) for parameter in group["params"]]
    assert sorted(map(id, found)) == sorted(map(id, wanted.values()))
    assert groups_of(model, optimizer, 0.1, only=()) == []


def test_only_adafactor_keeps_factors() -> None:
    model = gpt2()
    assert whole_state_of(model, "muon") == whole_state_of(model, "adamw") == {}
    found = whole_state_of(model, "adafactor")
    assert len(found) == 2 * len(matrices_of(model, "adafactor"))
    name = "transformer.h.0.attn.c_attn.weight"
    assert found[f"exp_avg_sq_row.{name}"] == (name, 36)
    assert found[f"exp_avg_sq_col.{name}"] == (name, 108)


def test_a_whole_parameter_is_one_fragment_of_itself() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    (fragment,) = all_of(parameter, "w")
    assert fragment.shape == (2, 3)
    fragment.of(parameter.detach()).zero_()
    assert not parameter.any()


def test_a_rank_without_peers_asks_nobody() -> None:
    alone, tensor = Peers.alone(), torch.arange(3.0)
    alone.add_up(tensor)
    (collected,) = alone.collect(tensor)
    received = torch.empty(3)
    alone.exchange(received, tensor, [3], [3])
    assert tensor.tolist() == collected.tolist() == received.tolist() == [0, 1, 2]


def cut(shape: tuple[int, ...], *ends: int) -> list[Fragment]:
    """A parameter's fragments on as many ranks as ``ends`` says, each from the end of the one before."""
    starts = (0, *ends[:-1])
    return [
        Fragment(name="w", shape=shape, start=start, count=end - start, offset=0)
        for start, end in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("ends", [(35,), (1, 35), (7, 14, 35), (3, 3, 11, 30, 35), (20, 35, 35), (34, 35)])
def test_sums_over_rows_and_columns_do_not_depend_on_the_cut(ends: tuple[int, ...]) -> None:
    matrix = torch.arange(35.0).view(5, 7)
    row, column = torch.zeros(5), torch.zeros(7)
    for fragment in cut((5, 7), *ends):
        values = matrix.flatten()[fragment.start : fragment.start + fragment.count]
        rows, padded, held = in_rows(fragment, values)
        row[rows] += padded.sum(1)
        column += padded.sum(0)
        assert torch.equal(held, values)
        held.fill_(-1.0)
        assert float(padded.sum()) == -fragment.count, "both are the same memory"
    assert torch.equal(row, matrix.sum(1))
    assert torch.equal(column, matrix.sum(0))


class Partitioned:
    """What ZeRO-3 tells of a parameter it has cut."""

    def __init__(self, shape: tuple[int, ...], ranks: int) -> None:
        self.ds_shape, self.ds_numel = shape, math.prod(shape)
        self._part = -(-self.ds_numel // ranks)

    def partition_numel(self) -> int:
        return self._part


def zero_three(rank: int, ranks: int, shapes: list[tuple[int, ...]]) -> Fragments:
    """The fragments of one rank, whose flat tensor holds all parameters."""
    names = {Partitioned(shape, ranks): str(number) for number, shape in enumerate(shapes)}
    (found,) = fragments_of(SimpleNamespace(fp16_groups=[list(names)]), names, stage=3, rank=rank)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_fragments_of_all_ranks_are_the_whole_parameter(ranks: int) -> None:
    shapes = [(5, 7), (3,), (2, 2), (11,)]
    of_ranks = [zero_three(rank, ranks, shapes) for rank in range(ranks)]
    for number, shape in enumerate(shapes):
        held = [fragments[number] for fragments in of_ranks]
        covered = [element for one in held for element in range(one.start, one.start + one.count)]
        assert covered == list(range(math.prod(shape)))
        assert len({one.offset for one in held}) == 1
        assert {one.shape for one in held} == {shape}


@pytest.mark.parametrize("shape", [(36, 50), (50, 36), (20, 20), (1, 9)])
def test_orthogonal_keeps_directions_and_evens_out_their_lengths(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    given = torch.randn(shape)
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    inner = left.T @ orthogonal(given) @ right.T
    assert inner.diagonal().min() > 0.6
    assert inner.diagonal().max() < 1.25
    torch.testing.assert_close(inner, torch.diag(inner.diagonal()), atol=1e-4, rtol=0)


def test_a_matrix_of_zeros_moves_nowhere() -> None:
    assert torch.equal(orthogonal(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_matrices_are_dealt_out_by_their_work() -> None:
    shapes = {"a": (100, 100), "b": (60, 60), "c": (60, 50), "d": (40, 60), "e": (10, 10)}
    matrices = [Fragment(name=name, shape=shape, start=0, count=0, offset=0) for name, shape in shapes.items()]
    turns = [[None if one is None else one.name for one in turn] for turn in turns_of(matrices, 3)]
    assert turns == [["a", "b", "c"], [None, "e", "d"]]
    assert turns_of(matrices[:1], 1) == [[matrices[0]]]


def config(name: str, **sections: Any) -> TuneConfig:
    usual = {
        "run": RunConfig(output="out"),
        "data": DataConfig(train=("text",)),
        "model": ModelConfig(path="somewhere"),
        "optimizer": OptimizerConfig(name=name),  # type: ignore[arg-type]
    }
    return TuneConfig(**{**usual, **sections})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_these_optimizers_cannot_do_is_refused_by_its_key(name: str) -> None:
    config(name, offload=OffloadConfig(optimizer="cpu", parameters="cpu"), lora=LoraConfig())
    config(name, offload=OffloadConfig(parameters="nvme", path="/disk"))
    with pytest.raises(ConfigError, match=rf"offload.optimizer is 'nvme'.* none or cpu with optimizer.name {name}"):
        config(name, offload=OffloadConfig(optimizer="nvme", path="/disk"))
    run, save = RunConfig(output="out", device="cuda"), SaveConfig(resume_state=False)
    for changed in ({"ratio": 0.5}, {"method": "superoffload"}):
        (key,) = changed
        with pytest.raises(ConfigError, match=rf"offload\.{key} is .* unless optimizer.name is adamw \(it is {name}\)"):
            config(name, offload=OffloadConfig(optimizer="cpu", **changed), run=run, save=save)


def test_twin_flow_is_for_adamw() -> None:
    with pytest.raises(ConfigError, match=r"offload.ratio is 0.5; it must be 1 unless optimizer.name is adamw \(it is lion\)"):
        config("lion", offload=OffloadConfig(optimizer="cpu", ratio=0.5))


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_momentum_lies_below_one(momentum: float) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.momentum"):
        OptimizerConfig(name="muon", momentum=momentum)


# -- whole runs


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_with_other_ranks(text_folder: Path, tmp_path: Path, name: str) -> None:
    tree = small_run(text_folder, tmp_path / "run", optimizer={"name": name}, offload={"optimizer": "cpu"})
    refused = gone_on_with_one_rank(tree, tmp_path, "--optimizer.name", "adamw")
    assert f"optimizer (was '{name}', is 'adamw')" in refused
    with open_checkpoint(tmp_path / "run" / "resume") as state:
        assert any(tensor.startswith(("momentum.", "exp_avg_sq_row.")) for tensor in state.tensors)


def gone_on_with_one_rank(tree: dict[str, Any], folder: Path, *refused: str) -> str:
    """Train on two ranks to the end, go back to the middle and on from there with one; the losses are the same.

    Returns:
        What is said to going on with the words ``refused``.
    """
    # Dropout draws per rank; and the bias of the keys has rounding alone for a gradient, which optimizers blow up.
    tree["model"]["new"] |= {"hidden_dropout": 0.0, "attention_bias": False}
    tree["batch"] = {"micro": 2, "total": 8}
    tree["run"]["ranks"] = 2
    path, run = write_config(tree, folder / "run.yaml"), folder / "run"
    done = run_command("tune", path)
    assert done.returncode == 0, done.stderr
    assert "CPU Adam" not in done.stdout, "nothing is built that the run does not use"
    offload = tree["offload"]
    assert f"with optimizer on cpu{' and zenflow' if offload.get('method') == 'zenflow' else ''};" in done.stdout
    expected = losses_of(run)
    assert expected[12] < expected[1] - 0.1
    for root in ("checkpoints", "resume"):
        shutil.rmtree(run / root / "step-00000012")
        (run / root / "latest").write_text("step-00000006\n")
    other = run_command("tune", path, "--resume", *refused)
    assert other.returncode == 2
    done = run_command("tune", path, "--resume", "--run.ranks", "1", "--zero.stage", "2")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 6" in done.stdout
    assert losses_of(run) == pytest.approx(expected, abs=1e-5)
    return other.stderr

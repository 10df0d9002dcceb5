"""ZenFlow learns, on ZeRO's pieces and beside the rest of a step, what its explanation says of whole matrices."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint import open_checkpoint
from finetune.config import OffloadConfig, OptimizerConfig, ScheduleConfig, TuneConfig, ZenFlowConfig, ZeroConfig
from finetune.distributed import Peers
from finetune.errors import ConfigError
from finetune.optimizers.algorithms.zenflow import ZenFlow
from finetune.optimizers.fragments import Fragment, all_of, pieces_of
from tests.finetune.config.test_config import config as settings
from tests.finetune.optimizers.test_optimizers import gone_on_with_one_rank
from tests.finetune.optimizers.zenflow_worker import CASES, OPTIONS, PACES, Matrix
from tests.finetune.support import run_ranks, small_run

CPU = torch.device("cpu")


# -- one matrix on one rank


def optimizer_of(weight: nn.Parameter, paces: ZenFlowConfig, **more: Any) -> ZenFlow:
    """ZenFlow over one whole matrix, with its state created as the engine does."""
    made = ZenFlow(
        [{"params": [weight], "weight_decay": 0.1}],
        matrices=frozenset({"w"}),
        lr=1e-2,
        betas=(OPTIONS.betas[0], OPTIONS.betas[1]),
        eps=OPTIONS.eps,
        share=paces.share,
        update_every=paces.update_every,
        select_every=paces.select_every,
    )
    keys = ("exp_avg", "exp_avg_sq", "put_off", "pending")
    made.state[weight] = {"step": 0, **{key: torch.zeros_like(weight) for key in keys}}
    if weight.ndim == 2:
        made.place({weight: all_of(weight, "w")}, CPU, Peers.alone())
    return made


def drawn(shape: tuple[int, int], step: int) -> torch.Tensor:
    """Gradients of which some rows are much longer than others, other ones after a while."""
    draw = torch.Generator().manual_seed(step)
    scale = torch.ones(shape[0], 1)
    scale[(step // 7) :: 5] = 10.0
    return torch.randn(shape, generator=draw) * scale


@pytest.mark.parametrize("shape", [(20, 6), (3, 300_000), (1, 4)], ids=["usual", "wide", "one row"])
@pytest.mark.parametrize("paces", [PACES, ZenFlowConfig(share=0.01, update_every=3, select_every=3)], ids=["slow", "restless"])
def test_a_whole_matrix_moves_as_explained(shape: tuple[int, int], paces: ZenFlowConfig) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    weight, explained = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer, matrix = optimizer_of(weight, paces), Matrix(explained, 0.1, paces)
    for step in range(20):
        optimizer.release_gradients()
        weight.grad = drawn(shape, step)
        explained.grad = weight.grad.clone()
        optimizer.step()
        matrix.step(1e-2)
        torch.testing.assert_close(weight, explained, atol=1e-5, rtol=0)
    optimizer.close()
    assert float((weight.detach() - start).abs().max()) > 0.02


def test_chosen_rows_move_in_each_step_and_the_rest_where_rows_are_chosen_and_an_interval_late() -> None:
    weight = nn.Parameter(torch.zeros(10, 4))
    optimizer = optimizer_of(weight, ZenFlowConfig(share=0.2, update_every=2, select_every=8))
    moved: list[list[int]] = []
    for _ in range(8):
        optimizer.release_gradients()
        before = weight.detach().clone()
        weight.grad = torch.ones(10, 4)
        weight.grad[[2, 7]] = 3.0
        optimizer.step()
        moved.append((weight != before).any(1).nonzero().squeeze(1).tolist())
    optimizer.close()
    chosen, every = [2, 7], list(range(10))
    #                interval        1                2               3               4
    assert moved == [*[chosen, every], *[chosen, chosen], *[chosen, every], *[chosen, every]]


def test_rows_are_chosen_by_later_gradients_where_the_first_ones_are_none() -> None:
    weight = nn.Parameter(torch.zeros(12, 3))
    optimizer = optimizer_of(weight, PACES)
    chosen = []
    for step in range(3):
        optimizer.release_gradients()
        weight.grad = torch.zeros(12, 3)
        weight.grad[[3, 9]] = float(step)
        optimizer.step()
        chosen.append(optimizer.whole["chosen.w"].nonzero().squeeze(1).tolist())
    optimizer.close()
    assert chosen == [[0, 1], [0, 1], [3, 9]]


@pytest.mark.parametrize(("rows", "share", "chosen"), [(13, 0.2, 3), (12, 0.2, 2), (3, 0.01, 1)])
def test_the_share_is_rounded_to_rows(rows: int, share: float, chosen: int) -> None:
    weight = nn.Parameter(torch.zeros(rows, 2))
    optimizer = optimizer_of(weight, ZenFlowConfig(share=share))
    weight.grad = torch.rand(rows, 2)
    optimizer.step()
    optimizer.close()
    assert int(optimizer.whole["chosen.w"].sum()) == chosen


def test_a_step_does_not_wait_for_the_rest_and_settling_does() -> None:
    """With the background held up, weights and state are in the end those of a run that nothing held up."""
    paces = ZenFlowConfig(share=0.2, update_every=2, select_every=8)
    start = torch.randn((20, 6), generator=torch.Generator().manual_seed(9))
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    held, free = (optimizer_of(weight, paces) for weight in weights)
    for step in range(5):
        may_go = threading.Event()
        if step == 3:  # starts the update of the rest, which lands two steps later
            held._updating.submit(may_go.wait)
        for weight, optimizer in zip(weights, (held, free), strict=True):
            optimizer.release_gradients()
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            weight.grad = drawn((20, 6), step)
            optimizer.step()
        free.settle()
        if step == 3:
            held.param_groups[0]["lr"] = 100.0  # what is under way has its own
            threading.Timer(0.0, may_go.set).start()
            held.settle()
        assert torch.equal(*weights)
    held.settle()
    for key in ("exp_avg", "exp_avg_sq", "put_off", "pending"):
        assert torch.equal(held.state[weights[0]][key], free.state[weights[1]][key]), key
    held.close()
    free.close()


def test_the_lengths_of_rows_are_those_of_all_ranks_together() -> None:
    """A matrix cut in the middle of a row, of which either part alone would choose other rows."""
    gradient = torch.ones(4, 4)
    gradient[1, :2], gradient[1, 2:], gradient[3] = 3.0, 3.0, 4.0
    gradient[0] = 3.5
    sums = [gradient.flatten()[:6], gradient.flatten()[6:]]
    other = {0: torch.stack([part.square().sum() for part in _rows_of(sums[1], 6)])}
    flat = nn.Parameter(torch.zeros(6))
    optimizer = optimizer_of(nn.Parameter(torch.zeros(1)), ZenFlowConfig(share=0.25))
    optimizer.param_groups[0]["params"] = [flat]
    keys = ("exp_avg", "exp_avg_sq", "put_off", "pending")
    optimizer.state[flat] = {"step": 0, **{key: torch.zeros_like(flat) for key in keys}}

    class Known(Peers):
        def add_up(self, tensor: torch.Tensor) -> None:
            tensor += other[0]

    optimizer.place({flat: [Fragment(name="w", shape=(4, 4), start=0, count=6, offset=0)]}, CPU, Known(0, 2))
    flat.grad = sums[0].clone()
    optimizer.step()
    optimizer.close()
    assert optimizer.whole["chosen.w"].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert torch.equal(flat, torch.zeros(6)), "the chosen row is the other rank's"


def _rows_of(values: torch.Tensor, start: int) -> list[torch.Tensor]:
    """The elements from ``start`` on of a matrix of four columns, by row, none for the rows before."""
    rows: list[list[float]] = [[], [], [], []]
    for place, value in enumerate(values.tolist(), start):
        rows[place // 4].append(value)
    return [torch.tensor(row) for row in rows]


def test_what_pads_a_flat_tensor_stays_as_it_is() -> None:
    flat = nn.Parameter(torch.full((26,), 0.5))
    optimizer = optimizer_of(nn.Parameter(torch.zeros(1)), PACES)
    keys = ("exp_avg", "exp_avg_sq", "put_off", "pending")
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.state[flat] = {"step": 0, **{key: torch.zeros_like(flat) for key in keys}}
    optimizer.place({flat: [Fragment(name="w", shape=(8, 4), start=5, count=20, offset=0)]}, CPU, Peers.alone())
    for _ in range(6):
        optimizer.release_gradients()
        flat.grad = torch.ones(26)
        optimizer.step()
    optimizer.close()
    assert torch.equal(flat[20:], torch.full((6,), 0.5))
    assert bool((flat[:20] < 0.5).all())


def test_gradients_are_released_once_they_have_been_added() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = optimizer_of(weight, PACES)
    may_add, told = threading.Event(), []
    optimizer._adding.submit(may_add.wait)
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    waiting = threading.Thread(target=lambda: (optimizer.release_gradients(), told.append("released")), daemon=True)
    waiting.start()
    waiting.join(timeout=0.1)
    assert waiting.is_alive()
    may_add.set()
    waiting.join(120.0)
    assert told == ["released"]
    assert torch.equal(optimizer.state[weight]["put_off"], torch.ones(4, 4))
    optimizer.close()


def test_a_failure_in_the_background_is_the_steps_failure() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = optimizer_of(weight, PACES)
    optimizer.state[weight]["put_off"] = torch.zeros(3, 3)
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="must match the size"):
        optimizer.close()


@pytest.mark.parametrize("ends", [(35,), (1, 35), (7, 14, 35), (3, 3, 11, 30, 35), (20, 35, 35), (34, 35), (9, 10, 35)])
def test_pieces_are_whole_rows_and_parts_of_one(ends: tuple[int, ...]) -> None:
    matrix = torch.arange(35.0).view(5, 7)
    seen: list[float] = []
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        flat = torch.cat([torch.full((2,), -1.0), matrix.flatten()[start:end]])
        pieces = pieces_of(Fragment(name="w", shape=(5, 7), start=start, count=end - start, offset=2))
        assert len(pieces) <= 3
        for piece in pieces:
            values = piece.of(flat)
            assert piece.columns == 7 or piece.rows == 1
            assert torch.equal(piece.of_rows(torch.arange(5)), torch.arange(piece.first, piece.first + piece.rows))
            assert {float(value) // 7 for value in values[0]} == {float(piece.first)}
            seen += values.flatten().tolist()
    assert seen == list(range(35))


# -- configuration


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ZenFlowConfig(share=0.0), r"offload\.zenflow\.share is 0\.0; it must be above 0 and at most 1"),
        (lambda: ZenFlowConfig(update_every=1), r"offload\.zenflow\.update_every is 1; it must be at least 2"),
        (lambda: ZenFlowConfig(update_every=3), r"select_every is 64; it must be a multiple of .*update_every, which is 3"),
        (lambda: ZenFlowConfig(select_every=0), r"offload\.zenflow\.select_every is 0"),
        (lambda: OffloadConfig(method="zenflow"), r"offload\.method is 'zenflow'; .* unless offload\.optimizer is cpu"),
        (lambda: OffloadConfig(zenflow=PACES), r"offload\.zenflow is .* be absent unless offload\.method is zenflow"),
        (
            lambda: OffloadConfig(optimizer="cpu", method="zenflow", ratio=0.5),
            r"offload\.ratio is 0\.5; it must be 1 with zenflow",
        ),
        (
            lambda: settings(offload=OffloadConfig(optimizer="cpu", method="zenflow"), schedule=ScheduleConfig(steps=3)),
            r"update_every is 4; it must be at most schedule\.steps, which is 3",
        ),
        (
            lambda: settings(offload=OffloadConfig(optimizer="cpu", method="zenflow"), optimizer=OptimizerConfig(name="lion")),
            r"offload\.method is 'zenflow'; it must be plain unless optimizer\.name is adamw",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_is_a_word_for_every_stage_that_offloads(stage: int) -> None:
    config: TuneConfig = settings(zero=ZeroConfig(stage=stage), offload=OffloadConfig(optimizer="cpu", method="zenflow"))  # type: ignore[arg-type]
    assert config.algorithm == "zenflow"


# -- pieces on several ranks


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zenflow")


@pytest.fixture(scope="module")
def two(out: Path) -> list[dict[str, Any]]:
    """What two ranks saw, by rank."""
    run_ranks("tests.finetune.optimizers.zenflow_worker", 2, out)
    return [json.loads((out / f"2-rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def one(two: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """What one rank saw, which went on from the two ranks' save."""
    run_ranks("tests.finetune.optimizers.zenflow_worker", 1, out)
    report: dict[str, Any] = json.loads((out / "1-rank-0.json").read_text())
    return report


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "zero3 in sub-groups"])
def test_two_ranks_learn_what_one_process_learns(two: list[dict[str, Any]], case: str) -> None:
    seen = two[0]["parity"][case]
    assert seen["losses"] == pytest.approx(two[0]["reference"], abs=1e-5)
    assert seen["difference"] < 1e-4
    assert seen["losses"][-1] < seen["losses"][0] - 0.3


@pytest.mark.slow
def test_one_rank_learns_what_one_process_learns(one: dict[str, Any]) -> None:
    assert one["parity"]["losses"] == pytest.approx(one["reference"], abs=1e-5)
    assert one["parity"]["difference"] < 1e-4


@pytest.mark.slow
def test_transposed_and_tied_weights_are_learned_too(two: list[dict[str, Any]]) -> None:
    assert two[0]["gpt2"]["losses"] == pytest.approx(two[0]["reference of gpt2"], abs=1e-5)


@pytest.mark.slow
def test_with_every_row_chosen_it_is_adamw(two: list[dict[str, Any]]) -> None:
    assert two[0]["all chosen"]["losses"] == pytest.approx(two[0]["adamw"], abs=1e-5)
    assert two[0]["all chosen"]["difference"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero1-fp32", "zero2-bf16", "zero3-bf16"])
def test_what_is_not_finite_reaches_neither_weights_nor_state(two: list[dict[str, Any]], case: str) -> None:
    for report in two:
        seen = report["not_finite"][case]
        assert seen["skipped"] == [None, "gradient", "loss", None]
        assert seen["untouched"]
        assert seen["moved_on"]
        assert seen["finite"]
        assert seen["finite_beyond"]


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(two: list[dict[str, Any]]) -> None:
    seen = two[0]["resumed"]
    assert seen["losses"]["zero3"] == seen["losses"]["uninterrupted"]
    assert seen["alike"]["zero3"]


@pytest.mark.slow
def test_a_save_changes_nothing(two: list[dict[str, Any]]) -> None:
    seen = two[0]["resumed"]
    assert seen["losses"]["never saved"] == seen["losses"]["uninterrupted"]
    assert seen["alike"]["never saved"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero1", "zero2"])
def test_a_run_can_be_resumed_in_another_stage(two: list[dict[str, Any]], case: str) -> None:
    seen = two[0]["resumed"]["losses"]
    assert seen[case] == pytest.approx(seen["uninterrupted"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_a_run_of_two_ranks_can_be_resumed_on_one(two: list[dict[str, Any]], one: dict[str, Any], case: str) -> None:
    assert one["resumed"][case] == pytest.approx(two[0]["resumed"]["losses"]["uninterrupted"], abs=1e-5)


@pytest.mark.slow
def test_gradients_are_released_before_the_next_ones_are_computed(two: list[dict[str, Any]]) -> None:
    assert two[0]["order"] == ["release_gradients", "backward", "backward"] * 2


@pytest.mark.slow
def test_adapters_have_rows_too(two: list[dict[str, Any]]) -> None:
    seen = two[0]["adapters"]
    keys = ["chosen", "exp_avg", "exp_avg_sq", "pending", "put_off", "updates"]
    assert seen["zero2"]["keys"] == seen["zero3"]["keys"] == keys
    assert seen["zero2"]["losses"] == pytest.approx(seen["zero3"]["losses"], abs=1e-5)
    assert seen["zero2"]["losses"][-1] < seen["zero2"]["losses"][0]


@pytest.mark.slow
def test_the_command_trains_resumes_on_other_ranks_and_refuses_other_paces(text_folder: Path, tmp_path: Path) -> None:
    offload = {"optimizer": "cpu", "method": "zenflow", "zenflow": {"share": 0.2, "update_every": 2, "select_every": 8}}
    tree = small_run(text_folder, tmp_path / "run", offload=offload)
    refused = gone_on_with_one_rank(tree, tmp_path, "--offload.zenflow.update_every", "4")
    assert "these differ: offload.zenflow.update_every (was 2, is 4)" in refused
    with open_checkpoint(tmp_path / "run" / "resume") as state:
        kinds = {name.split(".", 1)[0] for name in state.tensors}
    assert {"exp_avg", "exp_avg_sq", "put_off", "pending", "chosen", "updates"} <= kinds

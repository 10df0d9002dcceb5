"""What is computed before a model is served: its numbers must be finite, and what is at fault is named."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from serve.config import ModelConfig
from serve.engine.plan import Sampled, Span, Start, StepPlan, StepResult
from serve.errors import ConfigError
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import canary
from serve.worker.canary import check_forward, forward_fault
from serve.worker.loader import RankModel
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.worker.test_loader import load
from tests.support.models import VOCABULARY, build

PROMPT = (3, 4, 5)


def _spoiled(folder: Path, name: str, value: float = math.nan, place: int = 7, family: str = "gpt_neox") -> Path:
    model = build(family)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[place] = value
    model.save_pretrained(folder)
    return folder


def _check(folder: Path) -> Runner:
    model, ranks = load(folder), Ranks(0, 1)
    runner = Runner(model, ranks)
    check_forward(ModelConfig(path=str(folder)), model, ranks, runner)
    return runner


@pytest.mark.parametrize(
    "name",
    [
        "gpt_neox.layers.1.attention.query_key_value.bias",
        "gpt_neox.layers.2.mlp.dense_4h_to_h.weight",
        "gpt_neox.final_layer_norm.bias",
        "embed_out.weight",
    ],
)
def test_a_tensor_that_is_not_finite_is_named_with_its_file(tmp_path: Path, name: str) -> None:
    actual = name.replace("embed_out", "lm_head")
    with pytest.raises(
        ConfigError, match=rf"model\.safetensors: tensor '.*{name.split('.', 1)[1]}'.*NaN or infinite in float32"
    ):
        _check(_spoiled(tmp_path, actual, math.inf if "bias" in name else math.nan))


@pytest.mark.parametrize("stack", ["gate_up_proj", "down_proj"])
def test_an_expert_that_no_canary_token_goes_to_is_looked_at_too(tmp_path: Path, stack: str) -> None:
    model = build("mixtral", num_local_experts=24)
    weights = model.get_parameter(f"model.layers.1.mlp.experts.{stack}")
    for expert in range(24):
        folder = tmp_path / str(expert)
        with torch.no_grad():
            before = weights[expert, 3, 5].item()
            weights[expert, 3, 5] = math.nan
        model.save_pretrained(folder)
        with torch.no_grad():
            weights[expert, 3, 5] = before
        with pytest.raises(ConfigError, match=rf"tensor '.*experts\.{expert}\.w.*NaN or infinite in float32"):
            _check(folder)


class SecondRank(Ranks):
    """One that has the whole model, and the first rank's words."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def told_by_first(self, text: str, stage: int = 0) -> str:
        assert (text, stage) == ("", 0)
        return "what rank 0 has found"


def test_one_rank_alone_reads_the_checkpoint_again_and_all_say_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[str] = []
    opened = canary.open_checkpoint
    monkeypatch.setattr(canary, "open_checkpoint", lambda path, **more: read.append(path) or opened(path, **more))
    folder = _spoiled(tmp_path, "gpt_neox.layers.2.mlp.dense_4h_to_h.weight")
    model, second = load(folder), SecondRank()
    with pytest.raises(ConfigError, match="what rank 0 has found"):
        check_forward(ModelConfig(path=str(folder)), model, second, Runner(model, second))
    assert not read
    with pytest.raises(ConfigError, match="dense_4h_to_h"):
        _check(folder)
    assert len(read) == 1
    assert "not finite, first after layers.2; looking for the tensor" in caplog.text


def test_rows_of_an_embedding_that_no_canary_token_has_are_looked_at_too(tmp_path: Path) -> None:
    place = (VOCABULARY - 3) * 64
    with pytest.raises(ConfigError, match="embed_in"):
        _check(_spoiled(tmp_path, "gpt_neox.embed_in.weight", place=place))


def test_numbers_that_outgrow_their_type_name_the_layer_where_they_do(tmp_path: Path) -> None:
    model = build("gpt_neox")
    with torch.no_grad():
        for name in ("weight", "bias"):
            model.get_parameter(f"gpt_neox.layers.1.mlp.dense_4h_to_h.{name}").mul_(1e38)
            model.get_parameter(f"gpt_neox.layers.1.mlp.dense_h_to_4h.{name}").mul_(1e3)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"not finite after layers\.1, though its weights are: in float32.*model\.dtype"):
        _check(tmp_path)


def test_a_canary_changes_nothing_that_a_request_would_see(tmp_path: Path) -> None:
    build("gpt_neox").save_pretrained(tmp_path)
    start = Start(sequence=SequenceId(0), index=0, token_ids=PROMPT, num_prompt_tokens=3, sampling=SamplingParams(), logprobs=0)
    span = Span(sequence=SequenceId(0), start=0, count=3, new_blocks=(BlockId(0),), sample=True)
    answers: list[Sampled] = []
    for runner in (Runner(load(tmp_path), Ranks(0, 1)), _check(tmp_path)):
        assert len(runner._table) == 0
        result = runner.execute(StepPlan(step=0, starts=(start,), spans=(span,)))
        assert result is not None
        answers.extend(result.sampled)
    assert answers[0] == answers[1]
    assert not any(module._forward_hooks for module in runner._model.body.modules() if isinstance(module, nn.Module))


def test_a_model_of_one_position_passes(tmp_path: Path) -> None:
    model = load(_saved(tmp_path))
    object.__setattr__(model.facts, "max_model_len", 1)
    check_forward(ModelConfig(path=str(tmp_path)), model, Ranks(0, 1), Runner(model, Ranks(0, 1)))


def _saved(folder: Path) -> Path:
    build("gpt_neox").save_pretrained(folder)
    return folder


class Watched(Runner):
    """Notes how many positions each step computes."""

    def __init__(self, model: RankModel) -> None:
        super().__init__(model, Ranks(0, 1))
        self.counts: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.counts += [span.count for span in plan.spans]
        return super().execute(plan)


def test_a_gpu_computes_a_long_prompt_too_so_that_all_its_kernels_are_compiled_before_a_request(tmp_path: Path) -> None:
    build("gpt_neox", max_position_embeddings=512).save_pretrained(tmp_path)
    model = load(tmp_path)
    for device, counts in (("cpu", [8, 1]), ("cuda", [8, 1, 300, 1])):
        told = replace(model, facts=replace(model.facts, device=device))
        runner = Watched(told)
        check_forward(ModelConfig(path=str(tmp_path)), told, Ranks(0, 1), runner)
        assert runner.counts == counts


def test_between_two_steps_other_weights_are_gone_through_once(tmp_path: Path) -> None:
    model = load(_saved(tmp_path))
    runner = Watched(model)
    assert forward_fault(model, Ranks(0, 1), runner) == ""
    assert runner.counts == [8]
    assert runner.execute(StepPlan(step=0)) == StepResult(step=0), "nothing is left of it"

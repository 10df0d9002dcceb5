"""What of an architecture's configuration is not served, and why."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from serve.errors import ConfigError
from serve.model.checks import check_max_model_len, check_rope, check_switches, extended_positions, length_rule
from serve.model.families import FAMILIES
from serve.types import LengthRule
from tests.support.models import SMALL


def config(family: str, rope: dict[str, Any] | None = None, **changes: Any) -> Any:
    made = CONFIG_MAPPING[family](**{**SMALL[family], **changes})
    if rope is not None:
        made.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, **rope}
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_as_it_comes_is_served(family: str) -> None:
    check_rope(config(family))


def test_sequences_grow_beyond_the_models_length_only_where_angles_are_extended() -> None:
    extended = {"rope_scaling": {"type": "dynamic", "factor": 2.5}}
    assert extended_positions(512, extended) == 1280
    assert extended_positions(512, {"rope_parameters": {"rope_type": "yarn", "factor": 2.5}}) is None
    assert extended_positions(None, extended) is None
    assert check_max_model_len(1280, 512, 1280) == 1280
    assert check_max_model_len(None, 512, 1280) == 512, "more is served when it is asked for"
    with pytest.raises(ConfigError, match="the model has 512 positions, extended to 1280"):
        check_max_model_len(1281, 512, 1280)


def test_angles_depend_on_a_length_where_they_are_extended_by_it() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    llama, phi3 = (config(family, {"rope_type": "longrope", **factors}) for family in ("llama", "phi3"))
    dynamic = config("llama", {"rope_type": "dynamic", "factor": 2.0})
    assert length_rule(llama) == LengthRule(plain_tokens=64, each_length=False, recomputes=False)
    assert length_rule(phi3) == LengthRule(plain_tokens=64, each_length=False, recomputes=True)
    assert length_rule(dynamic) == LengthRule(plain_tokens=512, each_length=True, recomputes=False)
    assert length_rule(config("llama")) is None


def test_extended_angles_without_the_length_before_are_refused() -> None:
    with pytest.raises(ConfigError, match="without original_max_position_embeddings"):
        length_rule(config("llama", {"rope_type": "longrope"}))


def test_a_way_to_sum_that_is_not_computed_is_refused() -> None:
    with pytest.raises(ConfigError, match="slow_but_exact"):
        check_switches(config("bloom", slow_but_exact=True, pretraining_tp=2))
    check_switches(config("bloom", slow_but_exact=True))


@pytest.mark.parametrize(
    ("family", "heads", "factor"),
    [
        ("gpt_neox", 4, 2.0),  # more features than a head has
        ("gpt_neox", 4, -0.25),
        ("phi", 4, 2.0),
        ("phi", 4, 0.2),  # 3 of 16, and features are turned in pairs
        ("llama", 4, 0.5),  # this family turns whole heads
    ],
)
def test_a_rotary_width_that_fits_no_head_is_refused(family: str, heads: int, factor: float) -> None:
    """The kernel is given addresses alone: a width beyond the head's would be read and written beyond it."""
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        check_rope(config(family, {"partial_rotary_factor": factor}, num_attention_heads=heads))


@pytest.mark.parametrize("turned", [0, 7, 66, -2])
@pytest.mark.parametrize("family", ["gptj", "codegen"])
def test_pairs_that_fit_no_head_are_refused(family: str, turned: int) -> None:
    with pytest.raises(ConfigError, match=f"rotary_dim is {turned}; it must be an even number of a head's"):
        check_rope(config(family, rotary_dim=turned))
    check_rope(config(family, rotary_dim=8))


def test_an_odd_head_that_is_turned_whole_is_refused() -> None:
    with pytest.raises(ConfigError, match="partial_rotary_factor 1 of a head of 15 features"):
        check_rope(config("gpt_neox", {"partial_rotary_factor": 1.0}, hidden_size=60))


def test_an_odd_part_of_a_head_is_turned_as_transformers_turns_it() -> None:
    check_rope(config("gpt_neox", {"partial_rotary_factor": 0.25}, hidden_size=80))  # 5 of 20, of which transformers makes 6

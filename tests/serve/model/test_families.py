"""What of an architecture's configuration is not served, and why."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from serve.errors import ConfigError
from serve.model.checks import check_rope, check_switches, served_positions
from serve.model.families import FAMILIES
from tests.support.models import SMALL


def config(family: str, rope: dict[str, Any] | None = None, **changes: Any) -> Any:
    made = CONFIG_MAPPING[family](**{**SMALL[family], **changes})
    if rope is not None:
        made.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, **rope}
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_as_it_comes_is_served(family: str) -> None:
    check_rope(config(family))


@pytest.mark.parametrize(
    ("rope", "original", "positions"),
    [
        ({"type": "dynamic", "factor": 2.0}, None, 512),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, None, 64),
        ({"type": "longrope"}, 128, 128),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, 64, 512),
    ],
)
def test_sequences_stay_where_their_angles_depend_on_themselves(
    rope: dict[str, Any], original: int | None, positions: int
) -> None:
    assert served_positions(512, rope, original) == positions


def test_extended_angles_without_the_length_before_are_refused() -> None:
    with pytest.raises(ConfigError, match="without original_max_position_embeddings"):
        served_positions(512, {"rope_type": "longrope"}, None)


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


def test_an_odd_head_that_is_turned_whole_is_refused() -> None:
    with pytest.raises(ConfigError, match="partial_rotary_factor 1 of a head of 15 features"):
        check_rope(config("gpt_neox", {"partial_rotary_factor": 1.0}, hidden_size=60))


def test_an_odd_part_of_a_head_is_turned_as_transformers_turns_it() -> None:
    check_rope(config("gpt_neox", {"partial_rotary_factor": 0.25}, hidden_size=80))  # 5 of 20, of which transformers makes 6

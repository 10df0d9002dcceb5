"""What of an architecture's configuration is not served, and why."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from serve.errors import ConfigError
from serve.model.checks import check_rope
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


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_batch_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"rope_type is '{kind}'"):
        check_rope(config("llama", {"rope_type": kind}))


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

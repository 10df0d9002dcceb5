"""Ranks and alphas by patterns, as three generations of peft understood them."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint import CheckpointError
from checkpoint.readers.lora_patterns import is_pattern, of_module

Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
KNOWN: dict[str, dict[str, Any]] = {
    "0.13": {"layers_to_transform": None},
    "0.14": {"layers_to_transform": None, "exclude_modules": None},
    "0.15": {"layers_to_transform": None, "exclude_modules": None, "trainable_token_indices": None},
    "by hand": {},
}


@pytest.mark.parametrize(
    ("ranks", "alphas", "module", "want"),
    [
        ({"q_proj": 2}, {}, Q, [(2, 16)] * 3),
        ({"q_proj": 2}, {"q_proj": 8}, Q, [(2, 8)] * 3),
        ({"q_proj": 2}, {"q_proj": 8}, K, [(4, 16)] * 3),
        # One key for both: alpha's own is not sought.
        ({"q_proj": 2}, {"self_attn.q_proj": 8}, Q, [(2, 16), (2, 8), (2, 8)]),
        ({"self_attn.q_proj": 2}, {"q_proj": 8, "self_attn.q_proj": 9}, Q, [(2, 9), (2, 8), (2, 8)]),
        ({}, {"q_proj|k_proj": 8}, Q, [(4, 8)] * 3),
        ({}, {"q_proj|k_proj": 8}, K, [(4, 16), (4, 16), (4, 8)]),
        ({}, {"(q_proj|k_proj)": 8}, K, [(4, 8)] * 3),
        # The whole name is a key by itself, though no pattern with something before it.
        ({Q: 2}, {Q: 8}, Q, [(2, 8)] * 3),
        ({r"model\.layers\.1\..*": 2}, {}, Q, [(4, 16), (4, 16), (2, 16)]),
        ({"^model.layers.1.self_attn.q_proj": 2}, {}, Q, [(4, 16), (4, 16), (2, 16)]),
    ],
)
def test_a_module_has_what_the_release_that_trained_it_gave_it(
    ranks: dict[str, int], alphas: dict[str, int], module: str, want: list[tuple[int, int]]
) -> None:
    shared = {"r": 4, "lora_alpha": 16, "rank_pattern": ranks, "alpha_pattern": alphas}
    got = [of_module(shared | known, module, "x") for known in KNOWN.values()]
    assert got == [*want, want[-1]]


def test_tables_may_be_missing_and_keys_no_patterns() -> None:
    assert of_module({"r": 4, "lora_alpha": 16, "rank_pattern": None}, Q, "x") == (4, 16)
    with pytest.raises(CheckpointError, match=r"rank_pattern or alpha_pattern has '\(a', which is no pattern"):
        of_module({"rank_pattern": {"(a": 1}}, Q, "x")
    assert [is_pattern(text) for text in ("q_proj", r"layers\.[01]\..*", "(?:a|b)", "(a+)+", "", "a" * 201)] == [True] * 3 + [
        False
    ] * 3

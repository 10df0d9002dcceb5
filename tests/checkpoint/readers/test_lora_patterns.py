"""Ranks and alphas by patterns, as three generations of peft understood them."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint import CheckpointError
from checkpoint.readers.lora_patterns import alpha_of, is_pattern

Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
KNOWN: dict[str, dict[str, Any]] = {
    "0.13": {"layers_to_transform": None},
    "0.14": {"layers_to_transform": None, "exclude_modules": None},
    "0.15": {"layers_to_transform": None, "exclude_modules": None, "trainable_token_indices": None},
    "by hand": {},
}


SHARED: dict[str, Any] = {"r": 4, "lora_alpha": 16}


@pytest.mark.parametrize(
    ("ranks", "alphas", "module", "want"),
    [
        ({"q_proj": 2}, {}, Q, [(2, 16)] * 3),
        ({"q_proj": 2}, {"q_proj": 8}, Q, [(2, 8)] * 3),
        ({"q_proj": 2}, {"q_proj": 8}, K, [(4, 16)] * 3),
        # One key for both: alpha's own is not sought.
        ({"q_proj": 2}, {"self_attn.q_proj": 8}, Q, [(2, 16), (2, 8), (2, 8)]),
        ({"self_attn.q_proj": 2}, {"q_proj": 8, "k_proj": 9}, Q, [(2, 16), (2, 8), (2, 8)]),
        ({}, {"q_proj|k_proj": 8}, Q, [(4, 8)] * 3),
        ({}, {"q_proj|k_proj": 8}, K, [(4, 16), (4, 16), (4, 8)]),
        ({}, {"(q_proj|k_proj)": 8}, K, [(4, 8)] * 3),
        # The whole name is a key by itself, though no pattern with something before it.
        ({Q: 2}, {Q: 8}, Q, [(2, 8)] * 3),
        ({r"model\.layers\.1\..*": 2}, {}, Q, [(4, 16), (4, 16), (2, 16)]),
        ({"^model.layers.1.self_attn.q_proj": 2}, {}, Q, [(4, 16), (4, 16), (2, 16)]),
        # Of several that fit, the one that gives the rank of the factors; and in an order of their own, the first.
        ({"layers.1.self_attn.q_proj": 2, "q_proj": 6}, {"layers.1.self_attn.q_proj": 1, "o_proj": 2}, Q, [(2, 1)] * 3),
        ({"layers.1.self_attn.q_proj": 2, "q_proj": 6}, {"layers.1.self_attn.q_proj": 1}, Q, [(6, 16), (6, 1), (6, 1)]),
        ({"self_attn.q_proj": 2, "q_proj": 6}, {"self_attn.q_proj": 1, "q_proj": 3}, Q, [(2, 1)] * 3),
    ],
)
def test_a_module_has_what_the_release_that_trained_it_gave_it(
    ranks: dict[str, int], alphas: dict[str, int], module: str, want: list[tuple[int, int]]
) -> None:
    shared = SHARED | {"rank_pattern": ranks, "alpha_pattern": alphas}
    for known, (rank, alpha) in zip(KNOWN.values(), [*want, want[-1]], strict=True):
        assert alpha_of(shared | known, module, rank, "x") == alpha
        with pytest.raises(CheckpointError, match=rf"x: gives '{module}' the rank \d; its factors have 7"):
            alpha_of(shared | known, module, 7, "x")


@pytest.mark.parametrize("release", ["0.14", "0.15", "by hand"])
def test_alphas_of_several_keys_that_fit_are_refused_where_they_differ(release: str) -> None:
    """peft writes the tables sorted; the first that fitted in training may have been any."""
    patterns = {"rank_pattern": {}, "alpha_pattern": {"q_proj": 64, "self_attn.q_proj": 1}}
    with pytest.raises(CheckpointError, match=r"the lora_alpha 64 or 1: several keys of its patterns fit it"):
        alpha_of(SHARED | patterns | KNOWN[release], Q, 4, "x")
    patterns["alpha_pattern"]["self_attn.q_proj"] = 64
    assert alpha_of(SHARED | patterns | KNOWN[release], Q, 4, "x") == 64


def test_one_key_for_both_tells_by_the_rank_which_it_was() -> None:
    keys = {"layers.1.self_attn.q_proj": 2, "q_proj": 6}
    patterns = {"rank_pattern": keys, "alpha_pattern": {"layers.1.self_attn.q_proj": 1, "q_proj": 64}}
    assert [alpha_of(SHARED | patterns | KNOWN["0.13"], Q, rank, "x") for rank in (2, 6)] == [1, 64]
    with pytest.raises(CheckpointError, match="several keys"):
        alpha_of(SHARED | patterns | {"rank_pattern": dict.fromkeys(keys, 6)} | KNOWN["0.13"], Q, 6, "x")


def test_tables_may_be_missing_and_keys_no_patterns() -> None:
    assert alpha_of(SHARED | {"rank_pattern": None}, Q, 4, "x") == 16
    with pytest.raises(CheckpointError, match=r"rank_pattern or alpha_pattern has '\(a', which is no pattern"):
        alpha_of({"rank_pattern": {"(a": 1}}, Q, 1, "x")


@pytest.mark.parametrize(
    "text", ["q_proj", r"layers\.[01]\..*", "(?:a|b)", r"layers\.\d{1,2}\.(?!mlp).+", r"\w+\.q_proj", "(a|b)?c", "a" * 400]
)
def test_patterns_whose_time_is_bounded_are_tried(text: str) -> None:
    assert is_pattern(text)


@pytest.mark.parametrize("text", ["(a+)+", "(a|b)*", "(?:a?){9}", "", "a" * 401, ".*.*.*.*", "a?b+c*d{2}", r"(\w)\1", "(?i)a"])
def test_others_are_not(text: str) -> None:
    assert not is_pattern(text)


def test_a_long_name_is_not_tried_with_patterns() -> None:
    long = "layers." * 30 + "q_proj"
    assert alpha_of(SHARED | {"alpha_pattern": {"q_proj": 3}}, long, 4, "x") == 3
    with pytest.raises(CheckpointError, match="names of up to 128 characters"):
        alpha_of(SHARED | {"alpha_pattern": {".*q_proj": 3}}, long, 4, "x")

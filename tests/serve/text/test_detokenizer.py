from __future__ import annotations

import random
import time

import pytest

from checkpoint.text.tokenizer import Tokenizer
from serve.text.detokenizer import open_text
from serve.text.pieces import Kind, decoder_kind
from serve.types import Generation, RequestId, ResponseOptions, SamplingParams, StoppingParams
from tests.support.tokenizers import CORPUS, FOLDERS, TEXTS


def generation(
    stops: tuple[str, ...] = (),
    *,
    prompt: tuple[int, ...] = (0,),
    include_stop: bool = False,
    min_new: int = 0,
    text: bool = True,
) -> Generation:
    return Generation(
        request_id=RequestId("r"),
        prompt_ids=prompt,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=10_000, min_new_tokens=min_new, stop_strings=stops, include_stop=include_stop),
        response=ResponseOptions(text=text),
    )


def run(tokenizer: Tokenizer, request: Generation, ids: list[int]) -> tuple[list[str], str | None, int]:
    """Deltas, the matched stop string, and how many tokens were pushed."""
    stream = open_text(tokenizer)(request, 0)
    deltas = []
    for count, token_id in enumerate(ids, start=1):
        delta = stream.push(token_id)
        deltas.append(delta.text)
        if delta.matched_stop is not None:
            return deltas, delta.matched_stop, count
    return [*deltas, stream.finish()], None, len(ids)


def special_prompt(tokenizer: Tokenizer) -> tuple[int, ...]:
    """A prompt without visible text, so that the output is a text of its own."""
    return (min(tokenizer.special_ids),)


@pytest.mark.parametrize("name", FOLDERS)
def test_deltas_of_real_text_add_up_to_decoding_at_once(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    for text in TEXTS:
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        deltas, _, _ = run(tokenizer, generation(prompt=special_prompt(tokenizer)), ids)
        assert "".join(deltas) == tokenizer.decode(ids), text


_OTHER_PIECES = ("llama", "mistral", "mistral_prepend", "unigram", "wordpiece")
"""Tokenizers whose ids are not those of byte-level pieces."""


@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in _OTHER_PIECES])
def test_deltas_of_random_ids_add_up_to_decoding_at_once(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    assert decoder_kind(tokenizer.backend)[0] is Kind.BYTE_LEVEL
    rng = random.Random(7)
    single_bytes = [tokenizer.backend.token_to_id(token) for token in tokenizer.backend.get_vocab() if len(token) == 1]
    for _ in range(300):
        # Single bytes make broken characters of every kind; ids past the vocabulary are rows that only pad the model.
        ids = [rng.choice(single_bytes) if rng.random() < 0.5 else rng.randrange(tokenizer.vocab_size + 20) for _ in range(40)]
        deltas, _, _ = run(tokenizer, generation(), ids)
        assert "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", FOLDERS)
def test_no_delta_ends_inside_a_character(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    for text in TEXTS:
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        if "\ufffd" in tokenizer.decode(ids):
            continue
        deltas, _, _ = run(tokenizer, generation(), ids)
        assert all("\ufffd" not in delta for delta in deltas), text


def test_byte_fallback_shows_a_character_as_soon_as_it_is_whole(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama"]
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "\n😀".encode()]
    deltas, _, _ = run(tokenizer, generation(prompt=(5,)), ids)
    assert deltas == ["\n", "", "", "", "😀", ""]


@pytest.mark.parametrize(("broken", "shown"), [(b"\xe2\x98", 2), (b"\xff", 1), (b"\xf0\x9f\x98", 3)])
def test_byte_fallback_marks_every_byte_that_is_no_character(
    broken: bytes, shown: int, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers["llama"]
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in broken]
    ids += tokenizer.encode("the dog", add_special_tokens=False)
    deltas, _, _ = run(tokenizer, generation(prompt=(5,)), ids)
    assert "".join(deltas) == "\ufffd" * shown + " the dog" == tokenizer.decode(ids)


def test_output_that_continues_a_text_keeps_its_first_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama"]
    prompt, output = tokenizer.encode("the quick"), list(tokenizer.encode("brown fox", add_special_tokens=False))
    deltas, _, _ = run(tokenizer, generation(prompt=prompt), output)
    assert tokenizer.decode(prompt) + "".join(deltas) == tokenizer.decode([*prompt, *output]) == "the quick brown fox"


def expected_with_stops(pieces: list[str], stops: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """By hand: the first end of any stop string in the text; of several, the longest."""
    text = "".join(pieces)
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return (text[:end] if include_stop else text[: end - len(stop)]), stop
    return text, None


@pytest.mark.parametrize("name", ["gpt_neox", "qwen2", "llama", "unigram"])
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_end_the_text_wherever_token_borders_lie(
    name: str, include_stop: bool, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[name]
    rng = random.Random(3)
    matched_any = 0
    for _ in range(300):
        text = rng.choice(CORPUS)
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        plain, _, _ = run(tokenizer, generation(), ids)
        shown = "".join(plain)
        stops = []
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(len(shown))
            stop = shown[start : start + rng.randrange(1, 6)]
            stops.append(stop if rng.random() < 0.7 else stop + "~")
        deltas, matched, _ = run(tokenizer, generation(tuple(stops), include_stop=include_stop), ids)
        assert ("".join(deltas), matched) == expected_with_stops(plain, tuple(stops), include_stop)
        matched_any += matched is not None
    assert 100 < matched_any < 300


def test_text_that_may_become_a_stop_string_is_held_back_and_no_more(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["gpt_neox"]
    ids = [tokenizer.encode(character)[0] for character in "xababc"]
    stream = open_text(tokenizer)(generation(("abac",)), 0)
    assert [stream.push(token_id).text for token_id in ids] == ["x", "", "", "", "ab", "abc"]
    assert stream.finish() == ""


def test_what_is_held_back_comes_out_at_the_end(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["gpt_neox"]
    deltas, matched, _ = run(tokenizer, generation(("abac",)), [tokenizer.encode(character)[0] for character in "zab"])
    assert deltas == ["z", "", "", "ab"]
    assert matched is None


def test_stop_strings_count_from_the_token_that_reaches_the_minimum(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["gpt_neox"]
    ids = [tokenizer.encode(character)[0] for character in "..a..."]
    deltas, matched, count = run(tokenizer, generation((".",), min_new=4), ids)
    assert ("".join(deltas), matched, count) == ("..a", ".", 4)


def test_a_request_without_text_pays_for_none(tokenizers: dict[str, Tokenizer]) -> None:
    deltas, _, _ = run(tokenizers["gpt_neox"], generation(text=False), [5, 6, 7])
    assert "".join(deltas) == ""
    stream = open_text(None)(generation(), 0)
    assert stream.push(5).text == stream.finish() == ""


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "unigram"])
def test_a_token_costs_microseconds(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    ids = list(tokenizer.encode(" ".join(CORPUS), add_special_tokens=False)) * 20
    best = float("inf")
    for _ in range(5):
        stream = open_text(tokenizer)(generation(("\n\nUser:", "###")), 0)
        start = time.thread_time()
        for token_id in ids:
            stream.push(token_id)
        best = min(best, (time.thread_time() - start) / len(ids))
    # The thread's own time, and far above what it takes (1 to 10 µs): a busy machine does not fail it, quadratic costs would.
    assert best < 500e-6, f"{best * 1e6:.1f} µs per token"

"""Angles that are extended beyond a length follow each sequence's own length, whatever else the ranks compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from serve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from serve.engine.engine import Engine
from serve.engine.lookup import Lookup
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.engine.engines import ids_of, make_engine, make_request, run
from tests.serve.fake_executor import OnlyRank
from tests.support import reference
from tests.support.models import VOCABULARY, save

PLAIN = 64
"""Positions before the angles are extended."""
LONGEST = 192
NEW_TOKENS = 14
PROMPTS = {"short": 20, "up to it": PLAIN - NEW_TOKENS, "crossing": 57, "to the last": PLAIN, "long": 65, "longer": 130}
_HALF = 8
_LONG = {
    "max_position_embeddings": LONGEST,
    "original_max_position_embeddings": PLAIN,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + place / 8 for place in range(_HALF)],
        "long_factor": [4.0 + 3 * place for place in range(_HALF)],
        "original_max_position_embeddings": PLAIN,
    },
}
_DYNAMIC = {
    "max_position_embeddings": PLAIN,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e2, "factor": 3.0},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", _DYNAMIC),
    "longrope that goes on": ("llama", _LONG),
    "longrope that starts again": ("phi3", _LONG),
}


def prompt(size: int) -> tuple[int, ...]:
    """Those of other sizes begin alike, so that blocks could be taken for one another's."""
    return tuple((7 * place * place + 3) % (VOCABULARY - 9) + 1 for place in range(size))


@dataclasses.dataclass
class Judged:
    """A model on one rank, and what transformers generates with it, a fresh one for each prompt."""

    model: RankModel
    tokens: dict[str, list[int]]

    def engine(self, **limits: Any) -> Engine:
        num_blocks = limits.pop("num_blocks", self.model.facts.num_blocks)
        facts = dataclasses.replace(self.model.facts, num_blocks=num_blocks)
        return make_engine(facts, executor=OnlyRank(Runner(self.model, Ranks(0, 1))), **{"async_scheduling": True, **limits})


@pytest.fixture(scope="module", params=KINDS)
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    torch.set_num_threads(1)
    family, changes = KINDS[request.param]
    folder = save(family, tmp_path_factory.mktemp("lengths"), with_tokenizer=False, **{**changes, "num_hidden_layers": 2})
    config = ServerConfig(
        model=ModelConfig(path=str(folder), dtype="float32", device="cpu", max_model_len=LONGEST),
        cache=CacheConfig(kv_cache_gib=0.002, block_tokens=16),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    model, _ = load_rank(config, 0, torch.device("cpu"), lambda: Ranks(0, 1), Stopwatch())
    tokens = {}
    for name, size in PROMPTS.items():
        # transformers' module keeps the angles of the longest sequence that it has seen.
        tokens[name] = reference.greedy(reference.load(folder), prompt(size), NEW_TOKENS)
    return Judged(model, tokens)


def generate(engine: Engine, names: tuple[str, ...] = tuple(PROMPTS)) -> dict[str, list[int]]:
    for name in names:
        engine.add(make_request(name, prompt(PROMPTS[name]), NEW_TOKENS))
    events = run(engine)
    return {name: ids_of(events, name) for name in names}


def computed(engine: Engine, tenant: str) -> list[int]:
    return [seq.num_computed for seq in engine._scheduler.running.values() if seq.tenant == tenant]


def test_each_sequence_is_that_of_transformers_beside_others(judged: Judged) -> None:
    assert generate(judged.engine(max_step_tokens=256)) == judged.tokens


def test_chunks_of_a_prompt_are_computed_by_its_whole_length(judged: Judged) -> None:
    assert generate(judged.engine(max_step_tokens=24)) == judged.tokens


def test_blocks_are_shared_by_sequences_of_the_same_angles_alone(judged: Judged) -> None:
    engine = judged.engine()
    for names in (("longer",), ("short", "long"), ("to the last", "crossing"), ("longer", "up to it"), tuple(PROMPTS)):
        assert generate(engine, names) == {name: judged.tokens[name] for name in names}
    assert engine.stats().prefix_cache_hits > 0


def test_a_preempted_sequence_is_computed_again_by_the_same_lengths(judged: Judged) -> None:
    engine = judged.engine(num_blocks=11, prefix_caching=False, max_step_tokens=256)
    assert generate(engine) == judged.tokens
    assert engine.stats().preemptions > 0


def test_rows_that_a_step_leaves_out_for_another_tenant_go_on_where_they_were(judged: Judged) -> None:
    names = tuple(PROMPTS)
    engine = judged.engine(max_step_tokens=256, max_num_seqs=16)
    for name in names:
        engine.add(make_request(name, prompt(PROMPTS[name]), NEW_TOKENS, tenant="flood"))
    events = [event for _ in range(4) for event in engine.step()]
    left_out = 0
    for number, name in enumerate(names):
        engine.add(make_request(f"other {name}", prompt(PROMPTS[name]), NEW_TOKENS, tenant=f"other {number}"))
        for _ in range(2):
            before = computed(engine, "flood")
            events += engine.step()
            left_out += before == computed(engine, "flood") != []
    events += run(engine)
    assert left_out > 0
    for name in names:
        assert ids_of(events, name) == ids_of(events, f"other {name}") == judged.tokens[name]


def test_siblings_go_beyond_the_length_each_by_itself(judged: Judged) -> None:
    for caching in (False, True):
        engine = judged.engine(prefix_caching=caching)
        engine.add(make_request("crossing", prompt(PROMPTS["crossing"]), NEW_TOKENS, num_sequences=3))
        events = run(engine)
        assert [ids_of(events, "crossing", index) for index in range(3)] == [judged.tokens["crossing"]] * 3


def test_tokens_that_are_proposed_are_computed_by_the_same_lengths(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach beyond the lengths at which angles change, where sequences start again."""
    texts = [[*prompt(PROMPTS[name]), *tokens] for name, tokens in judged.tokens.items()]

    def guess(_: Lookup, token_ids: list[int], count: int, least: int) -> tuple[int, ...]:
        (text,) = (text for text in texts if text[: len(token_ids)] == token_ids and len(text) > len(token_ids) > 15)
        return (*text[len(token_ids) :][: count - 1], 1)

    monkeypatch.setattr(Lookup, "find", guess)
    engine = judged.engine(speculative_tokens=6)
    assert generate(engine) == judged.tokens
    assert engine.stats().accepted_tokens > 3 * len(PROMPTS)

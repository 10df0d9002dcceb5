"""A draft model changes how many steps a text takes, and nothing of what is said."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch

from serve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from serve.engine.plan import DRAFTED, Span, Start, StepPlan
from serve.errors import ConfigError
from serve.model.heads import Stage
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.batch import SequenceState, SequenceTable, Supposed
from serve.worker.drafting import Drafting, draft_bytes_per_block, draft_config, load_draft
from serve.worker.executor import RankExecutor
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from serve.worker.sampling.native import NativeSampling
from serve.worker.sampling.sampler import sample
from serve.worker.sizing import bytes_per_block
from tests.serve.engine.engines import ids_of, make_engine, make_request, run
from tests.serve.worker.test_sampled_rows import chi_square_limit
from tests.serve.worker.test_sampler import _state as state
from tests.serve.worker.test_speculation import _compare, answers, requests
from tests.support.kernels import cpu_kernels
from tests.support.models import VOCABULARY, save

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("drafting")
    return {
        "served": save("gpt_neox", root / "served", with_tokenizer=False, num_hidden_layers=2),
        "other": save("llama", root / "other", with_tokenizer=False, seed=3, num_hidden_layers=1, vocab_size=VOCABULARY - 7),
        "short": save("llama", root / "short", with_tokenizer=False, num_hidden_layers=1, max_position_embeddings=64),
    }


def config(folders: dict[str, Path], draft: str, ranks: int = 1) -> ServerConfig:
    path = {"draft_model": str(folders[draft])} if draft else {}
    return ServerConfig(
        model=ModelConfig(
            path=str(folders["served"]), dtype="float32", device="cpu", tensor_parallel_size=ranks, max_model_len=128, **path
        ),
        cache=CacheConfig(kv_cache_gib=0.004, block_tokens=4),
        scheduler=SchedulerConfig(speculative_tokens=8),
    )


def loaded(folders: dict[str, Path], draft: str) -> tuple[RankModel, RankModel | None]:
    settings = config(folders, draft)
    beside = draft_bytes_per_block(settings, 0, CPU)
    served, _ = load_rank(settings, 0, CPU, lambda: Ranks(0, 1), Stopwatch(), beside=beside)
    return served, load_draft(settings, served, 0)


@pytest.mark.parametrize("draft", ["served", "other"])
def test_every_request_says_the_same_with_a_draft_model_and_without(folders: dict[str, Path], draft: str) -> None:
    model, drafting = loaded(folders, draft)
    generations = requests()[:16]
    plain, failed, _ = answers(model, generations)
    for limits in (
        {"speculative_tokens": 8, "max_num_seqs": 1},
        {"speculative_tokens": 6, "num_blocks": 30, "max_step_tokens": 24},
    ):
        guessed, also_failed, stats = answers(model, generations, drafting, **limits)
        _compare(plain, guessed)
        assert also_failed == failed
        assert (stats.preemptions > 0) == ("num_blocks" in limits)
        assert stats.proposed_tokens > 50
        share = stats.accepted_tokens / stats.proposed_tokens
        assert share > 0.8 if draft == "served" else 0.02 < share < 0.8, (
            "of a model's own guesses only those after an end are lost"
        )


def test_a_text_longer_than_is_computed_at_once_is_guessed_as_if_it_had_been(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafting = loaded(folders, "served")
    prompt = tuple(7 * place % 90 + 1 for place in range(50))
    said = []
    for chunk in (512, 3):
        monkeypatch.setattr("serve.worker.drafting._CHUNK_TOKENS", chunk)
        table = SequenceTable(4, CPU)
        start = Start(
            sequence=SequenceId(1), index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=SamplingParams()
        )
        blocks = tuple(BlockId(block) for block in range(14))
        span = Span(sequence=SequenceId(1), start=0, count=53, new_blocks=blocks, sample=True, proposed=(DRAFTED,) * 3)
        plan = StepPlan(step=0, starts=(start,), spans=(span,))
        table.learn(plan)
        said.append(Drafting(drafting, table, model, Ranks(0, 1)).guess(plan.spans)[0].proposed)
    assert said[0] == said[1]
    assert DRAFTED not in said[0]


def test_fifty_thousand_draws_have_the_models_distribution_though_guesses_share_their_random_numbers() -> None:
    generator, draws, vocabulary = torch.Generator().manual_seed(5), 50_000, 24
    served_2V = torch.randn(2, vocabulary, generator=generator)
    draft_V = served_2V[0] + 0.5 * torch.randn(vocabulary, generator=generator)
    counts, backend = [Counter[int](), Counter[int]()], NativeSampling(cpu_kernels())
    for begin in range(0, draws, 5000):
        live = [state(sequence=seed, seed=seed, temperature=1.0) for seed in range(begin, begin + 5000)]
        guesses, _ = sample(draft_V.repeat(5000, 1), live, backend)
        rows: list[SequenceState | Supposed] = []
        for one, guess in zip(live, guesses, strict=True):
            rows += [one, Supposed(one, (guess.token_id,))]
        given = Counter[int]()
        for answer in sample(served_2V.repeat(5000, 1), rows, backend)[0]:
            counts[given[answer.sequence]][answer.token_id] += 1
            given[answer.sequence] += 1
    assert counts[0].total() == draws
    assert counts[1].total() > 0.5 * draws, "with the same random number, models that think alike choose alike"
    for row, count in enumerate(counts):
        expected_V = served_2V[row].double().softmax(0) * count.total()
        found_V = torch.tensor([count[token] for token in range(vocabulary)], dtype=torch.float64)
        assert float(((found_V - expected_V) ** 2 / expected_V).sum()) < chi_square_limit(vocabulary - 1)


@pytest.mark.slow
def test_two_ranks_guess_the_same_and_say_what_one_says_without(folders: dict[str, Path]) -> None:
    said = []
    for draft, ranks in (("", 1), ("served", 2)):
        executor = RankExecutor(config(folders, draft, ranks))
        try:
            facts = executor.start()
            engine = make_engine(facts, executor=executor, speculative_tokens=8 if draft else 0, drafts=bool(draft))
            for name in ("a", "b"):
                engine.add(make_request(name, prompt=(5, 6, 7, len(name), ord(name)), max_new=40))
            events = run(engine)
            said.append([ids_of(events, name) for name in ("a", "b")])
        finally:
            executor.close()
    assert said[0] == said[1]
    assert engine.stats().accepted_tokens > 50


def test_both_caches_together_take_no_more_than_was_given(folders: dict[str, Path]) -> None:
    plain, _ = loaded(folders, "")
    served, draft = loaded(folders, "other")
    assert draft is not None
    settings = config(folders, "other")
    given = settings.cache.kv_cache_gib
    assert given is not None
    each = bytes_per_block(served.survey, settings, 4, Stage()) + bytes_per_block(draft.survey, settings, 2, Stage())
    count = served.facts.num_blocks
    assert count == draft.facts.num_blocks < plain.facts.num_blocks or count * each <= given * 2**30
    assert draft_bytes_per_block(settings, 1, CPU) == 0, "rank 0 alone has it"


def test_a_draft_model_that_cannot_guess_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    served, _ = loaded(folders, "")
    with pytest.raises(ConfigError, match=r"^model.draft_model: it has 64 positions, and 128 are served: --max-model-len 64$"):
        load_draft(config(folders, "short"), served, 0)
    with pytest.raises(ConfigError, match=r"^model.draft_model: .*nothing-here"):
        draft_bytes_per_block(config({**folders, "none": tmp_path / "nothing-here"}, "none"), 0, CPU)
    with pytest.raises(ConfigError, match=r"^scheduler.speculative_tokens is 0; it must be at least 1 with model.draft_model"):
        dataclasses.replace(config(folders, "other"), scheduler=SchedulerConfig())
    assert draft_config(config(folders, "other", ranks=2)).model.tensor_parallel_size == 1

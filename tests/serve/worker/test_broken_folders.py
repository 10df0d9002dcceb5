"""Three hundred broken checkpoint folders: each is refused by file and rule, or served as if nothing were wrong with it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from serve.config import CacheConfig, ModelConfig, ServerConfig
from serve.errors import ConfigError
from serve.model.attention import StepLayout
from serve.runtime.opening import open_edition
from serve.worker.loader import Stopwatch, load_rank
from serve.worker.parallel import Ranks
from tests.serve.worker import broken

CPU = torch.device("cpu")
PROMPT = (5, 6, 7, 8, 9, 10)
MOST_SECONDS = 3.0
"""Of processor time, for a refusal; it takes some hundredths."""


def options(folder: Path) -> ServerConfig:
    cache = CacheConfig(kv_cache_gib=0.001, block_tokens=16)
    return ServerConfig(model=ModelConfig(path=str(folder), dtype="float32", device="cpu"), cache=cache)


@torch.inference_mode()
def served_logits(folder: Path) -> torch.Tensor:
    """What the server computes with a folder, by the functions of its start: [prompt, vocabulary].

    Raises:
        ConfigError: the folder is refused.
    """
    edition = open_edition(options(folder))
    model, _ = load_rank(edition.config, 0, CPU, lambda: Ranks(0, 1), Stopwatch())
    if edition.tokenizer is not None:
        ids = edition.tokenizer.encode("def read_config(path): \u00e9\u65e5")
        assert all(item < model.facts.vocab_size for item in ids)
        edition.tokenizer.decode(ids)
    assert all(item < model.facts.vocab_size for item in model.facts.eos_ids)
    count = len(PROMPT)
    model.state.layout = StepLayout(
        slots=torch.arange(count),
        positions=torch.arange(count, dtype=torch.int32),
        query_starts=(0, count),
        context_lengths=(count,),
        block_tables=torch.tensor([[0]], dtype=torch.int32),
        table_rows=(0,),
    )
    positions = torch.arange(count)[None]
    hidden = model.body(input_ids=torch.tensor([PROMPT]), position_ids=positions, use_cache=False, return_dict=True)
    logits: torch.Tensor = model.head(hidden.last_hidden_state)[0]
    return logits


@torch.inference_mode()
def judged_logits(folder: Path) -> torch.Tensor:
    """What transformers computes with a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def check(fault: broken.Fault, folder: Path, expected: torch.Tensor) -> bool:
    """Whether the folder is served. It is refused as it must be, or gives the right numbers; anything else fails."""
    began = time.process_time()
    try:
        logits = served_logits(folder)
    except ConfigError as error:
        assert time.process_time() - began < MOST_SECONDS, fault
        message = str(error)
        named = any(path.name in message for path in folder.iterdir()) or fault.file in message
        assert named or "is missing" in message, f"{fault}: {message}"
        assert ": " in message and len(message) < 1000 and "\n" not in message, f"{fault}: {message}"  # noqa: PT018
        message.encode()
        return False
    if fault.file == "config.json":
        torch.testing.assert_close(logits, judged_logits(folder), rtol=1e-3, atol=1e-3, msg=lambda text: f"{fault}: {text}")
    elif not (fault.file.endswith(".safetensors") and fault.name.startswith("byte")):  # those change a weight
        assert torch.equal(logits, expected), fault
    return True


@pytest.mark.parametrize(("family", "seed"), [("gpt_neox", 1), ("llama", 2)])
def test_a_broken_folder_is_refused_by_file_and_rule_or_served_exactly(tmp_path: Path, family: str, seed: int) -> None:
    sample = broken.make_sample(family, tmp_path / "sample")
    expected = served_logits(sample)
    torch.testing.assert_close(expected, judged_logits(sample), rtol=1e-4, atol=1e-4)
    num_served = 0
    for number, fault in enumerate(broken.faults(seed, 150, sample)):
        folder = tmp_path / f"{number}" / "model"
        shutil.copytree(sample, folder)
        fault.apply(folder / fault.file)
        num_served += check(fault, folder, expected)
        shutil.rmtree(folder.parent)
    assert 15 <= num_served <= 75, "most faults break something, and many do not"

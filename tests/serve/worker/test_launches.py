"""How much a layer launches on a GPU, where a launch costs more than most of a decoding step's work: on ``meta``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import pytest
import torch

from serve.model.attention import Backend
from serve.model.cuda.backend import TritonBackend
from serve.model.families import FAMILIES
from serve.worker.decode_graphs import DecodeGraphs
from serve.worker.decode_inputs import DecodeInputs
from serve.worker.parallel import Ranks
from tests.serve.worker.family_worker import BLOCK_TOKENS
from tests.serve.worker.launches import launches
from tests.serve.worker.waits import META, on_meta
from tests.support.models import save

LAUNCHES: Final = {
    "gpt_neox": (12, 24), "gpt2": (12, 19), "gpt_bigcode": (12, 12), "gptj": (15, 40), "codegen": (15, 40), "gpt_neo": (14, 21),
    "opt": (15, 15), "llama": (16, 40), "mistral": (16, 40), "qwen2": (16, 40), "qwen3": (18, 56), "olmo2": (18, 58),
    "stablelm": (18, 28), "gemma2": (18, 64), "mixtral": (34, 58), "gpt_oss": (39, 67), "phi": (15, 32), "phi3": (13, 39),
    "bloom": (12, 20), "falcon": (11, 21),
}  # fmt: skip
"""Of one layer in a decoding step, by family: products, attention, norms, activations and sums; and by transformers' own norms,
activations and angles."""
_AS_TOLD: Final = (
    *("gpt_neox", "gpt2", "gpt_bigcode", "gptj", "codegen", "gpt_neo", "opt", "llama", "mistral", "qwen2", "qwen3", "olmo2"),
    *("stablelm", "gemma2", "mixtral", "gpt_oss", "phi", "phi3", "bloom", "falcon"),
)
"""The order of the table in docs/gpu.md."""
_LAYERS: Final = {"gpt2": "n_layer", "gptj": "n_layer", "codegen": "n_layer", "gpt_bigcode": "n_layer", "bloom": "n_layer"}


class _AttentionAlone(TritonBackend):
    rotates = False
    rotates_by_any = False


def _of_a_step(family: str, layers: int, folder: Path, backend: Backend) -> Counter[str]:
    more = {"attention_types": [[["global", "local"], layers // 2]]} if family == "gpt_neo" else {}
    save(family, folder, with_tokenizer=False, **{_LAYERS.get(family, "num_hidden_layers"): layers}, **more)
    model = on_meta(folder, backend)
    inputs = DecodeInputs((4,), model.facts.max_model_len, BLOCK_TOKENS, META, by_length=model.facts.length_rule is not None)
    graphs = DecodeGraphs(model, inputs, Ranks(0, 1))
    with torch.inference_mode(), launches() as found:
        graphs.compute(inputs.steps[4])
    return Counter(found)


def _of_a_layer(family: str, folder: Path, backend: Backend) -> Counter[str]:
    few, more = (_of_a_step(family, layers, folder / str(layers), backend) for layers in (2, 4))
    layer = +Counter({name: (count - few[name]) // 2 for name, count in more.items()})
    assert few + layer + layer == more, "every layer launches the same"
    return layer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_a_decoding_step_launches_no_more_than_is_said(family: str, tmp_path: Path) -> None:
    layer = _of_a_layer(family, tmp_path / "few", TritonBackend(132))
    plain = _of_a_layer(family, tmp_path / "plain", _AttentionAlone(132))
    assert (layer.total(), plain.total()) == LAUNCHES[family], layer
    assert layer["write_kv"] == layer["attend"] == layer["combine"] == 1
    assert not layer.keys() & {"cos", "sin", "neg", "pow", "rsqrt", "tanh"}, (
        "angles, norms and activations are computed at once"
    )


def test_the_documents_say_how_many_they_are() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "gpu.md").read_text()
    _, _, table = text.partition("<!-- launches:")
    rows = [line.strip("| ").split(" | ") for line in table.partition("<!-- end")[0].splitlines() if line.startswith("| ")][2:]
    said = [(int(few), int(plain)) for names, few, plain in rows for _ in names.split(", ")]
    assert said == [LAUNCHES[family] for family in _AS_TOLD]

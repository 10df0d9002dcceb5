"""How much a layer launches on a GPU, where a launch costs more than most of a decoding step's work: on ``meta``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from serve.model.attention import Backend, Rotary, TorchBackend
from serve.model.cuda.backend import TritonBackend
from serve.model.families import FAMILIES
from serve.worker.decode_graphs import DecodeGraphs
from serve.worker.decode_inputs import DecodeInputs
from serve.worker.loader import with_blocks
from serve.worker.parallel import Ranks
from serve.worker.sizing import Blocks
from tests.serve.worker.family_worker import BLOCK_TOKENS, settings
from tests.serve.worker.launches import launches
from tests.serve.worker.waits import META, on_meta
from tests.support.models import save

LAUNCHES: Final = {
    "gpt_neox": (9, 24), "gpt2": (10, 19), "gpt_bigcode": (10, 12), "gptj": (13, 40), "codegen": (13, 40), "gpt_neo": (12, 21),
    "opt": (15, 15), "llama": (14, 40), "mistral": (14, 40), "qwen2": (14, 40), "qwen3": (16, 56), "olmo2": (18, 58),
    "stablelm": (16, 28), "gemma2": (18, 64), "mixtral": (32, 58), "gpt_oss": (37, 67), "phi": (13, 32), "phi3": (11, 39),
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


class _Noting(TritonBackend):
    """Notes what it is to turn queries and keys by."""

    rotary: Rotary | None = None

    def attend(self, *args: Any, **options: Any) -> Tensor:
        self.rotary = options["rotary"]
        return super().attend(*args, **options)


@pytest.mark.parametrize(
    ("family", "dtype", "pairs", "told"),
    [
        ("llama", torch.bfloat16, False, 1),
        ("gptj", torch.bfloat16, True, 2),
        ("codegen", torch.float32, True, 2),
        ("olmo2", torch.float32, False, 1),
        ("gpt_oss", torch.bfloat16, False, 2),
    ],
)
def test_angles_are_of_the_type_that_transformers_turns_by(
    family: str, dtype: torch.dtype, pairs: bool, told: int, tmp_path: Path
) -> None:
    """Of a model in bf16; those of CodeGen and OLMo 2 stay fp32."""
    noting = _Noting(132)
    _of_a_step(family, 2, tmp_path / family, noting)
    assert noting.rotary is not None
    assert (noting.rotary.cosines.dtype, noting.rotary.sines.dtype, noting.rotary.pairs) == (dtype, dtype, pairs)
    assert noting.rotary.cosines.shape == (4, noting.rotary.turned // told)


def test_a_cache_with_other_blocks_lies_as_the_one_before(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "llama", with_tokenizer=False)
    for backend in (TritonBackend(132), TorchBackend()):
        model = on_meta(folder, backend)
        more = Blocks(count=7, kv_heads=model.caches[0].values.shape[1], memory="")
        with_blocks(model, settings(folder, 1, "bfloat16"), Ranks(0, 1), more)
        assert [len(cache.keys) for cache in model.caches] == [7] * len(model.caches)
        assert {cache.keys_by_position for cache in model.caches} == {backend.keys_by_position}
        assert {cache.values.is_contiguous() for cache in model.caches} == {True}

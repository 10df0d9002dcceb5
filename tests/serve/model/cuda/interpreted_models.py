"""Every family computed as on a CUDA device, its kernels interpreted, beside plain torch, on the CPU.

``TRITON_INTERPRET=1 python -m tests.serve.model.cuda.interpreted_models NAME ...`` prints a JSON object: by model, how far its
logits are from those of plain torch, as a share of the largest. A process of its own, see ``interpreted``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from serve.model.attention import StepLayout, TorchBackend
from serve.model.cuda.backend import TritonBackend
from serve.model.cuda.device import launch_less
from serve.worker import loader
from serve.worker.loader import RankModel, Stopwatch, load_rank
from serve.worker.parallel import Ranks
from tests.serve.model.cuda.interpreter import patch_once
from tests.serve.worker.family_worker import settings
from tests.serve.worker.test_loader import VARIANTS
from tests.support.models import VOCABULARY, save

PARTS = ((0, 14), (14, 17), (17, 18))
"""A prompt in two parts, and a token that follows it."""
BLOCKS = (3, 1)


def _loaded(folder: Path, *, as_on_cuda: bool) -> RankModel:
    config = settings(folder, 1, "float32")

    def between(model: Any, *_: object) -> None:
        if as_on_cuda:
            launch_less(model, by_triton=True)

    backend = ("triton", TritonBackend(8)) if as_on_cuda else ("torch", TorchBackend())
    with mock.patch.multiple(
        loader,
        load_kernels=lambda *_: None,
        choose_linear=lambda *_, **__: ("torch", None),
        choose_attention=lambda *_, **__: backend,
        compute_between_products=between,
    ):
        return load_rank(config, 0, torch.device("cpu"), lambda: Ranks(0, 1), Stopwatch())[0]


@torch.inference_mode()
def _logits(model: RankModel, ids_T: Tensor) -> Tensor:
    found = []
    size = model.facts.block_tokens
    for begin, end in PARTS:
        model.state.layout = StepLayout(
            slots=torch.tensor([BLOCKS[p // size] * size + p % size for p in range(begin, end)]),
            positions=torch.arange(begin, end, dtype=torch.int32),
            query_starts=(0, end - begin),
            context_lengths=(end,),
            block_tables=torch.tensor([BLOCKS], dtype=torch.int32),
            table_rows=(0,),
            lengths=None if model.facts.length_rule is None else torch.full((end - begin,), end),
        )
        hidden = model.body(
            input_ids=ids_T[None, begin:end], position_ids=torch.arange(begin, end)[None], use_cache=False, return_dict=True
        ).last_hidden_state
        found.append(model.head(hidden)[0])
    return torch.cat(found)


def compare(name: str, folder: Path) -> float:
    """How far one model's logits are from plain torch's."""
    family, changes = VARIANTS[name]
    save(family, folder, with_tokenizer=False, **changes)
    ids_T = torch.randint(0, VOCABULARY, (PARTS[-1][1],), generator=torch.Generator().manual_seed(1))
    mine, plain = (_logits(_loaded(folder, as_on_cuda=on), ids_T) for on in (True, False))
    return float((mine - plain).abs().max() / plain.abs().max())


def main(names: list[str]) -> None:
    """Compare those that are named."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        print(json.dumps({name: compare(name, Path(root) / str(number)) for number, name in enumerate(names)}))


if __name__ == "__main__":
    patch_once()
    main(sys.argv[1:])

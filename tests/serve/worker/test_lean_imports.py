"""Ranks import less than transformers asks for, also while they load, and compute the same with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from serve.worker.parallel import Ranks
from serve.worker.rank_process import rank_environment
from tests.serve.worker.family_worker import load, logits
from tests.support.models import FAMILIES, MORE_FAMILIES, save

ROOT = Path(__file__).resolve().parents[3]
PROMPT = (3, 14, 15, 92, 65, 35)
OURS = """
import sys
import serve.worker.lean_torch
import serve.worker.lean_imports
def imported():
    spared = {"torch._dynamo", "torch._meta_registrations", "torch._refs", "torch.distributed.tensor", "accelerate", "sympy"}
    return spared & sys.modules.keys()
assert not imported(), imported()
from pathlib import Path
import torch
from serve.worker.parallel import Ranks
from tests.serve.worker.family_worker import load, logits
torch.set_num_threads(1)
ranks, root = Ranks(0, 1), Path(sys.argv[1])
found = {folder.name: logits(load(folder, 1, ranks), ranks, tuple(map(int, sys.argv[2:]))) for folder in root.iterdir()}
assert not imported(), imported()
torch.save(found, root.with_suffix(".pt"))
"""
AFTERWARDS = """
import sys
import serve.worker.lean_torch
import serve.worker.lean_imports
import torch
from transformers import masking_utils, utils
from transformers.utils import import_utils
assert not hasattr(torch, "_meta_registrations")
from torch._meta_registrations import meta_conv
assert torch.nn.Conv1d(2, 3, 1, device="meta")(torch.empty(1, 2, 5, device="meta")).shape == (1, 3, 5)
assert utils.is_accelerate_available is import_utils.is_accelerate_available
assert import_utils.define_import_structure.__module__ == "transformers.utils.import_utils"
assert utils.is_accelerate_available() and utils.is_torch_distributed_available()
assert torch.compiler.disable.__module__ == "torch.compiler"
mode = masking_utils.TransformGetItemToIndex()
assert type(mode).__module__ == "torch._dynamo._trace_wrapped_higher_order_op", type(mode)
assert type(torch._dynamo).__name__ == "module" and torch._dynamo.disable.__module__.startswith("torch._dynamo")
from torch.distributed.tensor import DTensor
"""
NAMES = """
import serve.worker.lean_imports
import transformers
from serve.model.families import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM
for family in FAMILIES:
    name = type(AutoConfig.for_model(family)).__name__
    assert getattr(transformers, name).model_type == family
assert not hasattr(transformers, "BertConfig")
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert import BertModel
assert BertModel.config_class is BertConfig
"""
UNKNOWN = """
import sys
import serve.worker.lean_torch
import serve.worker.lean_imports
import torch
from serve.model import pretrained
from transformers import GPT2Config
made, calls = pretrained._made, []
def unknown_operator(*arguments):
    calls.append("torch._meta_registrations" in sys.modules)
    if not calls[-1]:
        raise NotImplementedError("no rule for meta")
    return made(*arguments)
pretrained._made = unknown_operator
config = GPT2Config(n_layer=1, n_embd=8, n_head=1)
assert all(each.is_meta for each in pretrained.new_model_on_meta(config, torch.float32, "eager").parameters())
assert calls == [False, True]
"""
COMPILER = """
import serve.worker.lean_torch
import serve.worker.lean_imports
import torch._dynamo
assert torch._dynamo.optimize("eager")(lambda x: x + 1)(torch.ones(1)).item() == 2.0
assert torch._meta_registrations.__file__
"""
RECORDED = """
import sys
import serve.worker.lean_torch
import serve.worker.lean_imports
import torch
from serve.model.cuda import graphs
from serve.model.recording import Recorder, StepMemory, Steps
x = torch.ones(3)
for recorder in (Recorder(None, StepMemory()), graphs._Recorder([])):
    with torch.inference_mode(), recorder:
        y = x[:1] + 1
    assert y.item() == 2.0
assert "torch._dynamo" not in sys.modules
"""
UNEXPECTED = """
import sys
import torch
from serve.worker.compiler_stand_ins import without_compiler
with without_compiler():
    assert torch._dynamo.disable(len) is len and torch._dynamo.disable(recursive=False)(len) is len
    assert "torch._dynamo.config" not in sys.modules
    assert torch._dynamo.config.__name__ == "torch._dynamo.config"
    from torch._dynamo.utils import counters
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.utils.counters is counters
"""


def run(program: str, *words: str) -> None:
    command = [sys.executable, "-P", "-c", program, *words]
    environment = rank_environment(0, 1, "cpu") | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_family_computes_the_same_with_what_ranks_import(tmp_path: Path) -> None:
    root = tmp_path / "families"
    for family in (*FAMILIES, *MORE_FAMILIES):
        save(family, root / family, with_tokenizer=False)
    run(OURS, str(root), *map(str, PROMPT))
    found = torch.load(root.with_suffix(".pt"))
    assert found.keys() == {*FAMILIES, *MORE_FAMILIES}
    threads, ranks = torch.get_num_threads(), Ranks(0, 1)
    torch.set_num_threads(1)
    try:
        for family, got in found.items():
            expected = logits(load(root / family, 1, ranks), ranks, PROMPT)
            assert expected is not None
            assert torch.equal(got, expected), family
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "program",
    [AFTERWARDS, UNEXPECTED, NAMES, UNKNOWN, COMPILER, RECORDED],
    ids=[
        "everything is there",
        "other names are imported",
        "models that are served have names",
        "operators beyond those in C++",
        "the compiler",
        "a step is recorded",
    ],
)
def test_what_was_spared_is_had_afterwards_by_whoever_asks_for_it(program: str) -> None:
    run(program)

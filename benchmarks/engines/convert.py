"""One checkpoint in an engine's own format: ``python -m benchmarks.engines.convert FORMAT SOURCE OUT PRECISION [LLAMA.CPP]``.

Run by the Python that has the exporters.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final


def openvino(source: str, out: str, precision: str) -> None:
    """OpenVINO's intermediate representation, with weights in fp32 or int8."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    quantized = OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8, sym=False)) if precision == "int8" else None
    main_export(source, out, task="text-generation-with-past", ov_config=quantized or OVConfig(dtype="fp32"))


def ctranslate2(source: str, out: str, precision: str) -> None:
    """CTranslate2's folder."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(source).convert(out, quantization=precision, force=True)


def gguf(source: str, out: str, precision: str, llama_cpp: str) -> None:
    """GGUF by the converter of llama.cpp, which is told the pre-tokenizer: it knows tokenizers by a hash, and not ours."""
    sys.path.insert(0, llama_cpp)
    sys.path.insert(1, f"{llama_cpp}/gguf-py")
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", source, "--outfile", out, "--outtype", precision]
    runpy.run_path(str(Path(llama_cpp) / "convert_hf_to_gguf.py"), run_name="__main__")


CONVERTERS: Final[dict[str, Callable[..., None]]] = {"openvino": openvino, "ctranslate2": ctranslate2, "gguf": gguf}

if __name__ == "__main__":
    CONVERTERS[sys.argv[1]](*sys.argv[2:])

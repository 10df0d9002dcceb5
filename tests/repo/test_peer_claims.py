"""What the documents say of speed beside other engines is what the newest records say."""

from __future__ import annotations

from tests.repo.test_claims import newest, said_in


def test_the_figures_beside_other_engines_are_those_of_the_result_file() -> None:
    cells = newest("peers-cpu-*.json")["cells"]

    def beside(*names: str) -> str:
        ratios = [f"{cells[name]['tessera / best peer']:.2f}" for name in names]
        return " and ".join([", ".join(ratios[:-1]), ratios[-1]])

    def decoding(what: str, prompt_tokens: int = 64, sequences: tuple[int, ...] = (1, 8, 32)) -> str:
        return beside(*(f"{what}/decode/{count}x{prompt_tokens}" for count in sequences))

    def prompts(precision: str) -> str:
        return beside(*(f"160m/{precision}/prefill/{size}" for size in ("1x1024", "8x512")))

    precisions = ("fp32", "bf16", "int8")
    fp32, bf16, int8 = (decoding(f"160m/{precision}") for precision in precisions)
    best = "of the speed of the best of OpenVINO, llama.cpp, CTranslate2 and transformers in fp32 with 1, 8 and 32 sequences"
    assert said_in("docs/operations.md", f"decodes over gRPC at {fp32} {best}, at {bf16} in bf16 and at {int8} in int8, asked")
    fp32, bf16, int8 = map(prompts, precisions)
    assert said_in("docs/operations.md", f"tokens at {fp32} in fp32, at {bf16} in bf16 and at {int8} in int8, decodes 1 and 8")
    again = newest("peers-prompts-cpu-*.json")["cells"]
    both = " and ".join(f"{again[f'160m/bf16/prefill/{size}']['tessera / best peer']:.2f}" for size in ("1x1024", "8x512"))
    assert said_in("docs/operations.md", f"prompts in bf16 are computed at {both} ([")
    llama = decoding("llama-350m/bf16")
    long = decoding("160m/bf16", 1024, (1, 8))
    assert said_in("docs/operations.md", f"at {long} in bf16, and a Llama of 350M with grouped queries at {llama} (two cores")


def test_the_figures_of_other_shapes_and_of_arrivals_are_those_of_the_result_file() -> None:
    more = {name: f"{cell['tessera / best peer']:.2f}" for name, cell in newest("peers-more-cpu-*.json")["cells"].items()}

    def decoding(shape: str) -> str:
        one, eight, many = (more[f"{shape}/bf16/decode/{count}x64"] for count in (1, 8, 32))
        return f"at {one}, {eight} and {many}"

    llama, gpt2 = decoding("llama-1.1b"), decoding("gpt2-medium")
    assert said_in("docs/operations.md", f"a Llama of 1.1B decodes in bf16 {llama} of the best engine's speed with 1, 8 and 32")
    assert said_in("docs/operations.md", f"and GPT-2 medium {gpt2}; 32 prompts")
    fp32, bf16, int8 = (more[f"160m/{precision}/arrivals/32x64"] for precision in ("fp32", "bf16", "int8"))
    assert said_in("docs/operations.md", f"are answered at {fp32} in fp32, {bf16} in bf16 and {int8} in int8, of the engines")

"""Parts of what ``deepspeed_saves.py`` trains: transformers' blocks as the layers of a pipeline, and adapters merged."""

from __future__ import annotations

from typing import Any

import torch


def merged(whole: dict[str, torch.Tensor], alpha: float) -> dict[str, torch.Tensor]:
    """Each adapted weight with the product of its factors, scaled as rsLoRA does."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in whole.items():
        short = name.removeprefix("base_model.model.")
        if "lora_" in name or "original_module" in name:
            continue
        module = name.removesuffix(".base_layer.weight")
        for left, right, turned in (("lora_B", "lora_A", False), ("lora_embedding_B", "lora_embedding_A", True)):
            factors = [whole.get(f"{module}.{kind}.default{end}") for kind in (left, right) for end in ("", ".weight")]
            up, down = [factor for factor in factors if factor is not None] or (None, None)
            if up is not None:
                added = alpha / down.shape[0] ** 0.5 * (up @ down)
                tensor = tensor + (added.T if turned else added)
        found[short.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")] = tensor
    return found


class Block(torch.nn.Module):
    """A block of transformers as a pipeline's layer: hidden states in, hidden states out."""

    def __init__(self, block: torch.nn.Module, rotary: torch.nn.Module | None) -> None:
        super().__init__()
        self.block = block
        self._rotary = [rotary]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        places = torch.arange(hidden.shape[1])[None]
        mask = torch.full((hidden.shape[1],) * 2, -1e9).triu(1)[None, None].to(hidden.dtype)
        rotary = self._rotary[0]
        positions = {} if rotary is None else {"position_embeddings": rotary(hidden, places)}
        out = self.block(hidden, attention_mask=mask, **positions)
        return out[0] if isinstance(out, tuple) else out


class Embeddings(torch.nn.Module):
    """GPT-2's two, of tokens and of positions, the first of which is the head too."""

    def __init__(self, wte: torch.nn.Module, wpe: torch.nn.Module) -> None:
        super().__init__()
        self.wte, self.wpe = wte, wpe

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))


def layers_of(model: torch.nn.Module) -> list[Any]:
    """Embedding, blocks in a wrapper, last norm and head; a head that is tied has no file."""
    base = model.base_model
    if model.config.model_type == "gpt2":
        from deepspeed.pipe import TiedLayerSpec

        ends = [
            TiedLayerSpec("embed", Embeddings, base.wte, base.wpe, forward_fn=forward_fn, tied_weight_attr=["wte.weight"])
            for forward_fn in (None, lambda embeddings, hidden: hidden @ embeddings.wte.weight.T)
        ]
        return [ends[0], *(Block(block, None) for block in base.h), base.ln_f, ends[1]]
    blocks = [Block(block, base.rotary_emb) for block in base.layers]
    norm = base.final_layer_norm if model.config.model_type == "gpt_neox" else base.norm
    return [model.get_input_embeddings(), *blocks, norm, model.get_output_embeddings()]

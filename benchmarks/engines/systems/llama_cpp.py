"""llama.cpp by its C interface: one ``llama_decode`` a step over all sequences."""

from __future__ import annotations

import ctypes
import time
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.engines.systems.answering import answer

_BATCH = 2048
"""Positions of one call at most, which is llama.cpp's own default."""


class LlamaCpp:
    """A model with one context for each number of sequences and positions that was asked for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}
        self._threads = settings["threads"]
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp did not load {settings['model']}")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts: dict[tuple[int, int, bool], Any] = {}
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape=(_BATCH,))
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape=(_BATCH,))
        self._sampled = np.ctypeslib.as_array(self._batch.logits, shape=(_BATCH,))
        np.ctypeslib.as_array(self._batch.n_seq_id, shape=(_BATCH,))[:] = 1

    def _context(self, sequences: int, positions: int, exact: bool) -> Any:
        """A context with room for them, from earlier where there was one: steps of equal size find its buffers made."""
        each = -(-positions // 256) * 256
        if (sequences, each, exact) not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_seq_max, params.n_batch = sequences * each, sequences, _BATCH
            params.n_threads = params.n_threads_batch = self._threads
            params.no_perf = True
            if exact:
                params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            context = llama_cpp.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError("llama.cpp made no context")
            self._contexts[sequences, each, exact] = context
        return self._contexts[sequences, each, exact]

    def generate(self, prompts: list[list[int]], tokens: int, exact: bool, every: float) -> list[list[int]]:
        """See ``Engine``."""
        context = self._context(len(prompts), max(map(len, prompts)) + tokens, exact)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        if every:
            return self._one_by_one(context, prompts, tokens, every)
        rows = [(sequence, place) for sequence, prompt in enumerate(prompts) for place in range(len(prompt))]
        out: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(rows), _BATCH):
            part = rows[first : first + _BATCH]
            for row, (sequence, place) in enumerate(part):
                self._batch.seq_id[row][0] = sequence
                self._tokens[row], self._positions[row] = prompts[sequence][place], place
                self._sampled[row] = place + 1 == len(prompts[sequence])
            last = [sequence for sequence, place in part if place + 1 == len(prompts[sequence])]
            for sequence, token in zip(last, self._decode(context, len(part), len(last)), strict=True):
                out[sequence].append(token)
        for row in range(len(prompts)):
            self._batch.seq_id[row][0] = row
        self._sampled[: len(prompts)] = 1
        for step in range(tokens - 1):
            self._tokens[: len(prompts)] = [ids[-1] for ids in out]
            self._positions[: len(prompts)] = [len(prompt) + step for prompt in prompts]
            for ids, token in zip(out, self._decode(context, len(prompts), len(prompts)), strict=True):
                ids.append(token)
        return out

    def _one_by_one(self, context: Any, prompts: list[list[int]], tokens: int, every: float) -> list[list[int]]:
        """Each step has the prompts whose time has come, and a token more of each that was begun before."""
        out: list[list[int]] = [[] for _ in prompts]
        began = time.perf_counter()
        while any(len(ids) < tokens for ids in out):
            come = int((time.perf_counter() - began) / every) + 1
            rows = [(each, len(prompts[each]) + len(ids) - 1, ids[-1]) for each, ids in enumerate(out) if 0 < len(ids) < tokens]
            for each in (each for each, ids in enumerate(out[:come]) if not ids):
                if len(rows) + len(prompts[each]) <= _BATCH:
                    rows += [(each, place, token) for place, token in enumerate(prompts[each])]
            for row, (each, place, token) in enumerate(rows):
                self._batch.seq_id[row][0] = each
                self._tokens[row], self._positions[row] = token, place
                self._sampled[row] = place + 1 >= len(prompts[each])
            last = [each for each, place, _ in rows if place + 1 >= len(prompts[each])]
            for each, token in zip(last, self._decode(context, len(rows), len(last)) if rows else [], strict=True):
                out[each].append(token)
        return out

    def _decode(self, context: Any, rows: int, sampled: int) -> list[int]:
        """The likeliest token of each row that is sampled, in the order of rows."""
        self._batch.n_tokens = rows
        if failed := llama_cpp.llama_decode(context, self._batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        if not sampled:
            return []
        address = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        found = np.ctypeslib.as_array(address, shape=(sampled, self._vocabulary)).argmax(axis=1)
        return [int(token) for token in found]

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    answer(LlamaCpp)

"""The arithmetic of sampling on the CPU, by the kernels of ``serve/model/kernels/sampling.cpp``."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from serve.types import SamplingParams
from serve.worker.sampling.backend import Choice, floor_of
from serve.worker.sampling.seen import Seen


class NativeSampling:
    """``SamplingBackend`` for fp32 rows that lie one after the other: gone through side by side, none sorted whole."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        """``kernels`` as ``load_cpu_kernels`` gives them."""
        self._kernels = kernels
        whole, place = ctypes.c_int64, ctypes.c_void_p
        kernels.tessera_peaks.argtypes = (place, whole, whole, place, place, whole)
        kernels.tessera_choose.argtypes = (place, whole, whole, *(place,) * 15, whole)
        for function in (kernels.tessera_peaks, kernels.tessera_choose):
            function.restype = None

    def peaks(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of each row, NaN where it holds one, and the first id that has it: fp32 [R], int64 [R]."""
        rows, vocabulary = _shape(logits_RV)
        peaks_R, places_R = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self._kernels.tessera_peaks(
            logits_RV.data_ptr(), rows, vocabulary, peaks_R.data_ptr(), places_R.data_ptr(), torch.get_num_threads()
        )
        return peaks_R, places_R

    def choose(
        self,
        logits_RV: Tensor,
        params: Sequence[SamplingParams],
        uniform: Sequence[float],
        seen: Sequence[Seen | None],
        unread_R: Tensor | None = None,
    ) -> Choice:
        """A token for each row: the likeliest at temperature 0, else one that is drawn at the row's ``uniform``.

        Logits of what a row has ``seen`` are changed in place by its penalties first. All of it is one call of the kernel.
        """
        assert unread_R is None, "a CPU has read what it drew"
        rows, vocabulary = _shape(logits_RV)
        given: tuple[array[int] | array[float], ...] = (
            array("f", [p.repetition_penalty for p in params]),
            array("f", [p.presence_penalty for p in params]),
            array("f", [p.frequency_penalty for p in params]),
            array("q", [s.ids.buffer_info()[0] if s else 0 for s in seen]),
            array("q", [s.times.buffer_info()[0] if s else 0 for s in seen]),
            array("q", [len(s.ids) if s else 0 for s in seen]),
            array("f", [p.temperature for p in params]),
            array("f", [floor_of(p) for p in params]),
            array("q", [min(p.top_k, vocabulary) if p.top_k else vocabulary for p in params]),
            array("d", [p.top_p for p in params]),
            array("d", [p.typical_p for p in params]),
            array("d", uniform),
        )
        raw_peaks_R, peaks_R, tokens_R = torch.empty(rows), torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self._kernels.tessera_choose(
            logits_RV.data_ptr(),
            vocabulary,
            rows,
            *(column.buffer_info()[0] for column in given),
            raw_peaks_R.data_ptr(),
            peaks_R.data_ptr(),
            tokens_R.data_ptr(),
            torch.get_num_threads(),
        )
        return Choice(raw_peaks_R, peaks_R, tokens_R)


def _shape(logits_RV: Tensor) -> tuple[int, int]:
    assert logits_RV.dtype == torch.float32, "the kernel sees addresses alone"
    assert logits_RV.is_contiguous(), "the kernel sees addresses alone"
    rows, vocabulary = logits_RV.shape
    return rows, vocabulary

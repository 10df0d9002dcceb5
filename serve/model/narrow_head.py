"""The likeliest token of each of few rows by a narrower copy of the head, which finds what the head itself would.

A small model spends much of a step on its head: on the logits of all tokens, where a row that wants the likeliest needs one. A
copy of the head in half as many bits gives every logit to within a bound, and ``kernels/likeliest.cpp`` computes by the head
itself only those that may be the largest, to the last bit as a whole product does. Where too many may be, or one is not finite,
the whole product has to be computed as if there were no copy.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from serve.model.linear import Panels, PanelsProduct, Product
from serve.model.pace import Pace
from serve.model.quantized import packed_scales, packed_values, quantize
from serve.model.recording import KINDS, Job
from serve.model.weight_memory import WeightMemory

# Shapes.  R rows   I input features   O output features: this rank's columns of the logits

LEAST_SHARE: Final = 1 / 16
"""What part of the rank's weights a head takes at least: a copy of a smaller one would gain next to nothing."""
MOST_BYTES: Final = 256 << 20
"""What a copy may take."""
_MOST_PANELS: Final = 1 / 8
"""What part of a head may be computed after the copy: more says that the bound decides little."""
_FEW_CALLS, _MOST_FAILURES = 64, 1 / 4
_BLOCK_BYTES: Final = 1 << 20
_BF16, _FP32 = 2.0**-8, 2.0**-24
"""What rounding to nearest loses at most, for each of a number's size."""
_FLUSHED: Final = 2e-38
"""More than a denormal weight, which products of pairs take for zero."""
_QUANTIZED: Final = KINDS.index("quantized")

_log = logging.getLogger(__name__)


class Search(ctypes.Structure):
    """``Search`` of kernels/likeliest.cpp."""

    _fields_ = (
        ("narrow", Job),
        ("exact", Job),
        ("losses", ctypes.c_void_p),
        ("norms", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("rounding", ctypes.c_double),
        ("most_panels", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("peaks", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
    )


class Likeliest(NamedTuple):
    """The largest logit of each row, and where it is."""

    peaks_R: Tensor
    """fp32: the largest of this rank's logits."""
    places_R: Tensor
    """int64: the first column that has it."""
    panels: int
    """How many the head itself computed, for all rows."""


class _Copy(Protocol):
    """A head in fewer bits that is made by blocks of rows, in their order."""

    def put(self, begin: int, rows_BI: Tensor) -> Tensor:
        """Copy rows. Returns the copy as numbers, fp32 [B, I]."""
        ...

    def job(self) -> Job:
        """Its product, without rows."""
        ...


class _Bf16:
    """Panels as the head has them, of half the size."""

    def __init__(self, kernels: ctypes.CDLL, memory: WeightMemory, shape: tuple[int, int]) -> None:
        self._panels = Panels(kernels, memory, shape, torch.bfloat16, later=False)
        self._product = PanelsProduct(kernels, self._panels, None, "none")

    def put(self, begin: int, rows_BI: Tensor) -> Tensor:
        narrow_BI = rows_BI.bfloat16()
        self._panels.put(begin, narrow_BI, threads=1)
        return narrow_BI.float()

    def job(self) -> Job:
        nothing = torch.empty(0, self._panels.shape[1], dtype=torch.bfloat16)
        return self._product.job(nothing, nothing)


class _Int8:
    """Whole numbers, and a scale for each output."""

    def __init__(self, memory: WeightMemory, shape: tuple[int, int], dtype: torch.dtype, together: int) -> None:
        (outputs, inputs), self._dtype, self._together = shape, dtype, together
        panels = -(-outputs // Panels.ROWS)
        self._shape = shape
        self._packed = memory.empty((panels, inputs * Panels.ROWS), torch.int8)
        self._scales = memory.empty((panels, Panels.ROWS), torch.float32)

    def put(self, begin: int, rows_BI: Tensor) -> Tensor:
        narrow = quantize(rows_BI, 8, self._shape[1])
        first = begin // Panels.ROWS
        own = slice(first, first - (-len(rows_BI) // Panels.ROWS))
        self._packed[own] = packed_values(narrow.values_OI, 8, self._together).view(-1, self._packed.shape[1])
        self._scales[own] = packed_scales(narrow.scales_OG).view(-1, Panels.ROWS)
        return narrow.dequantized()

    def job(self) -> Job:
        job = Job(_QUANTIZED, int(self._dtype == torch.bfloat16), None, None, self._packed.data_ptr(), self._scales.data_ptr())
        (job.width, job.inputs), job.bits = self._shape, 8
        job.out_stride, job.group = job.width, job.inputs + job.inputs % 2
        return job


@dataclass(slots=True)
class _Ready:
    """What a search takes, and what it refers to."""

    of: PanelsProduct
    search: Search
    held: tuple[object, ...]
    calls: int = 0
    failures: int = 0


class Kind(NamedTuple):
    """What a head is copied to."""

    dtype: torch.dtype
    """bf16 or int8."""
    most_rows: int
    """Up to which the copy takes less time than the head."""


def kind_of_copy(kernels: ctypes.CDLL, dtype: torch.dtype, inputs: int) -> Kind | None:
    """The copy that pays for a head of this type on this processor; ``None`` where none does."""
    # Where the processor multiplies pairs of bf16 numbers, in the time of one product of fp32, these lie in pairs.
    has_pairs = kernels.tessera_linear_quantized_together(1) == 2
    if dtype == torch.float32:
        supported = kernels.tessera_linear_supported(1) and inputs % 2 == 0
        return Kind(torch.bfloat16, 32 if has_pairs else 16) if supported else None
    supported = kernels.tessera_linear_quantized_supported(1) and inputs % kernels.tessera_linear_quantized_together(1) == 0
    return Kind(torch.int8, 4 if has_pairs else 2) if supported else None


class NarrowHead:
    """A head's narrower copy, made while the model serves.

    ``build`` is called in one thread at a time, all else in the one that computes.
    """

    @staticmethod
    def of(head: nn.Module, kernels: ctypes.CDLL | None, weight_bytes: int) -> NarrowHead | None:
        """What may be copied of a head; ``None`` where that cannot be, or is not worth it.

        Args:
            head: from hidden states to logits.
            weight_bytes: what all weights of the rank take.
        """
        product = _product_of(head)
        if kernels is None or product is None:
            return None
        (outputs, inputs), dtype = product.panels.shape, product.panels.dtype
        kind = kind_of_copy(kernels, dtype, inputs)
        if kind is None or outputs * inputs * dtype.itemsize < LEAST_SHARE * weight_bytes:
            return None
        narrow = NarrowHead(head, kernels, kind)
        return narrow if narrow.num_bytes <= MOST_BYTES else None

    def __init__(self, head: nn.Module, kernels: ctypes.CDLL, kind: Kind) -> None:
        """``kind`` is one that the kernels and the head's type allow."""
        product = _product_of(head)
        assert product is not None, "it is computed by a packed weight"
        self._head, self._kernels, self.kind = head, kernels, kind
        kernels.tessera_likeliest.argtypes = (ctypes.c_void_p, ctypes.c_int)
        kernels.tessera_likeliest.restype = ctypes.c_int64
        outputs, inputs = product.panels.shape
        self.num_bytes = outputs * (inputs * kind.dtype.itemsize + kind.most_rows * 2 * product.panels.dtype.itemsize)
        """What the copy takes, and logits of both products."""
        self._ready: _Ready | None = None

    def serves(self, rows: int) -> bool:
        """Whether the likeliest tokens of so many rows are looked for by the copy: it is there, of the head as it is now."""
        ready = self._ready
        return ready is not None and 0 < rows <= self.kind.most_rows and ready.of is _product_of(self._head)

    def build(self, pace: Pace) -> None:
        """Copy the head as it is now, in place of what was copied before.

        Args:
            pace: of the parts.
        """
        self._ready = None
        product = _product_of(self._head)
        if product is None or product.panels.rows is not None:
            return
        torch.get_num_threads()  # it is set in a thread when it is first asked for
        self._kernels.omp_set_num_threads(1)  # for this thread alone, which computes beside steps
        panels = product.panels
        (outputs, inputs), memory = panels.shape, WeightMemory(large=True)
        copy: _Copy
        if self.kind.dtype == torch.bfloat16:
            copy = _Bf16(self._kernels, memory, panels.shape)
        else:
            together = self._kernels.tessera_linear_quantized_together(int(panels.dtype == torch.bfloat16))
            copy = _Int8(memory, panels.shape, panels.dtype, together)
        losses_O, norms_O = torch.empty(outputs), torch.empty(outputs)
        of_sums = (inputs + 32) * _FP32  # of as many additions, and of a few factors
        step = max(1, _BLOCK_BYTES // (inputs * 4 * Panels.ROWS)) * Panels.ROWS
        for begin in range(0, outputs, step):
            with pace.part():
                end = min(begin + step, outputs)
                rows_BI = panels.unpacked(begin, end)
                narrow_BI, whole_BI = copy.put(begin, rows_BI), rows_BI.float()
                norms_O[begin:end] = _norm(narrow_BI)
                summed_B = (_norm(whole_BI) + norms_O[begin:end]) * of_sums
                losses_O[begin:end] = _norm(whole_BI - narrow_BI) + summed_B + inputs * _FLUSHED
        if product is not _product_of(self._head):
            return
        self._ready = self._search(product, copy, losses_O, norms_O)
        _log.debug("the likeliest of up to %d tokens are found by a copy of the head in %s", *self.kind[::-1])

    def _search(self, product: PanelsProduct, copy: _Copy, losses_O: Tensor, norms_O: Tensor) -> _Ready:
        (outputs, inputs), dtype, most = product.panels.shape, product.panels.dtype, self.kind.most_rows
        type_of_copy = dtype if self.kind.dtype == torch.int8 else self.kind.dtype
        x_RI = torch.empty(most, inputs, dtype=torch.bfloat16)
        exact_RO, narrow_RO = torch.empty(most, outputs, dtype=dtype), torch.empty(most, outputs, dtype=type_of_copy)
        panels = torch.empty(-(-outputs // Panels.ROWS), dtype=torch.int32)
        search = Search(copy.job(), product.job(torch.empty(0, inputs, dtype=dtype), exact_RO))
        biases_O = None if product.bias_O is None else product.bias_O.float()
        search.biases = None if biases_O is None else biases_O.data_ptr()
        search.narrow.out = narrow_RO.data_ptr()
        search.narrow.x, search.narrow.x_stride = x_RI.data_ptr(), inputs
        search.losses, search.norms, search.panels = losses_O.data_ptr(), norms_O.data_ptr(), panels.data_ptr()
        search.most_panels = max(1, int(len(panels) * _MOST_PANELS))
        of_type = {torch.bfloat16: _BF16, torch.float32: _FP32}
        search.rounding = max(of_type[dtype], of_type[type_of_copy]) + 4 * _FP32  # a bias is added, and the bound
        return _Ready(product, search, (copy, losses_O, norms_O, x_RI, exact_RO, narrow_RO, panels, biases_O))

    def forget(self) -> None:
        """Give up the copy, and the head that it was made of, until the next ``build``."""
        self._ready = None

    def likeliest(self, hidden_RI: Tensor) -> Likeliest | None:
        """The largest logit of each row and its first place, as the head's product and a search through all of it give them;
        ``None`` where these have to be made, after all.

        Args:
            hidden_RI: as many rows as it ``serves``.
        """
        ready, rows = self._ready, len(hidden_RI)
        if ready is None:  # it is copied anew since
            return None
        if hidden_RI.stride(1) != 1:
            hidden_RI = hidden_RI.contiguous()
        peaks_R, places_R = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        search = ready.search
        search.exact.x, search.exact.x_stride = hidden_RI.data_ptr(), hidden_RI.stride(0)
        search.exact.rows = search.narrow.rows = rows
        if search.narrow.is_bf16 == search.exact.is_bf16:
            search.narrow.x, search.narrow.x_stride = search.exact.x, search.exact.x_stride
        search.peaks, search.places = peaks_R.data_ptr(), places_R.data_ptr()
        ready.calls += 1
        panels = self._kernels.tessera_likeliest(ctypes.addressof(search), torch.get_num_threads())
        if panels >= 0:
            return Likeliest(peaks_R, places_R, panels)
        ready.failures += 1
        if ready.calls >= _FEW_CALLS and ready.failures > _MOST_FAILURES * ready.calls:
            _log.info(
                "a copy of the head in %s does not tell the likeliest tokens from others, and is given up", self.kind.dtype
            )
            self._ready = None
        return None


def _norm(rows_BI: Tensor) -> Tensor:
    """Each row's length; squares of what is small enough would be zeros in fp32."""
    lengths_B: Tensor = torch.linalg.vector_norm(rows_BI, dim=1, dtype=torch.float64)
    return lengths_B


def _product_of(head: nn.Module) -> PanelsProduct | None:
    """What computes a head now, if it is a packed weight."""
    forward = head.__dict__.get("forward")
    matmul = forward.matmul if isinstance(forward, Product) else None
    return matmul if isinstance(matmul, PanelsProduct) else None

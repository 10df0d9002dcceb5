"""Linear layers as the CPU likes them: weights packed once, when they are loaded, the activation applied on the way out.

Three routes, the best one that the machine has: our own kernel (AVX-512 or AVX2: few rows at the speed of memory, many about as
fast as oneDNN), oneDNN's packed weights, and plain torch. A packed weight replaces the plain one: no rank holds both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from serve.model.recording import KINDS, Job, active
from serve.model.weight_memory import WeightMemory

# Shapes.  M rows, over all leading dimensions   I input features   O output features

Matmul = Callable[[Tensor], Tensor]
"""x [..., I] -> x @ weight.T [..., O], with bias and activation where the maker was given them."""


_PRODUCT: Final = KINDS.index("product")
_COMPRESSED_BITS: Final = 12


class Product:
    """The ``forward`` of a linear layer, or of experts. Whoever calls it may keep it: its weights are exchanged inside."""

    __slots__ = ("matmul",)

    def __init__(self, matmul: Callable[..., Tensor]) -> None:
        self.matmul = matmul

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.matmul(*inputs)


ACTIVATIONS: Final = ("none", "gelu", "gelu_tanh", "silu", "relu")
"""What can follow a product at once, in the order of ``Activation`` in kernels/linear.cpp."""


class Packer(Protocol):
    """(weight [O, I], bias [O] or None, one of ``ACTIVATIONS``) -> the product; the plain weight can be dropped afterwards."""

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: str = "none") -> Matmul: ...


class PlainRows(ctypes.Structure):
    """``PlainRows`` of kernels/parts.h: where the rows of a weight lie until they are packed, if they are not."""

    _fields_ = (("place", ctypes.c_void_p), ("stride", ctypes.c_int64), ("is_transposed", ctypes.c_int64))

    @classmethod
    def of(cls, weight_OI: Tensor) -> PlainRows:
        """The place of a weight whose rows or columns lie side by side in memory."""
        is_transposed = weight_OI.stride(1) != 1 and weight_OI.shape[1] > 1
        beside = weight_OI.shape[0] == 1 or weight_OI.stride(0) == 1
        assert not is_transposed or beside, "neither rows nor columns lie side by side"
        return cls(weight_OI.data_ptr(), weight_OI.stride(1 if is_transposed else 0), is_transposed)


class Panels:
    """A weight [O, I] as the kernel of ``kernels/linear.cpp`` reads it, which is filled by blocks of rows.

    It may be filled after its product computes, which reads plain rows until then and gives the same to the last bit.
    """

    ROWS: Final = 32
    """Outputs of a panel: blocks of rows begin at a multiple of it, and all but the last have a multiple of it."""

    packed: Tensor
    """What ``put`` fills."""

    bits: int
    """12 where what is packed is compressed, else 0."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        memory: WeightMemory,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        later: bool,
        compressed: bool = False,
    ) -> None:
        """
        Args:
            later: it gets its memory with ``read_from``.
            compressed: bf16 is packed in 12 bits a number, which hold all of it (kernels/compressed.h).
        """
        self.shape = shape
        self.dtype = dtype
        self.bits = _COMPRESSED_BITS if compressed else 0
        self._kernels = kernels
        self.beside: dict[int, Tensor] = {}
        """What panels that could not be compressed lie in as they are, by every panel of the block of rows they came in."""
        numbers = kernels.tessera_linear_packed_numbers(*shape)
        if compressed:
            numbers = -(-shape[0] // self.ROWS) * kernels.tessera_linear_compressed_bytes(shape[1]) // dtype.itemsize
        self._allocate = partial(memory.empty, (numbers,), dtype)
        if not later:
            self.packed = self._allocate()
        self.plain: PlainRows | None = None
        """What products look at for a place to read from; ``None`` where the weight is packed before there are any."""
        self._side_by_side = int(kernels.tessera_linear_panel_outputs(int(dtype == torch.bfloat16)))
        self._rows_OI: Tensor | None = None

    def put(self, begin: int, rows_RI: Tensor, threads: int | None = None) -> None:
        """Pack the rows from ``begin``. Any thread, and several at once for different rows, which no product reads meanwhile.

        Args:
            threads: that this call takes; as many as torch has without it.
        """
        count, inputs = rows_RI.shape
        plain_RI = rows_RI if 1 in (*rows_RI.stride(), *rows_RI.shape) else rows_RI.contiguous()
        lies = PlainRows.of(plain_RI)
        assert begin % self.ROWS == 0, "a block begins inside a panel"
        assert count % self.ROWS == 0 or begin + count == self.shape[0], "a block ends inside a panel"
        assert (rows_RI.dtype, inputs) == (self.dtype, self.shape[1]), "rows of another weight"
        several = threads or torch.get_num_threads()
        if self.bits:
            self._compress(several, lies, begin, count)
            return
        place = self.packed.data_ptr() + begin * inputs * self.packed.itemsize
        is_bf16 = int(self.dtype == torch.bfloat16)
        self._kernels.tessera_linear_pack(is_bf16, several, lies.place, lies.stride, lies.is_transposed, place, count, inputs)

    def _compress(self, threads: int, lies: PlainRows, begin: int, count: int) -> None:
        inputs = self.shape[1]
        place = self.packed.data_ptr() + begin // self.ROWS * self._kernels.tessera_linear_compressed_bytes(inputs)
        of = threads, lies.place, lies.stride, lies.is_transposed, place, count, inputs
        panels = range(begin // self.ROWS, -(-(begin + count) // self.ROWS))
        if left := self._kernels.tessera_linear_compress(*of, None):
            spare = torch.empty(left * self.ROWS * inputs, dtype=self.dtype)
            self._kernels.tessera_linear_compress(*of, spare.data_ptr())
            self.beside.update(dict.fromkeys(panels, spare))
        else:
            for panel in panels:
                self.beside.pop(panel, None)

    def unpacked(self, begin: int, end: int) -> Tensor:
        """The rows [begin, end) of what is packed, as they came; both are multiples of ``ROWS``, or ``end`` is the last."""
        assert begin % self.ROWS == 0, "rows begin inside a panel"
        inputs, width = self.shape[1], self._side_by_side
        together = 2 if self.dtype == torch.bfloat16 else 1
        first, last = begin // width, -(-end // width)
        if self.bits:
            packed = torch.empty((last - first) * width * inputs, dtype=self.dtype)
            place = self.packed.data_ptr() + first * self._kernels.tessera_linear_compressed_bytes(inputs)
            self._kernels.tessera_linear_decompress(place, last - first, inputs, packed.data_ptr())
        else:
            packed = self.packed[first * width * inputs : last * width * inputs]
        panels = packed.view(-1, inputs // together, width, together)
        return panels.transpose(1, 2).reshape(-1, inputs)[: end - begin]

    def read_from(self, rows_OI: Tensor) -> None:
        """Have products that are made from now on read these rows, until ``settle``. It is called before ``put``.

        Args:
            rows_OI: whose rows lie side by side, or whose columns do.
        """
        assert (rows_OI.shape, rows_OI.dtype) == (self.shape, self.dtype), "rows of another weight"
        self.packed = self._allocate()
        self._rows_OI, self.plain = rows_OI, PlainRows.of(rows_OI)

    @property
    def rows(self) -> Tensor | None:
        """The rows [O, I] that products read; ``None`` where the weight is packed."""
        return self._rows_OI

    def settle(self) -> None:
        """All rows are packed: no product that begins from now on reads the plain ones. One that has begun still may."""
        assert self.plain is not None, "products never read anything but what is packed"
        self.plain.place, self._rows_OI = None, None


_BY_CLASS: Final = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "BloomGelu": "gelu_tanh",
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "ReLU": "relu",
}


def activation_of(module: nn.Module) -> str:
    """The name in ``ACTIVATIONS`` of a module of transformers' ``ACT2FN``; "none" where it is another function."""
    return _BY_CLASS.get(type(module).__name__, "none")


def choose_packer(
    device: torch.device, dtype: torch.dtype, kernels: ctypes.CDLL | None, *, compressed: bool = False
) -> tuple[str, Packer | None]:
    """The fastest way to pack weights for this device and type, and its name in ``ModelFacts.linear``.

    Args:
        kernels: as ``load_cpu_kernels`` gives them; ``None`` where there are none.
        compressed: weights of bf16 are kept in 12 bits each where the kernels can, which changes no product.

    Returns:
        (name, packer); the packer is ``None`` where plain weights are as good.
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return "torch", None
    if kernels is not None and kernels.tessera_linear_supported(dtype == torch.bfloat16):
        packer = KernelPacker(kernels, compressed=compressed and dtype == torch.bfloat16)
        return "kernel-12bit" if packer.compresses else "kernel", packer
    return _choose_onednn(dtype)


def _choose_onednn(dtype: torch.dtype) -> tuple[str, Packer | None]:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return "torch", None
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "torch", None
    return "onednn", _pack_onednn


FUNCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "none": lambda x: x,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "silu": nn.functional.silu,
    "relu": torch.relu,
}
"""What the names of ``ACTIVATIONS`` mean, in plain torch."""


def plain(weight_OI: Tensor, bias_O: Tensor | None, activation: str = "none") -> Matmul:
    """The product without packing: every device and type."""
    activate = FUNCTIONS[activation]

    def matmul(x: Tensor) -> Tensor:
        return activate(nn.functional.linear(x, weight_OI, bias_O))

    return matmul


def _keep_plain(weight_OI: Tensor, bias_O: Tensor | None, activation: str = "none") -> Matmul:
    return plain(weight_OI.clone(), None if bias_O is None else bias_O.clone(), activation)


_ONEDNN_ACTIVATIONS: Final = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


def _pack_onednn(weight_OI: Tensor, bias_O: Tensor | None, activation: str = "none") -> Matmul:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
    # oneDNN's relu makes 0 of NaN, which would then never be reported.
    name, algorithm = _ONEDNN_ACTIVATIONS["none" if activation == "relu" else activation]

    def matmul(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias_O, name, [], algorithm)
        return out.relu_() if activation == "relu" else out

    return matmul


class KernelPacker:
    """The kernel of ``kernels/linear.cpp``. bf16 inputs come in pairs: a layer with an odd number goes another route."""

    def __init__(self, kernels: ctypes.CDLL, *, compressed: bool = False) -> None:
        """
        Args:
            compressed: weights of bf16 are packed in 12 bits each, on processors with AVX-512.
        """
        self._kernels = kernels
        self.compresses = compressed and bool(kernels.tessera_linear_compresses())
        """Whether weights of bf16 are."""
        self._memory, self._later = WeightMemory(), WeightMemory(large=True)
        flag, whole, place = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        kernels.tessera_linear_packed_numbers.argtypes = (whole, whole)
        kernels.tessera_linear_packed_numbers.restype = whole
        kernels.tessera_linear_panel_outputs.argtypes = (flag,)
        kernels.tessera_linear_pack.argtypes = (flag, flag, place, whole, flag, place, whole, whole)
        kernels.tessera_linear_pack.restype = None
        kernels.tessera_linear_compressed_bytes.argtypes = (whole,)
        kernels.tessera_linear_compressed_bytes.restype = whole
        kernels.tessera_linear_compress.argtypes = (flag, place, whole, flag, place, whole, whole, place)
        kernels.tessera_linear_compress.restype = whole
        kernels.tessera_linear_decompress.argtypes = (place, whole, whole, place)
        kernels.tessera_linear_decompress.restype = None
        kernels.tessera_linear.argtypes = (*(flag,) * 3, place, whole, whole, *(place,) * 3, flag, place, whole, whole)
        kernels.tessera_linear.restype = None

    def begin(self, shape: tuple[int, int], dtype: torch.dtype, *, later: bool = False) -> Panels | None:
        """Memory for a packed weight [O, I], to be filled by rows; ``None`` where it goes another route.

        Args:
            later: it is filled while the model serves, in large pages at once.
        """
        is_odd = dtype == torch.bfloat16 and shape[1] % 2
        memory = self._later if later else self._memory
        compressed = self.compresses and dtype == torch.bfloat16
        return None if is_odd else Panels(self._kernels, memory, shape, dtype, later=later, compressed=compressed)

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: str = "none") -> Matmul:
        """Pack a weight; see ``Packer``."""
        outputs, inputs = weight_OI.shape
        panels = self.begin((outputs, inputs), weight_OI.dtype)
        if panels is None:
            return (_choose_onednn(weight_OI.dtype)[1] or _keep_plain)(weight_OI, bias_O, activation)
        panels.put(0, weight_OI)
        return self.product(panels, bias_O, activation)

    def product(self, panels: Panels, bias_O: Tensor | None, activation: str = "none") -> PanelsProduct:
        """The product with a weight that is packed, or will be."""
        return PanelsProduct(self._kernels, panels, bias_O, activation)


class PanelsProduct:
    """``Matmul`` with a weight in panels."""

    __slots__ = ("_activation", "_bias", "_multiply", "_plain", "bias_O", "panels")

    def __init__(self, kernels: ctypes.CDLL, panels: Panels, bias_O: Tensor | None, activation: str) -> None:
        self.panels = panels
        self._multiply = kernels.tessera_linear
        self.bias_O, self._bias = bias_O, None if bias_O is None else bias_O.data_ptr()
        self._activation = ACTIVATIONS.index(activation)
        self._plain = None if panels.plain is None else ctypes.addressof(panels.plain)

    def __call__(self, x: Tensor) -> Tensor:
        panels = self.panels
        outputs, inputs = panels.shape
        assert x.dtype == panels.dtype, "the kernel sees addresses alone"
        rows_MI = x.reshape(-1, inputs)
        if rows_MI.stride(1) != 1:
            rows_MI = rows_MI.contiguous()
        out_MO = torch.empty(rows_MI.shape[0], outputs, dtype=panels.dtype)
        self._multiply(
            int(panels.dtype == torch.bfloat16),
            panels.bits,
            torch.get_num_threads(),
            rows_MI.data_ptr(),
            rows_MI.shape[0],
            rows_MI.stride(0),
            panels.packed.data_ptr(),
            self._plain,
            self._bias,
            self._activation,
            out_MO.data_ptr(),
            outputs,
            inputs,
        )
        if (recorder := active()) is not None:
            recorder.note(self.job(rows_MI, out_MO))
        return out_MO.view(*x.shape[:-1], outputs)

    def job(self, rows_MI: Tensor, out_MO: Tensor) -> Job:
        """The call as a value.

        Args:
            rows_MI: whose numbers lie side by side in each row.
            out_MO: contiguous.
        """
        panels = self.panels
        job = Job(_PRODUCT, int(panels.dtype == torch.bfloat16), rows_MI.data_ptr(), None, panels.packed.data_ptr())
        job.plain, job.bias, job.out, job.bits = self._plain, self._bias, out_MO.data_ptr(), panels.bits
        (job.width, job.inputs), job.rows = panels.shape, rows_MI.shape[0]
        job.x_stride, job.out_stride, job.activation = rows_MI.stride(0), job.width, self._activation
        return job

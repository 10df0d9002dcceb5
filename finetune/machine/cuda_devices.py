"""The GPUs that CUDA shows a process, asked of the driver's library: a program, too, which imports nothing of Tessera.

Its library is in every container that computes on a GPU, where ``nvidia-smi`` need not be. It obeys ``CUDA_VISIBLE_DEVICES``,
and tells the size of a slice (MIG), not that of the whole GPU. A process that asked it could no longer fork ranks that use it.
"""

from __future__ import annotations

import ctypes
import json
import sys

_TOTAL_SHARED_WITH_HOST = 18
"""``CU_DEVICE_ATTRIBUTE_INTEGRATED`` of cuda.h."""
_NAME_BYTES = 256


def found() -> list[tuple[str, int | None]]:
    """Name and bytes of each GPU in the order of CUDA's numbers; ``None`` bytes of one that shares the host's memory.

    Raises:
        OSError: there is no driver.
        RuntimeError: the driver found no device, or refuses.
    """
    driver, devices = _Driver(), list[tuple[str, int | None]]()
    for number in range(driver.count()):
        size, name = ctypes.c_size_t(), ctypes.create_string_buffer(_NAME_BYTES)
        driver.ask("cuDeviceGetName", name, _NAME_BYTES, driver.device(number))
        driver.ask("cuDeviceTotalMem_v2", ctypes.byref(size), driver.device(number))
        shared = driver.attribute(_TOTAL_SHARED_WITH_HOST, number)
        devices.append((name.value.decode(errors="replace"), None if shared else size.value))
    return devices


def attribute(which: int) -> list[int]:
    """An attribute, by its number in cuda.h, of each GPU in the order of CUDA's numbers.

    Raises:
        OSError: there is no driver.
        RuntimeError: the driver found no device, or refuses.
    """
    driver = _Driver()
    return [driver.attribute(which, number) for number in range(driver.count())]


class _Driver:
    """The driver's library, asked."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.ask("cuInit", 0)

    def ask(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise RuntimeError(f"{function}: CUDA error {code}")

    def count(self) -> int:
        count = ctypes.c_int()
        self.ask("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.ask("cuDeviceGet", ctypes.byref(device), number)
        return device

    def attribute(self, which: int, number: int) -> int:
        value = ctypes.c_int()
        self.ask("cuDeviceGetAttribute", ctypes.byref(value), which, self.device(number))
        return value.value


if __name__ == "__main__":
    try:
        print(json.dumps(found()))
    except (OSError, RuntimeError) as error:
        sys.exit(str(error))

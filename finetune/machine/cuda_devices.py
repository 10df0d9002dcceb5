"""The GPUs that CUDA shows a process, asked of the driver's library: a program of its own, which imports nothing of Tessera.

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
    driver = ctypes.CDLL("libcuda.so.1")

    def ask(function: str, *arguments: object) -> None:
        code = getattr(driver, function)(*arguments)
        if code:
            raise RuntimeError(f"{function}: CUDA error {code}")

    ask("cuInit", 0)
    count = ctypes.c_int()
    ask("cuDeviceGetCount", ctypes.byref(count))
    devices: list[tuple[str, int | None]] = []
    for number in range(count.value):
        device, size, shared = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int()
        name = ctypes.create_string_buffer(_NAME_BYTES)
        ask("cuDeviceGet", ctypes.byref(device), number)
        ask("cuDeviceGetName", name, _NAME_BYTES, device)
        ask("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        ask("cuDeviceGetAttribute", ctypes.byref(shared), _TOTAL_SHARED_WITH_HOST, device)
        devices.append((name.value.decode(errors="replace"), None if shared.value else size.value))
    return devices


if __name__ == "__main__":
    try:
        print(json.dumps(found()))
    except (OSError, RuntimeError) as error:
        sys.exit(str(error))

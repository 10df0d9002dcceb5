"""What DeepSpeed asks py-cpuinfo for each optimizer that it makes on the host, asked once for all that is forked from here.

The library answers by a process of its own, a second of computing; all processes of a machine have the same processor.
"""

from __future__ import annotations

import functools

import cpuinfo  # type: ignore[import-untyped]  # py-cpuinfo has no types

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()

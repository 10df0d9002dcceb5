"""What several tests of ranks in this process want around them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.kernels import cpu_kernels


@pytest.fixture
def one_thread_of_kernels() -> Iterator[None]:
    """Within, there are kernels, which compute in one thread, and no gradients."""
    cpu_kernels()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield

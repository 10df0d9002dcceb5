"""What the parts of a model on tensor-parallel ranks are called in its configuration."""

from __future__ import annotations

import pytest

from checkpoint.dtypes import TORCH_DTYPES
from checkpoint.dtypes import dtype_name as torch_name
from checkpoint.layout import DTYPE_BYTES, Stored
from checkpoint.readers.ranks import dtype_name


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_configuration_has_torchs_name_of_a_dtype_that_models_are_of(dtype: str) -> None:
    kept = TORCH_DTYPES[dtype]
    assert dtype_name(Stored(dtype, (1,), ())) == (torch_name(kept) if kept.is_floating_point else None)

"""Files that make the YAML reader itself stumble are configuration errors, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.errors import ConfigError
from serve.options import read_yaml


@pytest.mark.parametrize(
    "text",
    ["rpc: 2021-13-45\n", "rpc: {drain_seconds: 1" + "0" * 400 + "}\n", "a: " + "[" * 3000],
    ids=["an impossible date", "a number beyond all floats", "bottomless nesting"],
)
def test_what_yaml_stumbles_over(text: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_yaml(str(file))
    assert "server.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)

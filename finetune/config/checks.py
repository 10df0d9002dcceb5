"""How a broken rule of the configuration is said: key, value, rule."""

from __future__ import annotations

from finetune.errors import ConfigError


def require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; it must {rule}")

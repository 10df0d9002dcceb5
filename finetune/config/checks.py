"""How a broken rule of the configuration is said: key, value, rule."""

from __future__ import annotations

from finetune.errors import ConfigError


class BrokenRule(ConfigError, ValueError):
    """A value breaks the rule of its key. A ``ValueError``, so that msgspec says which entry of a list it was."""


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Refuse the value of the key ``name`` unless ``condition`` holds.

    Raises:
        ConfigError: ``<name> is <value>; it must <rule>``.
    """
    if not condition:
        raise BrokenRule(f"{name} is {value!r}; it must {rule}")

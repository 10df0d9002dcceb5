"""How a value of the configuration is refused: by its name and the rule that it breaks."""

from __future__ import annotations

import math

from serve.errors import ConfigError


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Refuse the value of an option unless it keeps a rule.

    Raises:
        ConfigError: it does not; says that ``name`` must ``rule``.
    """
    if not condition:
        raise ConfigError(f"{name} is {value!r}; it must {rule}")


def require_positive(name: str, value: float) -> None:
    """Refuse what is not a finite number above 0.

    Raises:
        ConfigError: it is not.
    """
    require(math.isfinite(value) and value > 0, name, value, "be greater than 0")

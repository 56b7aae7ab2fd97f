"""How a rule that an option breaks is told: the option, the rule and the value."""

from __future__ import annotations

import json
from typing import Any

from monarch_titan.config.errors import ConfigError


def require(holds: bool, option: str, rule: str, value: Any) -> None:
    """Raise ConfigError unless a rule holds: ``option must rule, got value.``"""
    if not holds:
        raise ConfigError(f"{option} must {rule}, got {json.dumps(value, ensure_ascii=False, default=str)}.")


def at_least(lowest: float, section: Any, path: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        require(value >= lowest, f"{path}.{name}", f"be at least {lowest}", value)


def positive(section: Any, path: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        require(value > 0, f"{path}.{name}", "be greater than 0", value)

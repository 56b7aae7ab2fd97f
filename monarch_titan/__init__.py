"""Monarch as the orchestration layer of TorchTitan.

>>> import monarch_titan as mt
>>> mt.train(mt.load("configs/local.toml", "training.steps=100"))

Importing the package loads neither torch nor monarch; the names below load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_titan.config.errors import ConfigError
    from monarch_titan.config.loader import load
    from monarch_titan.control.controller import RunFailed
    from monarch_titan.run import train

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "monarch_titan.config.errors",
    "RunFailed": "monarch_titan.control.controller",
    "load": "monarch_titan.config.loader",
    "train": "monarch_titan.run",
}

__all__ = ["ConfigError", "RunFailed", "__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)

"""What became of every key of a file, and where a message about an option belongs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from monarch_titan.config.errors import ConfigError
from monarch_titan.config.overlay import Given

ASKS_NOTHING = "it asks for nothing"
"""The reason why a value is not applied that would change nothing if it were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of one key."""

    old: str
    """As the user wrote it; empty for a default."""

    new: str
    """The path in 0.3.0's configuration; empty if there is none."""

    value: Any
    status: Literal["applied", "default", "not applied", "refused"]
    reason: str = ""
    where: str = ""

    @classmethod
    def applied(cls, old: str, new: str, item: Given, reason: str = "") -> Row:
        return cls(old=old, new=new, value=item.plain(), status="applied", reason=reason, where=item.where)


def leaves(given: Given, prefix: str = "") -> Iterator[tuple[str, Given]]:
    """Every key that holds a value or an empty table, by its dotted path."""
    for name, item in given.value.items():
        path = f"{prefix}{name}"
        if isinstance(item.value, dict) and item.value:
            yield from leaves(item, f"{path}.")
        else:
            yield path, item


@contextlib.contextmanager
def located(rows: Sequence[Row], source: str) -> Generator[None]:
    """Put the file and the line of the option that a ConfigError is about before its message.

    Whether options fit together is found when all are applied, and by then nobody knows where they came from.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(place(str(error), rows, source)) from error


def place(message: str, rows: Sequence[Row], source: str) -> str:
    """A message with the file and the line of the option that it is about before it."""
    for option in re.findall(r"[\w-]+(?:\.[\w-]+)+|\w+(?= must)", message):
        for row in reversed(rows):
            if row.where and row.new and (option == row.new or option.startswith(f"{row.new}.")):
                written = f"{row.where}: {message}"
                return written if row.old == row.new else written.replace(option, f"{row.old} ({option} now)", 1)
    return f"{source}: {message}"

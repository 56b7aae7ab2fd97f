"""What a user gave, before anything knows what it means: TOML files, their bases and the command line.

Precedence: the files that ``extends`` names, in their order < the file itself < the command line.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli

from monarch_titan.config.errors import ConfigError
from monarch_titan.config.overlay import Given, merge

COMMAND_LINE = "command line"
EXTENDS = "extends"


def gather(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Given:
    """A file over the files that it extends, with ``key=value`` arguments laid on top and the environment read.

    Raises ConfigError, whose message names the file and the line or the command line.
    """
    return with_overrides(_extended(Path(path), ()), overrides)


def with_overrides(given: Given, overrides: Iterable[str]) -> Given:
    """``given`` with ``key=value`` arguments laid over it in turn and the environment read."""
    for override in overrides:
        given = merge(given, parse_override(override))
    return _with_environment(given)


def _extended(path: Path, above: tuple[Path, ...]) -> Given:
    """A file over its bases; ``above`` are the files that led here."""
    given = read(path)
    bases = given.value.pop(EXTENDS, None)
    if bases is None:
        return given
    items = bases.value if isinstance(bases.value, list) else [bases]
    if not all(isinstance(item.value, str) for item in items):
        raise ConfigError(f"{bases.where}: extends must be a file or a list of files, got {bases.plain()!r}.")
    above = (*above, path.resolve())
    under: Given | None = None
    for item in items:
        base = path.parent / item.value
        if base.resolve() in above:
            chain = " -> ".join(f"{file.name}" for file in (*above[above.index(base.resolve()) :], base))
            raise ConfigError(f"{item.where}: extends must not lead back to a file that it came from, got {chain}.")
        if not base.is_file():
            raise ConfigError(f"{item.where}: extends must name a file next to this one, got {item.value!r}.")
        layer = _extended(base, above)
        under = layer if under is None else merge(under, layer)
    if under is None:
        return given
    return dataclasses.replace(merge(under, given), source=given.source)


# Files ---------------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Given:
    """The content of one TOML file, each value with the line it stands on."""
    source = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{source}: cannot read this file: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: this file is not UTF-8 text.") from error
    return parse(text, source)


def parse(text: str, source: str) -> Given:
    """TOML text as a tree that remembers where each value stands."""
    try:
        content = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{source}:{error.lineno}:{error.colno}: not TOML: {error.msg}.") from error
    return give(content, source, _lines(text))


def give(content: Any, source: str, lines: dict[str, int] | None = None) -> Given:
    """Plain tables, lists and values as ``Given``; ``lines`` holds the line of every dotted path that has one."""

    def walk(value: Any, option: str, line: int | None) -> Given:
        line = (lines or {}).get(option, line)  # an item of an inline table has the line of the table
        if isinstance(value, dict):
            value = {
                str(key): walk(item, f"{option}.{key}" if option else str(key), line) for key, item in value.items()
            }
        elif isinstance(value, list):
            value = [walk(item, f"{option}.{index}", line) for index, item in enumerate(value)]
        return Given(value=value, source=source, line=line)

    return walk(content, "", None)


def _lines(text: str) -> dict[str, int]:
    """The line of every table and key, by a plain scan: enough for messages, and wrong only inside long strings."""
    lines: dict[str, int] = {}
    table, counts = "", Counter[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[(\[?)\s*([\w.-]+)\s*\]", line):
            name = header[2]
            for array in counts:  # a table inside an item of an array of tables
                name = re.sub(rf"^{re.escape(array)}\.", f"{array}.{counts[array] - 1}.", name)
            if header[1]:
                counts[name] += 1
                name = f"{name}.{counts[name] - 1}"
            lines.setdefault(name, number)
            table = f"{name}."
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(f"{table}{key[1]}", number)
    return lines


# The command line and the environment --------------------------------------------------------------------------------


def parse_override(override: str) -> Given:
    """One ``key=value`` of a command line as the table that it stands for."""
    key, equals, text = override.partition("=")
    wrong = f"{COMMAND_LINE}: {override!r}"
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(f"{wrong} is not of the form key=value, as in training.steps=100.")
    given = dataclasses.replace(give(_parse_value(key, text, wrong), COMMAND_LINE), text=text)
    for name in reversed(key.split(".")):
        given = Given(value={name: given}, source=COMMAND_LINE)
    return given


def _parse_value(key: str, text: str, wrong: str) -> Any:
    """A value by Hydra's grammar for overrides."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException as error:
        hint = f"""quote a text with special characters, as in '{key}="{text}"'"""
        raise ConfigError(f"{wrong} cannot be read ({error}); {hint}.") from error
    if parsed.type is not OverrideType.CHANGE or parsed.is_sweep_override():
        raise ConfigError(f"{wrong} is a sweep, and this is one run; for a list write {key}=[a,b].")
    return parsed.value()


def _with_environment(given: Given) -> Given:
    """``given`` with every ``${oc.env:NAME}`` read; a value that is nothing else takes the type of its text."""
    match given.value:
        case dict():
            return dataclasses.replace(given, value={key: _with_environment(item) for key, item in given.value.items()})
        case list():
            return dataclasses.replace(given, value=[_with_environment(item) for item in given.value])
        case str() if "${" in given.value:
            text = re.sub(r"\$\{([^}]*)\}", lambda found: _variable(found[1], given), given.value)
            whole = re.fullmatch(r"\$\{[^}]*\}", given.value)
            value = _parse_value("value", text, f"{given.where}: {text!r}") if whole and text else text
            typed = give(value, given.source).value if isinstance(value, list | dict) else value
            return dataclasses.replace(given, value=typed, text=text)
    return given


def _variable(reference: str, given: Given) -> str:
    """The text behind ``oc.env:NAME`` or ``oc.env:NAME,default``."""
    kind, _, name = reference.partition(":")
    name, comma, default = name.partition(",")
    if kind.strip() != "oc.env" or not name.strip():
        raise ConfigError(
            f"{given.where}: the one reference is ${{oc.env:NAME}}, an environment variable; got ${{{reference}}}."
        )
    value = os.environ.get(name.strip(), default.strip() if comma else None)
    if value is None:
        raise ConfigError(f"{given.where}: ${{oc.env:{name.strip()}}}: this environment variable is not set.")
    return value

"""Write a file of the TOML era again in TorchTitan 0.3.0's names, with its comments and its order.

The new file says everything that the old one says or meant by silence, so that both give the same configuration; that
is tried before anything is written.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import AoT, Comment, Item, Key, Table, Whitespace

from monarch_titan.config import era
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.loader import load_given
from monarch_titan.config.overlay import Given
from monarch_titan.config.rows import Row
from monarch_titan.config.sources import gather, parse, with_overrides

BASE = "torchtitan"


@dataclass(kw_only=True, slots=True)
class _Section:
    """One table of the new file, as lines."""

    lines: list[str] = field(default_factory=list)
    said: set[str] = field(default_factory=set)
    """Keys that are there already."""

    def add(self, key: str, value: str, remark: str = "") -> None:
        if key not in self.said:
            self.said.add(key)
            self.lines.append(f"{key} = {value}" + (f"  # {remark}" if remark else ""))


def convert(path: Path) -> str:
    """The text of the new file for an old one.

    Raises ConfigError if the file is wrong, is in 0.3.0's names already, or means something that they cannot say.
    """
    given = gather(path)
    if not era.is_era(given):
        raise ConfigError(f"{path}: this file is in TorchTitan 0.3.0's names already.")
    translation = era.translate(given)
    translation.raise_refused()
    text = _Converter(tomlkit.parse(path.read_text()), translation).text()
    before = load_given(given).config
    after = load_given(with_overrides(parse(text, f"{path} converted"), ())).config
    if _comparable(before) != _comparable(after):
        raise ConfigError(f"{path}: what it means cannot be said in TorchTitan 0.3.0's names.")
    return text


def _comparable(config: Any) -> str:
    """All of a configuration, but for the addresses of functions, which each call makes anew."""
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(config.to_dict(), sort_keys=True, default=repr))


class _Converter:
    def __init__(self, document: tomlkit.TOMLDocument, translation: era.Translation) -> None:
        self._document = document
        self._native = translation.native
        self._rows = defaultdict(list)
        for row in translation.rows:
            self._rows[row.old].append(row)
        # Dictionaries keep the order in which sections come first.
        self._sections: dict[str, _Section] = defaultdict(_Section)
        self._sections[""], self._sections[BASE]

    def text(self) -> str:
        self._walk(self._document, "")
        for rows in self._rows.values():  # what the files that it extends say, and the era's defaults
            for row in rows:
                if row.new:
                    self._write(row, None, "")
        blocks = []
        for name, section in self._sections.items():
            if section.lines:
                blocks.append("\n".join([f"[{name}]", *section.lines] if name else section.lines))
        return "\n\n".join(blocks).rstrip() + "\n"

    def _walk(self, table: Any, prefix: str) -> None:
        """One table of the old file, in its order, comments with the key that follows them."""
        above: list[str] = []
        home = ""
        for key, item in _body(table):
            if isinstance(item, Comment):
                above.append(item.as_string().strip())
            elif isinstance(item, Whitespace) or key is None:
                continue
            elif isinstance(item, Table):
                self._comments(home, above)
                self._walk(item, f"{prefix}{key.key}.")
            else:
                home = self._key(f"{prefix}{key.key}", item, above, home)
        self._comments(home, above)

    def _key(self, old: str, item: Item, above: list[str], home: str) -> str:
        """Write one key of the old file; returns the section that it went to."""
        rows = self._rows.get(old, [])
        for row in rows:
            if not row.new:
                self._comments(home, above)
                self._sections[home].lines.append(f"# {old} = {item.as_string()}: {row.reason}")
                continue
            home = _split(row.new)[0]
            self._comments(home, above)
            self._write(row, item, item.trivia.comment.lstrip("# ").strip())
        return home

    def _comments(self, home: str, above: list[str]) -> None:
        self._sections[home].lines.extend(above)
        above.clear()

    def _write(self, row: Row, item: Item | None, remark: str) -> None:
        path, value = row.new, row.value
        if listed := re.fullmatch(r"(.+)\.\d+", path):  # one item of a list, such as betas: the whole list is said
            path = listed[1]
            value, item = _at(self._native, path), None
        section, key = _split(path)
        if item is not None and _unchanged(item, value):
            self._sections[section].add(key, item.as_string(), remark)
        else:
            self._sections[section].add(key, _inline(value), remark or row.reason)


def _body(table: Any) -> list[tuple[Key | None, Item]]:
    """Keys, comments and blank lines of a table in their order."""
    return table.body if isinstance(table, tomlkit.TOMLDocument) else table.value.body


def _split(path: str) -> tuple[str, str]:
    section, _, key = path.rpartition(".")
    return section, key


def _unchanged(item: Item, value: Any) -> bool:
    """Whether the old text says the new value; one with a variable of the environment is kept as it is."""
    if isinstance(item, AoT):
        return False  # its text is tables of its own
    return item.unwrap() == value or "${" in item.as_string()


def _inline(value: Any) -> str:
    """A value in one line of TOML."""
    match value:
        case list():
            return f"[{', '.join(map(_inline, value))}]"
        case dict():
            return f"{{{', '.join(f'{json.dumps(key)} = {_inline(item)}' for key, item in value.items())}}}"
    return tomlkit.item("null" if value is None else value).as_string()


def _at(given: Given, path: str) -> Any:
    for name in path.split("."):
        given = given.value[name] if isinstance(given.value, dict) else given.value[int(name)]
    return given.plain()

"""Lay what a user gave over a tree of dataclasses, checking every name and every type on the way.

TOML has no null, so the string ``"null"`` means None wherever None is allowed. Tables are laid over key by key, lists
replace what was there; a table over a list, with indices for keys, changes single items of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union

from monarch_titan.config.errors import ConfigError

T = TypeVar("T")

DERIVED = {
    "fault_tolerance.replica_id": "it is the replica's number, from 0",
    "fault_tolerance.group_size": "it is the number of replicas",
}
"""Keys of TorchTitan's TorchFT experiment that the controller fills in."""

SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A value as the user gave it, and where."""

    value: Any
    """A scalar, a ``list[Given]`` or, for a table, a ``dict[str, Given]``."""

    source: str
    """The file, or ``command line``."""

    line: int | None = None
    """In the file, where known."""

    text: str | None = None
    """What was typed on the command line, so that ``dump_folder=2024`` is a name and not a number."""

    said: str = ""
    """The option's name as the user wrote it, where it has another one now."""

    @property
    def where(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def plain(self) -> Any:
        """The value without its origin; ``"null"`` is None."""
        match self.value:
            case dict():
                return {key: item.plain() for key, item in self.value.items()}
            case list():
                return [item.plain() for item in self.value]
        return None if self.value == "null" else self.value

    def sources(self) -> list[str]:
        """Where this and everything in it came from, each once."""
        items = self.value.values() if isinstance(self.value, dict) else self.value
        inner = [source for item in items for source in item.sources()] if isinstance(self.value, dict | list) else []
        return list(dict.fromkeys(inner)) or [self.source]


def merge(under: Given, over: Given) -> Given:
    """``under`` with ``over`` laid on it."""
    if not isinstance(over.value, dict) or not isinstance(under.value, dict | list):
        return over
    if isinstance(under.value, dict):
        value = dict(under.value)
        for key, item in over.value.items():
            value[key] = merge(value[key], item) if key in value else item
        return dataclasses.replace(under, value=value)
    indexed = {str(index): item for index, item in enumerate(under.value)}
    merged = merge(dataclasses.replace(under, value=indexed), over)
    if added := [key for key in merged.value if key not in indexed]:
        raise ConfigError(f"{over.where}: there is no item {added[0]!r} in a list of {len(indexed)}.")
    return dataclasses.replace(under, value=list(merged.value.values()))


def lay(config: T, given: Given, option: str = "") -> T:
    """A copy of a dataclass with a table laid over it.

    Args:
        config: the dataclass; neither it nor what it holds is changed.
        given: the table.
        option: the path of ``config`` itself, for messages.

    Raises ConfigError for a key that is no field, a value that is not of the field's type, and a ValueError or
    AssertionError of a dataclass's own ``__post_init__``, which runs again for every dataclass that is laid over.
    """
    hints = _hints(type(config))
    changes = {}
    for name, item in given.value.items():
        path = f"{option}.{name}" if option else name
        if name not in _names(config):
            raise ConfigError(f"{item.where}: {_unknown(config, name, option)}")
        old = getattr(config, name)
        changes[name] = _alike(_convert(item, hints[name], old, path), old)
    return _rebuild(functools.partial(dataclasses.replace, config), changes, given, option)


def expressible(hint: Any) -> bool:
    """Whether TOML can hold values of a type; it cannot hold code, such as a callable or the model."""
    for kind in _kinds(hint)[0]:
        if kind is Any or kind in SCALARS or typing.get_origin(kind) in (Literal, list, tuple, dict):
            return True
        if dataclasses.is_dataclass(kind) and all(expressible(_hints(kind)[name]) for name in _needed(kind)):
            return True
    return False


def _rebuild(make: typing.Callable[..., T], values: dict[str, Any], given: Given, option: str) -> T:
    try:
        return make(**values)
    except (ValueError, AssertionError) as error:
        section = f"{option}: " if option else ""
        raise ConfigError(f"{' and '.join(given.sources())}: {section}{error}") from error


def _convert(given: Given, hint: Any, current: Any, option: str) -> Any:
    """The value for a field of type ``hint`` that holds ``current``."""
    if _kinds(hint)[1] and given.value in (None, "null"):
        return None
    if not expressible(hint):
        raise ConfigError(f"{given.where}: {option} is code and cannot be set here; it comes from torchtitan.config.")
    match given.value:
        case dict():
            return _table(given, hint, current, option)
        case list():
            return _list(given, hint, option)
    return _scalar(given, hint, option)


def _table(given: Given, hint: Any, current: Any, option: str) -> Any:
    kinds, _ = _kinds(hint)
    # The value that is there says which of several dataclasses is meant: fields are typed with a base class.
    if dataclasses.is_dataclass(current):
        return lay(current, given, option)
    classes = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if len(classes) == 1:
        return _create(classes[0], given, option)
    for kind in kinds:
        if kind is Any:
            return given.plain()
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is dict:
            result = dict(current or {})
            for key, item in given.value.items():
                result[key] = _convert(item, arguments[1], result.get(key), f"{option}.{key}")
            return result
        if origin is list and isinstance(current, list):
            return _items_of(given, arguments[0], current, option)
    raise _wrong(given, hint, option)


def _items_of(given: Given, kind: Any, current: list[Any], option: str) -> list[Any]:
    """``current`` with the items that a table names by index laid over."""
    result = list(current)
    for key, item in given.value.items():
        if not key.isdecimal() or int(key) >= len(current):
            raise ConfigError(f"{item.where}: {option} has {len(current)} item(s), counted from 0; got {key!r}.")
        result[int(key)] = _convert(item, kind, current[int(key)], f"{option}.{key}")
    return result


def _create(cls: type[T], given: Given, option: str) -> T:
    """A new dataclass from a table that must hold every field without a default."""
    if missing := [name for name in _needed(cls) if name not in given.value]:
        raise ConfigError(f"{given.where}: {option} needs {' and '.join(missing)}.")
    for name, item in given.value.items():
        if name not in _names(cls):
            raise ConfigError(f"{item.where}: {_unknown(cls, name, option)}")
    hints = _hints(cls)
    values = {name: _convert(item, hints[name], None, f"{option}.{name}") for name, item in given.value.items()}
    return _rebuild(cls, values, given, option)


def _list(given: Given, hint: Any, option: str) -> Any:
    for kind in _kinds(hint)[0]:
        if kind is Any:
            return given.plain()
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is tuple and len(arguments) != len(given.value):
            continue
        if origin in (list, tuple):
            each = arguments * len(given.value) if origin is list else arguments
            pairs = enumerate(zip(given.value, each, strict=True))
            return origin(_convert(item, item_hint, None, f"{option}.{index}") for index, (item, item_hint) in pairs)
    raise _wrong(given, hint, option)


def _scalar(given: Given, hint: Any, option: str) -> Any:
    value, (kinds, _) = given.value, _kinds(hint)
    for kind in kinds:
        if kind is Any:
            return given.plain()
        if type(value) is kind:  # bool is a subclass of int and must not pass for one
            return value
        if typing.get_origin(kind) is Literal and any(value == choice for choice in typing.get_args(kind)):
            return value
    if type(value) is int and float in kinds:
        return float(value)
    if given.text is not None and str in kinds:
        return given.text
    raise _wrong(given, hint, option)


def _alike(new: Any, old: Any) -> Any:
    """``new`` with tuples where ``old`` has some: TOML has lists only, and ``betas`` shall stay what it was."""
    match new, old:
        case list(), tuple():
            return tuple(new)
        case list(), list():
            return [_alike(item, old[i]) if i < len(old) else item for i, item in enumerate(new)]
        case dict(), dict():
            return {key: _alike(item, old.get(key)) for key, item in new.items()}
    if dataclasses.is_dataclass(new) and type(new) is type(old) and new is not old:
        names = _names(new)
        return dataclasses.replace(new, **{name: _alike(getattr(new, name), getattr(old, name)) for name in names})
    return new


def _wrong(given: Given, hint: Any, option: str) -> ConfigError:
    shown = textwrap.shorten(json.dumps(given.plain(), ensure_ascii=False, default=str), 80, placeholder=" ...")
    option = f"{given.said} ({option} now)" if given.said else option
    return ConfigError(f"{given.where}: {option} must be {_rule(hint)}, got {shown}.")


def _rule(hint: Any) -> str:
    """What a type asks for, in words."""
    kinds, optional = _kinds(hint)
    if float in kinds:
        kinds = [kind for kind in kinds if kind is not int]
    rules = list(dict.fromkeys(map(_rule_of_kind, kinds)))
    return " or ".join(rules + ['"null"'] * optional)


def _rule_of_kind(kind: Any) -> str:
    if kind in SCALARS:
        return SCALARS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        choices = [json.dumps(choice) for choice in arguments]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin is list:
        return f"a list whose items are each {_rule(arguments[0])}"
    return f"a list of {len(arguments)} items" if origin is tuple else "a table"


def _kinds(hint: Any) -> tuple[list[Any], bool]:
    """The members of a type that is a union, or the type itself; and whether None is one of them."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind for kind in members]
    return [kind for kind in kinds if kind is not NoneType], NoneType in kinds


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _names(config: Any) -> list[str]:
    """The fields of a dataclass or its instance that a user may set."""
    return [f.name for f in dataclasses.fields(config) if f.init and not f.name.startswith("_")]


def _needed(cls: type) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]


def _unknown(config: Any, name: str, option: str) -> str:
    """The message about a key that is no field, with the nearest that is one."""
    prefix = f"{option}." if option else ""
    if reason := DERIVED.get(prefix + name):
        return f"{prefix}{name} is derived by the controller ({reason}) and cannot be set; use monarch.num_replicas."
    near = difflib.get_close_matches(name, _names(config), n=1)
    # Else the right name in the wrong table.
    near = near or [path for path in paths(config) if path.rpartition(".")[2] == name]
    hint = f"did you mean {prefix}{near[0]}?" if near else f"there are: {', '.join(_names(config)) or 'none'}."
    return f"unknown option {prefix}{name}; {hint}"


def paths(config: Any) -> Iterator[str]:
    """All options below a dataclass, a list or a dictionary, by their dotted paths."""
    if dataclasses.is_dataclass(config):
        items = {name: getattr(config, name, None) for name in _names(config)}
    elif isinstance(config, list):
        items = {str(index): item for index, item in enumerate(config)}
    else:
        items = config if isinstance(config, dict) else {}
    for name, value in items.items():
        yield name
        yield from (f"{name}.{path}" for path in paths(value))

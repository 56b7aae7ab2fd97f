"""The resolved configuration as a TOML file that trains the same run again."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import tomlkit

from monarch_titan.config.base import base_config, checkpointing_modes, choose_classes
from monarch_titan.config.overlay import expressible

NO_BASE = "Made in Python: to train this file, name the configuration function that it started from in [torchtitan]."


def to_toml(config: Any) -> str:
    """``config.toml`` of a run: everything that TOML can say about a ``MonarchTrainer.Config``.

    :func:`monarch_titan.config.loader.load` reads it back to an equal configuration. Code, such as the model, is what
    ``[torchtitan]`` names. What was exchanged for another class in Python cannot be said; a comment names it.
    """
    chosen = config.torchtitan
    base = base_config(chosen) if chosen.config or chosen.flavor else None
    mode = _checkpointing_mode(config)
    if base is not None:
        validates = getattr(config.validator, "dataloader", None)
        named = {"hf_assets_path": config.hf_assets_path, "dataloader": {"dataset": config.dataloader.dataset}}
        named |= {"activation_checkpoint": {"mode": mode}}
        named |= {"validator": {"dataloader": {"dataset": getattr(validates, "dataset", None)}}}
        choose_classes(base, named)
    exchanged: list[str] = []
    if base is not None and _model(config) != _model(base):
        exchanged.append("model_spec")
    content = _table(config, base, "", exchanged)
    if mode is not None and not isinstance(content.get("activation_checkpoint"), str):
        content["activation_checkpoint"] = {"mode": mode} | content.get("activation_checkpoint", {})
    document = tomlkit.document()
    if base is None:
        document.add(tomlkit.comment(NO_BASE))
    for option in exchanged:
        document.add(tomlkit.comment(f"{option} was exchanged in Python and is not what [torchtitan] makes it."))
    # [torchtitan] comes first, but plain options of the top level must stand before all tables.
    for name in sorted(content, key=lambda name: (_is_table(content[name]), name != "torchtitan")):
        document.add(name, tomlkit.item(content[name]))
    return tomlkit.dumps(document)


def _checkpointing_mode(config: Any) -> str | None:
    """The name of the policy of activation checkpointing; None for one that has no name of ours."""
    kinds = {kind: name for name, kind in checkpointing_modes().items()}
    return kinds.get(type(config.activation_checkpoint))


def _model(config: Any) -> tuple[str, str] | None:
    return config.model_spec and (config.model_spec.name, config.model_spec.flavor)


def _table(config: Any, base: Any, option: str, exchanged: list[str]) -> dict[str, Any]:
    """A dataclass as a table, tables last as TOML wants it; ``base`` is what is there when nothing is said."""
    hints = typing.get_type_hints(type(config))
    table = {}
    for f in dataclasses.fields(config):
        if f.name.startswith("_") or not expressible(hints[f.name]):
            continue
        path = f"{option}.{f.name}" if option else f.name
        value, old = getattr(config, f.name), getattr(base, f.name, None)
        if dataclasses.is_dataclass(value):
            if base is not None and type(value) is not type(old):
                exchanged.append(path)
            value = _table(value, old, path, exchanged)
        if value == {} or (value is None and old is None):
            continue  # nothing to say
        table[f.name] = _value(value)
    return dict(sorted(table.items(), key=lambda item: _is_table(item[1])))


def _value(value: Any) -> Any:
    """A field's value in TOML's types: None is the string "null", tuples are lists."""
    if dataclasses.is_dataclass(value):
        return {f.name: _value(getattr(value, f.name)) for f in dataclasses.fields(value) if not f.name.startswith("_")}
    if isinstance(value, dict):
        return {str(key): _value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    return "null" if value is None else value


def _is_table(value: Any) -> int:
    """0 for a value, 1 for an array of tables, 2 for a table: the order that TOML needs."""
    if isinstance(value, list):
        return int(bool(value) and all(isinstance(item, dict) for item in value))
    return 2 * isinstance(value, dict)

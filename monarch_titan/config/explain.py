"""What ``monarch-titan validate`` says: every key as applied, not applied or refused, then whether it all fits."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from monarch_titan.config import era
from monarch_titan.config.checks import check, check_here
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.loader import Loaded, build, load_given
from monarch_titan.config.overlay import Given
from monarch_titan.config.rows import Row, leaves, located, place
from monarch_titan.config.scale import Scale, measure, render

if TYPE_CHECKING:
    from rich.console import Console

    from monarch_titan.training.trainer import MonarchTrainer

STYLES = {"applied": "green", "default": "dim", "not applied": "yellow", "refused": "bold red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Everything that is to be said about what a user gave."""

    dialect: str
    config: MonarchTrainer.Config | None
    """None if a key was refused."""

    rows: list[Row]
    errors: list[str]
    """What makes the run impossible, a line each."""

    notes: list[str]
    """What was applied and may not do what it seems to."""

    scale: Scale | None
    """The job at its full size; None if it cannot be built, or is no language model."""

    lacks: str
    """What this machine lacks to train it; empty if nothing."""


def examine(given: Given) -> Examination:
    """Apply what was given key by key; unlike ``load`` it goes on after the first mistake."""
    dialect, rows, errors = "TorchTitan 0.3", [], []
    loaded: Loaded | None = None
    native = given
    try:
        if era.is_era(given):
            dialect = "TOML era (TorchTitan 0.1 to 0.2)"
            translation = era.translate(given)
            native, rows = translation.native, translation.rows
        else:
            rows = [Row.applied(key, key, item) for key, item in leaves(given)]
        loaded = load_given(given)
    except ConfigError as error:
        rows = _with_refused(rows, native)
        refused = [row for row in rows if row.status == "refused"]
        errors = [f"{row.where}: {row.reason}" for row in refused] or [str(error)]
    if loaded is None:
        none = {"config": None, "notes": [], "scale": None, "lacks": ""}
        return Examination(dialect=dialect, rows=rows, errors=errors, **none)
    config, notes = loaded.config, loaded.notes
    scale, errors = _measured(config, rows, given.source)
    lacks = "" if errors else _missing(config)
    return Examination(dialect=dialect, config=config, rows=rows, errors=errors, notes=notes, scale=scale, lacks=lacks)


def _with_refused(rows: list[Row], native: Given) -> list[Row]:
    """The rows, with those refused that cannot be applied by themselves to what ``[torchtitan]`` names."""
    values = dict(leaves(native))
    chosen = {name: item for name, item in native.value.items() if name == "torchtitan"}
    if _reason(dataclasses.replace(native, value=chosen)):
        return rows  # there is nothing to apply them to
    result = []
    for row in rows:
        alone, reason = values.get(row.new), ""
        if row.status == "applied" and alone is not None and not row.new.startswith("torchtitan."):
            for name in reversed(row.new.split(".")):
                alone = Given(value={name: alone}, source=alone.source, line=alone.line)
            reason = _reason(dataclasses.replace(native, value=chosen | alone.value)).removeprefix(f"{row.where}: ")
        result.append(dataclasses.replace(row, status="refused", reason=reason) if reason else row)
    return result


def _reason(given: Given) -> str:
    """Why something cannot be applied; empty if it can."""
    try:
        build(given)
    except ConfigError as error:
        return str(error)
    return ""


def _measured(config: MonarchTrainer.Config, rows: list[Row], source: str) -> tuple[Scale | None, list[str]]:
    """The job at its full size, and what makes it impossible."""
    try:
        with located(rows, source):
            check(config)
            if not hasattr(config.model_spec.model, "layers"):
                return None, []
            scale = measure(config)
            if shortage := scale.shortage():
                return scale, [place(shortage, rows, source)]
    except ConfigError as error:
        return None, str(error).splitlines()
    return scale, []


def _missing(config: MonarchTrainer.Config) -> str:
    try:
        check_here(config, create=False)
    except ConfigError as error:
        return str(error)
    return ""


def print_examination(found: Examination, source: str, console: Console) -> None:
    """The rows, a summary line and what is wrong."""
    model = ""
    if found.config is not None and found.config.model_spec is not None:
        model = f", {found.config.model_spec.name} {found.config.model_spec.flavor}"
    console.print(Text(f"{source}: {found.dialect}{model}", style="bold"), soft_wrap=True)
    for row in found.rows:
        console.print(_line(row), soft_wrap=True)
    for note in found.notes:
        console.print(Text.assemble(("note        ", "yellow"), note), soft_wrap=True)
    if found.scale is not None:
        console.print(render(found.scale))
    count = {status: sum(row.status == status for row in found.rows) for status in STYLES}
    console.print(Text(", ".join(f"{number} {status}" for status, number in count.items()) + "."), soft_wrap=True)


def _line(row: Row) -> Text:
    """One row: ``applied  training.dataset -> dataloader.dataset = "c4"  (reason)``."""
    name = row.old if not row.new or row.old == row.new else f"{row.old} -> {row.new}" if row.old else row.new
    text = Text.assemble((f"{row.status:<12}", STYLES[row.status]), f"{name} = {_shown(row.value)}")
    if row.reason:
        text.append(f"   {row.reason}", style="red" if row.status == "refused" else "dim")
    return text


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)

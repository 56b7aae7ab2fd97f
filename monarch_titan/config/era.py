"""Translate a file of the TOML era, TorchTitan 0.1 to 0.2.2, into 0.3.0's own names.

Every key of the file ends in a row: applied under its new name, not applied for a reason, or refused. The rules are in
:mod:`monarch_titan.config.era_table`. Names of 0.3.0 may stand beside the old ones and win over them, so that options
the era did not have can be set in the same file, and on the command line either name works.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from monarch_titan.config import era_table
from monarch_titan.config.era_table import DEFAULTS, FAULT_TOLERANCE_DEFAULTS, FLUX, TABLE, Rule
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.overlay import Given, merge
from monarch_titan.config.rows import ASKS_NOTHING, Row, leaves
from monarch_titan.config.sources import COMMAND_LINE, give

ERA = "TOML era"
OLD_NAMES = {key for key, rule in TABLE.items() if rule.to != key}
"""Keys that only a file of the era holds."""

TYPES = {bool: "true or false", int: "a number", str: "a string", list: "a list"}
"""The types of the table in words."""

SHARED = {"activation_checkpoint.mode", "fault_tolerance.replica_id", "fault_tolerance.group_size"}
OWN_SECTIONS = ("monarch", "torchtitan")
CUSTOM = ("job.custom_config_module", "experimental.custom_args_module", "experimental.custom_import")


@dataclass(kw_only=True, slots=True)
class Translation:
    native: Given
    """The same in 0.3.0's names."""

    rows: list[Row] = field(default_factory=list)

    def raise_refused(self) -> None:
        """Raise ConfigError for the first key that was refused."""
        for row in self.rows:
            if row.status == "refused":
                raise ConfigError(f"{row.where}: {row.reason}")


def is_era(given: Given) -> bool:
    """Whether a file is of the TOML era; raises ConfigError if it names its model in both dialects."""
    chosen = given.value.get("torchtitan")
    if chosen is not None:
        if model := given.value.get("model"):
            rule = "[model] is how TorchTitan 0.2 names a model and [torchtitan] how 0.3 does; keep one of them"
            raise ConfigError(f"{model.where}: {rule}.")
        return False
    return any(key in OLD_NAMES and key not in SHARED for key, _ in leaves(given))


def translate(given: Given) -> Translation:
    """The same configuration in TorchTitan 0.3.0's names, with the era's defaults under it."""
    return _Translator(given).run()


class _Translator:
    def __init__(self, given: Given) -> None:
        self._given = given
        empty = {key.rpartition(".")[0] for key in TABLE | FLUX}  # a table that holds nothing says nothing
        self._items = {key: item for key, item in leaves(given) if item.value != {} or key not in empty}
        self._flux = self._plain("model.name", "llama3") == "flux"
        self._rules = TABLE | FLUX if self._flux else TABLE
        self._layer = give({}, given.source)
        self._rows: list[Row] = []

    def run(self) -> Translation:
        for path, value in self._defaults().items():
            self._put(path, give(value, ERA))
            self._rows.append(Row(old="", new=path, value=value, status="default", reason=f"default of the {ERA}"))
        self._converters()
        passed = []
        for key, item in self._items.items():
            if key in self._rules:
                self._one(key, item, self._rules[key])
            elif self._native(key, item):
                passed.append((key, item))
        for key, item in passed:  # new names win over old ones
            self._refuse_older_layer(key, item)
            self._put(key, item)
            self._rows.append(Row.applied(key, key, item))
        said = {row.new for row in self._rows if row.status == "applied"}
        rows = [row for row in self._rows if row.status != "default" or row.new not in said]
        return Translation(native=self._layer, rows=rows)

    def _plain(self, key: str, default: Any = None) -> Any:
        return self._items[key].plain() if key in self._items else default

    def _put(self, path: str, item: Given) -> None:
        for name in reversed(path.split(".")):
            item = Given(value={name: item}, source=item.source, line=item.line)
        self._layer = merge(self._layer, item)

    # One key ---------------------------------------------------------------------------------------------------------

    def _one(self, key: str, item: Given, rule: Rule) -> None:
        match key:
            case "model.name":
                return self._model(item)
            case "model.flavor":
                return self._flavor(item)
            case "model.converters":
                return None  # done for all converters together
            case "fault_tolerance.group_size":
                return self._group_size(item)
        value = item.plain()
        if key == "model.tokenizer_path" and "model.hf_assets_path" in self._items:
            return self._not_applied(key, item, "model.hf_assets_path replaced it")
        if rule.types and type(value) not in rule.types:
            return self._refuse(key, item, f"be {TYPES[rule.types[0]]}")
        if rule.when is not None and (now := self._plain(rule.when[0], rule.when[1][0])) not in rule.when[1]:
            return self._not_applied(key, item, f"it means nothing with {rule.when[0]} = {now!r}")
        if rule.only is not None and not any(value == allowed for allowed in rule.only):
            return self._refuse(key, item, rule.reason)
        if not rule.to:
            asks_nothing = value in (None, False, "", []) or rule.only is not None
            return self._not_applied(key, item, ASKS_NOTHING if asks_nothing else rule.reason)
        if rule.value is not None:
            try:
                changed = rule.value(value)
            except ValueError as error:
                return self._refuse(key, item, str(error))
            if changed != value:
                item = dataclasses.replace(give(changed, item.source), line=item.line)
                return self._apply(key, rule.to, item, rule.reason)
        return self._apply(key, rule.to, item)

    def _apply(self, key: str, path: str, item: Given, reason: str = "") -> None:
        self._put(path, dataclasses.replace(item, said=key if key != path else ""))
        self._rows.append(Row.applied(key, path, item, reason))
        if self._flux and (tokenizer := era_table.ENCODERS.get(key)):
            self._put(tokenizer, item)
            self._rows.append(Row.applied(key, tokenizer, item))

    def _not_applied(self, key: str, item: Given, reason: str) -> None:
        value = item.plain()
        self._rows.append(Row(old=key, new="", value=value, status="not applied", reason=reason, where=item.where))

    def _refuse(self, key: str, item: Given, rule: str) -> None:
        value = item.plain()
        said = f"{key} must {rule}, got {value!r}."
        self._rows.append(Row(old=key, new="", value=value, status="refused", reason=said, where=item.where))

    # Keys that are not in the table ----------------------------------------------------------------------------------

    def _native(self, key: str, item: Given) -> bool:
        """Whether a key that the era did not know goes on as one of 0.3.0's; the others end in a row here."""
        from monarch_titan.config.base import native_paths

        section = key.split(".", maxsplit=1)[0]
        if section in OWN_SECTIONS:
            return True
        sections = {name.split(".")[0] for name in self._rules}
        native = native_paths("flux", "flux-dev") if self._flux else native_paths()
        names = re.sub(r"\.\d+(?=\.|$)", ".0", key)
        above = {names[: dot.start()] for dot in re.finditer(r"\.", names)}
        tables = {path.rpartition(".")[0] for path in native} - {"optimizer.param_groups.0.optimizer_kwargs"}
        if names in native or above & (native - tables):
            return True
        known = [*self._rules, *(path for path in native if "." in path)]
        prefix = key.rpartition(".")[0]
        siblings = [name for name in known if name.rpartition(".")[0] == prefix]
        near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.85)
        if (custom := self._custom_module()) and (section not in sections or not near):
            self._not_applied(key, item, f"it belongs to {custom}, which TorchTitan 0.3.0 does not read")
            return False
        near = near or difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are the sections {', '.join(sorted(sections))}."
        said = f"unknown option {key}; {hint}"
        self._rows.append(Row(old=key, new="", value=item.plain(), status="refused", reason=said, where=item.where))
        return False

    def _custom_module(self) -> str:
        """The third party's module that reads sections of its own; TorchTitan's own are in the table."""
        modules = [self._plain(key) or "" for key in CUSTOM]
        return next(
            (name for name in modules if isinstance(name, str) and name and not name.startswith("torchtitan.")), ""
        )

    def _refuse_older_layer(self, key: str, item: Given) -> None:
        """An old name on the command line over the new one in a file: which is meant is not for us to say."""
        for old, rule in self._rules.items():
            if rule.to == key and old in self._items and item.source != COMMAND_LINE == self._items[old].source:
                self._refuse(old, self._items[old], f"be written {key}, as in {item.where}")

    # Keys that are read together -------------------------------------------------------------------------------------

    def _defaults(self) -> dict[str, Any]:
        defaults = {"torchtitan.module": "llama3", "torchtitan.flavor": "debugmodel"} | DEFAULTS
        if not self._flux:
            defaults["torchtitan.attn_backend"] = "flex"
        if any(key.startswith("optimizer.beta") for key in self._items):
            defaults["optimizer.param_groups.0.optimizer_kwargs.betas"] = [0.9, 0.95]
        if "fault_tolerance" in self._given.value:
            defaults |= FAULT_TOLERANCE_DEFAULTS
        if "monarch" not in self._given.value:
            defaults["fault_tolerance.enable"] = False
        return defaults

    def _model(self, item: Given) -> None:
        name = item.plain()
        if reason := era_table.NO_MODELS.get(name):
            return self._refuse("model.name", item, f"be one of {', '.join(era_table.MODELS)}: {reason}")
        if name not in era_table.MODELS:
            near = difflib.get_close_matches(str(name), era_table.MODELS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            return self._refuse("model.name", item, f"be one of {', '.join(era_table.MODELS)}{hint}")
        module = dataclasses.replace(item, value=era_table.MODELS[name])
        return self._apply("model.name", "torchtitan.module", module)

    def _flavor(self, item: Given) -> None:
        """``8B_flex`` is the flavor ``8B`` with the attention kernel ``flex``."""
        kernel = re.fullmatch(r"(.+?)_(flex|varlen)(_attn)?", str(item.plain()))
        if kernel is None:
            return self._apply("model.flavor", "torchtitan.flavor", item)
        self._apply("model.flavor", "torchtitan.attn_backend", dataclasses.replace(item, value=kernel[2]))
        return self._apply("model.flavor", "torchtitan.flavor", dataclasses.replace(item, value=kernel[1]))

    def _converters(self) -> None:
        """Switch on the converters that ``model.converters`` names, and off those that are only set up."""
        key = "model.converters"
        item = self._items.get(key)
        named = item.plain() if item is not None else []
        named = [named] if isinstance(named, str) else named
        if item is not None and not isinstance(named, list):
            return self._refuse(key, item, "be a list of converters")
        chosen = []
        for name in named:
            assert item is not None
            if reason := era_table.NO_CONVERTERS.get(name):
                self._refuse(key, item, f"name no {name}: {reason}")
            elif name not in era_table.CONVERTERS:
                self._refuse(key, item, f"name only {', '.join(era_table.CONVERTERS)}")
            else:
                chosen.append(era_table.CONVERTERS[name])
        for table in dict.fromkeys(era_table.CONVERTERS.values()):
            if item is not None and table in chosen:
                self._apply(
                    key, f"torchtitan.converters.{table}.enable", dataclasses.replace(item, value=True, text=None)
                )
            elif any(self._sets_up(table)):
                path = f"torchtitan.converters.{table}.enable"
                self._put(path, give(False, ERA))
                reason = "model.converters does not name it"
                self._rows.append(Row(old="", new=path, value=False, status="default", reason=reason))
        if item is not None and not named:
            self._not_applied(key, item, "it names none")
        return None

    def _sets_up(self, table: str) -> Iterable[bool]:
        return (
            self._rules[key].to.startswith(f"torchtitan.converters.{table}.")
            for key in self._items
            if key in self._rules
        )

    def _group_size(self, item: Given) -> None:
        """``fault_tolerance.group_size`` is often taken for the ranks of a replica; it is the number of replicas."""
        key, replicas = "fault_tolerance.group_size", self._plain("monarch.num_replicas", 1)
        if type(item.plain()) is int and item.plain() in (0, replicas):
            return self._not_applied(key, item, f"it is derived: the number of replica groups, {replicas}")
        rule = f"be the number of replica groups, monarch.num_replicas ({replicas}), and can be left out"
        return self._refuse(key, item, rule)

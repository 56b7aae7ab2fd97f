"""Recipes: complete configurations by name, composed from small YAML files by Hydra.

A recipe is ``NAME.yaml`` with a page ``NAME.md`` beside it. Its defaults list takes one option of each of its groups;
a group is a folder beside the recipes and an option a YAML file in it. ``group=option`` takes another one. What comes
out is the tree that a TOML file holds, so it goes the same way from there.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_titan.config.errors import ConfigError

VARIABLE = "MONARCH_TITAN_RECIPES"
"""Environment variable with folders of a user's own recipes and groups."""

PUBLISHED = Path(__file__).parents[1] / "recipes"
"""The recipes that come with the package."""

NO_CHOICES: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe as it is found on the search path."""

    name: str
    path: Path
    page: Path | None
    """The page that says what it needs and what to expect."""
    summary: str
    """The heading of the page, or else the first comment of the YAML file."""


# Where they are ------------------------------------------------------------------------------------------------------


def search_path() -> list[Path]:
    """The folders with recipes and groups: those of ``MONARCH_TITAN_RECIPES``, ``./recipes``, the package's own.

    Where several hold a file of the same name, the first counts. Raises ConfigError if the variable names a folder
    that does not exist.
    """
    folders = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{VARIABLE} must name folders that exist, got {json.dumps(str(folder))}.")
    here = Path("recipes")
    if any(here.glob("*.yaml")) or any(here.glob("*/*.yaml")):
        folders.append(here)
    return list(dict.fromkeys(folder.resolve() for folder in [*folders, PUBLISHED]))


def available() -> list[Recipe]:
    """All recipes on the search path, by name."""
    paths: dict[str, Path] = {}
    for folder in search_path():
        for path in folder.glob("*.yaml"):
            paths.setdefault(path.stem, path)
    return [_recipe(path) for _, path in sorted(paths.items())]


def is_recipe(name: str) -> bool:
    """Whether a recipe of this name is on the search path."""
    return _find(name) is not None


def _find(name: str) -> Path | None:
    if not name or name != Path(name).name:
        return None
    return next((path for folder in search_path() if (path := folder / f"{name}.yaml").is_file()), None)


def _recipe(path: Path) -> Recipe:
    page = path.with_suffix(".md")
    if page.is_file():
        first = page.read_text(encoding="utf-8", errors="replace").strip().partition("\n")[0]
        return Recipe(name=path.stem, path=path, page=page, summary=first.lstrip("# ").rstrip())
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comments = [line.lstrip("# ").rstrip() for line in lines if line.startswith("#")]
    # Hydra's own directive is a comment, too.
    summary = next((comment for comment in comments if comment and not comment.startswith("@package")), "")
    return Recipe(name=path.stem, path=path, page=None, summary=summary)


def options() -> dict[str, list[str]]:
    """All groups on the search path with their options."""
    found: dict[str, set[str]] = {}
    for folder in search_path():
        for path in folder.glob("[!.]*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


# What they say -------------------------------------------------------------------------------------------------------


def split(overrides: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Arguments as choices of a group's option, ``cluster=slurm``, and the others, left as they are for the loader.

    Raises ConfigError for a key that is nearly a group's name; no option of a configuration is.
    """
    known, choices, rest = options(), {}, []
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and key in known:
            choices[key] = value
        elif equals and "." not in key and (near := difflib.get_close_matches(key, known, n=1, cutoff=0.75)):
            raise ConfigError(f"command line: there is no group {json.dumps(key)}; did you mean {near[0]}?")
        else:
            rest.append(override)
    return choices, rest


def groups(name: str) -> dict[str, list[str]]:
    """The groups of a recipe with all options of each.

    Raises ConfigError if there is no such recipe or Hydra cannot read it.
    """
    with _composition(name) as overrides:
        from hydra.core.global_hydra import GlobalHydra
        from hydra.types import RunMode

        loader = GlobalHydra.instance().config_loader()
        chosen = loader.compute_defaults_list(name, overrides, RunMode.RUN).overrides.known_choices
    known = options()
    return {group: known[group] for group in sorted(chosen) if group in known}


def compose(name: str, choices: Mapping[str, str] = NO_CHOICES) -> dict[str, Any]:
    """The tree that a recipe describes: dictionaries with text for keys, lists, scalars and None.

    Args:
        name: the recipe.
        choices: options to take in place of the recipe's own, by group.

    Raises ConfigError if there is no such recipe, group or option, or if Hydra cannot read or compose the files.
    """
    if choices:
        _check(name, choices)
    with _composition(name, choices) as overrides:
        import hydra
        from omegaconf import OmegaConf

        tree = OmegaConf.to_container(hydra.compose(name, overrides), resolve=True, throw_on_missing=True)
    return _plain(tree, name)


def show(name: str, choices: Mapping[str, str] = NO_CHOICES) -> str:
    """The composed recipe as a TOML file, which trains the same; None is the text ``"null"``. Raises as compose()."""
    import tomlkit

    content = _toml(compose(name, choices))
    arguments = "".join(f" {group}={option}" for group, option in choices.items())
    document = tomlkit.document()
    document.add(tomlkit.comment(f"The recipe {name}, composed."))
    document.add(tomlkit.comment(""))
    document.add(tomlkit.comment(f"    monarch-titan train {name}{arguments}"))
    document.add(tomlkit.nl())
    # [torchtitan] first, as what everything else is laid over; but plain options of the top level go before all tables.
    for key in sorted(content, key=lambda key: (isinstance(content[key], dict), key != "torchtitan")):
        document.add(key, tomlkit.item(content[key]))
    return tomlkit.dumps(document)


def _check(name: str, choices: Mapping[str, str]) -> None:
    known = groups(name)
    for group, option in choices.items():
        if group not in known:
            hint = _nearest(group, known, f"it has: {', '.join(known) or 'none'}")
            raise ConfigError(f"the recipe {name} has no group {json.dumps(group)}; {hint}")
        if option not in known[group]:
            rule = f"be one of {', '.join(known[group])}"
            raise ConfigError(f"{group} must {rule}, got {json.dumps(option, ensure_ascii=False)}.")


@contextlib.contextmanager
def _composition(name: str, choices: Mapping[str, str] = NO_CHOICES) -> Generator[list[str]]:
    """Hydra over the search path; gives the overrides to compose with and turns what Hydra raises into ConfigError."""
    if _find(name) is None:
        names = [recipe.name for recipe in available()]
        hint = _nearest(name, names, f"there are: {', '.join(names)}")
        raise ConfigError(f"there is no recipe {json.dumps(name, ensure_ascii=False)}; {hint}")
    # Costs 0.1 s, which only those pay who use recipes.
    import yaml
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _hydra(search_path()):
            yield [f"{group}={_quoted(option)}" for group, option in choices.items()]
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        # Hydra hides an OmegaConf error behind one without a text.
        message = " ".join((str(error) or str(error.__cause__)).split())
        raise ConfigError(f"the recipe {name} cannot be composed: {message.rstrip('.')}.") from error


@contextlib.contextmanager
def _hydra(folders: list[Path]) -> Generator[None]:
    """Hydra for the length of a block, also in a process that uses it itself: what it keeps globally is put back."""
    first, *others = folders
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import JobRuntime
    from hydra.version import VersionBase

    outer, version, job = GlobalHydra.instance(), VersionBase.instance(), JobRuntime()
    before = outer.hydra, version.version_base, job.conf.copy()
    outer.clear()
    try:
        with initialize_config_dir(str(first), job_name="recipe", version_base="1.3"):
            # hydra.searchpath would not do: it finds groups in more folders, but the recipe itself in the first only.
            loader = GlobalHydra.instance().config_loader()
            for folder in others:
                loader.get_search_path().prepend("recipes", f"file://{folder}", anchor="schema")
            loader.repository.initialize_sources(loader.get_search_path())
            yield
    finally:
        GlobalHydra.set_instance(outer)
        outer.hydra, version.version_base, job.conf = before


def _quoted(text: str) -> str:
    """A text in Hydra's override grammar."""
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"


def _plain(value: Any, option: str) -> Any:
    """A composed tree with text for keys: ``0:`` in YAML is a number, and in TOML it is not."""
    if isinstance(value, dict):
        table = {str(key): _plain(item, f"{option}.{key}") for key, item in value.items()}
        if len(table) < len(value):
            raise ConfigError(f"{option} must have each key once, got {', '.join(map(repr, value))}.")
        return table
    if isinstance(value, list):
        return [_plain(item, option) for item in value]
    return value


def _toml(value: Any) -> Any:
    """A tree in TOML's types, with tables behind plain values as TOML wants them."""
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: isinstance(item[1], dict))
        return {key: _toml(item) for key, item in items}
    if isinstance(value, list):
        return [_toml(item) for item in value]
    return "null" if value is None else value


def _nearest(name: str, names: Collection[str], otherwise: str) -> str:
    near = [each for each in names if name and name in each][:3] or difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"{otherwise}."

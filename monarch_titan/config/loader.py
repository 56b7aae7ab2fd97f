"""From a TOML file and ``key=value`` arguments to one ``MonarchTrainer.Config``.

Precedence: the base configuration or the TOML era's defaults < ``extends`` < the file < the command line. What can be
checked without TorchTitan is checked before it is imported, which takes seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_titan.config import era
from monarch_titan.config.base import base_config, choose_classes
from monarch_titan.config.converters import check_converters, skipped_in_vain
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.overlay import Given, lay
from monarch_titan.config.rows import Row, leaves
from monarch_titan.config.sections import Base, FaultTolerance, Monarch
from monarch_titan.config.sources import gather, give, with_overrides

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer

SECTIONS = {"torchtitan": Base, "fault_tolerance": FaultTolerance, "monarch": Monarch}
"""The sections of our own, which need no TorchTitan to be checked."""

OWN = {"fault_tolerance", "monarch"}
"""Those that ask for replicas to be joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A configuration and how each key of its file became a part of it."""

    config: MonarchTrainer.Config
    rows: list[Row]
    notes: list[str]
    """What was applied and may not do what it seems to."""


def load(path: str | os.PathLike[str], *overrides: str) -> MonarchTrainer.Config:
    """The configuration that a TOML file of either dialect or a recipe describes, every key and every type checked.

    Args:
        path: the file, or the name of a recipe.
        overrides: ``key=value`` each, laid over it in turn, values in Hydra's grammar; ``group=option`` for a recipe.

    Raises ConfigError, whose message is one line that names the file or the command line, the option and the rule.
    Whether the options fit together is for :func:`monarch_titan.config.checks.check`.
    """
    return load_given(find(path, overrides)).config


def find(name: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Given:
    """What a file or a recipe says, with ``key=value`` arguments laid over it.

    Raises ConfigError if it is neither.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.exists() or len(path.parts) > 1:
        return gather(path, overrides)
    from monarch_titan.config import recipes

    choices, rest = recipes.split(overrides)
    tree = recipes.compose(path.name, choices)
    return with_overrides(give(tree, f"recipe {path.name}"), rest)


def load_given(given: Given) -> Loaded:
    """The configuration of what was given, in either dialect."""
    if era.is_era(given):
        translation = era.translate(given)
        _check_own_sections(translation.native)
        translation.raise_refused()
        given, rows = translation.native, translation.rows
    else:
        rows = [Row.applied(key, key, item) for key, item in leaves(given)]
        _check_own_sections(given)
    config = build(given)
    return Loaded(config=config, rows=rows, notes=skipped_in_vain(config))


def build(given: Given) -> MonarchTrainer.Config:
    """The base configuration that ``[torchtitan]`` names, with everything laid over it; 0.3.0's names only."""
    chosen = given.value.get("torchtitan")
    base = lay(Base(), chosen, "torchtitan") if chosen else Base()
    if not (base.module and (base.config or base.flavor)):
        raise ConfigError(
            f'{given.source}: add what to start from: a table [torchtitan] with module = "llama3" and '
            'config = "llama3_debugmodel", TorchTitan\'s --module and --config, or flavor = "8B" for a bare model.'
        )
    assert chosen is not None
    with _blamed_on(chosen):
        config = base_config(base)
    if not OWN & given.value.keys() and (config.monarch, config.fault_tolerance) == (Monarch(), FaultTolerance()):
        config.fault_tolerance = FaultTolerance(enable=False)  # nobody spoke of replicas: plain TorchTitan
    content = given.plain()
    with _blamed_on(given.value.get("activation_checkpoint", given)):
        choose_classes(config, content)
    if "converters" in chosen.value:
        check_converters(chosen.value["converters"])
    return _with_ranks(lay(config, _without_mode(given)), given)


def _with_ranks(config: MonarchTrainer.Config, given: Given) -> MonarchTrainer.Config:
    """As many ranks as the degrees of parallelism need, where nobody says how many there are: torchrun did before."""
    section = given.value.get("monarch")
    if (section is not None and "procs_per_host" in section.value) or config.monarch.ranks_per_replica > 1:
        return config
    degrees = config.parallelism
    shard, ranks = degrees.data_parallel_shard_degree, 1
    for name in ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel"):
        ranks *= getattr(degrees, f"{name}_degree")
    ranks = max(ranks, 1) * max(shard, 1)
    if shard == -1:  # the experts' ranks are those of the others, so there must be enough
        ranks *= max(1, degrees.expert_parallel_degree // ranks)
    config.monarch = dataclasses.replace(config.monarch, procs_per_host=ranks)
    return config


def _without_mode(given: Given) -> Given:
    """``given`` without ``activation_checkpoint.mode``, which chose a class and is no field of it."""
    section = given.value.get("activation_checkpoint")
    if section is None or not isinstance(section.value, dict) or "mode" not in section.value:
        return given
    rest = {name: item for name, item in section.value.items() if name != "mode"}
    value = dict(given.value) | {"activation_checkpoint": dataclasses.replace(section, value=rest)}
    if section.value["mode"].plain() == "none":
        if rest:
            option, item = next(iter(rest.items()))
            raise ConfigError(f'{item.where}: activation_checkpoint.{option} has no meaning with mode "none".')
        del value["activation_checkpoint"]
    return dataclasses.replace(given, value=value)


def _check_own_sections(given: Given) -> None:
    for name, section in SECTIONS.items():
        item = given.value.get(name)
        if item is not None and not isinstance(item.value, dict):
            raise ConfigError(f"{item.where}: {name} must be a table, got {item.plain()!r}.")
        if item is not None:
            lay(section(), item, name)


@contextlib.contextmanager
def _blamed_on(table: Given) -> Generator[None]:
    """Put the place of the option that a message begins with before it."""
    try:
        yield
    except ConfigError as error:
        option = str(error).split(":")[0].split()[0]
        names = option.split(".")[1:] if isinstance(table.value, dict) else []
        where = table.value[names[0]].where if names and names[0] in table.value else table.where
        raise ConfigError(f"{where}: {error}") from error

"""From a TOML file and ``key=value`` arguments to one ``MonarchTrainer.Config``.

Precedence: the base configuration function < the file < the command line. What can be checked without TorchTitan is
checked before it is imported, which takes seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import os
import pkgutil
import re
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import tomli

from monarch_titan.config.errors import ConfigError
from monarch_titan.config.overlay import Given, lay, merge
from monarch_titan.config.sections import Base, FaultTolerance, Monarch

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer

COMMAND_LINE = "command line"
SECTIONS = {"torchtitan": Base, "fault_tolerance": FaultTolerance, "monarch": Monarch}
"""The sections of our own, which need no TorchTitan to be checked."""


BYTE_TOKENIZER = "byte_tokenizer"
"""The ``hf_assets_path`` that stands for the project's tokenizer, which reads nothing."""


def load(path: str | os.PathLike[str], *overrides: str) -> MonarchTrainer.Config:
    """The configuration that a TOML file describes, with every key and every type checked.

    Args:
        path: the file.
        overrides: ``key=value`` each, laid over the file in turn; values in Hydra's grammar.

    Raises ConfigError, whose message is one line that names the file or the command line, the option and the rule.
    Whether the options fit together is for :func:`monarch_titan.config.checks.check`.
    """
    given = read(path)
    for override in overrides:
        given = merge(given, parse_override(override))
    _check_own_sections(given)
    base = lay(Base(), given.value["torchtitan"], "torchtitan") if "torchtitan" in given.value else Base()
    if not (base.module and base.config):
        raise ConfigError(
            f'{given.source}: add what to start from: a table [torchtitan] with module = "llama3" and '
            'config = "llama3_debugmodel", TorchTitan\'s --module and --config.'
        )
    from monarch_titan.training.trainer import MonarchTrainer

    chosen = given.value["torchtitan"].value
    with _blamed_on(chosen["module"]):
        registry = _registry(base.module)
    with _blamed_on(chosen["config"]):
        config = as_monarch(_configuration(registry, base.config), MonarchTrainer.Config)
    dataloader = given.value["dataloader"].value if "dataloader" in given.value else {}
    said = {"dataset": dataloader.get("dataset"), "assets": given.value.get("hf_assets_path")}
    use_own_components(config, **{name: value.value for name, value in said.items() if value is not None})
    return lay(config, given)


def use_own_components(config: MonarchTrainer.Config, dataset: str = "", assets: str = "") -> None:
    """Exchange what a name of ours stands for: ``dataset = "local_text"``, ``hf_assets_path = "byte_tokenizer"``.

    TorchTitan's configurations name classes, which TOML cannot.
    """
    from torchtitan.config.override import derive

    from monarch_titan.training.data import LocalTextDataLoader
    from monarch_titan.training.tokenizer import ByteTokenizer

    if dataset == "local_text" and not isinstance(config.dataloader, LocalTextDataLoader.Config):
        config.dataloader = derive(config.dataloader, LocalTextDataLoader.Config)
    if assets == BYTE_TOKENIZER:
        config.tokenizer = ByteTokenizer.Config()


def _check_own_sections(given: Given) -> None:
    for name, section in SECTIONS.items():
        item = given.value.get(name)
        if item is not None and not isinstance(item.value, dict):
            raise ConfigError(f"{item.where}: {name} must be a table, got {item.plain()!r}.")
        if item is not None:
            lay(section(), item, name)


@contextlib.contextmanager
def _blamed_on(given: Given) -> Generator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{given.where}: {error}") from error


# The file and the command line ---------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Given:
    """The content of a TOML file, each value with the line it stands on."""
    source = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{source}: cannot read this file: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: this file is not UTF-8 text.") from error
    try:
        content = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{source}:{error.lineno}:{error.colno}: not TOML: {error.msg}.") from error
    lines = _lines(text)

    def give(value: Any, option: str, line: int | None) -> Given:
        line = lines.get(option, line)  # an item of an inline table has the line of the table
        if isinstance(value, dict):
            value = {key: give(item, f"{option}.{key}" if option else key, line) for key, item in value.items()}
        elif isinstance(value, list):
            value = [give(item, f"{option}.{index}", line) for index, item in enumerate(value)]
        return Given(value=value, source=source, line=line)

    return give(content, "", None)


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


def parse_override(override: str) -> Given:
    """One ``key=value`` of a command line as the table that it stands for."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    key, equals, text = override.partition("=")
    wrong = f"{COMMAND_LINE}: {override!r}"
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(f"{wrong} is not of the form key=value, as in training.steps=100.")
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        hint = f"""quote a text with special characters, as in '{key}="{text}"'"""
        raise ConfigError(f"{wrong} cannot be read ({error}); {hint}.") from error
    if parsed.type is not OverrideType.CHANGE or parsed.is_sweep_override():
        raise ConfigError(f"{wrong} is a sweep, and this is one run; for a list write {key}=[a,b].")
    given = _give_argument(parsed.value(), text)
    for name in reversed(key.split(".")):
        given = Given(value={name: given}, source=COMMAND_LINE)
    return given


def _give_argument(value: Any, text: str | None = None) -> Given:
    if isinstance(value, dict):
        value = {str(key): _give_argument(item) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_give_argument(item) for item in value]
    return Given(value=value, source=COMMAND_LINE, text=text)


# The base configuration ----------------------------------------------------------------------------------------------


def base_config(base: Base) -> Any:
    """What the configuration function that ``base`` names returns, found as TorchTitan finds it.

    Raises ConfigError if there is no such module or function, or if it needs a package that is not installed.
    """
    return _configuration(_registry(base.module), base.config)


def as_monarch(config: Any, cls: type[MonarchTrainer.Config]) -> MonarchTrainer.Config:
    """A configuration of TorchTitan's own Trainer as one of ours, with our sections at their defaults."""
    from torchtitan.trainer import Trainer

    if isinstance(config, cls):
        return config
    if type(config) is not Trainer.Config:
        kind = f"{type(config).__module__}.{type(config).__qualname__}"
        raise ConfigError(f"torchtitan.config must give a Trainer.Config or a MonarchTrainer.Config, got {kind}.")
    names = [f.name for f in dataclasses.fields(config)]
    return cls(**{name: getattr(config, name) for name in names})


def _registry(module: str) -> ModuleType:
    """The module with the configuration functions; TorchTitan's short names go before installed packages."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"torchtitan.module must be the name of a module, got {module!r}.")
    homes = ("torchtitan.models.", "torchtitan.experiments.", "")
    for candidate in [f"{home}{module}.config_registry" for home in homes] + [module]:
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{candidate}.".startswith(f"{error.name}."):
                raise ConfigError(f"torchtitan.module: {module} needs {error.name}, which is not installed.") from error
        except ImportError as error:
            raise ConfigError(f"torchtitan.module: {module} cannot be imported: {error}") from error
    import torchtitan.models

    models = [found.name for found in pkgutil.iter_modules(torchtitan.models.__path__)]
    hint = _nearest(module, [*models, "monarch_titan"])
    raise ConfigError(f"torchtitan.module: there is no module {module!r} on the Python path{hint}")


def _configuration(registry: ModuleType, name: str) -> Any:
    functions = {name: found for name, found in vars(registry).items() if _makes_config(found)}
    if name not in functions:
        raise ConfigError(f"torchtitan.config: {registry.__name__} has no function {name!r}{_nearest(name, functions)}")
    try:
        return functions[name]()
    except (ImportError, ValueError) as error:
        raise ConfigError(f"torchtitan.config: {name} cannot be used here: {error}") from error


def _makes_config(found: Any) -> bool:
    """Whether something in a registry looks like a configuration function: one that can be called without arguments."""
    if not inspect.isroutine(found) or found.__name__.startswith("_"):
        return False
    parameters = inspect.signature(found).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(sorted(names))}."

"""The configuration that a file is laid over: TorchTitan's configuration functions, models and component classes.

TOML holds values and TorchTitan's configurations name classes. What a file says by a name of ours, such as
``dataset = "local_text"`` or ``mode = "full"``, is exchanged here for the class that it stands for.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from monarch_titan import upstream
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.overlay import paths
from monarch_titan.config.sections import Base

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer

BYTE_TOKENIZER = "byte_tokenizer"
"""The ``hf_assets_path`` that stands for the project's tokenizer, which reads nothing."""

LOCAL_TEXT = "local_text"
"""The dataset that stands for the project's own loader of text files."""

FRESH = "profiler metrics dataloader lr_scheduler training parallelism checkpoint compile comm validator debug override"
"""Sections of a configuration around a bare model: the classes that the module's own configurations use there, each at
its own defaults."""


@functools.cache
def native_paths(module: str = "llama3", flavor: str = "debugmodel") -> frozenset[str]:
    """Every option of the configurations around a model, by its dotted path."""
    modes = [mode for mode in checkpointing_modes().values() if dataclasses.is_dataclass(mode)]
    below = {f"activation_checkpoint.{path}" for mode in modes for path in paths(mode())}
    return frozenset(paths(base_config(Base(module=module, flavor=flavor)))) | below | {"activation_checkpoint.mode"}


def base_config(base: Base) -> MonarchTrainer.Config:
    """The configuration that ``base`` names, as one of ours.

    Raises ConfigError if there is no such module, function or model, or if it needs a package that is not installed.
    """
    registry = _registry(base.module)
    if base.config:
        config = as_monarch(_configuration(registry, base.config))
        model = _model(base) if base.flavor else config.model_spec
    else:
        model = _model(base)
        config = as_monarch(_around(model, registry))
    # A new object: a configuration function may give the same one again.
    changes: dict[str, Any] = {"model_spec": model, "loss": _loss_for(config.loss, model)}
    return dataclasses.replace(config, torchtitan=base, **changes)


def as_monarch(config: Any) -> MonarchTrainer.Config:
    """A configuration of TorchTitan's core trainer, or of one derived from it, with our sections at their defaults."""
    from torchtitan.trainer import Trainer

    from monarch_titan.training.trainer import monarch_trainer

    trainer = upstream.owner(type(config)) if isinstance(config, Trainer.Config) else None
    if trainer is None or trainer.Config is not type(config):
        kind = f"{type(config).__module__}.{type(config).__qualname__}"
        raise ConfigError(f"torchtitan.config must give the Config of TorchTitan's Trainer or one derived, got {kind}.")
    cls = monarch_trainer(trainer).Config
    if isinstance(config, cls):
        return config
    return cls(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})


# Modules and functions -----------------------------------------------------------------------------------------------


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
    hint = nearest(module, [*models, "monarch_titan"])
    raise ConfigError(f"torchtitan.module: there is no module {module!r} on the Python path{hint}")


def _configuration(registry: ModuleType, name: str) -> Any:
    functions = {name: found for name, found in vars(registry).items() if _makes_config(found)}
    if name not in functions:
        raise ConfigError(f"torchtitan.config: {registry.__name__} has no function {name!r}{nearest(name, functions)}")
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


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about a wrong name: the nearest right one, or all of them."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(sorted(names))}."


# Models --------------------------------------------------------------------------------------------------------------


def _model(base: Base, **arguments: Any) -> Any:
    """What the module's ``model_registry`` makes of a flavor."""
    package = _registry(base.module).__name__.removesuffix(".config_registry")
    registry = getattr(importlib.import_module(package), "model_registry", None)
    if registry is None:
        raise ConfigError(f"torchtitan.flavor: {base.module} has no model_registry, which makes a model of a flavor.")
    takes = inspect.signature(registry).parameters
    for name in ("attn_backend", "moe_comm_backend"):
        if value := getattr(base, name):
            if name not in takes:
                raise ConfigError(f"torchtitan.{name}: the models of {base.module} have no such choice, got {value!r}.")
            arguments[name] = value
    try:
        return registry(base.flavor, **arguments)
    except KeyError as error:
        hint = nearest(base.flavor, _flavors(package))
        raise ConfigError(f"torchtitan.flavor: {base.module} has no {base.flavor!r}{hint}") from error
    except (ImportError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"torchtitan.flavor: {base.module} {base.flavor} cannot be made: {error}") from error


def _flavors(package: str) -> list[str]:
    """The flavors of a module of TorchTitan, which keeps them in a dictionary called ``..._configs``."""
    tables = {
        name: table for name, table in vars(importlib.import_module(package)).items() if name.endswith("_configs")
    }
    return [flavor for table in tables.values() if isinstance(table, dict) for flavor in table]


def _around(model: Any, registry: ModuleType) -> Any:
    """TorchTitan's defaults around a model."""
    makers = [
        found for found in vars(registry).values() if _makes_config(found) and found.__module__ == registry.__name__
    ]
    sample = makers[0]()
    sections = {name: type(getattr(sample, name))() for name in FRESH.split()}
    from torchtitan.components.optimizer import default_adamw

    return type(sample)(
        model_spec=model,
        tokenizer=type(sample.tokenizer)(),
        optimizer=default_adamw(lr=8e-4),
        loss=_loss_for(sample.loss, model),
        **sections,
    )


def _loss_for(loss: Any, model: Any) -> Any:
    """A loss made for another model's vocabulary, made for this one's."""
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.models.common.config_utils import decoder_vocab_size

    if isinstance(loss, ChunkedLossWrapper.Config):
        return dataclasses.replace(loss, loss_fn=_loss_for(loss.loss_fn, model))
    if hasattr(loss, "global_vocab_size"):
        return dataclasses.replace(loss, global_vocab_size=decoder_vocab_size(model))
    return loss


# Classes that stand behind a name ------------------------------------------------------------------------------------


def checkpointing_modes() -> dict[str, Any]:
    """``activation_checkpoint.mode`` and the policy that it stands for."""
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    return {
        "selective": SelectiveAC.Config,
        "full": FullAC.Config,
        "memory_budget": MemoryBudgetAC.Config,
        "none": type(None),
    }


def choose_classes(config: MonarchTrainer.Config, content: Mapping[str, Any]) -> None:
    """Exchange in place what ``content``, plain tables to be laid over, names: data, tokenizer, checkpointing."""
    from torchtitan.config.override import derive

    from monarch_titan.training.data import LocalTextDataLoader
    from monarch_titan.training.tokenizer import ByteTokenizer

    local = LocalTextDataLoader.Config
    if _at(content, "dataloader.dataset") == LOCAL_TEXT and not isinstance(config.dataloader, local):
        config.dataloader = derive(config.dataloader, local)
    validates = getattr(config.validator, "dataloader", None)
    if _at(content, "validator.dataloader.dataset") == LOCAL_TEXT and not isinstance(validates, local):
        config.validator = dataclasses.replace(config.validator, dataloader=derive(validates, local))
    if content.get("hf_assets_path") == BYTE_TOKENIZER:
        config.tokenizer = ByteTokenizer.Config()
    if (mode := _at(content, "activation_checkpoint.mode")) is not None:
        modes = checkpointing_modes()
        if mode not in modes:
            choices = ", ".join(f'"{name}"' for name in modes)
            raise ConfigError(f"activation_checkpoint.mode must be one of {choices}, got {mode!r}.")
        if type(config.activation_checkpoint) is not modes[mode]:
            config.activation_checkpoint = modes[mode]()


def _at(content: Mapping[str, Any], path: str) -> Any:
    found: Any = content
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found

"""``[torchtitan.converters.NAME]``: TorchTitan's low-precision versions of a model's layers.

TorchTitan converts a model where its configuration function is called, which needs torchao and an accelerator. Here the
tables are checked where the file is read, and the model is converted in the trainers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch_titan.config.errors import ConfigError
from monarch_titan.config.overlay import Given, lay
from monarch_titan.config.sources import give

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer

CONVERTERS = {
    "float8_linear": "Float8LinearConverter",
    "float8_grouped_experts": "Float8GroupedExpertsConverter",
    "mxfp8_linear": "MXFP8LinearConverter",
    "mxfp8_grouped_experts": "MXFP8GroupedExpertsConverter",
    "nvfp4_linear": "NVFP4LinearConverter",
}
"""The tables' names and TorchTitan's classes, in the order in which they are applied."""

ENABLE = "enable"
"""The one key of ours in such a table: false keeps the settings and switches the converter off."""

OPTION = "torchtitan.converters"


def check_converters(given: Given) -> None:
    """Raise ConfigError for a table that is no converter, or a key or value that is none of its options."""
    for name, table in given.value.items():
        if name not in CONVERTERS:
            raise ConfigError(f"{table.where}: {OPTION}.{name} must be one of {', '.join(CONVERTERS)}.")
        _configured(name, table, model_compile_enabled=False)


def enabled_converters(config: MonarchTrainer.Config) -> list[Any]:
    """TorchTitan's configurations of the converters that are switched on."""
    compiled = config.compile.enable and "model" in config.compile.components
    tables = config.torchtitan.converters
    return [
        _configured(name, give(tables[name], "configuration"), model_compile_enabled=compiled)
        for name in CONVERTERS
        if name in tables and tables[name].get(ENABLE, True)
    ]


def _configured(name: str, table: Given, model_compile_enabled: bool) -> Any:
    from torchtitan.components import quantization

    path = f"{OPTION}.{name}"
    if not isinstance(table.value, dict):
        raise ConfigError(f"{table.where}: {path} must be a table, got {table.plain()!r}.")
    given = dict(table.value)
    if (enable := given.pop(ENABLE, None)) is not None and not isinstance(enable.value, bool):
        raise ConfigError(f"{enable.where}: {path}.{ENABLE} must be true or false, got {enable.plain()!r}.")
    if derived := given.get("model_compile_enabled"):
        raise ConfigError(f"{derived.where}: {path}.model_compile_enabled is derived from compile.enable.")
    config = getattr(quantization, CONVERTERS[name]).Config(model_compile_enabled=model_compile_enabled)
    return lay(config, Given(value=given, source=table.source, line=table.line), path)


def skipped_in_vain(config: MonarchTrainer.Config) -> list[str]:
    """A line for every name in ``filter_fqns`` that no layer of the model has: nothing is left out for it.

    Layers were called otherwise in other versions of TorchTitan, and a layer that is not left out is converted.
    """
    from torchtitan.models.common.linear import Linear

    layers = [fqn for fqn, *_ in config.model_spec.model.traverse(Linear.Config)]
    return [
        f"{OPTION}.{name}.filter_fqns: {part!r} is in the name of no layer of this model and leaves out nothing"
        for name, table in config.torchtitan.converters.items()
        for part in table.get("filter_fqns", [])
        if part != "auto_filter_small_kn" and not any(part in fqn for fqn in layers)
    ]


def convert_model(config: MonarchTrainer.Config) -> None:
    """Exchange the layers of ``config.model_spec`` in place; called where the model is built.

    Raises ImportError without torchao and ValueError on a device that cannot compute in the format.
    """
    from torchtitan.models.utils import validate_converter_order

    if not (converters := enabled_converters(config)):
        return
    validate_converter_order(converters)
    for converter in converters:
        config.model_spec.model = converter.build().convert(config.model_spec.model)

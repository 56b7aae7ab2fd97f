"""Whether the options of a configuration fit together, before any process starts.

TorchTitan and TorchFT check much of this too, but inside the trainers, after minutes, and once a rank.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from monarch_titan.config.base import BYTE_TOKENIZER, nearest
from monarch_titan.config.converters import enabled_converters
from monarch_titan.config.degrees import violations
from monarch_titan.config.errors import ConfigError

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

    from monarch_titan.training.trainer import MonarchTrainer


OPTIMIZERS = ("Adam", "AdamW", "DistMuon")
"""What TorchTitan 0.3 knows by name."""


def check(config: MonarchTrainer.Config) -> None:
    """Raise ConfigError for the first option that contradicts another or is out of its range, wherever it would run."""
    _check_monarch(config)
    _check_training(config)
    _check_optimizer(config)
    _check_fault_tolerance(config)
    check_parallelism(config)
    if broken := violations(config):
        raise ConfigError(broken[0])
    _check_dataset_paths(config)


def check_here(config: MonarchTrainer.Config, *, create: bool = True) -> None:
    """Raise ConfigError for the first thing that this machine lacks to train it.

    Creates ``dump_folder``, as the run would, if ``create``: whether it can be is found by doing it.
    """
    scheduler = config.monarch.scheduler
    rule = 'be "local" to train: the other schedulers can be validated and are not launched yet'
    _require(scheduler == "local", "monarch.scheduler", rule, scheduler)
    _check_converters(config)
    _check_assets(config)
    if create:
        _check_dump_folder(config.dump_folder)


def _check_converters(config: MonarchTrainer.Config) -> None:
    """TorchTitan checks this too, inside the trainers."""
    try:
        for converter in enabled_converters(config):
            converter.build()
    except (ImportError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"torchtitan.converters: this machine cannot convert the model: {error}") from error


def _check_optimizer(config: MonarchTrainer.Config) -> None:
    """Each group's arguments, by giving them to the optimizer that they are for."""
    for index, group in enumerate(config.optimizer.param_groups):
        path = f"optimizer.param_groups.{index}"
        name, arguments = group.optimizer_name, group.optimizer_kwargs
        _require(name in OPTIMIZERS, f"{path}.optimizer_name", f"be one of {', '.join(OPTIMIZERS)}", name)
        try:
            re.compile(group.pattern)
        except re.error as error:
            raise ConfigError(
                f"{path}.pattern must be a regular expression ({error}), got {group.pattern!r}."
            ) from error
        _require("lr" in arguments, f"{path}.optimizer_kwargs", "hold lr", arguments)
        optimizer = getattr(torch.optim, name, None)
        if optimizer is None:
            continue  # TorchTitan's own, with arguments that only a model on its meshes can check
        known = inspect.signature(optimizer).parameters
        for option in arguments:
            if option not in known or option == "params":
                raise ConfigError(f"unknown option {path}.optimizer_kwargs.{option}{nearest(option, known)}")
        for option, value in arguments.items():
            try:
                optimizer([torch.zeros(1, requires_grad=True)], **{option: value})
            except (TypeError, ValueError, RuntimeError) as error:
                place = f"{path}.optimizer_kwargs.{option}"
                raise ConfigError(f"{place} must be what {name} takes ({error}), got {value!r}.") from error


def _require(holds: bool, option: str, rule: str, value: Any) -> None:
    if not holds:
        raise ConfigError(f"{option} must {rule}, got {json.dumps(value, ensure_ascii=False, default=str)}.")


def _at_least(lowest: float, section: Any, path: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(value >= lowest, f"{path}.{name}", f"be at least {lowest}", value)


def _positive(section: Any, path: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(value > 0, f"{path}.{name}", "be greater than 0", value)


def _check_monarch(config: MonarchTrainer.Config) -> None:
    monarch, recovery = config.monarch, config.monarch.recovery
    _at_least(1, monarch, "monarch", "num_replicas", "hosts_per_replica", "procs_per_host")
    if monarch.min_replicas is not None:
        rule = f"be between 1 and monarch.num_replicas ({monarch.num_replicas})"
        _require(1 <= monarch.min_replicas <= monarch.num_replicas, "monarch.min_replicas", rule, monarch.min_replicas)
    rule = 'be 1 with monarch.scheduler "local", which is one machine'
    local = monarch.scheduler == "local"
    _require(not local or monarch.hosts_per_replica == 1, "monarch.hosts_per_replica", rule, monarch.hosts_per_replica)
    _positive(monarch, "monarch", "quorum_timeout_seconds")
    names = ("heartbeat_timeout_ms", "join_timeout_ms", "quorum_tick_ms")
    _positive(monarch.lighthouse, "monarch.lighthouse", *names)

    path = "monarch.recovery"
    _at_least(1, recovery, path, "max_failures")
    rule = f"be between 1 and max_failures ({recovery.max_failures})"
    _require(1 <= recovery.respawns <= recovery.max_failures, f"{path}.respawns", rule, recovery.respawns)
    _at_least(0, recovery, path, "backoff_seconds", "max_backoff_seconds", "commit_retries")


def _check_fault_tolerance(config: MonarchTrainer.Config) -> None:
    ours, replicas = config.fault_tolerance, config.monarch.num_replicas
    path, method = "fault_tolerance", config.fault_tolerance.semi_sync_method
    rule = f"be true to join the replicas when monarch.num_replicas is greater than 1 (it is {replicas})"
    _require(ours.enable or replicas == 1, f"{path}.enable", rule, ours.enable)
    _at_least(1, ours, path, "sync_steps", "num_fragments")
    _positive(ours, path, "process_group_timeout_ms")
    rule = f'be 1 with {path}.semi_sync_method "{method}", because only "diloco" has fragments'
    _require(ours.num_fragments == 1 or method == "diloco", f"{path}.num_fragments", rule, ours.num_fragments)
    rule = f"be divisible by {path}.num_fragments ({ours.num_fragments})"
    _require(ours.sync_steps % ours.num_fragments == 0, f"{path}.sync_steps", rule, ours.sync_steps)
    rule = f"be at least {path}.sync_steps ({ours.sync_steps}), or the replicas are never synchronised"
    enough = not ours.enable or method == "none" or config.training.steps >= ours.sync_steps
    _require(enough, "training.steps", rule, config.training.steps)


def _check_training(config: MonarchTrainer.Config) -> None:
    _at_least(1, config.training, "training", "steps", "seq_len", "local_batch_size", "gc_freq")
    _at_least(1, config.metrics, "metrics", "log_freq")
    _positive(config.comm, "comm", "init_timeout_seconds", "train_timeout_seconds")
    real = config.comm.mode in ("default", "torchcomms")
    _require(real, "comm.mode", "be a real backend, which replicas can be joined with", config.comm.mode)
    seed = config.checkpoint.create_seed_checkpoint
    rule = "be false: a seed checkpoint is made by python -m torchtitan.train in one process"
    _require(not seed, "checkpoint.create_seed_checkpoint", rule, seed)


def check_parallelism(config: MonarchTrainer.Config) -> None:
    """Raise ConfigError for a degree that breaks TorchTitan's rules for one replica, whose ranks are a world apart."""
    from torchtitan.distributed import ParallelDims

    degrees, monarch = config.parallelism, config.monarch
    path, world = "parallelism", config.monarch.ranks_per_replica
    names = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    _at_least(1, degrees, path, *(f"{name}_degree" for name in names))
    shard = degrees.data_parallel_shard_degree
    rule = "be at least 1, or -1 for the ranks that are left"
    _require(shard == -1 or shard >= 1, f"{path}.data_parallel_shard_degree", rule, shard)
    try:
        dims = ParallelDims.from_config(degrees, world)
    except AssertionError as error:
        hosts, procs = monarch.hosts_per_replica, monarch.procs_per_host
        factors = {name: getattr(degrees, f"{name}_degree") for name in names[:-1]}
        factors = {name: degree for name, degree in factors.items() if degree > 1}
        if shard != -1:
            factors["data_parallel_shard"] = shard
        product = " * ".join(f"{path}.{name}_degree ({degree})" for name, degree in factors.items())
        raise ConfigError(
            f"{product} must {'divide' if shard == -1 else 'be'} the ranks of one replica, which are "
            f"monarch.hosts_per_replica ({hosts}) * monarch.procs_per_host ({procs}) = {world}."
        ) from error
    inner = dims.dp_shard * dims.cp * dims.tp
    rule = f"divide the ranks that share a pipeline stage's weights, dp_shard * cp * tp = {inner}"
    _require(inner % dims.ep == 0, f"{path}.expert_parallel_degree", rule, dims.ep)

    _check_shapes(config, dims)


def _check_shapes(config: MonarchTrainer.Config, dims: ParallelDims) -> None:
    training, sequence_parallel = config.training, config.parallelism.enable_sequence_parallel
    divisor = (dims.tp if sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
    rule = f"be divisible by {divisor} for tensor_parallel_degree ({dims.tp}) and context_parallel_degree ({dims.cp})"
    _require(training.seq_len % divisor == 0, "training.seq_len", rule, training.seq_len)
    batch, ranks = training.local_batch_size, dims.dp_replicate * dims.dp_shard
    rule = f"be -1 or a multiple of training.local_batch_size ({batch}) * data-parallel ranks in a replica ({ranks})"
    size = training.global_batch_size
    # TorchTitan takes any negative number for "no accumulation".
    _require(size < 0 or (size > 0 and size % (batch * ranks) == 0), "training.global_batch_size", rule, size)


def _check_assets(config: MonarchTrainer.Config) -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    # Other tokenizers, such as the byte tokenizer, are given the path and read nothing.
    if isinstance(config.tokenizer, HuggingFaceTokenizer.Config):
        exists = os.path.exists(config.hf_assets_path)
        rule = f'be a folder that exists, for the tokenizer, or "{BYTE_TOKENIZER}", which needs none'
        _require(exists, "hf_assets_path", rule, config.hf_assets_path)


def _check_dataset_paths(config: MonarchTrainer.Config) -> None:
    loaders = {"dataloader": config.dataloader}
    if getattr(config.validator, "enable", False):
        loaders["validator.dataloader"] = config.validator.dataloader
    for option, loader in loaders.items():
        if loader.dataset == "local_text":
            _check_dataset(option, loader.dataset_path)


def _check_dataset(option: str, path: str | None) -> None:
    from monarch_titan.training.text_files import check_dataset_path

    try:
        check_dataset_path(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace("dataloader.", f"{option}.", 1)) from error
    except OSError as error:
        value = f"{error.filename!r}: {error.strerror}"
        raise ConfigError(f"{option}.dataset_path must be readable, got {value}.") from error


def _check_dump_folder(folder: str) -> None:
    _require(bool(folder.strip()), "dump_folder", "name a folder", folder)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        value = f"{folder!r}: {error.strerror}"
        raise ConfigError(f"dump_folder must be a folder that can be written, got {value}.") from error

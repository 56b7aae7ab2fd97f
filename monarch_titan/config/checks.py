"""Whether the options of a configuration fit together, before any process starts.

TorchTitan and TorchFT check much of this too, but inside the trainers, after minutes, and once a rank.
"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from monarch_titan import upstream
from monarch_titan.config.base import BYTE_TOKENIZER, nearest
from monarch_titan.config.converters import enabled_converters
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.parallelism import check_parallelism, check_without_accelerator
from monarch_titan.config.rules import at_least, positive, require

if TYPE_CHECKING:
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
    _check_dataset_paths(config)


def check_here(config: MonarchTrainer.Config, *, create: bool = True) -> None:
    """Raise ConfigError for the first thing that this machine lacks to train it.

    Creates ``dump_folder``, as the run would, if ``create``: whether it can be is found by doing it.
    """
    scheduler = config.monarch.scheduler
    rule = 'be "local" to train: the other schedulers can be validated and are not launched yet'
    require(scheduler == "local", "monarch.scheduler", rule, scheduler)
    if upstream.accelerator() is None:
        check_without_accelerator(config)
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
        require(name in OPTIMIZERS, f"{path}.optimizer_name", f"be one of {', '.join(OPTIMIZERS)}", name)
        try:
            re.compile(group.pattern)
        except re.error as error:
            raise ConfigError(
                f"{path}.pattern must be a regular expression ({error}), got {group.pattern!r}."
            ) from error
        require("lr" in arguments, f"{path}.optimizer_kwargs", "hold lr", arguments)
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


def _check_monarch(config: MonarchTrainer.Config) -> None:
    monarch, recovery = config.monarch, config.monarch.recovery
    at_least(1, monarch, "monarch", "num_replicas", "hosts_per_replica", "procs_per_host")
    if monarch.min_replicas is not None:
        rule = f"be between 1 and monarch.num_replicas ({monarch.num_replicas})"
        require(1 <= monarch.min_replicas <= monarch.num_replicas, "monarch.min_replicas", rule, monarch.min_replicas)
    rule = 'be 1 with monarch.scheduler "local", which is one machine'
    local = monarch.scheduler == "local"
    require(not local or monarch.hosts_per_replica == 1, "monarch.hosts_per_replica", rule, monarch.hosts_per_replica)
    positive(monarch, "monarch", "quorum_timeout_seconds")
    names = ("heartbeat_timeout_ms", "join_timeout_ms", "quorum_tick_ms")
    positive(monarch.lighthouse, "monarch.lighthouse", *names)

    path = "monarch.recovery"
    at_least(1, recovery, path, "max_failures")
    rule = f"be between 1 and max_failures ({recovery.max_failures})"
    require(1 <= recovery.respawns <= recovery.max_failures, f"{path}.respawns", rule, recovery.respawns)
    at_least(0, recovery, path, "backoff_seconds", "max_backoff_seconds", "commit_retries")


def _check_fault_tolerance(config: MonarchTrainer.Config) -> None:
    ours, replicas = config.fault_tolerance, config.monarch.num_replicas
    path, method = "fault_tolerance", config.fault_tolerance.semi_sync_method
    rule = f"be true to join the replicas when monarch.num_replicas is greater than 1 (it is {replicas})"
    require(ours.enable or replicas == 1, f"{path}.enable", rule, ours.enable)
    at_least(1, ours, path, "sync_steps", "num_fragments")
    positive(ours, path, "process_group_timeout_ms")
    rule = f'be 1 with {path}.semi_sync_method "{method}", because only "diloco" has fragments'
    require(ours.num_fragments == 1 or method == "diloco", f"{path}.num_fragments", rule, ours.num_fragments)
    rule = f"be divisible by {path}.num_fragments ({ours.num_fragments})"
    require(ours.sync_steps % ours.num_fragments == 0, f"{path}.sync_steps", rule, ours.sync_steps)
    rule = f"be at least {path}.sync_steps ({ours.sync_steps}), or the replicas are never synchronised"
    enough = not ours.enable or method == "none" or config.training.steps >= ours.sync_steps
    require(enough, "training.steps", rule, config.training.steps)


def _check_training(config: MonarchTrainer.Config) -> None:
    at_least(1, config.training, "training", "steps", "seq_len", "local_batch_size", "gc_freq")
    positive(config.training, "training", "max_norm")
    at_least(1, config.metrics, "metrics", "log_freq")
    schedule, path = config.lr_scheduler, "lr_scheduler"
    at_least(0, schedule, path, "warmup_steps")
    for name in ("decay_ratio", "min_lr_factor"):
        value = getattr(schedule, name)
        require(value is None or 0 <= value <= 1, f"{path}.{name}", "be between 0 and 1", value)
    positive(config.comm, "comm", "init_timeout_seconds", "train_timeout_seconds")
    real = config.comm.mode in ("default", "torchcomms")
    require(real, "comm.mode", "be a real backend, which replicas can be joined with", config.comm.mode)
    seed = config.checkpoint.create_seed_checkpoint
    rule = "be false: a seed checkpoint is made by python -m torchtitan.train in one process"
    require(not seed, "checkpoint.create_seed_checkpoint", rule, seed)
    kind = type(config.checkpoint).__qualname__
    ours = not config.checkpoint.enable or kind == "CheckpointManager.Config"
    require(ours, "checkpoint", "be TorchTitan's CheckpointManager, which replicas can be resumed from", kind)
    folder = config.checkpoint.folder
    below = not (os.path.isabs(folder) or "://" in folder or ".." in Path(folder).parts)
    require(below, "checkpoint.folder", "be a path below the folder of each replica", folder)


def _check_assets(config: MonarchTrainer.Config) -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    # Other tokenizers, such as the byte tokenizer, are given the path and read nothing.
    if isinstance(config.tokenizer, HuggingFaceTokenizer.Config):
        exists = os.path.exists(config.hf_assets_path)
        rule = f'be a folder that exists, for the tokenizer, or "{BYTE_TOKENIZER}", which needs none'
        require(exists, "hf_assets_path", rule, config.hf_assets_path)


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
    require(bool(folder.strip()), "dump_folder", "name a folder", folder)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        value = f"{folder!r}: {error.strerror}"
        raise ConfigError(f"dump_folder must be a folder that can be written, got {value}.") from error

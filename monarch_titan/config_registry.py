"""Configurations to start from: TorchTitan's ``--module monarch_titan --config NAME`` finds its functions here.

Debug models that train on a CPU in seconds, on real text, with a tokenizer that needs no download.
"""

from __future__ import annotations

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from monarch_titan import run
from monarch_titan.config.base import as_monarch
from monarch_titan.training.data import LocalTextDataLoader
from monarch_titan.training.tokenizer import ByteTokenizer
from monarch_titan.training.trainer import MonarchTrainer

__all__ = ["deepseek_v3_debug_diloco", "llama3_debug_diloco", "run"]


def llama3_debug_diloco() -> MonarchTrainer.Config:
    """TorchTitan's Llama 3 debug model; DiLoCo every 20 steps over 3 replicas of 2 ranks."""
    return _debug(llama3_debugmodel(), "llama3_debug_diloco")


def deepseek_v3_debug_diloco() -> MonarchTrainer.Config:
    """TorchTitan's DeepSeek-V3 debug model (mixture of experts); DiLoCo every 20 steps over 3 replicas of 2 ranks."""
    return _debug(deepseek_v3_debugmodel(), "deepseek_v3_debug_diloco")


def _debug(base: Trainer.Config, name: str) -> MonarchTrainer.Config:
    config = as_monarch(base)
    config.torchtitan.module, config.torchtitan.config = "monarch_titan", name
    config.monarch.num_replicas, config.monarch.procs_per_host = 3, 2
    config.dataloader = LocalTextDataLoader.Config()
    config.tokenizer = ByteTokenizer.Config()
    config.training.steps = 100
    config.training.seq_len = 128
    config.training.local_batch_size = 2
    config.metrics.log_freq = 1
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.validator.enable = False
    config.debug.seed = 0
    # The flight recorder's buffer costs memory in each of many processes on one machine.
    config.comm.trace_buf_size = 0
    return config

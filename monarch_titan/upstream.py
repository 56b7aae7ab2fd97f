"""The only place that touches private or version-pinned APIs of the libraries underneath.

Each says why it is here and until when; a contract test in ``tests/unit/test_upstream.py`` fails when it is no longer
needed.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import signal
import sys
import types
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torchft
    from torchtitan.distributed import ParallelDims
    from torchtitan.trainer import Trainer

MONARCH_ENVIRONMENT = {
    # How often Monarch asks whether its processes live. 10 s by default: most of a recovery would be waiting.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    # How long a process may take to answer. Whoever does not is taken for dead: with 1 s, 32 trainers on two cores made
    # Monarch give up processes that were merely busy. Deaths on the host of the one who watches are seen at once anyway
    # (actors/watch.py); this is for other hosts and for frozen processes.
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "10s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "10s",
    # How long a process that is told to stop may take before it is killed. 10 s by default.
    "HYPERACTOR_PROCESS_EXIT_TIMEOUT": "2s",
}


CONTEXT_PARALLEL_BLOCK = 128
"""Tokens: torch 2.14 makes masks for context parallelism only where each rank's share of a sequence is whole blocks."""


def set_monarch_environment() -> None:
    """Set Monarch's supervision knobs, unless the user has.

    Monarch 0.7 reads them once, when it is imported, and children inherit them: call this before the first import.
    """
    if "monarch" in sys.modules:
        return
    for name, value in MONARCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def monarch_bootstrap_main() -> None:
    """Run the main function of a Monarch process in this process.

    Monarch 0.7 starts its processes with ``python -m``; the fork server needs the same function without a new
    interpreter, and Monarch has no public name for it.
    """
    from monarch._src.actor.bootstrap_main import invoke_main

    invoke_main()


def read_process_report(report: str) -> tuple[int | None, str | None]:
    """Rank and cause out of what Monarch reports of a dead process; None for what the report does not say.

    Monarch 0.7 has no structured form of it.
    """
    rank = re.search(r"\{'gpus': (\d+)/\d+\}", report)
    code = 0 if "process exited cleanly" in report else None
    if killed := re.search(r"Killed\(sig=(\d+)\)", report):
        code = -int(killed[1])
    elif stopped := re.search(r"Stopped\(exit_code=(\d+)\)", report):
        code = int(stopped[1])
    return int(rank[1]) if rank else None, None if code is None else describe_exit(code)


def describe_exit(code: int) -> str:
    """How a process ended, in words; negative codes are signals, as in ``subprocess``."""
    if code >= 0:
        return f"its process exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


class _CpuDevice(types.ModuleType):
    """``torch.cpu`` with the calls that TorchTitan makes on ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch.cpu, name)

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        import psutil

        return types.SimpleNamespace(total_memory=psutil.virtual_memory().total, name="CPU")

    def memory_stats(self, device: object = None) -> dict[str, int]:
        import psutil

        resident = psutil.Process().memory_info().rss
        return {
            "active_bytes.all.peak": resident,
            "reserved_bytes.all.peak": resident,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: object = None) -> None:
        return

    def empty_cache(self) -> None:
        return

    def set_device(self, device: object) -> None:
        return

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def accelerator() -> str | None:
    """The accelerator's device type as torch names it (``cuda`` also for ROCm), or None on a CPU machine."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else None


def _all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None) -> None:
    """``torch.distributed.all_to_all`` for parts of any size, over ``all_to_all_single``."""
    import torch
    import torch.distributed as dist

    sizes = [tensor.numel() for tensor in outputs]
    received = torch.empty(sum(sizes), dtype=outputs[0].dtype, device=outputs[0].device)
    sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
    dist.all_to_all_single(received, sent, sizes, [tensor.numel() for tensor in inputs], group=group)
    for output, part in zip(outputs, received.split(sizes), strict=True):
        output.copy_(part.view_as(output))


def install_cpu_device() -> None:
    """Make TorchTitan use the CPU where there is no accelerator.

    TorchTitan 0.3 decides its device at import, knows accelerators only, and its other modules copy the names: call
    this before any other module of it is imported. torch 2.13 also lacks ``torch.distributed.set_timeout``, which
    TorchTitan calls; 2.14 has it.
    """
    import torch.distributed as dist

    if accelerator() is not None:
        return
    if not hasattr(dist, "set_timeout"):
        from torch.distributed.distributed_c10d import _set_pg_timeout

        def set_timeout(timeout: timedelta, group: Any = None) -> None:
            _set_pg_timeout(timeout, group)

        dist.set_timeout = set_timeout  # type: ignore[attr-defined]
    dist.all_to_all = _all_to_all  # type: ignore[assignment]
    if "torchtitan.trainer" in sys.modules:
        return  # too late to train here; a process that only launches replicas does not need it
    import torchtitan.tools.utils as tools

    if tools.device_type != "cpu":
        tools.device_type, tools.device_module = "cpu", _CpuDevice("monarch_titan_cpu")


def spmd_backend_needs_dtensor() -> bool:
    """True where TorchTitan's default SPMD backend cannot shard: ``spmd_types`` needs torch 2.14."""
    import torch
    from packaging.version import Version

    return Version(torch.__version__) < Version("2.14.0.dev0")


def owner(config: type) -> Any:
    """The class that a ``Config`` of TorchTitan 0.3 builds, which it keeps to itself."""
    return config._owner  # type: ignore[attr-defined]


@contextlib.contextmanager
def fake_world(rank: int, world_size: int, spmd_backend: str) -> Generator[None]:
    """Be one rank of a job of ``world_size`` ranks whose collectives do nothing, on the CPU, and leave no trace.

    TorchTitan 0.3's fake backend alone would shard on the device it chose at import: on a CPU machine that is "cuda",
    which fails, and on a GPU machine FSDP would open a CUDA context in a process that only wants to count. It also
    logs each mesh. DTensor (torch 2.13 and 2.14) remembers the meshes of destroyed process groups and gives them out
    for equal ones, which FSDP then refuses as foreign. Raises RuntimeError in a process that has joined a real job.
    """
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torchtitan.distributed import parallel_dims, utils

    if dist.is_initialized():
        raise RuntimeError("a process that is a rank of one job cannot pretend to be a rank of another")
    device, backend, disabled = parallel_dims.device_type, utils.get_spmd_backend(), logging.root.manager.disable
    _clear_sharding_prop_cache()
    utils.init_fake_mode(world_size, rank=rank)
    try:
        logging.disable(logging.WARNING)
        parallel_dims.device_type = "cpu"
        utils.set_spmd_backend(spmd_backend)
        yield
    finally:
        utils.set_spmd_backend(backend)
        parallel_dims.device_type = device
        logging.disable(disabled)
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


def take_microbatches(schedule: Any) -> None:
    """Let a pipeline schedule be given microbatches that are already split.

    TorchTitan 0.3 calls ``step(arg_mbs=..., kwarg_mbs=..., target_mbs=...)``, which torch 2.14 has. In 2.13 the public
    ``step`` only splits whole batches, and what it hands its own ``_step_microbatches`` is what we exchange.
    """
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        return
    step, run = schedule.step, schedule._step_microbatches

    def step_microbatches(*, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **options: Any) -> Any:
        def run_given(_args: Any, _kwargs: Any, _targets: Any, *rest: Any, **options: Any) -> Any:
            return run(arg_mbs, kwarg_mbs, target_mbs, *rest, **options)

        schedule._step_microbatches = run_given
        return step(**options)

    schedule.step = step_microbatches


def check_pipeline(config: Trainer.Config, dims: ParallelDims) -> None:
    """Raise ValueError for a pipeline that the first pipeline rank could not build; nothing is built.

    TorchTitan 0.3 and torch know how many layers, stages and microbatches fit together, and say so only while they
    build. Their private functions are given stages without modules here.
    """
    from torchtitan.distributed import pipeline_parallel as titan

    parallelism = config.parallelism
    stages, layers, first, last = titan._get_pipeline_metadata(dims, parallelism, config.model_spec.model)
    if parallelism.module_fqns_per_model_part is None:
        titan._generate_llm_fqn_per_model_part(stages, layers, first, last)
    else:
        stages = len(parallelism.module_fqns_per_model_part)
    schedule = parallelism.pipeline_parallel_schedule
    indices = titan._get_pp_rank_to_stage_indices_mapping(0, dims.pp, schedule, stages)
    titan._build_pipeline_schedule(
        parallelism=parallelism,
        local_batch_size=config.training.local_batch_size,
        stages=[
            types.SimpleNamespace(num_stages=stages, stage_index=index, group_size=dims.pp, group_rank=0, submod=None)
            for index in indices
        ],
        loss_fn=lambda: None,
    )


class QuorumClient:
    """TorchFT's quorum client with quorum ids that stay unique when the lighthouse is restarted.

    The lighthouse of TorchFT 0.2 counts quorums from 1 after each start, and managers reconfigure their process
    group only when the id changes, under a store prefix made of the id: after a restart an old group could pass for
    the new one. The controller announces each restart (``lighthouse_attempt``) before the new lighthouse exists, so
    that all ranks of all replicas shift the ids of the same quorum by the same amount.

    Args:
        formed: called with the names of a quorum's replicas before the manager connects with them; the manager keeps
            them to itself.
    """

    IDS_PER_LIGHTHOUSE = 1_000_000

    def __init__(
        self, manager: torchft.Manager, lighthouse_attempt: Callable[[], int], formed: Callable[[list[str]], None]
    ) -> None:
        self._attempt, self._formed = lighthouse_attempt, formed
        self.quorum_id = 0
        self.heal = False
        self._client = manager._client
        manager._client = self  # type: ignore[assignment]

    def _quorum(self, **request: Any) -> types.SimpleNamespace:
        result = self._client._quorum(**request)
        names = [name for name in dir(result) if not name.startswith("_")]
        quorum = types.SimpleNamespace(**{name: getattr(result, name) for name in names})
        # After the answer: the lighthouse may have been restarted while we waited for it.
        quorum.quorum_id += self._attempt() * self.IDS_PER_LIGHTHOUSE
        self.quorum_id, self.heal = quorum.quorum_id, quorum.heal
        # TorchFT makes each name unique with a suffix of its own.
        self._formed([replica_id.partition(":")[0] for replica_id in quorum.replica_ids])
        return quorum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

"""The ``[torchtitan]``, ``[fault_tolerance]`` and ``[monarch]`` sections.

Plain dataclasses, so that the controller and the views read them without loading torch. Every field can be set in
TOML, as ``section.field=value`` on the command line of ``monarch-titan``, and as ``--section.field value`` on
TorchTitan's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from monarch_titan.control.faults import Faults
from monarch_titan.control.recovery import RecoveryPolicy


@dataclass(kw_only=True, slots=True)
class Base:
    """The configuration that everything else is laid over."""

    module: str = ""
    """TorchTitan's ``--module``: a model's short name, such as ``llama3``, or any importable package."""

    config: str = ""
    """TorchTitan's ``--config``: the function there that returns the configuration."""

    flavor: str = ""
    """Size of the model, such as ``8B``, in place of the one in ``config``. Without ``config``, TorchTitan's own
    defaults surround it."""

    attn_backend: str = ""
    """Attention kernel of ``flavor``: ``flex`` or ``varlen``; the module's own choice unless it is given."""

    moe_comm_backend: str = ""
    """How tokens reach the experts of ``flavor``: ``standard``, ``deepep`` or ``hybridep``; the module's own choice
    unless it is given."""

    converters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """TorchTitan's low-precision layers, a table each: ``float8_linear``, ``float8_grouped_experts``,
    ``mxfp8_linear``, ``mxfp8_grouped_experts``, ``nvfp4_linear``, with TorchTitan's options and ``enable``."""


@dataclass(kw_only=True, slots=True)
class OuterOptimizer:
    """SGD on the global parameters, of ``diloco``. The defaults are DiLoCo's."""

    lr: float = 0.7
    momentum: float = 0.9
    """Without any, the outer state is half as large."""

    nesterov: bool = True


@dataclass(kw_only=True, slots=True)
class FaultTolerance:
    """How replicas are kept equal. Names are those of TorchTitan's TorchFT experiment."""

    enable: bool = True
    """Whether TorchFT joins the replicas. False is for one replica only: it then trains as plain TorchTitan."""

    semi_sync_method: Literal["none", "local_sgd", "diloco"] = "diloco"
    """``none`` all-reduces the gradients of every step, ``local_sgd`` averages parameters and ``diloco`` averages
    pseudo-gradients every ``sync_steps`` steps (https://arxiv.org/abs/2311.08105)."""

    sync_steps: int = 20
    """Inner steps between two outer steps of the same parameters."""

    num_fragments: int = 1
    """Parts of the model that ``diloco`` synchronises in turn, one every ``sync_steps / num_fragments`` steps
    (https://arxiv.org/abs/2501.18512)."""

    fragment_update_alpha: float = 0.0
    """How much of a replica's own parameters is left after an outer step of ``diloco``: it goes on from
    ``(1 - alpha) * global + alpha * own``."""

    outer_optimizer: OuterOptimizer = field(default_factory=OuterOptimizer)

    process_group: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend across replicas: ``auto`` is nccl (RCCL on AMD) with an accelerator and gloo without."""

    process_group_timeout_ms: int = 30_000
    """Longest wait of a collective across replicas, of a commit vote and of a state transfer between peers."""


@dataclass(kw_only=True, slots=True)
class Lighthouse:
    """TorchFT's quorum server."""

    heartbeat_timeout_ms: int = 1_000
    """A replica that is silent for longer is left out of the next quorum. Survivors wait this long for a peer that
    died without a trace; shorter is riskier on a machine that is busy enough to delay heartbeats."""

    join_timeout_ms: int = 60_000
    """How long a quorum waits for replicas that are alive but have not asked yet."""

    quorum_tick_ms: int = 100
    """How often the lighthouse looks whether a quorum is complete."""


@dataclass(kw_only=True, slots=True)
class Monarch:
    """How replicas are launched, watched and relaunched."""

    description: str = ""
    """What the run is for, in a sentence; kept in ``config.toml``."""

    scheduler: Literal["local", "slurm", "kubernetes", "skypilot"] = "local"
    """Where replicas run: ``local`` is this machine. The others are checked by ``validate`` and not launched yet."""

    gpu: str | None = None
    """Accelerator of the job, such as ``MI325X``, for what ``validate`` says about memory. Nothing else reads it."""

    num_replicas: int = 1
    """Replicas of the model, each with its own processes."""

    min_replicas: int | None = None
    """Replicas that must live for the run to go on and that a quorum needs. The default is a majority of
    ``num_replicas``, so that no minority ever trains a model of its own."""

    hosts_per_replica: int = 1
    """Hosts that one replica spans."""

    procs_per_host: int = 1
    """Trainer processes a host, one an accelerator. A file that does not say gets as many as its degrees of parallelism
    need, one without any."""

    fork_server: bool | None = None
    """Fork trainers from one preloaded process instead of starting each from nothing: seconds instead of tens of
    seconds, half of the memory. The default is yes without an accelerator and no with one, whose driver cannot be
    forked."""

    check_replicas: Literal["end", "outer_step"] = "end"
    """When replicas are compared bit for bit: before the run is called a success, or also after every outer step."""

    quorum_timeout_seconds: int = 600
    """Longest wait for a quorum. Must exceed the time that a replica needs to come back and that others need to
    train ``sync_steps`` steps."""

    lighthouse: Lighthouse = field(default_factory=Lighthouse)
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    faults: Faults = field(default_factory=Faults)

    @property
    def ranks_per_replica(self) -> int:
        return self.hosts_per_replica * self.procs_per_host

    @property
    def live_replicas_needed(self) -> int:
        """``min_replicas`` with its default filled in: a majority."""
        return self.num_replicas // 2 + 1 if self.min_replicas is None else self.min_replicas

"""What happened in a run: the dataclasses behind ``events.jsonl``.

Every line of ``events.jsonl`` is one :class:`Event` as a JSON object with ``time`` (seconds since the epoch,
float) and ``event`` (the class name in snake case) followed by the fields below. Fields are only ever added,
never renamed or removed, because other tools read them. Steps count from 1, ranks and replicas from 0.

Trainers also send :class:`Report` objects, which the controller needs and which never reach the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of everything written to ``events.jsonl``."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    time: float = field(default_factory=time.time)
    """Seconds since the epoch, taken where the event happened."""


def _kind(cls: type[Event]) -> type[Event]:
    """Register an event class under its name in snake case."""
    Event.kinds[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls
    return cls


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted(Event):
    """The controller is about to launch replicas."""

    dump_folder: str
    num_replicas: int
    min_replicas: int
    ranks_per_replica: int
    steps: int
    """Inner steps each replica is to take (``training.steps``)."""
    method: str
    """``none``, ``local_sgd`` or ``diloco``."""
    sync_steps: int
    device: str
    """``cpu``, ``cuda`` or what TorchTitan calls the accelerator."""
    versions: dict[str, str]
    """Package name -> version, for torch, torchtitan, torchft and torchmonarch."""


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class LighthouseStarted(Event):
    """TorchFT's quorum server answers at ``address``; ``attempt`` counts its restarts."""

    address: str
    attempt: int
    pid: int


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class LighthouseFailed(Event):
    """The quorum server is gone; it is started again at the same address."""

    cause: str


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed(Event):
    """A run that had been stopped goes on from a checkpoint, or had none that was whole (``step`` is 0)."""

    step: int
    outer_step: int
    replicas: list[int]
    """Those that have a part of it; the others heal from them."""
    ignored: list[str]
    """Newer checkpoints that were not used, and why, a line each."""


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStarted(Event):
    """All trainer processes of one attempt of a replica are up."""

    replica: int
    attempt: int
    """0 for the first launch, then one more for every relaunch."""
    pids: dict[int, int]
    """Rank -> process id on its host."""
    actor_pid: int
    """Process id of the ReplicaActor, which drives them."""


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Event):
    """One inner step, reported every ``metrics.log_freq`` steps."""

    replica: int
    step: int
    loss: float
    """Mean over the tokens of all ranks of the replica; ``null`` in the file when it is not finite."""
    tokens: int
    """Tokens trained by all ranks of the replica since its previous ``step`` event."""
    seconds: float
    """Wall time since the previous ``step`` event of this attempt."""


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class Quorum(Event):
    """A quorum was formed, seen by rank 0 of ``replica``."""

    replica: int
    quorum_id: int
    participants: int
    """Replicas in the quorum."""
    healing: bool
    """True when this replica took its state from a peer in this quorum."""
    seconds: float
    """Wall time from asking to having it, healing included."""


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class OuterStep(Event):
    """One synchronisation across replicas, seen by rank 0 of ``replica``."""

    replica: int
    outer_step: int
    """Number of outer steps committed, this one included when ``committed``."""
    step: int
    """Inner step at which it happened."""
    participants: int
    committed: bool
    contributed: bool
    """False when this replica had just healed and gave nothing to the average."""
    seconds: float
    """From the first byte sent to the new parameters in place."""
    bytes: int
    """Payload given to the all-reduce by all ranks of this replica."""
    error: str | None = None
    """Why it was not committed."""
    first_batch: int = 0
    """Batches of its shard that rank 0 had drawn when its window began."""
    seen_batches: list[int] = field(default_factory=list)
    """Replica -> batches of its rank 0's shard that the global parameters have seen now."""


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaState(Event):
    """Hashes of one rank's state, to compare replicas bit for bit (``monarch.check_replicas``)."""

    replica: int
    rank: int
    outer_step: int
    step: int
    healed: bool
    """True when the state before this outer step came from a peer."""
    global_parameters: str
    outer_optimizer: str
    optimizer: str
    """Adam's moments and step counts as they entered the outer step."""
    lr: float


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasDiffer(Event):
    """Replicas have committed different states in one outer step."""

    outer_step: int
    rank: int
    right: list[int]
    """Those that agree and are the majority; the others heal from them. Empty without one, and the run fails."""
    wrong: list[int]


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaFailed(Event):
    """A replica stopped before its end."""

    replica: int
    attempt: int
    rank: int | None
    """The rank that failed first; None when no single rank is known."""
    step: int
    """Last inner step that the replica had reported."""
    cause: str
    log: str
    """Path of the log to read, relative to the dump folder."""
    action: str
    """What follows: ``respawn``, ``reallocate`` or ``give up``."""


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLost(Event):
    """A replica was given up; the run goes on while ``min_replicas`` live."""

    replica: int
    failures: int
    cause: str


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaFinished(Event):
    """A replica has trained all its steps and waits for its peers."""

    replica: int
    step: int
    outer_step: int


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class FaultInjected(Event):
    """A signal was sent on purpose (``monarch.faults``)."""

    replica: int | None
    """None for the lighthouse, as is ``rank``."""
    rank: int | None
    step: int
    pid: int
    signal: str


@_kind
@dataclass(frozen=True, kw_only=True, slots=True)
class RunFinished(Event):
    """The last line of every run that could still write it."""

    status: str
    """``succeeded``, ``failed`` or ``interrupted``."""
    seconds: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Base of what trainers tell the controller and nobody else."""

    replica: int
    attempt: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuorumRequested(Report):
    """This rank is about to ask for a quorum; peers held at the end must attend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuorumFormed(Report):
    """This rank has its quorum."""

    has_state: bool
    """Whether it has a state to give, its own or one that it has just taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterStepCommitted(Report):
    """An outer step committed; the rank's data position belongs to it."""

    outer_step: int
    batches: int
    """Batches of its shard that the rank has drawn, in all of the replica's lives."""
    data: Any
    """``state_dict()`` of the rank's dataloader there."""
    lineage: str
    """By which outer steps the state came about: where two differ after one outer step, so do the states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerFinished(Report):
    """This rank has trained all its steps and is held until the others have too."""

    step: int
    outer_step: int
    state: str
    """Hash of the rank's global parameters."""


def to_json(event: Event) -> str:
    """One line of ``events.jsonl``, without the newline."""
    name = next(name for name, cls in Event.kinds.items() if cls is type(event))
    body: dict[str, Any] = dataclasses.asdict(event)
    # JSON has no NaN, which a loss can be.
    body = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in body.items()
    }
    return json.dumps({"time": round(body.pop("time"), 3), "event": name, **body})


def from_json(line: str) -> Event:
    """Read back one line of ``events.jsonl``. Raises ValueError for an event this version does not know."""
    body = json.loads(line)
    cls = Event.kinds.get(name := body.pop("event"))
    if cls is None:
        raise ValueError(f"unknown event {name!r}; this version knows {', '.join(Event.kinds)}.")
    known = {f.name for f in dataclasses.fields(cls)}
    body = {key: value for key, value in body.items() if key in known}
    if cls is Step and body["loss"] is None:
        body["loss"] = math.nan
    if "pids" in body:
        body["pids"] = {int(rank): pid for rank, pid in body["pids"].items()}
    return cls(**body)


class EventLog:
    """Writes events to ``events.jsonl`` and shows each to the observers, in order."""

    def __init__(self, path: Path, observers: Iterable[Callable[[Event], None]] = ()) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._observers = list(observers)

    def __call__(self, event: Event) -> None:
        self._file.write(to_json(event) + "\n")
        for observer in self._observers:
            observer(event)

    def observe(self, observer: Callable[[Event], None]) -> None:
        """Show events to one more observer, after the others."""
        self._observers.append(observer)

    def close(self) -> None:
        self._file.close()

"""Failures on purpose: at given steps, or at random moments. Without faults to inject, no injector exists."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import SIGKILL, Signals

from monarch_titan.control.events import Event, FaultInjected, LighthouseStarted, ReplicaFailed, ReplicaStarted, Step

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGSTOP")
KINDS = (*SIGNALS, "replica", "lighthouse")

SCHEDULED = re.compile(r"(?P<kind>\w+)(?: replica (?P<replica>\d+)(?: rank (?P<rank>\d+))?)? at step (?P<step>\d+)")


@dataclass(kw_only=True, slots=True)
class Faults:
    """Failures on purpose, on the controller's host. The defaults are none.

    A kind is a signal to one rank, ``replica`` (SIGKILL to all of its ranks at once) or ``lighthouse`` (SIGKILL).
    """

    mtbf_seconds: float = 0.0
    """Mean time between failures of the run, counted from its first step; 0 for no random ones. The times between them
    are distributed exponentially."""

    kinds: list[str] = field(default_factory=lambda: ["SIGKILL"])
    """What may happen at random, each as likely as the others."""

    schedule: list[str] = field(default_factory=list)
    """What happens at which step, as ``SIGKILL replica 1 rank 0 at step 30``. Without rank or replica it is a random
    one."""

    seed: int = 0
    """Of all that is random here."""

    @property
    def any(self) -> bool:
        """Whether anything is to be injected."""
        return self.mtbf_seconds > 0 or bool(self.schedule)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens when a replica reports a step; to a random replica or rank where none is given."""

    step: int
    kind: str = "SIGKILL"
    replica: int | None = None
    rank: int | None = None

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read an entry of ``Faults.schedule``. Raises ValueError when it is none."""
        found = SCHEDULED.fullmatch(text)
        if found is None or found["kind"] not in KINDS:
            raise ValueError(text)
        numbers = {name: None if found[name] is None else int(found[name]) for name in ("replica", "rank")}
        return cls(step=int(found["step"]), kind=found["kind"], **numbers)


class Injector:
    """Watches events and injects faults into processes of this host, each that has a step once."""

    def __init__(self, faults: Faults, log: Callable[[Event], None]) -> None:
        self._pending = [Fault.parse(text) for text in faults.schedule]
        self._mtbf, self._kinds, self._log = faults.mtbf_seconds, faults.kinds, log
        self._random = random.Random(faults.seed)
        self._pids: dict[int, dict[int, int]] = {}
        self._lighthouse: int | None = None
        self._steps: dict[int, int] = {}
        self._next: float | None = None

    def __call__(self, event: Event) -> None:
        """Take an event of the run."""
        match event:
            case ReplicaStarted():
                self._pids[event.replica] = dict(event.pids)
            case ReplicaFailed():
                self._pids.pop(event.replica, None)
            case LighthouseStarted():
                self._lighthouse = event.pid
            case Step():
                self._steps[event.replica] = event.step
                self._inject_due(event)
        if self._next is not None and event.time >= self._next:
            self._next = event.time + self._random.expovariate(1 / self._mtbf)
            self._inject(Fault(step=0, kind=self._random.choice(self._kinds)))

    def _inject_due(self, event: Step) -> None:
        if self._mtbf and self._next is None:
            self._next = event.time + self._random.expovariate(1 / self._mtbf)
        for fault in list(self._pending):
            if fault.replica in (None, event.replica) and fault.step <= event.step and self._inject(fault):
                self._pending.remove(fault)

    def _inject(self, fault: Fault) -> bool:
        """Whether anything was hit. What has just died by itself leaves the fault to its successor."""
        if fault.kind == "lighthouse":
            return self._lighthouse is not None and self._kill(self._lighthouse, SIGKILL)
        running = sorted(self._pids)
        replica = fault.replica
        if replica is None and running:
            replica = self._random.choice(running)
        if replica not in self._pids:
            return False
        pids = self._pids[replica]
        if fault.kind == "replica":
            hit = [self._kill(pid, SIGKILL, replica, rank) for rank, pid in sorted(pids.items())]
            return any(hit)
        rank = self._random.choice(sorted(pids)) if fault.rank is None else fault.rank
        return self._kill(pids[rank], Signals[fault.kind], replica, rank)

    def _kill(self, pid: int, number: Signals, replica: int | None = None, rank: int | None = None) -> bool:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        step = max(self._steps.values(), default=0) if replica is None else self._steps.get(replica, 0)
        self._log(FaultInjected(replica=replica, rank=rank, step=step, pid=pid, signal=number.name))
        return True

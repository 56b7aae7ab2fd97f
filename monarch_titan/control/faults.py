"""Failures on purpose: a signal to a trainer at a step. Without faults to inject, no injector exists."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from signal import SIGKILL, Signals

from monarch_titan.control.events import Event, FaultInjected, ReplicaStarted, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Send ``signal`` to one rank when its replica reports ``step``."""

    replica: int
    rank: int
    step: int
    signal: Signals = SIGKILL


class Injector:
    """Watches events and injects each fault once, into processes of this host."""

    def __init__(self, faults: Sequence[Fault], log: Callable[[Event], None]) -> None:
        self._pending, self._log = list(faults), log
        self._pids: dict[tuple[int, int], int] = {}

    def __call__(self, event: Event) -> None:
        """Take an event of the run."""
        match event:
            case ReplicaStarted():
                self._pids |= {(event.replica, rank): pid for rank, pid in event.pids.items()}
            case Step():
                due = [f for f in self._pending if f.replica == event.replica and f.step <= event.step]
                for fault in due:
                    self._inject(fault, event.step)

    def _inject(self, fault: Fault, step: int) -> None:
        pid = self._pids[fault.replica, fault.rank]
        try:
            os.kill(pid, fault.signal)
        except ProcessLookupError:
            return  # it has just died by itself: the fault waits for its successor
        self._pending.remove(fault)
        name = fault.signal.name
        self._log(FaultInjected(replica=fault.replica, rank=fault.rank, step=step, pid=pid, signal=name))

"""A replica as the controller drives it, and what the controller keeps of it over all its attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from monarch_titan.control.events import OuterStepCommitted, QuorumFormed, QuorumRequested, Report, TrainerFinished
from monarch_titan.control.recovery import Action


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a replica stopped before its end."""

    cause: str | None
    """None: a process died, and how is not known."""
    rank: int | None = None
    pid: int | None = None
    log: str = ""
    """Path of the log to read, relative to the dump folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a replica is launched with."""

    replica: int
    attempt: int
    action: Action
    positions: dict[int, dict[int, Any]]
    """Rank -> batches drawn -> state of its dataloader there; the state that it heals with says which counts."""
    lighthouse_attempt: int


class Replica(Protocol):
    """A launched replica, as the controller drives it. Once it is stopped, calls return without effect."""

    async def run(self) -> Failure | None:
        """Train; None when all ranks have left after ``release()``."""

    async def attend(self) -> None:
        """Have a replica that waits at the end take part in one more quorum; returns when it has, healing included."""

    async def announce_lighthouse(self, attempt: int) -> None:
        """Tell all ranks that the lighthouse will be restarted; those of a replica that does not run yet too."""

    async def peer_gone(self, replica: int, attempt: int) -> None:
        """Have no rank wait for this attempt of another replica any more."""

    async def release(self) -> None:
        """Let a replica that waits at the end leave."""

    async def stop(self) -> None:
        """End all processes of the replica, whatever state they are in."""


@dataclass(slots=True)
class Member:
    """A replica's place in the run, over all its attempts."""

    replica_id: int
    ranks: int
    replica: Replica | None = None
    attempt: int = 0
    failures: int = 0
    """In a row: an outer step to which the replica contributed sets it back."""
    step: int = 0
    has_state: bool = True
    """Whether a peer can heal from it: true from the start and again once it has caught up."""
    condemned: Failure | None = None
    """Why the present attempt must not go on, although it could."""
    lost: bool = False
    attending: bool = False
    """Whether it was sent into a quorum, held as it is, and is not back."""
    asking: set[int] = field(default_factory=set)
    """Ranks that wait for a quorum."""
    with_state: set[int] = field(default_factory=set)
    """Ranks that came out of a quorum with a state to give."""
    finished: dict[int, TrainerFinished] = field(default_factory=dict)
    """Ranks that have trained all steps and are held."""

    @property
    def held(self) -> bool:
        """Whether all ranks have trained all steps and wait."""
        return self.replica is not None and len(self.finished) == self.ranks

    @property
    def outer_steps(self) -> set[int]:
        """The outer steps at which ranks are held: more than one while some have healed and others not yet said so."""
        return {report.outer_step for report in self.finished.values()}

    def take(self, report: Report) -> None:
        """Note what a rank of the present attempt reports."""
        match report:
            case QuorumRequested():
                self.asking.add(report.rank)
            case QuorumFormed():
                self.asking.discard(report.rank)
                # Two replicas that need a state can form a quorum, and ask again.
                if report.has_state:
                    self.with_state.add(report.rank)
                self.has_state = self.has_state or len(self.with_state) == self.ranks
            case OuterStepCommitted():
                self.has_state = True
            case TrainerFinished():
                self.has_state = True
                self.finished[report.rank] = report

    def end_attempt(self) -> None:
        """Forget the attempt that has just failed; what it still reports is of the past from now on."""
        self.attempt += 1
        self.has_state = False
        self.condemned = None
        self.with_state.clear()
        self.asking.clear()
        self.finished.clear()


class Changes:
    """Wakes whoever waits for a condition that others bring about."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Have every waiter look again."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, condition: Callable[[], bool], within: float | None = None) -> bool:
        """True as soon as the condition holds, False when it does not after ``within`` seconds."""
        try:
            async with asyncio.timeout(within):
                while not condition():
                    await self._next.wait()
        except TimeoutError:
            return condition()  # it may have come about in the same turn of the loop
        return True

"""What goes wrong in a simulated run, and when."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class LastWords(Enum):
    """What becomes of what a replica has just sent when it dies."""

    ARRIVE = "arrive"
    LATE = "arrive after its death was noticed"
    LOST = "are lost"


class Moment(Enum):
    """Where in its life a replica is."""

    LAUNCH = "launch"
    START = "start"
    WINDOW = "window"
    QUORUM = "wait for a quorum"
    HEALING = "healing"
    OUTER_STEP = "outer step"
    COMMITTED = "time right after a commit"
    SAVING = "saving of a checkpoint"
    HELD = "wait at the end"
    ATTENDING = "help for a late peer"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Death:
    """A replica dies ``after`` seconds, if it still is there, in the ``nth`` time (from 0) that it is at a moment."""

    replica: int
    moment: Moment
    nth: int = 0
    after: float = 0.0

    def __str__(self) -> str:
        return f"replica {self.replica} dies {self.after:g} s into {self.moment.value} number {self.nth + 1}"


@dataclass(frozen=True, kw_only=True)
class Outage:
    """These replicas, and the lighthouse if so, die in the same instant."""

    at: float
    replicas: tuple[int, ...] = ()
    lighthouse: bool = False

    def __str__(self) -> str:
        dead = [f"replica {replica}" for replica in self.replicas] + ["the lighthouse"] * self.lighthouse
        return f"after {self.at:g} s die at once: {', '.join(dead) or 'none'}"


@dataclass(frozen=True, kw_only=True)
class Crash:
    """Everything is killed, the controller too; the checkpoints of some replicas are gone; the run is started again."""

    at: float
    lost: tuple[int, ...] = ()

    def __str__(self) -> str:
        lost = f", the checkpoints of replicas {self.lost} are gone" if self.lost else ""
        return f"after {self.at:g} s (or when it fails) the whole run is killed{lost}, and started again"


@dataclass(frozen=True, kw_only=True)
class Break:
    """The ``nth`` all-reduce (from 0) breaks with nobody dead."""

    nth: int

    def __str__(self) -> str:
        return f"all-reduce number {self.nth + 1} breaks"


@dataclass(frozen=True, kw_only=True)
class Interrupt:
    """The user presses Ctrl-C."""

    at: float

    def __str__(self) -> str:
        return f"after {self.at:g} s the user interrupts"


Fault = Death | Outage | Crash | Break | Interrupt


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All that decides how a simulated run goes: the same schedule always plays the same way."""

    num_replicas: int = 3
    min_replicas: int = 2
    ranks: int = 1
    outer_steps: int = 3
    """Windows that each replica is to train."""
    window_seconds: tuple[float, ...] = (8.0, 9.0, 10.0, 11.0)
    """Of each replica."""
    respawns: int = 4
    max_failures: int = 16
    backoff_seconds: float = 1.0
    checkpoint_every: int = 0
    """Windows between two checkpoints; 0: there are none."""
    torn: int = 0
    """Survivors of a broken all-reduce who have its result nevertheless, if all had given theirs."""
    last_words: LastWords = LastWords.ARRIVE
    faults: tuple[Fault, ...] = ()

    def of(self, kind: type) -> tuple:
        """The faults of a kind."""
        return tuple(fault for fault in self.faults if isinstance(fault, kind))

    @property
    def patience(self) -> float:
        """Seconds after which a run that goes on does so for ever: a fault costs a window, a relaunch and a quorum."""
        windows = (self.outer_steps + len(self.faults)) * max(self.window_seconds)
        return 600.0 + windows + 150.0 * len(self.faults)

    def simpler(self) -> Iterator[Schedule]:
        """Schedules with a fault less."""
        for index in range(len(self.faults)):
            yield dataclasses.replace(self, faults=self.faults[:index] + self.faults[index + 1 :])

    def __str__(self) -> str:
        seconds = ", ".join(f"{s:g}" for s in self.window_seconds[: self.num_replicas])
        lines = [
            f"{self.num_replicas} replicas of {self.ranks} ranks, at least {self.min_replicas}; "
            f"{self.outer_steps} windows of {seconds} s, a checkpoint every {self.checkpoint_every}",
            f"respawns {self.respawns}, max_failures {self.max_failures}, backoff {self.backoff_seconds:g} s; "
            f"{self.torn} survivors have a broken all-reduce's result; last words "
            f"{self.last_words.value}",
            *(f"- {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        """A random schedule, the same one for the same seed."""
        dice = random.Random(seed)
        num_replicas = dice.randint(1, 4)
        replicas = range(num_replicas)
        respawns = dice.randint(1, 3)
        checkpoint_every = dice.choice([0, 1, 2])
        return cls(
            num_replicas=num_replicas,
            min_replicas=dice.randint(num_replicas // 2 + 1, num_replicas),
            ranks=dice.randint(1, 2),
            outer_steps=dice.randint(1, 5),
            # Now and then one is ten times slower than its peers, who do not wait for it.
            window_seconds=tuple(dice.randint(5, 15) * dice.choice([1.0] * 19 + [10.0]) for _ in replicas),
            respawns=respawns,
            max_failures=dice.randint(respawns, 5),
            backoff_seconds=dice.choice([0.0, 1.0, 20.0]),
            checkpoint_every=checkpoint_every,
            torn=dice.choice([0, 0, 1, 2]),
            last_words=dice.choice(list(LastWords)),
            faults=tuple(_faults(dice, replicas, crashes=checkpoint_every > 0)),
        )


def _faults(dice: random.Random, replicas: range, *, crashes: bool) -> Iterator[Fault]:
    for _ in range(dice.randint(0, 8)):
        moment, after = dice.choice(list(Moment)), dice.choice([0.0, 0.02, 0.05, 0.5, 3.0])
        yield Death(replica=dice.choice(replicas), moment=moment, nth=dice.randint(0, 3), after=after)
    for _ in range(dice.choice([0, 0, 1, 2])):
        dead, at = tuple(replica for replica in replicas if dice.random() < 0.5), dice.randint(0, 600) / 10
        yield Outage(at=at, replicas=dead, lighthouse=dice.random() < 0.5)
        if dice.random() < 0.3:  # while they are launched again
            yield Outage(at=at + 0.7, lighthouse=True)
    for _ in range(dice.choice([0, 0, 0, 1])):
        yield Break(nth=dice.randint(0, 3))
    for _ in range(dice.choice([0, 0, 1, 2]) if crashes else 0):
        lost = tuple(replica for replica in replicas if dice.random() < 0.1)
        yield Crash(at=dice.randint(0, 600) / 10, lost=lost)
    if dice.random() < 0.05:
        yield Interrupt(at=dice.randint(0, 600) / 10)

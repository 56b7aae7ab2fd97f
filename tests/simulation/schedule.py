"""What goes wrong in a simulated run, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Moment(Enum):
    """Where in its life a replica is."""

    LAUNCH = "launch"
    START = "start"
    WINDOW = "window"
    QUORUM = "quorum"
    HEALING = "healing"
    OUTER_STEP = "outer step"
    COMMITTED = "committed"
    HELD = "held"
    ATTENDING = "attending"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Death:
    """A replica dies ``after`` seconds, if it still is there, in the ``nth`` time (from 0) that it is at a moment."""

    replica: int
    moment: Moment
    nth: int = 0
    after: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outage:
    """These replicas, and the lighthouse if so, die in the same instant."""

    at: float
    replicas: tuple[int, ...] = ()
    lighthouse: bool = False


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All that decides how a simulated run goes. Its ``repr`` is what to replay."""

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
    checkpoint: bool = False
    """Whether an only replica saves every outer step and restarts from it."""
    deaths: tuple[Death, ...] = ()
    outages: tuple[Outage, ...] = ()
    torn: bool = False
    """Whether a death in an all-reduce leaves one survivor with its result and the others without."""
    interrupt_at: float | None = None
    """When the user presses Ctrl-C."""

    @classmethod
    def draw(cls, dice: random.Random) -> Schedule:
        """A random schedule: the same dice throw the same one."""
        num_replicas = dice.randint(1, 4)
        replicas = range(num_replicas)
        respawns = dice.randint(1, 3)
        return cls(
            num_replicas=num_replicas,
            min_replicas=dice.randint(num_replicas // 2 + 1, num_replicas),
            ranks=dice.randint(1, 2),
            outer_steps=dice.randint(1, 4),
            window_seconds=tuple(float(dice.randint(5, 15)) for _ in replicas),
            respawns=respawns,
            max_failures=dice.randint(respawns, 5),
            backoff_seconds=dice.choice([0.0, 1.0, 20.0]),
            checkpoint=num_replicas == 1 and dice.random() < 0.5,
            deaths=tuple(_death(dice, dice.choice(replicas)) for _ in range(dice.randint(0, 8))),
            outages=tuple(_outage(dice, replicas) for _ in range(dice.choice([0, 0, 1, 2]))),
            torn=dice.random() < 0.5,
            interrupt_at=dice.randint(0, 600) / 10 if dice.random() < 0.05 else None,
        )


def _death(dice: random.Random, replica: int) -> Death:
    moment, after = dice.choice(list(Moment)), dice.choice([0.0, 0.02, 0.05, 0.5, 3.0])
    return Death(replica=replica, moment=moment, nth=dice.randint(0, 3), after=after)


def _outage(dice: random.Random, replicas: range) -> Outage:
    dead = tuple(replica for replica in replicas if dice.random() < 0.5)
    return Outage(at=dice.randint(0, 600) / 10, replicas=dead, lighthouse=dice.random() < 0.5)

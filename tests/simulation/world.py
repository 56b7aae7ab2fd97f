"""What outlives a run that is killed and started again: checkpoints, and which faults have happened."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.quorum import State
from tests.simulation.schedule import Break, Death, Fault, Moment, Schedule

KEPT = 2
"""Checkpoints of a replica, ``checkpoint.keep_latest_k``."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a replica saves."""

    state: State
    windows_trained: int
    sample: int


class Disk:
    """Checkpoints that were written to their end, and which of them a run goes on from: as ``control.checkpoints``."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, Part]] = {}

    def begin(self, replica: int, windows_trained: int) -> None:
        """What was saved there before is not whole any more."""
        self._parts.setdefault(replica, {}).pop(windows_trained, None)

    def seal(self, replica: int, part: Part) -> None:
        parts = self._parts[replica]
        parts[part.windows_trained] = part
        for oldest in sorted(parts)[:-KEPT]:
            del parts[oldest]

    def lose(self, replica: int) -> None:
        self._parts.pop(replica, None)

    def newest(self, num_replicas: int) -> dict[int, Part]:
        """The parts of the newest checkpoint that all have, else of the newest that any has, else none."""
        partial: dict[int, Part] = {}
        for step in sorted(set().union(*self._parts.values()), reverse=True):
            found = {replica: parts[step] for replica, parts in self._parts.items() if step in parts}
            states = [part.state for part in found.values()]
            agreed = {replica: part for replica, part in found.items() if part.state == max(states, key=states.count)}
            if len(agreed) == num_replicas:
                return agreed
            partial = partial or agreed
        return partial


@dataclass(kw_only=True)
class World:
    """Everything but the run that is there now."""

    schedule: Schedule
    disk: Disk = field(default_factory=Disk)
    forks: set[int] = field(default_factory=set)
    """Outer steps that a quorum was to take while somebody who lives and was not in it had taken them."""
    struck: set[Fault] = field(default_factory=set)
    """Of the faults that have a time those that have happened; each does once."""
    _moments: dict[tuple[int, Moment], int] = field(default_factory=dict)
    _reductions: int = -1

    def death(self, replica: int, moment: Moment) -> Death | None:
        """The death that the schedule has for a replica that comes to this moment now."""
        nth = self._moments[replica, moment] = self._moments.get((replica, moment), -1) + 1
        deaths = self.schedule.of(Death)
        return next((d for d in deaths if (d.replica, d.moment, d.nth) == (replica, moment, nth)), None)

    def breaks(self) -> bool:
        """Whether the all-reduce that begins now breaks."""
        self._reductions += 1
        return Break(nth=self._reductions) in self.schedule.faults

"""What a soak came to: how much training was committed despite the failures, and whether any of it is wrong."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from monarch_titan.control import events
from monarch_titan.view.summary import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Figures of a soak."""

    replicas: int
    outer_steps: int
    """Committed."""
    faults: int
    """Signals sent on purpose."""
    failures: int
    """Replicas that failed, for whatever reason."""
    goodput: float | None
    """Windows of training that were committed, of those that all replicas would have committed at the undisturbed
    pace; None when there was no undisturbed outer step to take that from."""
    undisturbed: list[float]
    """Seconds from one outer step to the next where all replicas contributed to both and none failed between."""
    lost: int
    """Batches, of rank 0 of each replica, that the global parameters were said to have seen and that nobody trained."""
    repeated: int
    """Batches that were trained into the global parameters twice."""
    differences: int
    """Outer steps in which replicas committed different states, on any rank."""

    @property
    def sound(self) -> bool:
        """Whether anything was committed, and nothing wrong."""
        return self.outer_steps > 0 and not (self.lost or self.repeated or self.differences)


class Soak:
    """Folds the events of a run into a Verdict."""

    def __init__(self) -> None:
        self._replicas = 0
        self._faults = self._failures = 0
        self._failure_times: list[float] = []
        self._commits: dict[int, list[events.OuterStep]] = {}
        self._different: set[int] = set()

    def __call__(self, event: events.Event) -> None:
        """Add one event."""
        match event:
            case events.RunStarted():
                self._replicas = event.num_replicas
            case events.FaultInjected():
                self._faults += 1
            case events.ReplicaFailed():
                self._failures += 1
                self._failure_times.append(event.time)
            case events.OuterStep(committed=True):
                self._commits.setdefault(event.outer_step, []).append(event)
            case events.ReplicasDiffer():
                self._different.add(event.outer_step)

    def verdict(self) -> Verdict:
        """What it came to so far."""
        undisturbed = self._undisturbed()
        lost, repeated = self._misread()
        return Verdict(
            replicas=self._replicas,
            outer_steps=len(self._commits),
            faults=self._faults,
            failures=self._failures,
            goodput=self._goodput(statistics.median(undisturbed)) if undisturbed else None,
            undisturbed=undisturbed,
            lost=lost,
            repeated=repeated,
            differences=len(self._different),
        )

    def _contributors(self, outer_step: int) -> int:
        return len({event.replica for event in self._commits.get(outer_step, []) if event.contributed})

    def _committed_at(self, outer_step: int) -> float:
        return min(event.time for event in self._commits[outer_step])

    def _undisturbed(self) -> list[float]:
        found = []
        for outer_step in sorted(self._commits):
            if {self._contributors(outer_step - 1), self._contributors(outer_step)} != {self._replicas}:
                continue
            begin, end = self._committed_at(outer_step - 1), self._committed_at(outer_step)
            if not any(begin <= time <= end for time in self._failure_times):
                found.append(end - begin)
        return found

    def _goodput(self, pace: float) -> float:
        first, *others = sorted(self._commits)
        seconds = self._committed_at(max(self._commits)) - self._committed_at(first)
        return sum(map(self._contributors, others)) * pace / (self._replicas * seconds)

    def _misread(self) -> tuple[int, int]:
        """Between what the parameters had seen of a shard and where the next window of it began: gaps and overlaps."""
        lost = repeated = 0
        for outer_step, commits in self._commits.items():
            before = Counter(tuple(event.seen_batches) for event in self._commits.get(outer_step - 1, []))
            for event in commits:
                if before and event.contributed:
                    ((seen, _),) = before.most_common(1)
                    gap = event.first_batch - seen[event.replica]
                    lost, repeated = lost + max(0, gap), repeated + max(0, -gap)
        return lost, repeated


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Print a soak's figures, and whether they are what they must be."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_row("outer steps committed", str(verdict.outer_steps))
    table.add_row("failures", f"{verdict.failures}, of {plural(verdict.faults, 'injected fault')}")
    goodput = "not known: no outer step was undisturbed"
    if verdict.goodput is not None:
        pace = f"{statistics.median(verdict.undisturbed):.1f} s an outer step, the median of {len(verdict.undisturbed)}"
        all_ = plural(verdict.replicas, "replica")
        goodput = f"{verdict.goodput:.1%} of what {all_} commit undisturbed ({pace})"
    table.add_row("goodput", goodput)
    table.add_row("batches lost", _must_be_0(verdict.lost))
    table.add_row("batches repeated", _must_be_0(verdict.repeated))
    table.add_row("outer steps with different states", _must_be_0(verdict.differences))
    console.print()
    word, style = ("sound", "bold green") if verdict.sound else ("not sound", "bold red")
    console.print(Text("Verdict: ", style="bold").append(word, style=style))
    console.print(table)


def _must_be_0(count: int) -> Text:
    return Text(str(count), style="red" if count else "")

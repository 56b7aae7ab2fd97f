"""The state of a run, folded from its events.

The fold also writes the sentences a user must not miss (:class:`Note`), so that the terminal, the report and any
other view tell the same story in the same words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

from monarch_titan.control import events

SMOOTHING = 0.5
"""Weight of the newest step in the tokens a second of a replica."""

FAULT_WINDOW = 60.0
"""Seconds within which a failure is put down to the fault injected before it."""

Kind = Literal["bad", "warning", "good", "info"]


class State(Enum):
    """What a replica is doing; the value is the word to show."""

    STARTING = "starting"
    TRAINING = "training"
    HEALING = "healing"
    WAITING = "waiting for peers"
    FINISHED = "finished"
    RESPAWNING = "respawning"
    REALLOCATING = "reallocating"
    STOPPED = "stopped"
    LOST = "lost"


ALIVE = {State.STARTING, State.TRAINING, State.HEALING}
AFTER_FAILURE = {"respawn": State.RESPAWNING, "reallocate": State.REALLOCATING, "give up": State.LOST}


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One sentence worth keeping, ``seconds`` after the start of the run."""

    seconds: float
    kind: Kind
    text: str


@dataclass(kw_only=True, slots=True)
class Failure:
    """One failure of a replica, and when the replica was back."""

    event: events.ReplicaFailed
    since: float
    """Epoch seconds of the injected fault, or of the failure when there was none."""
    injected: bool
    back: float | None = None
    """Epoch seconds of the first outer step the replica committed afterwards."""

    @property
    def cause(self) -> str:
        return first_line(self.event.cause)

    @property
    def recovery_seconds(self) -> float | None:
        """Seconds from the fault to the replica's next committed outer step; None while it has not come back."""
        return None if self.back is None else max(0.0, self.back - self.since)


@dataclass(kw_only=True, slots=True)
class ReplicaSummary:
    """Where one replica stands."""

    replica: int
    state: State = State.STARTING
    attempts: int = 0
    step: int = 0
    loss: float | None = None
    tokens: int = 0
    """Tokens trained in all attempts, those that a failure threw away included."""
    outer_step: int = 0
    """Number of the last outer step it committed."""
    outer_steps: int = 0
    """Outer steps that it committed itself: less than ``outer_step`` when it missed some."""
    outer_failures: int = 0
    """Outer steps that it took part in and that did not commit."""
    failures: list[Failure] = field(default_factory=list)
    healed: bool = False
    """Whether the state came from a peer since the last committed outer step."""
    faults: list[events.FaultInjected] = field(default_factory=list)
    """Faults that no failure has answered yet."""
    recent_tokens: float = 0.0
    recent_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last few steps of this attempt; None before the first."""
        return self.recent_tokens / self.recent_seconds if self.recent_seconds > 0 else None


class RunSummary:
    """The state of the run whose events it was called with; a new ``run_started`` begins anew.

    ``replicas`` maps a replica's number to its :class:`ReplicaSummary`; ``notes`` are in the order of arrival.
    """

    def __init__(self) -> None:
        self._clear(None)

    def _clear(self, started: events.RunStarted | None) -> None:
        self.started = started
        self.finished: events.RunFinished | None = None
        self.replicas = {r: ReplicaSummary(replica=r) for r in range(started.num_replicas if started else 0)}
        self.step = 0
        """Furthest inner step of any replica."""
        self.participants: int | None = None
        """Replicas in the newest quorum."""
        self.lighthouse_failures = 0
        self.notes: list[Note] = []
        self._start = started.time if started else None
        self._last = started.time if started else 0.0
        self._first_step: tuple[float, int] | None = None

    @classmethod
    def read(cls, path: Path) -> RunSummary:
        """The summary of the last run in an ``events.jsonl``; lines this version cannot read are left out.

        Raises FileNotFoundError when there is no such file.
        """
        summary = cls()
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    event = events.from_json(line)
                except ValueError:  # an event of a newer version, or half a line of a controller that was killed
                    continue
                summary(event)
        return summary

    @property
    def steps(self) -> int:
        """Inner steps that each replica is to take."""
        return self.started.steps if self.started else 0

    @property
    def method(self) -> str:
        """``none``, ``local_sgd`` or ``diloco``."""
        return self.started.method if self.started else "none"

    @property
    def status(self) -> str:
        """``succeeded``, ``failed``, ``interrupted``, or ``running`` while no end has been recorded."""
        return self.finished.status if self.finished else "running"

    @property
    def elapsed(self) -> float:
        """Seconds from the start of the run to its end or, before that, to its last event."""
        return self.finished.seconds if self.finished else self.seconds_at(self._last)

    @property
    def failures(self) -> list[Failure]:
        """Failures of all replicas, oldest first."""
        every = (failure for replica in self.replicas.values() for failure in replica.failures)
        return sorted(every, key=lambda failure: failure.event.time)

    @property
    def outer_steps(self) -> int:
        """Outer steps the run has committed: the furthest of any replica."""
        return max((replica.outer_step for replica in self.replicas.values()), default=0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all replicas over the whole run, launches and recoveries included."""
        return sum(replica.tokens for replica in self.replicas.values()) / self.elapsed if self.elapsed > 0 else 0.0

    def seconds_at(self, time: float) -> float:
        """Seconds since the start of the run at an epoch time; 0 when a host's clock runs behind."""
        return 0.0 if self._start is None else max(0.0, time - self._start)

    def remaining_seconds(self, now: float) -> float | None:
        """Seconds to the last step at the run's mean pace so far; None before there is one."""
        if self._first_step is None or self.step <= self._first_step[1]:
            return None
        since, first = self._first_step
        return max(0.0, now - since) / (self.step - first) * max(0, self.steps - self.step)

    def __call__(self, event: events.Event) -> None:
        """Add one event. Those that change nothing a user sees are let pass."""
        if isinstance(event, events.RunStarted):
            self._clear(event)
            return
        if self._start is None:
            self._start = event.time
        self._last = max(self._last, event.time)
        match event:
            case events.Step():
                self._add_step(event)
            case events.Quorum():
                self._add_quorum(event)
            case events.OuterStep():
                self._add_outer_step(event)
            case events.ReplicaStarted():
                replica = self._replica(event.replica)
                replica.state, replica.attempts, replica.healed = State.STARTING, event.attempt + 1, False
            case events.ReplicaFailed():
                self._add_failure(event)
            case events.ReplicaLost():
                self._replica(event.replica).state = State.LOST
                after = f"{plural(event.failures, 'failure')}: {first_line(event.cause)}"
                self._note(event, "bad", f"replica {event.replica} lost after {after}")
            case events.ReplicaFinished():
                replica = self._replica(event.replica)
                replica.state, replica.step, replica.outer_step = State.WAITING, event.step, event.outer_step
                self.step = max(self.step, event.step)
                where = f"replica {event.replica} finished at step {event.step}"
                self._note(event, "info", f"{where}, waiting for its peers")
            case events.FaultInjected():
                self._replica(event.replica).faults.append(event)
                target = f"replica {event.replica} rank {event.rank} (pid {event.pid})"
                self._note(event, "warning", f"fault injected: {event.signal} to {target} at step {event.step}")
            case events.LighthouseFailed():
                self.lighthouse_failures += 1
                self._note(event, "bad", f"lighthouse failed: {first_line(event.cause)}; starting it again")
            case events.LighthouseStarted() if self.lighthouse_failures:
                self._note(event, "good", f"lighthouse answers again at {event.address}")
            case events.Resumed():
                self._add_resumed(event)
            case events.RunFinished():
                self._end(event)

    def _replica(self, number: int) -> ReplicaSummary:
        return self.replicas.setdefault(number, ReplicaSummary(replica=number))

    def _note(self, event: events.Event, kind: Kind, text: str) -> None:
        self.notes.append(Note(seconds=self.seconds_at(event.time), kind=kind, text=text))

    def _add_resumed(self, event: events.Resumed) -> None:
        for line in event.ignored:
            self._note(event, "warning", f"checkpoint not used: {line}")
        if not event.step:
            self._note(event, "warning", "no checkpoint can be used, training begins anew")
            return
        self.step = event.step
        self._note(event, "info", f"resumed from the checkpoints of step {event.step}, outer step {event.outer_step}")
        for replica in sorted(set(self.replicas) - set(event.replicas)):
            self._note(event, "warning", f"replica {replica} has no part of it and heals from its peers")

    def _add_step(self, event: events.Step) -> None:
        replica = self._replica(event.replica)
        if not math.isfinite(event.loss) and (replica.loss is None or math.isfinite(replica.loss)):
            self._note(event, "bad", f"replica {event.replica} loss is {event.loss} at step {event.step}")
        replica.step, replica.loss = event.step, event.loss
        replica.tokens += event.tokens
        # Means of tokens and of seconds, not of their ratio: a slow step weighs as long as it lasted.
        replica.recent_tokens += SMOOTHING * (event.tokens - replica.recent_tokens)
        replica.recent_seconds += SMOOTHING * (event.seconds - replica.recent_seconds)
        self.step = max(self.step, event.step)
        if self._first_step is None:
            self._first_step = event.time, event.step
        if replica.state is State.STARTING:
            # A relaunched replica trains for nobody until its peers' state has replaced its own.
            heals = replica.attempts > 1 and len(self.replicas) > 1 and self.method != "none"
            replica.state = State.HEALING if heals else State.TRAINING
        elif replica.state is State.HEALING and self.method == "none":
            replica.state = State.TRAINING

    def _add_quorum(self, event: events.Quorum) -> None:
        replica = self._replica(event.replica)
        self.participants = event.participants
        replica.healed = replica.healed or event.healing
        # A finished replica still attends quorums for peers that are not, and stays a finished one.
        if replica.state in ALIVE:
            replica.state = State.HEALING if event.healing else State.TRAINING

    def _add_outer_step(self, event: events.OuterStep) -> None:
        replica = self._replica(event.replica)
        if not event.committed:
            replica.outer_failures += 1
            why = f": {first_line(event.error)}" if event.error else ""
            what = f"outer step {event.outer_step + 1} at step {event.step}"
            self._note(event, "warning", f"replica {event.replica} did not commit {what}{why}")
            return
        replica.outer_steps += 1
        replica.outer_step, replica.step = event.outer_step, event.step
        self.step = max(self.step, event.step)
        if replica.state in ALIVE:
            replica.state = State.TRAINING
            self._back(event, replica)

    def _back(self, event: events.OuterStep, replica: ReplicaSummary) -> None:
        """Settle the failures that this outer step ends."""
        settled = [failure for failure in replica.failures if failure.back is None]
        for failure in settled:
            failure.back = event.time
        how = "healed from its peers" if replica.healed else "commits again"
        if settled:
            what = "the fault" if settled[0].injected else "its failure"
            after = f", back {settled[0].recovery_seconds:.1f} s after {what}"
            self._note(event, "good", f"replica {event.replica} {how} at step {event.step}{after}")
        elif replica.healed:
            self._note(event, "good", f"replica {event.replica} {how} at step {event.step}")
        replica.healed = False

    def _add_failure(self, event: events.ReplicaFailed) -> None:
        replica = self._replica(event.replica)
        faults = [fault for fault in replica.faults if 0 <= event.time - fault.time <= FAULT_WINDOW]
        since = min((fault.time for fault in faults), default=event.time)
        replica.failures.append(Failure(event=event, since=since, injected=bool(faults)))
        replica.faults.clear()
        replica.state = AFTER_FAILURE.get(event.action, State.RESPAWNING)
        replica.recent_tokens = replica.recent_seconds = 0.0
        who = f"replica {event.replica}" + ("" if event.rank is None else f" rank {event.rank}")
        then = "giving it up" if replica.state is State.LOST else replica.state.value
        cause = first_line(event.cause)
        self._note(event, "bad", f"{who} failed at step {event.step}: {cause}; {then}, log: {event.log}")

    def _end(self, event: events.RunFinished) -> None:
        self.finished = event
        for replica in self.replicas.values():
            if replica.state is State.WAITING or (event.status == "succeeded" and replica.state is not State.LOST):
                replica.state = State.FINISHED
            elif replica.state is not State.LOST:
                replica.state = State.STOPPED
        reason = f": {first_line(event.reason)}" if event.reason else ""
        kinds: dict[str, Kind] = {"succeeded": "good", "interrupted": "warning"}
        self._note(event, kinds.get(event.status, "bad"), f"run {event.status} after {event.seconds:.1f} s{reason}")


def first_line(text: str) -> str:
    """The line of a cause that says most: the last of a traceback, else the first; empty if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

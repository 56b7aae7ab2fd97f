"""What a simulated replica tells the controller."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from monarch_titan.control.events import (
    Event,
    OuterStep,
    OuterStepCommitted,
    ReplicaStarted,
    ReplicaState,
    Report,
    Step,
    TrainerFinished,
)
from tests.simulation.clock import now
from tests.simulation.quorum import State
from tests.simulation.schedule import LastWords

if TYPE_CHECKING:
    from tests.simulation.replica import SimulatedReplica

LATENCY = 0.01
"""Seconds of a message's way to the controller."""

LATE = 0.6
"""Seconds by which last words are late: long enough for the next attempt to be launched already."""

SAMPLES = 4
"""Of a window, one at each inner step."""


class Reports:
    """One attempt's line to the controller."""

    def __init__(self, replica: SimulatedReplica) -> None:
        self._replica = replica
        self._ids = {"replica": replica.launch.replica, "attempt": replica.launch.attempt}
        self._sent_at = 0.0

    @property
    def _step(self) -> int:
        return SAMPLES * self._replica.windows_trained

    def started(self) -> None:
        self._send(ReplicaStarted(**self._ids, pids=dict.fromkeys(self._replica.ranks, 1), actor_pid=1))

    def step(self) -> None:
        self._send(Step(replica=self._ids["replica"], step=self._step, loss=1.0, tokens=1, seconds=1.0))

    def tell(self, kind: type[Report], **values: Any) -> None:
        """Report on every rank."""
        for rank in self._replica.ranks:
            self._send(kind(**self._ids, rank=rank, **values))

    def position(self, state: State) -> None:
        """Tell of the place in the data that belongs to a state."""
        for rank in self._replica.ranks:
            batches = self._replica.batches[rank]
            values = {"outer_step": state.outer_step, "batches": batches.drawn, "data": batches.mark()}
            values["lineage"] = state.digest
            self._send(OuterStepCommitted(**self._ids, rank=rank, **values))

    def commit(self, state: State) -> None:
        """Tell of a state that has just been committed."""
        self.position(state)
        hashes = {"global_parameters": state.digest, "outer_optimizer": "", "optimizer": ""}
        ids = {"replica": self._ids["replica"], "outer_step": state.outer_step, "step": self._step}
        for rank in self._replica.ranks:
            self._send(ReplicaState(**ids, rank=rank, healed=False, lr=1.0, **hashes))

    def outer_step(self, *, committed: bool, contributed: bool) -> None:
        """Tell how an outer step ended."""
        assert self._replica.state is not None
        self._send(
            OuterStep(
                replica=self._ids["replica"],
                outer_step=self._replica.state.outer_step,
                step=self._step,
                participants=1,
                committed=committed,
                contributed=contributed,
                seconds=0.1,
                bytes=8,
            )
        )

    def finished(self) -> None:
        state = self._replica.state
        assert state is not None
        self.tell(TrainerFinished, step=self._step, outer_step=state.outer_step, state=state.digest)

    def _send(self, message: Event | Report) -> None:
        """Messages arrive in the order in which they were sent; those of a replica's last moment perhaps not at all."""
        self._sent_at = max(now(), self._sent_at + 1e-6)
        asyncio.get_running_loop().call_at(self._sent_at + LATENCY, self._arrive, message)

    def _arrive(self, message: Event | Report) -> None:
        cluster = self._replica.cluster
        if not self._replica.dead or cluster.schedule.last_words is LastWords.ARRIVE:
            cluster.deliver(message)
        elif cluster.schedule.last_words is LastWords.LATE:
            asyncio.get_running_loop().call_later(LATE, cluster.deliver, message)

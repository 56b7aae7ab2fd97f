"""A replica as the controller drives it, living through windows, quorums and outer steps in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from monarch_titan.control.controller import Failure, Launch
from monarch_titan.control.events import (
    Event,
    OuterStep,
    OuterStepCommitted,
    QuorumFormed,
    QuorumRequested,
    ReplicaStarted,
    ReplicaState,
    Report,
    Step,
    TrainerFinished,
)
from tests.simulation.clock import now
from tests.simulation.quorum import Quorum, State, Window
from tests.simulation.schedule import Moment

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

BUILD, HEAL, COMMIT, STOP, ASK_AGAIN = 2.0, 0.2, 0.03, 0.2, 0.5
"""Seconds: to build a trainer, to take a peer's state, from a commit to the next window, to stop processes, and until a
replica that found no state to heal from asks again."""

LATENCY, NOTICED = 0.01, 0.3
"""Seconds of a message's way to the controller, and until a death is noticed: what was sent before it arrives first."""

SAMPLES = 20
COMMIT_RETRIES = 3


class Broken(Exception):
    """What makes a trainer fail by itself."""


class SimulatedReplica:
    """One attempt of a replica."""

    def __init__(self, cluster: Cluster, launch: Launch) -> None:
        self.cluster, self.launch = cluster, launch
        self.lighthouse_attempt = launch.lighthouse_attempt
        self.state: State | None = State()
        self.windows_trained = 0
        if cluster.schedule.checkpoint:
            self.state, self.windows_trained, positions = cluster.checkpoint
        else:
            positions = launch.positions
            if launch.attempt > 0:
                self.state = None
        self.sample = self._first_sample(positions)
        self.held = self.stopped = self.released = False
        self.died_at: float | None = None
        self.cause = ""
        self._quorum: Quorum | None = None
        self._failed_in_a_row = 0
        self._sent_at = 0.0
        self._commands: asyncio.Queue[asyncio.Future[None] | None] = asyncio.Queue()
        self._ended: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def _first_sample(self, positions: dict[int, Any]) -> int:
        if not positions:
            return 0
        assert sorted(positions) == list(self._ranks), f"positions of ranks {sorted(positions)}"
        samples = {position["sample"] for position in positions.values()}
        assert all(position["rank"] == rank for rank, position in positions.items()), f"ranks mixed: {positions}"
        assert len(samples) == 1, f"ranks torn apart: {positions}"
        return samples.pop()

    @property
    def _ranks(self) -> range:
        return range(self.cluster.schedule.ranks)

    @property
    def dead(self) -> bool:
        return self.died_at is not None

    # What the controller calls ---------------------------------------------------------------------------------------

    async def run(self) -> Failure | None:
        self._task = asyncio.create_task(self._live())
        return await self._ended

    async def attend(self) -> None:
        attended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commands.put_nowait(attended)
        gone = asyncio.create_task(self._gone.wait())
        await asyncio.wait([attended, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()

    async def announce_lighthouse(self, attempt: int) -> None:
        self.lighthouse_attempt = attempt
        self.cluster.quorums.look()

    async def release(self) -> None:
        self._commands.put_nowait(None)

    async def stop(self) -> None:
        self._gone.set()
        self._end_process()
        await asyncio.sleep(STOP)
        self.stopped = True

    # Death -----------------------------------------------------------------------------------------------------------

    def die(self, cause: str = "killed") -> None:
        """All processes of the replica end now."""
        if self.dead or self.released:
            return
        self.cause = cause
        self._end_process()
        asyncio.get_running_loop().call_later(NOTICED, self._notice)

    def _end_process(self) -> None:
        if not self.dead:
            self.died_at = now()
            self.cluster.quorums.lose(self)
        if self._task is not None:
            self._task.cancel()
        if self._quorum is not None:
            self._quorum.lose_member()

    def _notice(self) -> None:
        if not self._ended.done():
            self._ended.set_result(Failure(cause=self.cause))

    @contextlib.contextmanager
    def _moment(self, moment: Moment) -> Generator[None]:
        """Be at a moment; if the schedule says so, die in it."""
        death = self.cluster.death(self.launch.replica, moment)
        timer = None if death is None else asyncio.get_running_loop().call_later(death.after, self.die)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    # Life ------------------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._train()
        except Broken as error:
            self.die(str(error))
        else:
            self.released = True
            if not self._ended.done():
                self._ended.set_result(None)

    async def _train(self) -> None:
        schedule = self.cluster.schedule
        ids = {"replica": self.launch.replica, "attempt": self.launch.attempt}
        self._send(ReplicaStarted(**ids, pids=dict.fromkeys(self._ranks, 1), actor_pid=1))
        with self._moment(Moment.START):
            await asyncio.sleep(BUILD)
        self.cluster.quorums.beat(self)
        finished = self.state is None and await self._outer_step(None)
        while not finished and self.windows_trained < schedule.outer_steps:
            with self._moment(Moment.WINDOW):
                await asyncio.sleep(schedule.window_seconds[self.launch.replica])
            window = Window(self.launch.replica, self.sample, self.sample + SAMPLES)
            self.sample = window.end
            self.windows_trained += 1
            self._send(Step(replica=self.launch.replica, step=self._step, loss=1.0, tokens=1, seconds=1.0))
            finished = await self._outer_step(window)
        await self._wait_for_peers()

    @property
    def _step(self) -> int:
        return SAMPLES * self.windows_trained

    async def _wait_for_peers(self) -> None:
        self.held = True
        self._report_finished()
        with self._moment(Moment.HELD):
            command = await self._commands.get()
        while command is not None:
            try:
                with self._moment(Moment.ATTENDING):
                    if await self._join():
                        self._report_finished()
            finally:
                if not command.done():
                    command.set_result(None)
            with self._moment(Moment.HELD):
                command = await self._commands.get()

    async def _outer_step(self, window: Window | None) -> bool:
        """Take an outer step with the next quorum; whether the peers had already finished."""
        healed = await self._join()
        assert self._quorum is not None
        quorum = self._quorum
        if healed and window is not None:
            self.cluster.wasted.add(window)
        if healed and quorum.source_for(self).held:
            return True
        contributed = None if healed else window
        with self._moment(Moment.OUTER_STEP):
            state = await quorum.reduce(self, contributed)
        self._quorum = None
        self._failed_in_a_row = 0 if state is not None else self._failed_in_a_row + 1
        if state is not None:
            self.state = state
            self.cluster.save(self)
            self._report_commit(state)
        elif contributed is not None:
            self.cluster.wasted.add(contributed)
        self._send(self._outer_step_event(committed=state is not None, contributed=not healed))
        if self._failed_in_a_row > COMMIT_RETRIES:
            raise Broken("outer steps did not commit")
        with self._moment(Moment.COMMITTED):
            await asyncio.sleep(COMMIT)
        return False

    async def _join(self) -> bool:
        """Wait for a quorum, and for one with a state to give where this replica needs it; whether it healed."""
        while True:
            self._tell(QuorumRequested)
            with self._moment(Moment.QUORUM):
                quorum = self._quorum = await self.cluster.quorums.ask(self)
            healed = quorum.is_behind(self)
            if healed:
                await self._heal(quorum.source_for(self))
            self._tell(QuorumFormed, outer_step=None if self.state is None else self.state.outer_step)
            if self.state is not None:
                return healed
            await asyncio.sleep(ASK_AGAIN)

    async def _heal(self, source: SimulatedReplica) -> None:
        state, windows_trained = source.state, source.windows_trained
        with self._moment(Moment.HEALING):
            await asyncio.sleep(HEAL)
        if source.dead:
            raise Broken("could not take the state of a peer")
        self.state, self.windows_trained = state, windows_trained

    # What the controller is told ---------------------------------------------------------------------------------------

    def _tell(self, kind: type[Report], **values: Any) -> None:
        """Report on every rank; a held replica tells of no quorums."""
        if self.held and kind in (QuorumRequested, QuorumFormed):
            return
        for rank in self._ranks:
            self._send(kind(replica=self.launch.replica, attempt=self.launch.attempt, rank=rank, **values))

    def positions(self) -> dict[int, Any]:
        return {rank: {"rank": rank, "sample": self.sample} for rank in self._ranks}

    def _report_commit(self, state: State) -> None:
        ids = {"replica": self.launch.replica, "outer_step": state.outer_step}
        for rank, position in self.positions().items():
            self._send(OuterStepCommitted(**ids, attempt=self.launch.attempt, rank=rank, data=position))
            hashes = {"global_parameters": state.digest, "outer_optimizer": "", "optimizer": ""}
            self._send(ReplicaState(**ids, rank=rank, step=self._step, healed=False, lr=1.0, **hashes))

    def _outer_step_event(self, *, committed: bool, contributed: bool) -> OuterStep:
        assert self.state is not None
        return OuterStep(
            replica=self.launch.replica,
            outer_step=self.state.outer_step,
            step=self._step,
            participants=1,
            committed=committed,
            contributed=contributed,
            seconds=0.1,
            bytes=8,
        )

    def _report_finished(self) -> None:
        assert self.state is not None
        self._tell(TrainerFinished, step=self._step, outer_step=self.state.outer_step, state=self.state.digest)

    def _send(self, message: Event | Report) -> None:
        """Messages arrive in the order in which they were sent."""
        self._sent_at = max(now(), self._sent_at + 1e-6)
        asyncio.get_running_loop().call_at(self._sent_at + LATENCY, self.cluster.deliver, message)

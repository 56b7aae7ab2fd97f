"""A replica as the controller drives it, living through windows, quorums and outer steps in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

from monarch_titan.control.controller import Failure, Launch
from monarch_titan.control.events import QuorumFormed, QuorumRequested
from monarch_titan.training.batches import Batches
from tests.simulation.clock import now
from tests.simulation.quorum import PATIENCE, Quorum, State, Window
from tests.simulation.reports import SAMPLES, Reports
from tests.simulation.schedule import Moment
from tests.simulation.shard import Shard
from tests.simulation.world import Part

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

MANAGER, BUILD, HEAL, COMMIT, SAVE, STOP, ASK_AGAIN = 1.0, 1.0, 0.2, 0.03, 0.3, 0.2, 0.5
"""Seconds: to join the lighthouse, to build a trainer, to take a peer's state, from a commit to the next window, to
save a checkpoint, to stop processes, and until a replica that found no state to heal from asks again."""

NOTICED = 0.3
"""Seconds until a death is noticed; what was sent before it arrives first, if it does."""

COMMIT_RETRIES = 3

FEW = 2 * SAMPLES
"""A replica passes over no more than two windows: of those that it took and could not report."""


class Broken(Exception):
    """What makes a trainer fail by itself."""


class SimulatedReplica:
    """One attempt of a replica."""

    def __init__(self, cluster: Cluster, launch: Launch) -> None:
        self.cluster, self.launch = cluster, launch
        self.lighthouse_attempt = launch.lighthouse_attempt
        self.states: list[State] = []
        """All that it has had, the present one last."""
        self.windows_trained = 0
        self._part = cluster.parts.get(launch.replica)
        self._begin()
        self.held = self.stopped = self.released = False
        self.died_at: float | None = None
        self.cause = ""
        self._quorum: Quorum | None = None
        self._failed_in_a_row = 0
        self._reports = Reports(self)
        self._commands: asyncio.Queue[asyncio.Future[None] | None] = asyncio.Queue()
        self._ended: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def _begin(self) -> None:
        """Be where a replica is that was launched so."""
        part, positions = self._part, self.launch.positions
        begin = part.sample if part is not None else 0
        self._shards = [Shard(self.launch.replica, rank, begin) for rank in self.ranks]
        self.batches = [Batches(shard, begin, positions.get(shard.rank, {})) for shard in self._shards]
        lacks_part = bool(self.cluster.parts) and part is None
        if self.cluster.schedule.num_replicas > 1 and (self.launch.attempt or lacks_part):
            return
        self.states.append(part.state if part is not None else State())
        if part is not None:
            self.windows_trained = part.windows_trained

    @property
    def sample(self) -> int:
        """Samples that each rank has drawn."""
        drawn = {batches.drawn for batches in self.batches}
        assert len(drawn) == 1, f"ranks torn apart: {drawn}"
        return drawn.pop()

    def _window(self) -> Window:
        """Draw a window's samples, on every rank the same ones of its own shard."""
        first = self.sample
        for rank, batches in enumerate(self.batches):
            drawn = [next(batches) for _ in range(SAMPLES)]
            expected = [(self.launch.replica, rank, first + index) for index in range(SAMPLES)]
            assert drawn == expected, f"drawn {drawn} rather than {expected}"
        return Window(self.launch.replica, first, self.sample)

    @property
    def state(self) -> State | None:
        """What a peer could heal from."""
        return self.states[-1] if self.states else None

    @property
    def ranks(self) -> range:
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

    async def peer_gone(self, replica: int, attempt: int) -> None:
        peers = [r for r in self.cluster.replicas if (r.launch.replica, r.launch.attempt) == (replica, attempt)]
        assert all(peer.dead for peer in peers), f"replica {replica} attempt {attempt} is not gone"

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
        death = self.cluster.world.death(self.launch.replica, moment)
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
        except (Broken, TimeoutError) as error:
            self.die(str(error))
        except (AssertionError, RuntimeError) as error:  # what must not happen, of ours and of Batches
            self.cluster.complaints.append(f"replica {self.launch.replica}: {error!r}")
            self.die(str(error))
        else:
            self.released = True
            if not self._ended.done():
                self._ended.set_result(None)

    async def _train(self) -> None:
        schedule = self.cluster.schedule
        self._reports.started()
        with self._moment(Moment.START):
            await asyncio.sleep(MANAGER)
            self.cluster.quorums.beat(self)
            await asyncio.sleep(BUILD)
        if self.state is not None and self._part is not None:
            self._reports.position(self.state)
        finished = self.state is None and await self._outer_step(None)
        while not finished and self.windows_trained < schedule.outer_steps:
            with self._moment(Moment.WINDOW):
                await asyncio.sleep(schedule.window_seconds[self.launch.replica])
            window = self._window()
            self.windows_trained += 1
            self._reports.step()
            finished = await self._outer_step(window)
        await self._wait_for_peers()

    async def _wait_for_peers(self) -> None:
        self.held = True
        self._reports.finished()
        with self._moment(Moment.HELD):
            command = await self._commands.get()
        while command is not None:
            try:
                with self._moment(Moment.ATTENDING):
                    if await self._join():
                        self._reports.finished()
            finally:
                if not command.done():
                    command.set_result(None)
            with self._moment(Moment.HELD):
                command = await self._commands.get()

    async def _outer_step(self, window: Window | None) -> bool:
        """Take an outer step, with as many quorums as it needs; whether the peers had already finished."""
        state = None
        while state is None:
            healed = await self._join()
            assert self._quorum is not None and self.state is not None
            quorum = self._quorum
            if healed and quorum.source_for(self).held:
                return True
            if healed:
                window = None  # it is not of these parameters: its samples are drawn anew
                self._go_to(self.state.seen(self.launch.replica))
            with self._moment(Moment.OUTER_STEP):
                state = await quorum.reduce(self, window)
            self._quorum = None
            self._failed_in_a_row = 0 if state is not None else self._failed_in_a_row + 1
            if self._failed_in_a_row > COMMIT_RETRIES:
                raise Broken("outer steps did not commit")
            if state is not None:
                self.states.append(state)
                self._reports.commit(state)
            self._reports.outer_step(committed=state is not None, contributed=window is not None)
        with self._moment(Moment.COMMITTED):
            await asyncio.sleep(COMMIT)
        await self._save(state)
        return False

    def _go_to(self, sample: int) -> None:
        """Go on after these samples of the shard. Passing over more than a few takes long where data is tokenized."""
        before = self._shards[0].drawn
        for batches in self.batches:
            batches.go_to(sample)
        passed = self._shards[0].drawn - before
        if passed > FEW and (self._part is not None or not self.cluster.parts):
            self.cluster.complaints.append(f"replica {self.launch.replica} passes over {passed} samples")

    async def _save(self, state: State) -> None:
        """Save a checkpoint where one is due. At the end TorchTitan saves only the model."""
        every, disk = self.cluster.schedule.checkpoint_every, self.cluster.world.disk
        if every and self.windows_trained % every == 0 and self.windows_trained < self.cluster.schedule.outer_steps:
            disk.begin(self.launch.replica, self.windows_trained)
            with self._moment(Moment.SAVING):
                await asyncio.sleep(SAVE)
            part = Part(state=state, windows_trained=self.windows_trained, sample=self.sample)
            disk.seal(self.launch.replica, part)

    async def _join(self) -> bool:
        """Wait for a quorum, and for one with a state to give where this replica needs it; whether it healed."""
        deadline = now() + PATIENCE
        while True:
            if not self.held:
                self._reports.tell(QuorumRequested)
            with self._moment(Moment.QUORUM):
                quorum = self._quorum = await self.cluster.quorums.ask(self)
            healed = quorum.is_behind(self)
            if healed:
                await self._heal(quorum.source_for(self))
            if not self.held:
                self._reports.tell(QuorumFormed, has_state=self.state is not None)
            if self.state is not None:
                return healed
            if now() > deadline:
                raise TimeoutError("no peer had a state to heal from")
            await asyncio.sleep(ASK_AGAIN)

    async def _heal(self, source: SimulatedReplica) -> None:
        state, windows_trained = source.state, source.windows_trained
        assert state is not None
        with self._moment(Moment.HEALING):
            await asyncio.sleep(HEAL)
        if source.dead:
            raise Broken("could not take the state of a peer")
        self.states.append(state)
        self.windows_trained = windows_trained

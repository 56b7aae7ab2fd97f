"""Runs of the real controller on simulated replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from monarch_titan.control.controller import Controller, Launch, RunFailed
from monarch_titan.control.events import Event, LighthouseStarted, Report
from monarch_titan.control.recovery import RecoveryPolicy
from tests.simulation.clock import VirtualTime, now
from tests.simulation.quorum import Quorums, SimulatedLighthouse
from tests.simulation.replica import SimulatedReplica
from tests.simulation.schedule import Crash, Interrupt, Moment, Outage, Schedule
from tests.simulation.world import World

LAUNCH = 0.4


@dataclass(frozen=True, kw_only=True)
class Logged:
    """An event and what was true when it was logged."""

    at: float
    event: Event
    holders: int
    """Living replicas with a state that a peer could heal from."""


class Cluster:
    """One run: what is there besides the controller, and what became of it.

    Args:
        world: what earlier runs have left.
        crash: how this one is killed, if it has not ended until then.
    """

    def __init__(self, world: World, crash: Crash | None = None) -> None:
        self.world, self.schedule, self._crash = world, world.schedule, crash
        self.quorums = Quorums(world)
        self.replicas: list[SimulatedReplica] = []
        self.launches: list[tuple[float, Launch]] = []
        self.refused: list[Launch] = []
        """Launches that failed."""
        self.lighthouses: list[SimulatedLighthouse] = []
        self.log: list[Logged] = []
        self.parts = world.disk.newest(self.schedule.num_replicas)
        """Of the checkpoint that the run goes on from."""
        self.complaints: list[str] = []
        self.status = ""
        """``succeeded``, ``failed``, ``interrupted`` or ``killed``."""
        self.reason = ""
        self.policy = RecoveryPolicy(
            respawns=self.schedule.respawns,
            max_failures=self.schedule.max_failures,
            backoff_seconds=self.schedule.backoff_seconds,
        )
        alone = self.schedule.num_replicas == 1
        self._controller = Controller(
            self._launch,
            self._start_lighthouse,
            num_replicas=self.schedule.num_replicas,
            min_replicas=self.schedule.min_replicas,
            ranks_per_replica=self.schedule.ranks,
            policy=self.policy,
            log=self._log,
            restart_alone=alone and self.schedule.checkpoint_every > 0,
            without_state=set(range(self.schedule.num_replicas)) - set(self.parts) if self.parts else (),
        )

    @property
    def died(self) -> list[SimulatedReplica | Launch]:
        """Attempts that ended by themselves, those included that never began."""
        return [*(replica for replica in self.replicas if replica.cause), *self.refused]

    # What the controller calls ---------------------------------------------------------------------------------------

    async def _launch(self, launch: Launch) -> SimulatedReplica:
        running = [r for r in self.replicas if r.launch.replica == launch.replica and not r.stopped]
        if running:
            self.complaints.append(f"replica {launch.replica} launched while attempt {running[0].launch.attempt} runs")
        self.launches.append((now(), launch))
        death = self.world.death(launch.replica, Moment.LAUNCH)
        if death is not None:
            await asyncio.sleep(death.after)
            self.refused.append(launch)
            raise OSError("no host")
        if launch.attempt and self.schedule.num_replicas == 1:
            self.parts = self.world.disk.newest(1)
        await asyncio.sleep(LAUNCH)
        self.replicas.append(replica := SimulatedReplica(self, launch))
        return replica

    async def _start_lighthouse(self, attempt: int) -> SimulatedLighthouse:
        lighthouse = await self.quorums.start(attempt)
        self.lighthouses.append(lighthouse)
        self._log(LighthouseStarted(address="here", attempt=attempt, pid=1))
        return lighthouse

    def _log(self, event: Event) -> None:
        holders = sum(not replica.dead and replica.state is not None for replica in self.replicas)
        self.log.append(Logged(at=now(), event=event, holders=holders))

    def deliver(self, message: Event | Report) -> None:
        """Have the controller receive what a replica sent."""
        if not self.status:
            self._controller.receive(message)

    # The run ---------------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """Have the controller run to its end."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.complaints.append(str(context)))
        run = asyncio.create_task(self._controller.run())
        for outage in self.schedule.of(Outage):
            loop.call_at(outage.at, self._strike, outage)
        for interrupt in self.schedule.of(Interrupt):
            loop.call_at(interrupt.at, run.cancel)  # and it is not started again
        if self._crash is not None:
            loop.call_at(self._crash.at, self._kill, run)
        done, _ = await asyncio.wait([run], timeout=self.schedule.patience)
        if not done:
            self.complaints.append("the run goes on for ever")
            run.cancel()
            await asyncio.wait([run])
        try:
            run.result()
            self.status = "succeeded"
        except RunFailed as failure:
            self.status, self.reason = "failed", str(failure)
        except asyncio.CancelledError:
            self.status = self.status or "interrupted"
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        self.complaints += [f"task left: {task}" for task in left]

    def _strike(self, outage: Outage) -> None:
        if outage in self.world.struck:
            return
        self.world.struck.add(outage)
        for replica in self.replicas:
            if replica.launch.replica in outage.replicas and not replica.stopped:
                replica.die()
        if outage.lighthouse and self.quorums.lighthouse is not None:
            self.quorums.lighthouse.die()

    def _kill(self, run: asyncio.Task[None]) -> None:
        if not run.done():
            self.status = "killed"
            for replica in self.replicas:
                replica.die()
            run.cancel()


@dataclass(frozen=True)
class Story:
    """A run, and those that went on from its checkpoints."""

    world: World
    runs: list[Cluster]

    @property
    def status(self) -> str:
        """How the last one ended."""
        return self.runs[-1].status

    @property
    def reason(self) -> str:
        """Why it failed, if it did."""
        return self.runs[-1].reason

    @property
    def died(self) -> list[SimulatedReplica | Launch]:
        return [dead for run in self.runs for dead in run.died]


def play(schedule: Schedule) -> Story:
    """What became of a run on this schedule."""
    story = Story(World(schedule=schedule), [])
    for crash in [*schedule.of(Crash), None]:
        with asyncio.Runner(loop_factory=VirtualTime) as runner:
            runner.run(_play_one(story, crash))
        if story.status in ("succeeded", "interrupted"):
            break
        for replica in crash.lost if crash is not None else ():
            story.world.disk.lose(replica)
    return story


async def _play_one(story: Story, crash: Crash | None) -> None:
    story.runs.append(run := Cluster(story.world, crash))
    await run.play()

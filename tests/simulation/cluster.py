"""One run of the real controller on simulated replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from monarch_titan.control.controller import Controller, Launch, RunFailed
from monarch_titan.control.events import Event, LighthouseStarted, Report
from monarch_titan.control.recovery import RecoveryPolicy
from tests.simulation.clock import VirtualTime, now
from tests.simulation.quorum import Quorums, SimulatedLighthouse, State, Window
from tests.simulation.replica import SimulatedReplica
from tests.simulation.schedule import Death, Moment, Schedule

LAUNCH = 0.4

PATIENCE = 24 * 3600.0
"""Virtual seconds after which a run that goes on does so for ever."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """An event and what was true when it was logged."""

    at: float
    event: Event
    holders: int
    """Living replicas with a state that a peer could heal from."""


class Cluster:
    """What is there besides the controller, and what became of it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.quorums = Quorums(schedule.min_replicas, torn=schedule.torn)
        self.replicas: list[SimulatedReplica] = []
        self.launches: list[tuple[float, Launch]] = []
        self.refused: list[Launch] = []
        """Launches that failed."""
        self.lighthouses: list[SimulatedLighthouse] = []
        self.log: list[Logged] = []
        self.wasted: set[Window] = set()
        """Windows that were trained and that an outer step did not take, to the knowledge of who trained them."""
        self.checkpoint: tuple[State, int, dict[int, Any]] = (State(), 0, {})
        self.complaints: list[str] = []
        self.status = ""
        """``succeeded``, ``failed`` or ``interrupted``."""
        self.reason = ""
        self._pending = list(schedule.deaths)
        self._moments: dict[tuple[int, Moment], int] = {}
        self.policy = RecoveryPolicy(
            respawns=schedule.respawns,
            max_failures=schedule.max_failures,
            backoff_seconds=schedule.backoff_seconds,
        )
        self._controller = Controller(
            self._launch,
            self._start_lighthouse,
            num_replicas=schedule.num_replicas,
            min_replicas=schedule.min_replicas,
            ranks_per_replica=schedule.ranks,
            policy=self.policy,
            log=self._log,
            restart_alone=schedule.checkpoint,
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
        death = self.death(launch.replica, Moment.LAUNCH)
        if death is not None:
            await asyncio.sleep(death.after)
            self.refused.append(launch)
            raise OSError("no host")
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

    # What replicas call ------------------------------------------------------------------------------------------------

    def death(self, replica: int, moment: Moment) -> Death | None:
        """The death that the schedule has for a replica that comes to this moment now."""
        nth = self._moments[replica, moment] = self._moments.get((replica, moment), -1) + 1
        return next((d for d in self._pending if (d.replica, d.moment, d.nth) == (replica, moment, nth)), None)

    def save(self, replica: SimulatedReplica) -> None:
        """Save a checkpoint, if replicas do so."""
        assert replica.state is not None
        self.checkpoint = replica.state, replica.windows_trained, replica.positions()

    def deliver(self, message: Event | Report) -> None:
        if not self.status:
            self._controller.receive(message)

    # The run -----------------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """Have the controller run to its end."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.complaints.append(str(context)))
        run = asyncio.create_task(self._controller.run())
        for outage in self.schedule.outages:
            loop.call_at(outage.at, self._strike, outage.replicas, outage.lighthouse)
        if self.schedule.interrupt_at is not None:
            loop.call_at(self.schedule.interrupt_at, run.cancel)
        done, _ = await asyncio.wait([run], timeout=PATIENCE)
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
            self.status = "interrupted"
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        self.complaints += [f"task left: {task}" for task in left]

    def _strike(self, replicas: tuple[int, ...], lighthouse: bool) -> None:
        for replica in self.replicas:
            if replica.launch.replica in replicas and not replica.stopped:
                replica.die()
        if lighthouse and self.quorums.lighthouse is not None:
            self.quorums.lighthouse.die()


def play(schedule: Schedule) -> Cluster:
    """What became of a run on this schedule."""

    async def run() -> Cluster:
        cluster = Cluster(schedule)
        await cluster.play()
        return cluster

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(run())

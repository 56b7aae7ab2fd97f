"""What the controller launches: a replica's processes and the lighthouse's, as Monarch meshes that it owns."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Awaitable
from typing import Any, TypeVar

from monarch.actor import Actor, Channel, HostMesh, MeshFailure, default_bootstrap_cmd
from monarch.spmd import setup_torch_elastic_env_async

from monarch_titan import upstream
from monarch_titan.actors.forkserver import ForkServer
from monarch_titan.actors.lighthouse import LighthouseActor
from monarch_titan.actors.replica import ReplicaActor
from monarch_titan.actors.trainer import TrainerLaunch
from monarch_titan.config.sections import Lighthouse
from monarch_titan.control.controller import Failure

T = TypeVar("T")

# Stopping a mesh with a frozen process takes Monarch 4 to 5 s; more than this means that it has lost track of it.
STOP_SECONDS = 20.0

# Monarch reports how a process died within its supervision poll and idle time, see upstream.MONARCH_ENVIRONMENT.
REPORT_SECONDS = 1.5


class WatchActor(Actor):
    """Does nothing: its death is reported to the controller, which owns the mesh, with the cause and the rank."""


class FaultReports:
    """Monarch's reports on dead processes, for whoever waits for the one on a mesh; set as ``unhandled_fault_hook``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, asyncio.Future[str]] = {}

    def expect(self, name: str) -> asyncio.Future[str]:
        """The first report on the mesh of this name."""
        return self._expected.setdefault(name, self._loop.create_future())

    def __call__(self, failure: MeshFailure) -> None:
        """Called by Monarch, from any thread, for every dead process; without a hook it would stop the program."""
        self._loop.call_soon_threadsafe(self._take, failure.mesh_name.rpartition("-")[0], failure.report())

    def _take(self, name: str, report: str) -> None:
        print(name, report, file=sys.stderr)
        if name in self._expected and not self._expected[name].done():
            self._expected[name].set_result(report)


class ReplicaProcesses:
    """A launched replica: its trainer processes and the process of its ReplicaActor."""

    def __init__(self, trainers: Any, proc: Any, actor: Any, report: asyncio.Future[str]) -> None:
        self._trainers, self._proc, self._actor, self._report = trainers, proc, actor, report
        self._stopped = asyncio.Event()

    @classmethod
    async def launch(
        cls,
        host: HostMesh,
        launch: TrainerLaunch,
        ranks: int,
        port: Channel,
        reports: FaultReports,
        fork_server: ForkServer | None,
    ) -> ReplicaProcesses:
        """Start the processes on ``host``; training starts with run()."""
        environment = {"OMP_NUM_THREADS": "1"}  # as torchrun does: ranks would fight for the cores
        if fork_server is not None:
            await fork_server.ready()
            command = fork_server.bootstrap(environment)
        else:
            command = default_bootstrap_cmd().with_env(environment)
        name = f"replica{launch.replica}attempt{launch.attempt}"
        trainers = host.spawn_procs({"gpus": ranks}, name=f"trainers{launch.replica}", bootstrap_command=command)
        proc = host.spawn_procs(name=f"replica{launch.replica}")
        actor = proc.spawn("replica", ReplicaActor, trainers, launch, port)
        trainers.spawn(name, WatchActor)
        processes = cls(trainers, proc, actor, reports.expect(name))
        try:
            await setup_torch_elastic_env_async(trainers)
        except BaseException:
            await processes.stop()
            raise
        return processes

    async def run(self) -> Failure | None:
        """Train; see control.controller.Replica."""
        try:
            failure = await self._actor.run.call_one()
        except Exception as error:
            return Failure(cause=f"its replica actor died: {_explained(error)}")
        if failure is None or failure.cause is not None:
            return failure
        try:
            rank, cause = upstream.read_process_report(await asyncio.wait_for(self._report, REPORT_SECONDS))
        except TimeoutError:
            return failure
        return dataclasses.replace(failure, cause=cause, rank=rank if failure.rank is None else failure.rank)

    async def attend(self) -> None:
        await self._unless_stopped(self._actor.attend.call_one())

    async def release(self) -> None:
        await self._unless_stopped(self._actor.release.call_one())

    async def announce_lighthouse(self, attempt: int) -> None:
        await self._unless_stopped(self._actor.announce_lighthouse.call_one(attempt))

    async def _unless_stopped(self, call: Awaitable[None]) -> None:
        """Await a call, or the end of the processes that would have answered it."""
        tasks = [asyncio.ensure_future(_awaited(call)), asyncio.create_task(self._stopped.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End all processes; the trainers first, for their peers may wait for them."""
        self._stopped.set()
        for mesh in (self._trainers, self._proc):
            await _stop(mesh)


class LighthouseProcess:
    """The process of a LighthouseActor."""

    def __init__(self, proc: Any, actor: Any, port: int, pid: int) -> None:
        self._proc, self._actor = proc, actor
        self.port, self.pid = port, pid

    @classmethod
    async def launch(cls, host: HostMesh, port: int, min_replicas: int, options: Lighthouse) -> LighthouseProcess:
        """Start a quorum server on ``port`` (0: any)."""
        proc = host.spawn_procs(name="lighthouse")
        actor = proc.spawn("lighthouse", LighthouseActor)
        try:
            port, pid = await actor.start.call_one(port, min_replicas, options)
        except BaseException:
            await _stop(proc)
            raise
        return cls(proc, actor, port, pid)

    async def run(self) -> str:
        """Wait until the process is gone; the cause."""
        try:
            await self._actor.run.call_one()
        except Exception as error:
            return _explained(error)
        return "it returned"

    async def stop(self) -> None:
        await _stop(self._proc)


async def _awaited(call: Awaitable[T]) -> T:
    return await call


async def _stop(mesh: Any) -> None:
    with contextlib.suppress(Exception):  # it may be dead in any way; what must be gone is checked by the run's end
        await asyncio.wait_for(_awaited(mesh.stop()), STOP_SECONDS)


def _explained(error: Exception) -> str:
    """How a process ended, out of the exception that Monarch raises for a call to it."""
    _, cause = upstream.read_process_report(str(error))
    return cause or (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()

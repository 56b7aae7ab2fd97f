"""What the controller launches: a replica's processes and the lighthouse's, as Monarch meshes that it owns."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import sys
import time
from collections.abc import Awaitable
from typing import Any

from monarch.actor import Channel, HostMesh, MeshFailure, default_bootstrap_cmd
from monarch.spmd import setup_torch_elastic_env_async

from monarch_titan import upstream
from monarch_titan.actors.forkserver import ForkServer
from monarch_titan.actors.lighthouse import LighthouseActor
from monarch_titan.actors.replica import ReplicaActor
from monarch_titan.actors.trainer import TrainerLaunch
from monarch_titan.actors.watch import awaited, watched
from monarch_titan.config.sections import Lighthouse
from monarch_titan.control.controller import Failure

# Stopping a mesh with a frozen process takes Monarch 4 to 5 s; more than this means that it has lost track of it.
STOP_SECONDS = 20.0

# Monarch reports how a process died within its supervision poll and idle time, see upstream.MONARCH_ENVIRONMENT.
REPORT_SECONDS = 1.5


class FaultReports:
    """How processes died, out of Monarch's reports to the owner of their meshes; set as ``unhandled_fault_hook``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._causes: list[tuple[float, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, failure: MeshFailure) -> None:
        """Called by Monarch, from any thread, for every dead process; without a hook it would stop the program."""
        self._loop.call_soon_threadsafe(self._take, failure.report())

    def _take(self, report: str) -> None:
        print(report, file=sys.stderr)
        if (cause := upstream.read_process_report(report)[1]) is not None:
            self._causes.append((time.monotonic(), cause))
            self._changed.set()

    async def cause(self) -> str | None:
        """How the process died that somebody has just noticed; None if Monarch does not say so in time.

        Several reports come for one process. Most only say that it does not answer, and the one that says why bears a
        name that leads nowhere: it is known by its time.
        """
        since = time.monotonic() - REPORT_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                while True:
                    for at, cause in reversed(self._causes):
                        if at >= since:
                            return cause
                    self._changed.clear()
                    await self._changed.wait()
        return None


class ReplicaProcesses:
    """A launched replica: its trainer processes and the process of its ReplicaActor."""

    def __init__(self, trainers: Any, reports: FaultReports, fork_server: ForkServer | None) -> None:
        self._trainers, self._reports, self._fork_server = trainers, reports, fork_server
        self._proc: Any = None
        self._actor: Any = None
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
        trainers = host.spawn_procs({"gpus": ranks}, name=f"trainers{launch.replica}", bootstrap_command=command)
        processes = cls(trainers, reports, fork_server)
        try:
            processes._proc = host.spawn_procs(name=f"replica{launch.replica}")
            processes._actor = processes._proc.spawn("replica", ReplicaActor, trainers, launch, port)
            await setup_torch_elastic_env_async(trainers)
        except BaseException:
            await processes.stop()
            raise
        return processes

    async def run(self) -> Failure | None:
        """Train; see control.controller.Replica."""
        try:
            failure = await _while_alive(self._actor, self._actor.run)
        except ProcessEnded:
            return Failure(cause=f"its replica actor died: {await self._reports.cause() or 'its process is gone'}")
        except Exception as error:
            return Failure(cause=f"its replica actor died: {_explained(error)}")
        if failure is None or failure.cause is not None:
            return failure
        return dataclasses.replace(failure, cause=await self._cause(failure))

    async def _cause(self, failure: Failure) -> str | None:
        """How a trainer's process ended: its parent knows, or else Monarch may say so."""
        if self._fork_server is not None and failure.pid is not None:
            code = await self._fork_server.exit_code(failure.pid)
            return None if code is None else upstream.describe_exit(code)
        return await self._reports.cause()

    async def attend(self) -> None:
        await self._unless_stopped(self._actor.attend.call_one())

    async def release(self) -> None:
        await self._unless_stopped(self._actor.release.call_one())

    async def announce_lighthouse(self, attempt: int) -> None:
        await self._unless_stopped(self._actor.announce_lighthouse.call_one(attempt))

    async def peer_gone(self, replica: int, attempt: int) -> None:
        await self._unless_stopped(self._actor.peer_gone.call_one(replica, attempt))

    async def _unless_stopped(self, call: Awaitable[None]) -> None:
        """Await a call, or the end of the processes that would have answered it."""
        tasks = [asyncio.ensure_future(awaited(call)), asyncio.create_task(self._stopped.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End all processes; the trainers first, for their peers may wait for them."""
        self._stopped.set()
        for mesh in (self._trainers, self._proc):
            if mesh is not None:
                await _stop(mesh)


class LighthouseProcess:
    """The process of a LighthouseActor."""

    def __init__(self, proc: Any, actor: Any, reports: FaultReports, port: int, pid: int) -> None:
        self._proc, self._actor, self._reports = proc, actor, reports
        self.port, self.pid = port, pid

    @classmethod
    async def launch(
        cls, host: HostMesh, port: int, min_replicas: int, options: Lighthouse, reports: FaultReports
    ) -> LighthouseProcess:
        """Start a quorum server on ``port`` (0: any)."""
        proc = host.spawn_procs(name="lighthouse")
        actor = proc.spawn("lighthouse", LighthouseActor)
        try:
            port = await actor.start.call_one(port, min_replicas, options)
            _, pid = await actor.process.call_one()
        except BaseException:
            await _stop(proc)
            raise
        return cls(proc, actor, reports, port, pid)

    async def run(self) -> str:
        """Wait until the process is gone; the cause."""
        try:
            await _while_alive(self._actor, self._actor.run)
        except ProcessEnded:
            return await self._reports.cause() or "its process is gone"
        except Exception as error:
            return _explained(error)
        return "it returned"

    async def stop(self) -> None:
        await _stop(self._proc)


class ProcessEnded(Exception):
    """The process of an actor on this host has ended."""


async def _while_alive(actor: Any, endpoint: Any) -> Any:
    """What an endpoint returns. Raises ProcessEnded as soon as the actor's process is gone, if it is on this host."""
    host, pid = await actor.process.call_one()
    with watched(pid) if host == socket.gethostname() else contextlib.nullcontext(asyncio.Event()) as ended:
        call, end = asyncio.create_task(awaited(endpoint.call_one())), asyncio.create_task(ended.wait())
        try:
            await asyncio.wait([call, end], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ProcessEnded
            return call.result()
        finally:
            call.cancel()
            end.cancel()
            await asyncio.gather(call, end, return_exceptions=True)


async def _stop(mesh: Any) -> None:
    with contextlib.suppress(Exception):  # it may be dead in any way; what must be gone is checked by the run's end
        await asyncio.wait_for(awaited(mesh.stop()), STOP_SECONDS)


def _explained(error: Exception) -> str:
    """How a process ended, out of the exception that Monarch raises for a call to it."""
    _, cause = upstream.read_process_report(str(error))
    return cause or (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()

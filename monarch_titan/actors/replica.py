"""The process that drives one replica's trainers and says why they failed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
from typing import Any

from monarch.actor import Actor, Channel, MeshFailure, ProcMesh, concurrent_endpoint

from monarch_titan import upstream
from monarch_titan.actors.hangs import hung_rank
from monarch_titan.actors.trainer import TrainerActor, TrainerLaunch
from monarch_titan.actors.watch import awaited, watched
from monarch_titan.control.controller import Failure
from monarch_titan.control.events import ReplicaStarted

# How long to wait for the death of a process to explain an exception.
CAUSE_SECONDS = 0.7


class ReplicaActor(Actor):
    """Spawns trainer actors on a mesh that the controller owns, so that the controller can stop them without us.

    Args:
        mesh: the trainer processes, one dimension ``gpus``.
        launch: what the trainers are launched with.
        port: where trainers report.
    """

    def __init__(self, mesh: ProcMesh, launch: TrainerLaunch, port: Channel) -> None:
        self.mesh, self.launch, self.port = mesh, launch, port
        self.trainers: Any = None
        self.pids: dict[int, int] = {}
        self.here: list[int] = []
        """Ranks on this host."""
        self.process_died = asyncio.Event()
        self.dead_ranks: list[int] = []
        """Ranks of this host whose process is gone, in order."""
        self.reports: list[str] = []
        """What Monarch said of dead processes."""

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Called by Monarch when a trainer's process is gone. True: handled, do not propagate."""
        self._note(failure.report())
        return True

    def _note(self, report: str) -> None:
        self.reports.append(report)
        self.process_died.set()

    @concurrent_endpoint
    async def process(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()

    @concurrent_endpoint
    async def run(self) -> Failure | None:
        """Train on all ranks; None once all were released, or what went wrong first."""
        self.trainers = self.mesh.spawn("trainer", TrainerActor, self.launch, self.port)
        processes = {point.rank: process for point, process in (await self.trainers.process.call()).items()}
        pids = {rank: pid for rank, (_, pid) in processes.items()}
        self.port.send(
            ReplicaStarted(replica=self.launch.replica, attempt=self.launch.attempt, pids=pids, actor_pid=os.getpid())
        )
        self.pids = pids
        with contextlib.ExitStack() as watches:
            self.here = [rank for rank, (host, _) in processes.items() if host == socket.gethostname()]
            waits = [
                asyncio.create_task(self._wait_for_end(rank, watches.enter_context(watched(pids[rank]))))
                for rank in self.here
            ]
            try:
                return await self._train_all(list(processes))
            finally:
                for wait in waits:
                    wait.cancel()

    async def _train_all(self, ranks: list[int]) -> Failure | None:
        died = asyncio.create_task(self.process_died.wait())
        hung = asyncio.create_task(hung_rank(self.trainers, ranks, self.launch.pause_seconds))
        trains = {asyncio.create_task(self._train(rank)): rank for rank in ranks}
        pending: set[asyncio.Task[Any]] = {died, hung, *trains}
        try:
            while not pending <= {died, hung}:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task is hung:
                        return self._end_hung(*hung.result())
                    if task is died or task.result() is not None:
                        self._leave_quorum()
                        return await self._failure(trains.get(task), None if task is died else task.result())
            return None
        finally:
            died.cancel()
            hung.cancel()

    def _end_hung(self, rank: int | None, cause: str) -> Failure:
        """Kill the ranks of this host now: a frozen process does not end when it is told to."""
        for pid in (self.pids[known] for known in self.here):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self._made(rank, cause)

    def _leave_quorum(self) -> None:
        """Have the lighthouse see at once that this replica is gone."""
        self.leaving = asyncio.ensure_future(awaited(self.trainers.leave_quorum.call()))
        self.leaving.add_done_callback(lambda left: left.cancelled() or left.exception())

    async def _train(self, rank: int) -> str | None:
        try:
            return await self.trainers.slice(gpus=rank).train.call_one()
        except Exception as error:  # Monarch's word for a process that died under the call
            self._note(str(error))
            return "its process died"

    async def _wait_for_end(self, rank: int, ended: asyncio.Event) -> None:
        await ended.wait()
        self.dead_ranks.append(rank)
        self.process_died.set()

    async def _failure(self, rank: int | None, cause: str | None) -> Failure:
        """The root of a failure: a process that died, or else the exception of the first rank that reported one."""
        try:
            # When a process dies, the other ranks may be the first to fail, with a broken connection.
            await asyncio.wait_for(self.process_died.wait(), CAUSE_SECONDS)
        except TimeoutError:
            return self._made(rank, cause)
        found = [upstream.read_process_report(report) for report in self.reports]
        dead = [*self.dead_ranks, *(rank for rank, _ in found if rank is not None)]
        causes = [cause for _, cause in found if cause is not None]
        return self._made(dead[0] if dead else None, causes[0] if causes else None)

    def _made(self, rank: int | None, cause: str | None) -> Failure:
        log = self.launch.log(0 if rank is None else rank)
        pid = None if rank is None else self.pids[rank]
        return Failure(cause=cause, rank=rank, pid=pid, log=f"{log.parent.name}/{log.name}")

    @concurrent_endpoint
    async def attend(self) -> None:
        await self.trainers.attend.call()

    @concurrent_endpoint
    async def release(self) -> None:
        await self.trainers.release.call()

    @concurrent_endpoint
    async def announce_lighthouse(self, attempt: int) -> None:
        self.launch = dataclasses.replace(self.launch, lighthouse_attempt=attempt)  # for trainers yet to come
        if self.trainers is not None:
            await self.trainers.announce_lighthouse.call(attempt)

    @concurrent_endpoint
    async def peer_gone(self, replica: int, attempt: int) -> None:
        if self.trainers is not None:
            await self.trainers.peer_gone.call(replica, attempt)

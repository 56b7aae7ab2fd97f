"""The process that drives one replica's trainers and says why they failed."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

from monarch.actor import Actor, Channel, MeshFailure, ProcMesh, concurrent_endpoint

from monarch_titan.actors.trainer import TrainerActor, TrainerLaunch
from monarch_titan.control.controller import Failure
from monarch_titan.control.events import ReplicaStarted

# When a rank's process dies, the others fail first, with a broken connection. Wait this long for the real cause.
CAUSE_SECONDS = 1.0


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
        self.process_died = asyncio.Event()
        self.reports: list[str] = []

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Called by Monarch when a trainer's process is gone. True: handled, do not propagate."""
        self._note(failure.report())
        return True

    def _note(self, report: str) -> None:
        self.reports.append(report)
        self.process_died.set()

    @concurrent_endpoint
    async def run(self) -> Failure | None:
        """Train on all ranks; None once all were released, or what went wrong first."""
        self.trainers = self.mesh.spawn("trainer", TrainerActor, self.launch, self.port)
        pids = await self.trainers.pid.call()
        self.pids = {point.rank: pid for point, pid in pids.items()}
        self.port.send(ReplicaStarted(replica=self.launch.replica, attempt=self.launch.attempt, pids=self.pids))
        died = asyncio.create_task(self.process_died.wait())
        trains = {asyncio.create_task(self._train(rank)): rank for rank in self.pids}
        pending: set[asyncio.Task[Any]] = {died, *trains}
        while pending != {died}:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is died or task.result() is not None:
                    return await self._failure(trains.get(task), None if task is died else task.result())
        died.cancel()
        return None

    async def _train(self, rank: int) -> str | None:
        try:
            return await self.trainers.slice(gpus=rank).train.call_one()
        except Exception as error:  # Monarch's word for a process that died under the call
            self._note(str(error))
            return "its process died"

    async def _failure(self, rank: int | None, cause: str | None) -> Failure:
        """The root of a failure: a process that died, or else the exception of the first rank that reported one."""
        if not self.process_died.is_set():
            try:
                await asyncio.wait_for(self.process_died.wait(), CAUSE_SECONDS)
            except TimeoutError:
                return self._made(rank, cause)
        dead_rank, dead_cause = _read(self.reports)
        if dead_rank is None:
            dead = [rank for rank, pid in self.pids.items() if not _alive(pid)]
            dead_rank = dead[0] if len(dead) == 1 else None
        return self._made(dead_rank, dead_cause)

    def _made(self, rank: int | None, cause: str | None) -> Failure:
        log = self.launch.log(0 if rank is None else rank)
        return Failure(cause=cause or "its process died", rank=rank, log=f"{log.parent.name}/{log.name}")

    @concurrent_endpoint
    async def attend(self) -> None:
        await self.trainers.attend.call()

    @concurrent_endpoint
    async def release(self) -> None:
        await self.trainers.release.call()

    @concurrent_endpoint
    async def announce_lighthouse(self, attempt: int) -> None:
        if self.trainers is not None:
            await self.trainers.announce_lighthouse.call(attempt)


def _read(reports: list[str]) -> tuple[int | None, str]:
    """Rank and cause out of Monarch 0.7's reports on a dead process; it has no structured form of them."""
    text = "\n".join(reports)
    rank = re.search(r"\{'gpus': (\d+)/\d+\}", text)
    if killed := re.search(r"Killed\(sig=(\d+)\)", text):
        cause = f"killed by {signal.Signals(int(killed[1])).name}"
    elif stopped := re.search(r"Stopped\(exit_code=(\d+)\)", text):
        cause = f"its process exited with code {stopped[1]}"
    elif "process exited cleanly" in text:
        cause = "its process exited with code 0"
    else:
        cause = "its process died"
    return int(rank[1]) if rank else None, cause


def _alive(pid: int) -> bool:
    """Whether a process of this host runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

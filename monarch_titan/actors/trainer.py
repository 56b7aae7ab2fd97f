"""One rank's process: builds the trainer and trains."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import Actor, Channel, concurrent_endpoint, current_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLaunch:
    """What all ranks of one attempt of a replica are launched with."""

    config: bytes
    """Pickled MonarchTrainer.Config: unpickling imports TorchTitan, which must come after the CPU device."""
    dump_folder: Path
    """The replica's own."""
    replica: int
    attempt: int
    load_step: int | None
    """Step of the checkpoint to go on from, if any."""
    lacks_part: bool
    """Whether its peers go on from a checkpoint of which it has no part."""
    positions: dict[int, Any]
    """Rank -> data position to go on from."""
    lighthouse: str
    lighthouse_attempt: int
    hostname: str

    def log(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return self.dump_folder / f"rank_{rank}.log"


class TrainerActor(Actor):
    """Runs a MonarchTrainer in a thread of its own and answers the controller meanwhile."""

    def __init__(self, launch: TrainerLaunch, port: Channel) -> None:
        self.launch, self.port = launch, port
        self.rank = current_rank().rank
        self.lighthouse_attempt = launch.lighthouse_attempt
        self.context: Any = None  # the ReplicaContext, once the trainer is built
        # build() and train() must share one thread: torch keeps modes of autograd and of device meshes per thread.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    @concurrent_endpoint
    async def process(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()

    @concurrent_endpoint
    async def train(self) -> str | None:
        """Train until released; the cause when that failed, None when it did not."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._train)

    @concurrent_endpoint
    async def attend(self) -> None:
        """While held at the end: take part in one more quorum. Returns when it has formed."""
        attended: Future[None] = Future()
        self.context.commands.put(attended)
        await asyncio.wrap_future(attended)

    @concurrent_endpoint
    async def release(self) -> None:
        """Let the held trainer leave."""
        self.context.commands.put(None)

    @concurrent_endpoint
    async def announce_lighthouse(self, attempt: int) -> None:
        """The lighthouse is gone and this attempt of it will be next."""
        self.lighthouse_attempt = attempt
        if self.context is not None:
            self.context.lighthouse_attempt = attempt

    def _train(self) -> str | None:
        self._redirect_output()
        try:
            trainer = self._build()
        except Exception as error:
            return _cause(error)
        try:
            trainer.train()
        except Exception as error:
            if trainer.manager is not None:
                trainer.manager.shutdown(wait=False)  # a dead replica must not look alive to the lighthouse
            return _cause(error)
        trainer.close()
        return None

    def _redirect_output(self) -> None:
        self.launch.dump_folder.mkdir(parents=True, exist_ok=True)
        log = os.open(self.launch.log(self.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)

    def _build(self) -> Any:
        from torchtitan.observability import structured_logger
        from torchtitan.tools.logging import init_logger

        import monarch_titan.actors.preload  # noqa: F401
        from monarch_titan.training.replica import ReplicaContext

        init_logger()
        logging.getLogger("monarch_titan").setLevel(logging.INFO)
        config = pickle.loads(self.launch.config)
        config.dump_folder = str(self.launch.dump_folder)
        structured_logger.init_structured_logger(
            source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
        )
        self.context = ReplicaContext(
            replica=self.launch.replica,
            attempt=self.launch.attempt,
            rank=self.rank,
            lighthouse=self.launch.lighthouse,
            lighthouse_attempt=self.lighthouse_attempt,
            hostname=self.launch.hostname,
            report=self.port.send,
            load_step=self.launch.load_step,
            lacks_part=self.launch.lacks_part,
            data=self.launch.positions.get(self.rank),
        )
        return config.build(context=self.context)


def _cause(error: Exception) -> str:
    """One line for the user; the traceback goes to the log."""
    traceback.print_exception(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

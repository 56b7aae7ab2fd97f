"""One run: the place where configuration, controller, actors and job meet."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from monarch_titan import upstream
from monarch_titan.config.checks import check, check_here
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.writer import to_toml
from monarch_titan.control.checkpoints import Found, newest
from monarch_titan.control.controller import Controller, Launch, RunFailed
from monarch_titan.control.events import Event, EventLog, LighthouseStarted, Resumed, RunFinished, RunStarted
from monarch_titan.control.faults import Fault, Injector
from monarch_titan.training import cpu
from monarch_titan.training.trainer import MonarchTrainer
from monarch_titan.view.summary import RunSummary

if TYPE_CHECKING:
    from monarch_titan.actors.forkserver import ForkServer

PACKAGES = ("torch", "torchtitan", "torchft", "torchmonarch")


class Interrupted(KeyboardInterrupt):
    """The user or the system asked the run to stop; ``signal`` says how."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


def train(
    config: MonarchTrainer.Config,
    *,
    observers: Iterable[Callable[[Event], None]] = (),
    faults: Sequence[Fault] = (),
) -> RunSummary:
    """Train with all replicas to the end and return what happened.

    Args:
        config: from ``load()`` or a configuration function; it is checked first.
        observers: called with every event, in order.
        faults: failures to inject.

    Raises:
        ConfigError: the configuration cannot be run; nothing was started.
        RunFailed: the run could not go on.
        Interrupted: SIGINT or SIGTERM; everything was stopped.
    """
    if config.debug.seed is None:
        config.debug.seed = 0  # replicas start equal by starting from one seed; TorchTitan would draw one for each
    resolved = to_toml(config)  # before it is adapted to the machine at hand: another may train it again
    cpu.adapt(config)
    check(config)
    check_here(config)
    folder = Path(config.dump_folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(resolved)
    with _terminable():
        return _recorded(config, folder, checkpoint_to_resume(config, folder), observers, faults)


def _recorded(
    config: MonarchTrainer.Config,
    folder: Path,
    checkpoint: Found,
    observers: Iterable[Callable[[Event], None]],
    faults: Sequence[Fault],
) -> RunSummary:
    """Train with every event written down, the last one however it ends."""
    summary = RunSummary()
    events = EventLog(folder / "events.jsonl", [summary, *observers])
    if faults:
        events.observe(Injector(faults, events))
    began = time.time()
    status, reason = "failed", "internal error"
    events(_run_started(config, folder))
    if checkpoint.step or checkpoint.ignored:
        events(_resumed(checkpoint))
    try:
        with _output_to(folder / "controller.log"):
            asyncio.run(_Run(config, folder, checkpoint, events).run())
        status, reason = "succeeded", ""
    except KeyboardInterrupt as stop:
        status, reason = "interrupted", str(stop) or signal.SIGINT.name
        raise
    except RunFailed as failure:
        reason = str(failure)
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise
    finally:
        events(RunFinished(status=status, seconds=round(time.time() - began, 3), reason=reason))
        events.close()
    return summary


def _run_started(config: MonarchTrainer.Config, folder: Path) -> RunStarted:
    return RunStarted(
        dump_folder=str(folder),
        num_replicas=config.monarch.num_replicas,
        min_replicas=config.monarch.live_replicas_needed,
        ranks_per_replica=config.monarch.ranks_per_replica,
        steps=config.training.steps,
        method=config.fault_tolerance.semi_sync_method,
        sync_steps=config.fault_tolerance.sync_steps,
        device=upstream.accelerator() or "cpu",
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )


def _resumed(checkpoint: Found) -> Resumed:
    return Resumed(
        step=checkpoint.step,
        outer_step=checkpoint.outer_step,
        replicas=checkpoint.replicas,
        ignored=checkpoint.ignored,
    )


def checkpoint_to_resume(config: MonarchTrainer.Config, folder: Path) -> Found:
    """The checkpoint in the dump folder from which the run goes on; of step 0 when there is none.

    Raises ConfigError when ``checkpoint.load_step`` cannot be loaded, or was written by others than would load it.
    """
    ours, monarch = config.checkpoint, config.monarch
    if not ours.enable:
        return Found()
    step = None if ours.load_step == -1 else ours.load_step
    folders = [folder / f"replica_{replica}" / ours.folder for replica in range(monarch.num_replicas)]
    found = newest(folders, step)
    if step is not None and not found.step:
        raise ConfigError(f"checkpoint.load_step must be a step whose checkpoint is whole, got {step}.")
    same = (found.saved_replicas, found.saved_ranks) == (monarch.num_replicas, monarch.ranks_per_replica)
    if found.step and not same and "dataloader" not in ours.exclude_from_loading:
        raise ConfigError(
            f"the checkpoint of step {found.step} in {folder} was written by {found.saved_replicas} replicas of "
            f"{found.saved_ranks} ranks, whose places in the data others cannot take: give monarch.num_replicas and "
            "monarch.procs_per_host as they were, or read the data from its beginning with "
            "checkpoint.exclude_from_loading = ['dataloader']."
        )
    return found


class _Run:
    """Owns what a run needs besides the controller: the fork server, the report channel, the lighthouse's port."""

    def __init__(self, config: MonarchTrainer.Config, folder: Path, checkpoint: Found, events: EventLog) -> None:
        self._config, self._folder, self._checkpoint, self._events = config, folder, checkpoint, events
        self._pickled = cloudpickle.dumps(config)
        self._lighthouse_port = 0
        self._fork_server: ForkServer | None = None

    async def run(self) -> None:
        """Train to the end; raises RunFailed or Interrupted."""
        upstream.set_monarch_environment()
        import monarch.actor

        from monarch_titan.actors.processes import FaultReports
        from monarch_titan.launch.local import LocalJob

        monarch_ = self._config.monarch
        self._job = LocalJob()
        self._reports = monarch.actor.unhandled_fault_hook = FaultReports()
        self._start_fork_server()
        self._port, receiver = monarch.actor.Channel.open()
        controller = Controller(
            self._launch,
            self._start_lighthouse,
            num_replicas=monarch_.num_replicas,
            min_replicas=monarch_.live_replicas_needed,
            ranks_per_replica=monarch_.ranks_per_replica,
            policy=monarch_.recovery,
            log=self._events,
            restart_alone=monarch_.num_replicas == 1 and self._config.checkpoint.enable,
            without_state=self._without_part(),
        )
        pump = asyncio.create_task(_pump(receiver, controller))
        try:
            await _interruptible(_first_error(controller.run(), pump))
        finally:
            pump.cancel()
            if self._fork_server is not None:
                self._fork_server.stop()

    def _start_fork_server(self) -> None:
        from monarch_titan.actors.forkserver import ForkServer

        wanted = self._config.monarch.fork_server
        if wanted is None:
            wanted = upstream.accelerator() is None
        if wanted:
            self._fork_server = ForkServer(["monarch_titan.actors.preload"], self._folder / "forkserver.log")
            self._fork_server.start()

    def _without_part(self) -> set[int]:
        """Replicas that have nothing of the checkpoint from which the others go on."""
        if not self._checkpoint.step:
            return set()
        return set(range(self._config.monarch.num_replicas)) - set(self._checkpoint.replicas)

    def _load_step(self, launch: Launch) -> int | None:
        """The step that a replica goes on from. One that is relaunched heals from its peers, if it has any."""
        if launch.attempt and self._config.monarch.num_replicas == 1:
            self._checkpoint = checkpoint_to_resume(self._config, self._folder)
        return None if launch.replica in self._without_part() else self._checkpoint.step or None

    async def _launch(self, launch: Launch) -> Any:
        from monarch_titan.actors.processes import ReplicaProcesses
        from monarch_titan.actors.trainer import TrainerLaunch

        trainer_launch = TrainerLaunch(
            config=self._pickled,
            dump_folder=self._folder / f"replica_{launch.replica}",
            replica=launch.replica,
            attempt=launch.attempt,
            load_step=self._load_step(launch),
            lacks_part=launch.replica in self._without_part(),
            positions=launch.positions,
            lighthouse=self._lighthouse_address,
            lighthouse_attempt=launch.lighthouse_attempt,
            hostname=self._job.hostname,
        )
        return await ReplicaProcesses.launch(
            self._job.hosts(),
            trainer_launch,
            self._config.monarch.ranks_per_replica,
            self._port,
            self._reports,
            self._fork_server,
        )

    @property
    def _lighthouse_address(self) -> str:
        return f"http://{self._job.hostname}:{self._lighthouse_port}"

    async def _start_lighthouse(self, attempt: int) -> Any:
        from monarch_titan.actors.processes import LighthouseProcess

        monarch_ = self._config.monarch
        lighthouse = await LighthouseProcess.launch(
            self._job.hosts(), self._lighthouse_port, monarch_.live_replicas_needed, monarch_.lighthouse, self._reports
        )
        self._lighthouse_port = lighthouse.port
        self._events(LighthouseStarted(address=self._lighthouse_address, attempt=attempt, pid=lighthouse.pid))
        return lighthouse


async def _pump(receiver: Any, controller: Controller) -> None:
    """Hand every message of the trainers to the controller."""
    while True:
        controller.receive(await receiver.recv())


async def _first_error(run: Any, pump: asyncio.Task[None]) -> None:
    """Await the run; raises what ends the pump too, because a run that hears nothing would wait for ever."""
    task = asyncio.ensure_future(run)
    try:
        await asyncio.wait([task, pump], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if pump.done():
        pump.result()
    await task


async def _interruptible(run: Any) -> None:
    """Await the run; SIGINT and SIGTERM cancel it and raise Interrupted once everything has stopped."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(run)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _terminable() -> Generator[None]:
    """Make SIGTERM an Interrupted, as Python makes SIGINT a KeyboardInterrupt, also before the loop takes over."""

    def interrupt(number: int, _: object) -> None:
        raise Interrupted(signal.Signals(number))

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _output_to(path: Path) -> Generator[None]:
    """Send what this process and its children print to a file: the libraries' chatter is not for the terminal.

    Views that are to stay visible write to a copy of the terminal's descriptor, see ``view.terminal``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    saved = [os.dup(stream) for stream in (1, 2)]
    try:
        for stream in (1, 2):
            os.dup2(log, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, original in zip((1, 2), saved, strict=True):
            os.dup2(original, stream)
            os.close(original)
        os.close(log)


class Run:
    """What ``MonarchTrainer.Config.build()`` gives outside of a trainer process: TorchTitan's main trains it."""

    def __init__(self, config: MonarchTrainer.Config) -> None:
        self.config = config

    def train(self) -> None:
        """Train with a view on the terminal; exits with the code that ``monarch-titan train`` would."""
        from monarch_titan.cli import run_and_report

        if code := run_and_report(self.config):
            sys.exit(code)

    def close(self) -> None:
        """Nothing is left open after train()."""


MonarchTrainer.Config.launcher = Run

__all__ = ["ConfigError", "Interrupted", "Run", "RunFailed", "train"]

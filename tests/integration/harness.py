"""A run of ``monarch-titan train`` in processes of its own, watched through its events."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from monarch_titan.control.events import (
    Event,
    LighthouseStarted,
    OuterStep,
    ReplicaStarted,
    ReplicaState,
    Step,
    from_json,
)

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "configs" / "local.toml"

# Small steps: a run takes about 10 s on two cores, after as many of starting.
SMALL = (
    "training.steps=30",
    "training.seq_len=32",
    "training.local_batch_size=1",
    "fault_tolerance.sync_steps=10",
    "monarch.check_replicas=outer_step",
    "monarch.lighthouse.heartbeat_timeout_ms=3000",
)

E = TypeVar("E", bound=Event)


class TrainingRun:
    """One run; on leaving the ``with`` block whatever is left of it is killed."""

    def __init__(self, folder: Path, *overrides: str, config: Path = LOCAL, command: list[str] | None = None) -> None:
        self.folder = folder / "run"
        self.command = command or [
            *(sys.executable, "-m", "monarch_titan", "train", str(config), f"dump_folder={self.folder}"),
            *SMALL,
            *overrides,
        ]
        self.marker = f"MONARCH_TITAN_TEST={uuid.uuid4().hex}"
        self.output = folder / "terminal.txt"

    def __enter__(self) -> TrainingRun:
        name, _, value = self.marker.partition("=")
        environment = {**os.environ, name: value, "PYTHONPATH": str(ROOT)}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                cwd=self.output.parent, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.process.pid, *self.processes()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)

    # What happens ----------------------------------------------------------------------------------------------------

    def events(self, kind: type[E] = Event) -> list[E]:  # type: ignore[assignment]
        """All events so far, or those of one kind."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(from_json, lines) if isinstance(event, kind)]

    def wait_for(self, kind: type[E], when: Callable[[E], bool] = lambda _: True, timeout: float = 180) -> E:
        """The first event of a kind that fulfils a condition, as soon as it has happened."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for event in self.events(kind):
                if when(event):
                    return event
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"no such {kind.__name__}; the terminal said:\n{self.terminal()}")

    def wait_for_step(self, replica: int, step: int) -> Step:
        """A replica's report of this step, or of a later one."""
        return self.wait_for(Step, lambda event: event.replica == replica and event.step >= step)

    def finish(self, timeout: float = 300) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s; the terminal said:\n{self.terminal()}") from None

    def terminal(self) -> str:
        return self.output.read_text()

    # Its processes ---------------------------------------------------------------------------------------------------

    def started(self, replica: int) -> ReplicaStarted:
        """The newest start of a replica."""
        return [event for event in self.events(ReplicaStarted) if event.replica == replica][-1]

    def lighthouse_pid(self) -> int:
        return self.events(LighthouseStarted)[-1].pid

    def processes(self) -> list[int]:
        """All processes that the run has started and that live."""
        marker = self.marker.encode()
        entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [int(entry.name) for entry in entries if marker in _read(entry / "environ") and _lives(entry)]

    def left_over(self, seconds: float = 5) -> list[int]:
        """Processes that are still there this long after the run has ended."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    # What must hold --------------------------------------------------------------------------------------------------

    def committed(self) -> dict[int, list[int]]:
        """Replica -> the outer steps it committed, in order."""
        steps: dict[int, list[int]] = {}
        for event in self.events(OuterStep):
            if event.committed:
                steps.setdefault(event.replica, []).append(event.outer_step)
        return steps

    def assert_healed_like_peers(self) -> None:
        """Replicas that share an outer step have equal global parameters, and a healed one has taken a peer's state."""
        states: dict[tuple[int, int], list[ReplicaState]] = {}
        for state in self.events(ReplicaState):
            states.setdefault((state.outer_step, state.rank), []).append(state)
        assert len(states) > 1
        healed = 0
        for group in states.values():
            assert len({(s.global_parameters, s.outer_optimizer, s.lr, s.step) for s in group}) == 1, group
            peers = {s.optimizer for s in group if not s.healed}
            for state in (s for s in group if s.healed):
                healed += 1
                assert state.optimizer in peers, state
        assert healed > 0, "no replica healed"

    def assert_ended_well(self, survivors: tuple[int, ...]) -> None:
        """Exit code 0, survivors that never went back, a healed replica equal to its peers, nothing left."""
        assert self.finish() == 0, self.terminal()
        for replica in survivors:
            steps = self.committed()[replica]
            assert steps == sorted(set(steps)), f"replica {replica} committed {steps}"
        assert len({steps[-1] for steps in self.committed().values()}) == 1
        self.assert_healed_like_peers()
        assert self.left_over() == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _lives(entry: Path) -> bool:
    return _read(entry / "stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"])


def kill(*pids: int) -> None:
    """SIGKILL, to each at once."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)

"""However a run ends, nothing of it is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from monarch_titan.control.events import RunFinished
from tests.integration.harness import TrainingRun

pytestmark = pytest.mark.integration

# Long enough to be in the middle of it.
LONG = "training.steps=1000"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_everything_in_seconds(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with TrainingRun(tmp_path, LONG) as run:
        run.wait_for_step(0, 3)
        begin = time.monotonic()
        os.kill(run.process.pid, number)
        assert run.finish(30) == code
        assert time.monotonic() - begin < 10
        assert run.left_over() == []
        assert run.terminal().strip().splitlines()[-1] == f"monarch-titan: error: stopped by {number.name}"
        assert run.events(RunFinished)[-1].status == "interrupted"
        assert "Traceback" not in run.terminal()


def test_ctrl_c_of_a_terminal_reaches_the_whole_group(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, LONG) as run:
        run.wait_for_step(0, 3)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.finish(30) == 130
        assert run.left_over() == []


def test_signal_while_replicas_are_starting(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, LONG) as run:
        deadline = time.monotonic() + 60
        while not (run.folder / "events.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish(30) == 143
        assert run.left_over() == []


def test_sigkill_of_the_controller_takes_everything_along(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, LONG) as run:
        run.wait_for_step(0, 3)
        assert len(run.processes()) > 6
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.finish(10) == -signal.SIGKILL
        assert run.left_over() == []

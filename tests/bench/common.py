"""Runs to measure, and how the figures are written down."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from monarch_titan.control.events import Event, from_json

E = TypeVar("E", bound=Event)
CONFIG = ("--module", "monarch_titan", "--config", "llama3_debug_diloco")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def machine() -> str:
    """The machine in one line."""
    cpu = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "CPU")
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores of {cpu}, {memory:.0f} GiB, no GPU; Python {platform.python_version()}, "
        f"torch {torch.__version__}, {date.today()}"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def events(folder: Path, kind: type[E]) -> list[E]:
    """All events of one kind that a run has left."""
    return [event for event in map(from_json, _lines(str(folder / "events.jsonl"))) if isinstance(event, kind)]


def monarch(config: Path, folder: Path, overrides: Sequence[str], *, verb: str = "train", timeout: float = 300) -> None:
    """Run ``monarch-titan`` to its end. Raises CalledProcessError with what it printed when it fails."""
    given = [str(config)] if verb == "train" else []
    run([sys.executable, "-m", "monarch_titan", verb, *given, f"dump_folder={folder}", *overrides], timeout)


def run(command: Sequence[str], timeout: float) -> str:
    """Run a command to its end and return what it printed."""
    done = subprocess.run(
        command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        done.check_returncode()
    return done.stdout + done.stderr


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"

"""Seconds from SIGKILL of a trainer to ``replica_failed``: five kills in one run of three replicas."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from monarch_titan import load, train
from monarch_titan.control.events import FaultInjected, ReplicaFailed
from tests.bench.common import events, machine, spread

CONFIG = Path(__file__).parents[2] / "configs" / "local.toml"
# One replica at a time, in the middle of a window, each healed before the next one is hit.
FAULTS = [f"SIGKILL replica {index % 3} rank {index % 2} at step {15 + 20 * index}" for index in range(5)]
LIMIT_SECONDS = 2.0


def seconds(folder: Path) -> list[float]:
    """For each injected fault of a run, how long it took to be reported."""
    failures = events(folder, ReplicaFailed)
    return [
        next(f.time for f in failures if f.replica == fault.replica and f.time >= fault.time) - fault.time
        for fault in events(folder, FaultInjected)
    ]


def measure(folder: Path) -> list[float]:
    """Train through five kills."""
    small = ["training.steps=120", "training.seq_len=32", "training.local_batch_size=1"]
    config = load(CONFIG, f"dump_folder={folder}", *small)
    config.monarch.faults.schedule = FAULTS
    train(config)
    return seconds(folder)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    print(machine())
    print(f"SIGKILL to replica_failed, {len(found)} kills: {spread(found, 2)} s")
    return int(statistics.median(found) > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())

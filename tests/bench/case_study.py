"""The published case study's shape on one machine: 4 replicas x 8 ranks, DiLoCo every 20 steps, one replica killed.

32 trainer processes on a few cores say nothing about speed on accelerators. What is shown is that the whole works at
this size: quorum, outer steps, the loss of a replica and its return.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from monarch_titan import load, train
from monarch_titan.control.events import OuterStep, ReplicaStarted, Step
from tests.bench.common import events, machine, spread

CONFIG = Path(__file__).parents[2] / "configs" / "local.toml"
FAULT = "SIGKILL replica 2 rank 5 at step 30"
NEEDED_GIB = 14
OVERRIDES = [
    "monarch.num_replicas=4",
    "monarch.procs_per_host=8",
    "training.steps=60",
    "training.seq_len=64",
    "training.local_batch_size=1",
    "fault_tolerance.sync_steps=20",
    # With 16 processes a core, a heartbeat can be late by seconds and a collective slow by tens of them.
    "monarch.lighthouse.heartbeat_timeout_ms=10000",
    "fault_tolerance.process_group_timeout_ms=120000",
]


class PeakMemory:
    """Samples the proportional memory (Pss) of this process and all its descendants."""

    def __init__(self) -> None:
        self.gib = 0.0
        self.processes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        me = psutil.Process()
        while not self._end.wait(5):
            found = [me, *me.children(recursive=True)]
            self.gib = max(self.gib, sum(map(_pss, found)) / 2**20)
            self.processes = max(self.processes, len(found))


def _pss(process: psutil.Process) -> int:
    """Pss of a process in KiB, 0 when it is gone."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def main() -> int:
    available = psutil.virtual_memory().available / 2**30
    if available < NEEDED_GIB:
        print(
            f"the case study needs {NEEDED_GIB} GiB of free memory, this machine has {available:.0f}.", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory() as name, PeakMemory() as memory:
        folder, begin = Path(name), time.time()
        config = load(CONFIG, f"dump_folder={folder}", *OVERRIDES)
        config.monarch.faults.schedule = [FAULT]
        summary = train(config)
        steps = events(folder, Step)
        committed = [event for event in events(folder, OuterStep) if event.committed]
        started = [event for event in events(folder, ReplicaStarted) if event.attempt == 0]
        first_steps = [next(s.time for s in steps if s.replica == r) - begin for r in range(4)]
        inner = [event.seconds for event in steps if event.step > 2]
        recovery = [failure.recovery_seconds for failure in summary.failures]
    rows = {
        "replicas x ranks": "4 x 8",
        "result": summary.status,
        "wall time": f"{summary.elapsed:.0f} s",
        "launch to all processes up": f"{max(s.time for s in started) - begin:.0f} s",
        "launch to first step": f"{spread(first_steps)} s",
        "inner step": f"{spread(inner, 2)} s",
        "outer steps committed by each replica": ", ".join(
            str(len([e for e in committed if e.replica == r])) for r in range(4)
        ),
        "replicas in each outer step": ", ".join(
            str(max(e.participants for e in committed if e.outer_step == n))
            for n in sorted({e.outer_step for e in committed})
        ),
        "outer step": f"{spread([e.seconds for e in committed], 2)} s",
        "SIGKILL to the next outer step with all four": ", ".join(f"{value:.1f} s" for value in recovery if value),
        "peak memory, all processes": f"{memory.gib:.1f} GiB in {memory.processes} processes",
    }
    print(machine(), "\n\n| what | measured |\n|---|---|")
    for what, measured in rows.items():
        print(f"| {what} | {measured} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A row for each kind of failure and moment: how soon it is noticed, and what it costs the survivors.

Three replicas of two ranks train the debug model. Every fault has a run of its own. A survivor's stall is how much
longer than undisturbed ones its next outer step took, from asking for a quorum to new parameters, all attempts
included.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from monarch_titan.control.events import OuterStep, Quorum, ReplicaFailed, RunFinished
from monarch_titan.view.verdict import Soak
from tests.bench.common import events, machine, monarch, spread

FAULTY = Path(__file__).parents[1] / "integration" / "faulty.toml"
VICTIM, SURVIVORS = 1, (0, 2)
STEPS, SYNC_STEPS, BATCH = 50, 10, 25
OVERRIDES = (
    f"training.steps={STEPS}",
    f"fault_tolerance.sync_steps={SYNC_STEPS}",
    "fault_tolerance.process_group_timeout_ms=120000",
    "training.seq_len=32",
    "training.local_batch_size=1",
    "monarch.check_replicas=outer_step",
    # Rank 1 of replica 1, at its 26th batch or its third outer all-reduce.
    "dataloader.fail_shard=3",
)
MOMENTS = {
    "in a window": (f"dataloader.fail_batch={BATCH}",),
    "in the outer all-reduce": ("dataloader.in_allreduce=true", "dataloader.fail_batch=2"),
}
KINDS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGSTOP", "raise", "exit", "hang")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one fault led to."""

    cause: str
    noticed: float
    """Seconds from the fault to ``replica_failed``."""
    stalls: list[float]
    """Seconds, of each survivor."""
    windows_lost: int
    """Windows of survivors that were not committed."""
    lost: int
    repeated: int
    """Batches, see Verdict."""
    equal: bool
    """Whether all replicas ended with the same state."""


def measure(kind: str, moment: str, folder: Path) -> Row:
    """Train once with one fault."""
    record = folder / "record"
    record.mkdir()
    monarch(
        FAULTY,
        folder,
        [*OVERRIDES, *MOMENTS[moment], f"dataloader.how={kind}", f"dataloader.record={record}"],
        timeout=900,
    )
    at = float((record / "failed").read_text())
    failed = next(event for event in events(folder, ReplicaFailed) if event.time > at)
    soak = Soak()
    for event in events(folder, OuterStep):
        soak(event)
    verdict = soak.verdict()
    return Row(
        cause=failed.cause,
        noticed=failed.time - at,
        stalls=[_stall(folder, replica, at) for replica in SURVIVORS],
        windows_lost=sum(_committed(folder, replica) < STEPS // SYNC_STEPS for replica in SURVIVORS),
        lost=verdict.lost,
        repeated=verdict.repeated,
        equal=events(folder, RunFinished)[-1].status == "succeeded",
    )


def _committed(folder: Path, replica: int) -> int:
    return sum(e.committed and e.contributed and e.replica == replica for e in events(folder, OuterStep))


def _stall(folder: Path, replica: int, at: float) -> float:
    """How much longer a survivor's outer step took that the fault met, than those before and those well after it."""
    spent: dict[int, float] = {}
    outer_step = 1
    ended: dict[int, float] = {}
    told = [event for event in events(folder, Quorum) + events(folder, OuterStep) if event.replica == replica]
    for event in sorted(told, key=lambda event: event.time):
        spent[outer_step] = spent.get(outer_step, 0.0) + event.seconds
        if isinstance(event, OuterStep) and event.committed:
            ended[outer_step] = event.time
            outer_step += 1
    met = min(step for step, time in ended.items() if time > at)
    usual = statistics.median(seconds for step, seconds in spent.items() if step not in (met, met + 1))
    return max(0.0, spent[met] - usual)


def main() -> int:
    print(machine(), "\n")
    columns = ["kind", "when", "noticed after, s", "stall of survivors, s", "their windows lost"]
    columns += ["batches lost", "repeated", "equal at the end"]
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    sound = True
    for kind in KINDS:
        for moment in MOMENTS:
            with tempfile.TemporaryDirectory() as folder:
                row = measure(kind, moment, Path(folder))
            figures = [f"{row.noticed:.1f}", spread(row.stalls), row.windows_lost, row.lost, row.repeated]
            print("|", " | ".join(map(str, [kind, moment, *figures, "yes" if row.equal else "no"])), "|", flush=True)
            sound = sound and row.equal and not (row.windows_lost or row.lost or row.repeated)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())

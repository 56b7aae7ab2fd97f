"""What Monarch costs and what it gains, against plain torchrun, alternating in one run.

Overhead: one replica of two ranks, the same TorchTitan configuration, median seconds of a step as TorchTitan's own
metrics give them (TensorBoard for torchrun, ``step`` events here: both are written from the same dictionary).

Recovery: one rank is killed with SIGKILL at the same step. Under Monarch, until the healed replica's next committed
outer step. Under ``torchrun --max-restarts``, the whole job restarts from its last checkpoint, until the step at which
it was killed is reached again. Both have the same six ranks, the same model and state that is 20 steps old at worst:
outer steps every 20 steps here, checkpoints every 20 steps there. torchrun's own detection is made as quick as it
goes (``--monitor-interval 0.1``), and its workers make their own store: with the agent's, which is the default, gloo
finds the addresses of the dead workers after a restart and torch 2.13 never comes back.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from monarch_titan.control.events import FaultInjected, OuterStep, Step
from tests.bench.common import CONFIG, ENVIRONMENT, events, machine, monarch, run, spread

LOCAL = Path(__file__).parents[2] / "configs" / "local.toml"
ROUNDS = 3
STEPS, SKIPPED = 80, 20
KILL_STEP, RECOVERY_STEPS = 30, 60


def flags(options: dict[str, str]) -> list[str]:
    """Options as TorchTitan's command line takes them."""
    return [word for key, value in options.items() for word in (f"--{key}", value)]


def torchrun(ranks: int, *own: str) -> list[str]:
    """The start of a torchrun command line."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *own,
            "-m", "monarch_titan.train", *CONFIG]  # fmt: skip


# Overhead ------------------------------------------------------------------------------------------------------------

SAME = {"training.steps": str(STEPS), "training.seq_len": "128", "training.local_batch_size": "2"}


def step_seconds_torchrun(folder: Path) -> list[float]:
    """Seconds of each step, under torchrun."""
    run([*torchrun(2), *flags({**SAME, "dump_folder": str(folder)}), "--metrics.enable_tensorboard"], 300)
    log = EventAccumulator(str(next(folder.glob("tb/*"))))
    log.Reload()
    return [point.value for point in log.Scalars("time_metrics/end_to_end(s)")]


def step_seconds_monarch(folder: Path, *overrides: str) -> list[float]:
    """Seconds of each step of one replica under Monarch."""
    same = [f"{key}={value}" for key, value in SAME.items()]
    one = ["monarch.num_replicas=1", "metrics.enable_tensorboard=true", *same, *overrides]
    monarch(LOCAL, folder, one)
    return [event.seconds for event in events(folder, Step)]


def overhead(folder: Path) -> None:
    """Print tokens/s of one replica, each way."""
    ways = {
        "torchrun": step_seconds_torchrun,
        "Monarch": lambda path: step_seconds_monarch(path, "fault_tolerance.enable=false"),
        "Monarch, TorchFT, DiLoCo(20)": step_seconds_monarch,
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(ROUNDS):
        for index, (way, measure) in enumerate(ways.items()):
            steps = measure(folder / f"overhead_{round_}_{index}")
            found[way].append(2 * 2 * 128 / statistics.median(steps[SKIPPED:]))
    print(f"\n| one replica of 2 ranks, {ROUNDS} rounds | tokens/s | ratio to torchrun |\n|---|---|---|")
    for way, values in found.items():
        ratios = [value / base for value, base in zip(values, found["torchrun"], strict=True)]
        print(f"| {way} | {spread(values, 0)} | {spread(ratios, 3)} |")


# Recovery ------------------------------------------------------------------------------------------------------------

SMALL = {"training.steps": str(RECOVERY_STEPS), "training.seq_len": "64", "training.local_batch_size": "1"}


def recover_monarch(folder: Path) -> float:
    """Seconds from SIGKILL to the healed replica's next committed outer step."""
    monarch(LOCAL, folder, [f"{key}={value}" for key, value in SMALL.items()], verb="demo")
    fault = events(folder, FaultInjected)[0]
    assert fault.step == KILL_STEP
    outer = events(folder, OuterStep)
    return (
        next(e.time for e in outer if e.replica == fault.replica and e.committed and e.time > fault.time) - fault.time
    )


def recover_torchrun(folder: Path) -> tuple[float, float]:
    """Seconds from SIGKILL to the first step after the restart, and to the step at which it was killed."""
    checkpoint = {"checkpoint.interval": "20", "dump_folder": str(folder)}
    command = torchrun(6, "--max-restarts", "3", "--monitor-interval", "0.1")
    words = [*command, *flags(SMALL), *flags(checkpoint), "--checkpoint.enable", "--checkpoint.no-last-save-model-only"]
    folder.mkdir()
    log = folder / "log.txt"
    with log.open("w") as output:
        environment = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = subprocess.Popen(words, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        _wait(log, KILL_STEP, 0, job)
        lines = log.read_text().count("\n")
        killed = time.time()
        os.kill(_rank(job.pid), signal.SIGKILL)
        first = _wait(log, 0, lines, job)
        again = _wait(log, KILL_STEP, lines, job)
        if job.wait(200):
            raise RuntimeError(f"torchrun failed:\n{log.read_text()[-3000:]}")
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(30)
    return first - killed, again - killed


def _wait(log: Path, step: int, skip: int, job: subprocess.Popen[bytes]) -> float:
    """When the log, after its first ``skip`` lines, shows a step of at least this number."""
    deadline = time.time() + 200
    while time.time() < deadline and job.poll() is None:
        text = "\n".join(log.read_text().split("\n")[skip:])
        if any(int(found) >= step for found in re.findall(r"step:\D*(\d+)", re.sub(r"\x1b\[[\d;]*m", "", text))):
            return time.time()
        time.sleep(0.05)
    raise RuntimeError(f"no step {step}:\n{log.read_text()[-3000:]}")


def _rank(parent: int) -> int:
    """A trainer process of this torchrun."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[1])


def recovery(folder: Path) -> None:
    """Print what the loss of one of six ranks costs, each way."""
    healed, first, again = [], [], []
    for round_ in range(ROUNDS):
        healed.append(recover_monarch(folder / f"healed_{round_}"))
        seconds = recover_torchrun(folder / f"restarted_{round_}")
        first.append(seconds[0])
        again.append(seconds[1])
    ratios = [b / a for a, b in zip(healed, again, strict=True)]
    print(f"\n| one of 6 ranks killed at step {KILL_STEP}, {ROUNDS} rounds | seconds | steps others redo |")
    print("|---|---|---|")
    print(f"| Monarch, 3 replicas x 2: healed replica's next committed outer step | {spread(healed)} | 0 |")
    print(f"| torchrun --max-restarts, 1 x 6: first step after the restart | {spread(first)} | {KILL_STEP - 20} |")
    print(f"| torchrun --max-restarts, 1 x 6: the step it was killed at, again | {spread(again)} | {KILL_STEP - 20} |")
    print(f"\nratio of the last to the first: {spread(ratios)}")


def main() -> int:
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        overhead(Path(name))
        recovery(Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())

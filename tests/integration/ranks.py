"""One replica's ranks without a controller: imports TorchTitan once, then forks the ranks of one case after another.

``python -m tests.integration.ranks`` reads a case a line from its standard input and answers each with a line. Both are
JSON. A case names a base configuration, overrides and how many ranks to train with; the answer has the loss and the
gradient norm of every step, or why there are none.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 240
"""Longest time for one case; a test needs up to three."""


class Ranks:
    """The process that forks, seen from the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def train(self, folder: Path, base: str, ranks: int, *overrides: str) -> Any:
        """``[[loss, gradient norm], ...]``, one pair a step; asserts that all ranks succeeded."""
        case = {"folder": str(folder), "base": base, "ranks": ranks, "overrides": overrides}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the process that forks has died"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["steps"]

    def close(self) -> None:
        self._process.communicate(timeout=10)


def main() -> None:
    import monarch_titan.actors.preload  # noqa: F401 (the CPU device comes before anything of TorchTitan)

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is not an answer
    for line in sys.stdin:
        try:
            answer = _train(json.loads(line))
        except (AssertionError, OSError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _train(case: dict[str, Any]) -> dict[str, Any]:
    from monarch_titan.config.checks import check
    from monarch_titan.config.loader import load
    from monarch_titan.training.cpu import adapt

    folder, ranks = Path(case["folder"]), case["ranks"]
    folder.mkdir(parents=True)
    module, _, name = case["base"].partition(".")
    (folder / "base.toml").write_text(f'[torchtitan]\nmodule = "{module}"\nconfig = "{name}"\n')
    overrides = [f"dump_folder={folder}", f"monarch.procs_per_host={ranks}", *case["overrides"]]
    config = load(folder / "base.toml", *overrides)
    seed = config.checkpoint.create_seed_checkpoint
    if not seed:
        adapt(config)
        check(config)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pids = {}
    for rank in range(ranks):
        if not (pid := os.fork()):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({key: str(value) for key, value in environment.items()})
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
            _run_rank(config, folder, rank, seed)
        pids[pid] = rank
    failed = _wait(pids)
    if failed is not None:
        return {"error": (folder / f"rank_{failed}.log").read_text()[-3000:]}
    steps = [json.loads(file.read_text()) for file in sorted(folder.glob("steps_*.json"))]
    assert all(other == steps[0] for other in steps), "ranks disagree on the loss"
    return {"steps": steps[0] if steps else []}


def _run_rank(config: Any, folder: Path, rank: int, seed: bool) -> None:
    """Train and leave the process: 0 for success."""
    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        import torch
        import torchtitan.trainer
        from torchtitan.tools.logging import init_logger

        torch.set_num_threads(1)
        init_logger()
        # Rank 0 sleeps two seconds at the end.
        torchtitan.trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
        trainer = config.build()
        if seed:
            trainer.checkpointer.save(0, last_step=True)
        else:
            notes = trainer.metrics_processor.logger = Notes()
            trainer.train()
            if not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage:
                (folder / f"steps_{rank}.json").write_text(json.dumps(notes.steps))
        torch.distributed.barrier()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Notes:
    """In the place of TorchTitan's metrics logger."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.steps.append([float(metrics["loss_metrics/global_avg_loss"]), float(metrics["grad_norm"])])

    def close(self) -> None:
        return


def _wait(pids: dict[int, int]) -> int | None:
    """The rank that failed first, or hung; all are gone on return."""
    deadline = time.monotonic() + SECONDS
    failed = None
    while pids and time.monotonic() < deadline and failed is None:
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank = pids.pop(pid)
                failed = rank if status and failed is None else failed
        time.sleep(0.02)
    if failed is None and pids:
        failed = min(pids.values())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return failed


if __name__ == "__main__":
    main()

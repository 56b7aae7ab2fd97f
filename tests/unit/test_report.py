"""The report at the end: how the run ended, what failed and how fast it was back."""

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from monarch_titan.control.events import (
    Event,
    FaultInjected,
    OuterStep,
    ReplicaFailed,
    ReplicaFinished,
    ReplicaStarted,
    RunFinished,
    RunStarted,
    Step,
    to_json,
)
from monarch_titan.view.report import print_report, report
from monarch_titan.view.summary import RunSummary

START = 1000.0
LONG = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.91 GiB. GPU 0 has a capacity of 191.98 GiB."
FAILED = ReplicaFailed(
    time=START + 17.4,
    replica=1,
    attempt=0,
    rank=1,
    step=30,
    cause="killed by SIGKILL",
    log="replica_1/rank_1.log",
    action="respawn",
)
END = RunFinished(time=START + 93.5, status="succeeded", seconds=93.5)


def outer_step(at: float, replica: int, number: int) -> OuterStep:
    return OuterStep(
        time=START + at,
        replica=replica,
        outer_step=number,
        step=20 * number,
        participants=2,
        committed=True,
        contributed=True,
        seconds=0.1,
        bytes=1 << 20,
    )


def run(*failures: Event, end: RunFinished | None = END) -> Iterator[Event]:
    """Two replicas for 40 steps; ``failures`` come between the two outer steps and replica 1 is back at the second."""
    yield RunStarted(
        time=START,
        dump_folder="outputs/demo",
        num_replicas=2,
        min_replicas=2,
        ranks_per_replica=2,
        steps=40,
        method="diloco",
        sync_steps=20,
        device="cpu",
        versions={},
    )
    for replica in range(2):
        yield ReplicaStarted(time=START + 2, replica=replica, attempt=0, pids={0: 1, 1: 2}, actor_pid=9)
    for number in (1, 2):
        for replica in range(2):
            yield Step(time=START + 12, replica=replica, step=20 * number, loss=5.0, tokens=18700, seconds=10.0)
            yield outer_step(3 + 10 * number, replica, number)
        for failure in failures if number == 1 else ():
            yield failure
            if isinstance(failure, ReplicaFailed):
                yield ReplicaStarted(
                    time=failure.time + 1, replica=1, attempt=failure.attempt + 1, pids={0: 3, 1: 4}, actor_pid=9
                )
    for replica in range(2):
        yield ReplicaFinished(time=START + 93, replica=replica, step=40, outer_step=2)
    if end is not None:
        yield end


def printed(events: Iterator[Event], width: int = 80) -> list[str]:
    summary, out = RunSummary(), io.StringIO()
    for event in events:
        summary(event)
    print_report(Console(file=out, width=width), summary, Path("outputs/demo"))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_row_a_replica_tells_attempts_steps_failures_and_recovery():
    fault = FaultInjected(time=START + 17.1, replica=1, rank=1, step=30, pid=2, signal="SIGKILL")
    lines = printed(run(fault, FAILED))
    first, second = (line.split() for line in lines if line.strip()[:1] in {"0", "1"})
    assert first == ["0", "finished", "1", "40", "2", "5.0000", "-", "-"]
    assert second == ["1", "finished", "2", "40", "2", "5.0000", "killed", "by", "SIGKILL", "5.9", "s"]


def test_the_time_line_tells_each_failure_and_its_log():
    text = "\n".join(printed(run(FAILED), width=200))
    assert "[   17.4 s] replica 1 rank 1 failed at step 30: killed by SIGKILL; respawning, log: replica_1/rank" in text
    assert "[   23.0 s] replica 1 commits again at step 40, back 5.6 s after its failure" in text


def test_the_verdict_tells_how_it_ended_and_its_figures():
    lines = printed(run(FAILED))
    place = lines.index("succeeded after 93.5 s (0:01:33)")
    assert lines[place + 1] == "step 40 of 40, 2 outer steps, 1 failure, 800 tokens/s overall"


def test_the_reason_of_a_failed_run_is_told():
    end = dataclasses.replace(END, status="failed", reason="1 of 2 replicas left, 2 needed")
    assert "failed after 93.5 s (0:01:33): 1 of 2 replicas left, 2 needed" in printed(run(FAILED, end=end))


def test_a_run_without_an_end_is_not_called_a_success():
    text = "\n".join(printed(run(end=None)))
    assert "no end recorded after 93.0 s (0:01:33): it still runs, or its controller was" in text
    assert "succeeded" not in text


def test_a_run_without_failures_has_no_time_line():
    assert "What happened" not in printed(run())


def test_failures_of_one_cause_share_a_row():
    second = dataclasses.replace(FAILED, time=START + 20, attempt=1)
    text = "\n".join(printed(run(FAILED, second), width=120))
    assert "2 x killed by SIGKILL  3.0-5.6 s" in text


def test_the_files_of_the_run_are_named():
    lines = printed(run())
    for name in ("Files in outputs/demo", "config.toml", "events.jsonl", "replica_<i>/rank_<r>.log"):
        assert any(name in line for line in lines)


def test_a_long_cause_fits_80_columns():
    lines = printed(run(dataclasses.replace(FAILED, cause=LONG)))
    assert max(map(len, lines)) <= 80
    assert "191.98 GiB." in " ".join(lines)


def test_report_reads_the_folder_of_a_run(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(to_json(event) + "\n" for event in run(FAILED)))
    out = io.StringIO()
    assert report(tmp_path, Console(file=out, width=80)) == 0
    assert "succeeded after 93.5 s" in out.getvalue()
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("content", [None, ""], ids=["no file", "empty file"])
def test_report_without_a_run_is_one_clear_line(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "events.jsonl").write_text(content)
    assert report(tmp_path, Console(file=io.StringIO(), width=80)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(tmp_path / "events.jsonl") in error

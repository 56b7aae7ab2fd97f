"""What a user reads while a run goes on: plain lines in a log, a live table on a terminal."""

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator

import pytest
from rich.console import Console

from monarch_titan.control.events import (
    Event,
    FaultInjected,
    OuterStep,
    Quorum,
    ReplicaFailed,
    ReplicaFinished,
    ReplicaStarted,
    RunFinished,
    RunStarted,
    Step,
)
from monarch_titan.view.terminal import TerminalView, frame

START = 1000.0


def run_with_a_fault(replicas: int = 3, method: str = "diloco") -> Iterator[Event]:
    """40 steps at two a second; replica 1 is killed at step 30 and back with the outer step at 40."""
    yield RunStarted(
        time=START,
        dump_folder="outputs/demo",
        num_replicas=replicas,
        min_replicas=2,
        ranks_per_replica=2,
        steps=40,
        method=method,
        sync_steps=20,
        device="cpu",
        versions={},
    )
    for replica in range(replicas):
        yield ReplicaStarted(time=START + 1, replica=replica, attempt=0, pids={0: 41, 1: 42}, actor_pid=9)
    for step in range(1, 41):
        now = START + 2 + step / 2
        for replica in range(replicas):
            if replica != 1 or step <= 30:
                yield Step(time=now, replica=replica, step=step, loss=9 - step / 10, tokens=1000, seconds=0.5)
        if step == 30:
            yield FaultInjected(time=now, replica=1, rank=1, step=30, pid=42, signal="SIGKILL")
            yield ReplicaFailed(
                time=now + 0.3,
                replica=1,
                attempt=0,
                rank=1,
                step=30,
                cause="killed by SIGKILL",
                log="replica_1/rank_1.log",
                action="respawn",
            )
            yield ReplicaStarted(time=now + 2, replica=1, attempt=1, pids={0: 43, 1: 44}, actor_pid=9)
            yield Quorum(time=now + 4, replica=1, quorum_id=2, participants=3, healing=True, seconds=1.0)
        for replica in range(replicas if step % 20 == 0 and method != "none" else 0):
            yield OuterStep(
                time=now + 0.9,
                replica=replica,
                outer_step=step // 20,
                step=step,
                participants=replicas,
                committed=True,
                contributed=True,
                seconds=0.12,
                bytes=1 << 20,
            )
    for replica in range(replicas):
        yield ReplicaFinished(time=START + 23, replica=replica, step=40, outer_step=2)
    yield RunFinished(time=START + 24, status="succeeded", seconds=24.0)


def plain_lines(events: Iterator[Event]) -> list[str]:
    out = io.StringIO()
    with TerminalView(Console(file=out, width=80)) as view:
        for event in events:
            view(event)
    return out.getvalue().splitlines()


def live_lines(events: Iterable[Event], height: int = 24) -> list[str]:
    """The live view after these events on a terminal of 80 columns, as text."""
    view = TerminalView(Console(file=io.StringIO()))
    for event in events:
        view(event)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(frame(view.summary, now=event.time, height=height), end="")
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def until(stop: Callable[[Event], bool], events: Iterable[Event]) -> Iterator[Event]:
    """The events up to the first that ``stop`` is true of, that one included."""
    for event in events:
        yield event
        if stop(event):
            return


def test_plain_lines_tell_the_run():
    assert plain_lines(run_with_a_fault()) == [
        "[    0.0 s] 3 replicas x 2 ranks, diloco every 20 steps, cpu, 40 steps, files in outputs/demo",
        "[    1.0 s] replica 0 started",
        "[    1.0 s] replica 1 started",
        "[    1.0 s] replica 2 started",
        "[   12.9 s] replica 0 step 20/40, loss 7.0000, 2,000 tokens/s, outer step 1 with 3 replicas in 0.12 s",
        "[   12.9 s] replica 1 step 20/40, loss 7.0000, 2,000 tokens/s, outer step 1 with 3 replicas in 0.12 s",
        "[   12.9 s] replica 2 step 20/40, loss 7.0000, 2,000 tokens/s, outer step 1 with 3 replicas in 0.12 s",
        "[   17.0 s] fault injected: SIGKILL to replica 1 rank 1 (pid 42) at step 30",
        "[   17.3 s] replica 1 rank 1 failed at step 30: killed by SIGKILL; respawning, log: replica_1/rank_1.log",
        "[   19.0 s] replica 1 started again, attempt 2",
        "[   22.9 s] replica 0 step 40/40, loss 5.0000, 2,000 tokens/s, outer step 2 with 3 replicas in 0.12 s",
        "[   22.9 s] replica 1 healed from its peers at step 40, back 5.9 s after the fault",
        "[   22.9 s] replica 1 step 40/40, loss 6.0000, outer step 2 with 3 replicas in 0.12 s",
        "[   22.9 s] replica 2 step 40/40, loss 5.0000, 2,000 tokens/s, outer step 2 with 3 replicas in 0.12 s",
        "[   23.0 s] replica 0 finished at step 40, waiting for its peers",
        "[   23.0 s] replica 1 finished at step 40, waiting for its peers",
        "[   23.0 s] replica 2 finished at step 40, waiting for its peers",
        "[   24.0 s] run succeeded after 24.0 s",
    ]


def test_plain_mode_can_be_asked_for_on_a_terminal_and_writes_no_escape_codes():
    out = io.StringIO()
    with TerminalView(Console(file=out, force_terminal=True, width=80), plain=True) as view:
        for event in run_with_a_fault():
            view(event)
    assert "\x1b" not in out.getvalue()
    assert "run succeeded" in out.getvalue()


def test_plain_lines_are_flushed_at_once():
    class File(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    out = File()
    with TerminalView(Console(file=out)) as view:
        for event in run_with_a_fault():
            view(event)
            assert out.flushed == out.getvalue().count("\n")


def test_plain_mode_without_outer_steps_writes_a_line_every_sync_steps_steps():
    lines = [line for line in plain_lines(run_with_a_fault(method="none")) if "replica 2 step" in line]
    assert [re.search(r"step (\d+)/", line)[1] for line in lines] == ["1", "20", "40"]


def test_the_live_view_shows_what_trains_and_where_each_replica_stands():
    lines = live_lines(until(lambda event: isinstance(event, Step) and event.step == 31, run_with_a_fault()))
    assert lines[0] == "3 replicas x 2 ranks, diloco every 20 steps, cpu, outputs/demo"
    assert lines[1].split() == ["replica", "state", "step", "loss", "tokens/s", "outer", "steps", "attempts"]
    assert lines[2].split() == ["0", "training", "31", "5.9000", "2,000", "1", "1"]
    assert lines[3].split() == ["1", "healing", "30", "6.0000", "-", "1", "2"]
    assert lines[5].startswith("step 31/40 ")
    assert lines[5].endswith("0:00:17  0:00:04 left  quorum 3 of 3")


@pytest.mark.parametrize("replicas", [2, 40])
@pytest.mark.parametrize("kind", [RunStarted, ReplicaStarted, ReplicaFailed, RunFinished])
def test_the_live_view_fits_a_terminal_of_80_columns_and_24_lines(replicas, kind):
    lines = live_lines(until(lambda event: isinstance(event, kind), run_with_a_fault(replicas)))
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    assert lines[-2].startswith("step ")


def test_of_many_replicas_the_live_view_shows_those_in_trouble():
    events = until(lambda event: isinstance(event, ReplicaFailed), run_with_a_fault(replicas=40))
    lines = live_lines(events, height=12)
    assert lines[2].split()[:2] == ["1", "respawning"]
    assert "and 34 more training" in lines


def test_a_loss_that_is_no_number_is_shown():
    nan = Step(time=START + 30, replica=0, step=41, loss=math.nan, tokens=1, seconds=1)
    assert live_lines([*run_with_a_fault(), nan])[2].split()[3] == "nan"


def test_on_a_terminal_the_notes_stay_and_the_live_view_goes():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, color_system=None)
    with TerminalView(console, clock=lambda: START + 20) as view:
        for event in run_with_a_fault():
            view(event)
    text = re.sub(r"(\r|\x1b\[[0-9?;]*[A-Za-z])+", "\n", out.getvalue())
    assert text.count("killed by SIGKILL; respawning") == 1
    assert text.count("back 5.9 s after the") == 1
    assert max(map(len, text.splitlines())) <= 80
    # Hidden during the run, shown again after it; the last thing done is to clear the frame's lines.
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1
    assert out.getvalue().endswith("\x1b[1A\x1b[2K")


def test_the_terminal_is_given_back_when_the_run_raises():
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), TerminalView(Console(file=out, force_terminal=True)):
        raise KeyboardInterrupt
    assert "\x1b[?25h" in out.getvalue()


def test_what_else_the_process_prints_stays_out_of_the_live_view(capsys):
    out = io.StringIO()
    with TerminalView(Console(file=out, force_terminal=True)):
        print("chatter of a library")
    assert "chatter" not in out.getvalue()
    assert capsys.readouterr().out == "chatter of a library\n"

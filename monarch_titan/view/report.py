"""The report at the end of a run: a row a replica, what failed, how it ended and where its files are."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from monarch_titan.view.summary import Failure, ReplicaSummary, RunSummary, first_line, plural
from monarch_titan.view.terminal import STATE_STYLES, clock_text, headline, loss_text, note_line

FILES = {
    "config.toml": "the configuration it ran with",
    "events.jsonl": "everything above, one event a line",
    "replica_<i>/rank_<r>.log": "what rank r of replica i printed",
    "controller.log": "what the controller and the lighthouse printed",
}
CAUSE_WIDTH = 50
VERDICT_STYLES = {"succeeded": "bold green", "failed": "bold red"}


def report(run_dir: Path, console: Console) -> int:
    """Print the report of the last run in a dump folder. Returns the exit code: 2 when there is none, else 0."""
    path = run_dir / "events.jsonl"
    try:
        summary = RunSummary.read(path)
    except OSError as error:
        return _mistake(f"RUN_DIR must be the dump folder of a run: {path}: {error.strerror}.")
    if summary.started is None:
        return _mistake(f"{path} holds no run: it has no run_started event.")
    print_report(console, summary, run_dir)
    return 0


def _mistake(message: str) -> int:
    print(f"monarch-titan: error: {message}", file=sys.stderr)
    return 2


def print_report(console: Console, summary: RunSummary, dump_folder: Path | str) -> None:
    """Print what a run came to; fits the width of the console."""
    console.print()
    if summary.started is not None:
        console.print(Text(headline(summary.started), style="bold"))
        console.print()
    console.print(_replicas(summary))
    console.print()
    told = [note for note in summary.notes if note.kind != "info"]
    if summary.finished is not None:
        told.pop()  # its last note is the verdict, which has a line of its own
    if told:
        console.print(Text("What happened", style="bold"))
        for note in told:
            console.print(note_line(note))
        console.print()
    console.print(_verdict(summary))
    console.print()
    console.print(Text(f"Files in {dump_folder}", style="bold"), overflow="fold")
    console.print(_files())


def _replicas(summary: RunSummary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("replica", justify="right")
    table.add_column("state")
    for name in ("attempts", "steps", "outer\nsteps", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("failures", overflow="fold")
    table.add_column("recovery", justify="right", overflow="fold")
    for replica in sorted(summary.replicas.values(), key=lambda replica: replica.replica):
        causes: dict[str, list[Failure]] = {}
        for failure in replica.failures:
            causes.setdefault(failure.cause, []).append(failure)
        told = [(_times(len(same), cause), _recovery(same)) for cause, same in causes.items()] or [("-", "-")]
        for place, (cause, recovery) in enumerate(told):
            cells = [""] * 6 if place else _cells(replica)
            table.add_row(*cells, Text(cause), recovery)
    return table


def _cells(replica: ReplicaSummary) -> list[str | Text]:
    return [
        str(replica.replica),
        Text(replica.state.value, style=STATE_STYLES[replica.state]),
        str(replica.attempts),
        str(replica.step),
        str(replica.outer_steps),
        "-" if replica.loss is None else loss_text(replica.loss),
    ]


def _times(count: int, cause: str) -> str:
    """A cause short enough for a cell; the whole of it is in the notes."""
    return ("" if count == 1 else f"{count} x ") + textwrap.shorten(cause, CAUSE_WIDTH, placeholder=" ...")


def _recovery(failures: list[Failure]) -> str:
    """Seconds from fault to the next committed outer step, as a range for several failures of one cause."""
    seconds = [failure.recovery_seconds for failure in failures if failure.recovery_seconds is not None]
    if not seconds:
        return "never"
    low, high = f"{min(seconds):.1f}", f"{max(seconds):.1f}"
    return f"{high} s" if low == high else f"{low}-{high} s"


def _verdict(summary: RunSummary) -> Text:
    if summary.finished is None:
        status, reason = "no end recorded", "it still runs, or its controller was killed"
    else:
        status, reason = summary.finished.status, first_line(summary.finished.reason)
    seconds = f"{summary.elapsed:.1f} s" + (f" ({clock_text(summary.elapsed)})" if summary.elapsed >= 60 else "")
    uncommitted = max((replica.outer_failures for replica in summary.replicas.values()), default=0)
    figures = [
        f"step {summary.step} of {summary.steps}",
        plural(summary.outer_steps, "outer step") + (f" ({uncommitted} not committed)" if uncommitted else ""),
        plural(len(summary.failures), "failure"),
        f"{summary.tokens_per_second:,.0f} tokens/s overall",
    ]
    styled = (status, VERDICT_STYLES.get(status, "bold yellow"))
    return Text.assemble(styled, f" after {seconds}" + (f": {reason}" if reason else ""), "\n", ", ".join(figures))


def _files() -> Table:
    table = Table.grid(padding=(0, 2))
    for name, content in FILES.items():
        table.add_row(Text(f"  {name}"), content)
    return table

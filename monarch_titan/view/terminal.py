"""A run in the terminal while it goes on: live on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from monarch_titan.control import events
from monarch_titan.view.summary import Note, ReplicaSummary, RunSummary, State, plural

# Only the terminal's own named colours, so that every line is readable on light and on dark.
NOTE_STYLES = {"bad": "red", "warning": "yellow", "good": "green", "info": ""}
STATE_STYLES = {
    State.STARTING: "cyan",
    State.TRAINING: "green",
    State.HEALING: "yellow",
    State.WAITING: "cyan",
    State.FINISHED: "green",
    State.RESPAWNING: "red",
    State.REALLOCATING: "red",
    State.STOPPED: "yellow",
    State.LOST: "bold red",
}

REFRESHES_PER_SECOND = 4

FRAME_LINES = 6
"""Lines of the live view that are not a replica's."""


class TerminalView:
    """Shows each event it is called with; use as a context manager around the run.

    On a terminal, a table is redrawn in place and the sentences of :class:`Note` stay above it; elsewhere, or with
    ``plain=True``, every note and every outer step is one line without escape codes, flushed at once and never
    wrapped. ``summary`` holds the state of the run, for a report afterwards. Events may come from one thread only.

    What else the process prints is left alone and would tear the live view: send it to a file, and give the view a
    console on a copy of the terminal's descriptor, ``Console(file=open(os.dup(1), "w"))``.
    """

    def __init__(self, console: Console, *, plain: bool | None = None, clock: Callable[[], float] = time.time) -> None:
        self.summary = RunSummary()
        self._console = console
        self._plain = not console.is_terminal or console.is_dumb_terminal if plain is None else plain
        self._clock = clock
        self._lock = threading.Lock()
        self._noted = 0
        self._windows: dict[int, int] = {}
        self._live = Live(
            console=console,
            get_renderable=self._frame,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        if not self._plain:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: events.Event) -> None:
        """Show one event, with every note it gave rise to."""
        # The lock keeps the refresh thread from seeing half an event. It is not held while printing, because
        # printing waits for the refresh thread.
        with self._lock:
            self.summary(event)
            if isinstance(event, events.RunStarted):
                self._noted = 0
                self._windows.clear()
            notes = self.summary.notes[self._noted :]
            self._noted += len(notes)
        for note in notes:
            if self._plain:
                self._write(note.seconds, note.text)
            else:
                self._console.print(note_line(note))
        if self._plain and (line := self._progress(event)) is not None:
            self._write(self.summary.seconds_at(event.time), line)

    def _write(self, seconds: float, text: str) -> None:
        self._console.out(f"{stamp(seconds)} {text}", highlight=False)

    def _progress(self, event: events.Event) -> str | None:
        """The plain line of an event that is no note: at most one a replica and outer step."""
        match event:
            case events.RunStarted():
                return f"{headline(event)}, {event.steps} steps, files in {event.dump_folder}"
            case events.ReplicaStarted():
                again = f" again, attempt {event.attempt + 1}" if event.attempt else ""
                return f"replica {event.replica} started{again}"
            case events.OuterStep(committed=True) if self.summary.method != "none":
                peers = plural(event.participants, "replica")
                outer = f"outer step {event.outer_step} with {peers} in {event.seconds:.2f} s"
                return f"{self._position(event.replica)}, {outer}"
            case events.Step() if self.summary.method == "none":
                # Without outer steps, a line every sync_steps steps is as many.
                every = self.summary.started.sync_steps if self.summary.started else 1
                before, now = self._windows.get(event.replica), event.step // max(1, every)
                self._windows[event.replica] = now
                return self._position(event.replica) if now != before else None
        return None

    def _position(self, number: int) -> str:
        replica = self.summary.replicas[number]
        loss = "" if replica.loss is None else f", loss {loss_text(replica.loss)}"
        rate = "" if replica.tokens_per_second is None else f", {replica.tokens_per_second:,.0f} tokens/s"
        return f"replica {number} step {replica.step}/{self.summary.steps}{loss}{rate}"

    def _frame(self) -> RenderableType:
        with self._lock:
            return frame(self.summary, now=self._clock(), height=self._console.height)


def frame(summary: RunSummary, *, now: float, height: int) -> RenderableType:
    """The live view at one moment: what trains, a line a replica, the progress of the run.

    Takes at most ``height`` lines: of many replicas it shows those that are not simply training first.
    """
    if summary.started is None:
        return Text("starting ...\n")
    rows = max(1, height - FRAME_LINES)
    # Stable, so that replicas keep their order within both halves.
    replicas = sorted(summary.replicas.values(), key=lambda replica: replica.replica)
    if len(replicas) > rows:
        replicas.sort(key=lambda replica: replica.state is State.TRAINING)
    hidden = Counter(replica.state.value for replica in replicas[rows:])
    more = [Text("and " + ", ".join(f"{count} more {state}" for state, count in hidden.items()))] if hidden else []
    return Group(
        Text.assemble((headline(summary.started), "bold"), f", {summary.started.dump_folder}"),
        _table(replicas[:rows]),
        *more,
        _progress(summary, now),
        # Where the terminal echoes ^C: at the end of a full line it would wrap, and the frame leave a line behind.
        Text(),
    )


def _table(replicas: list[ReplicaSummary]) -> Table:
    # Fixed widths: columns that move with every number are hard to read.
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("replica", justify="right", no_wrap=True)
    table.add_column("state", min_width=len(State.WAITING.value), no_wrap=True)
    for name, width in {"step": 6, "loss": 8, "tokens/s": 9, "outer steps": 11, "attempts": 8}.items():
        table.add_column(name, justify="right", min_width=width, no_wrap=True)
    for replica in replicas:
        rate, loss = replica.tokens_per_second, replica.loss
        table.add_row(
            str(replica.replica),
            Text(replica.state.value, style=STATE_STYLES[replica.state]),
            str(replica.step),
            Text("-") if loss is None else Text(loss_text(loss), style="" if math.isfinite(loss) else "bold red"),
            "-" if rate is None else f"{rate:,.0f}",
            str(replica.outer_steps),
            str(replica.attempts),
        )
    return table


def _progress(summary: RunSummary, now: float) -> Table:
    remaining = summary.remaining_seconds(now)
    total = max(1, summary.steps)
    bar = ProgressBar(total, summary.step, style="dim", complete_style="cyan", finished_style="green")
    line = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for ratio in (None, 1, None, None, None):
        line.add_column(ratio=ratio, no_wrap=True)
    line.add_row(
        f"step {summary.step:{len(str(summary.steps))}}/{summary.steps}",
        bar,
        clock_text(summary.seconds_at(now)),
        "" if remaining is None else f"{clock_text(remaining)} left",
        "" if summary.participants is None else f"quorum {summary.participants} of {len(summary.replicas)}",
    )
    return line


def note_line(note: Note) -> Table:
    """A note with its time; what does not fit on the line continues below its own beginning."""
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_column(no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(Text(stamp(note.seconds)), Text(note.text, style=NOTE_STYLES[note.kind]))
    return line


def headline(started: events.RunStarted) -> str:
    """What trains, in a few words: ``3 replicas x 2 ranks, diloco every 20 steps, cpu``."""
    who = f"{plural(started.num_replicas, 'replica')} x {plural(started.ranks_per_replica, 'rank')}"
    if started.method != "none":
        who += f", {started.method} every {started.sync_steps} steps"
    elif started.num_replicas > 1:
        who += ", gradients joined every step"
    return f"{who}, {started.device}"


def stamp(seconds: float) -> str:
    """Seconds since the start of the run, as every line begins."""
    return f"[{seconds:7.1f} s]"


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds: ``0:01:12``."""
    return str(timedelta(seconds=int(seconds)))


def loss_text(loss: float) -> str:
    """Four decimals, or a power of ten for what would not fit the column."""
    return f"{loss:.4f}" if abs(loss) < 1000 or not math.isfinite(loss) else f"{loss:.2e}"

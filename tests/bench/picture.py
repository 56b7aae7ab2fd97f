"""The README's picture: ``python -m tests.bench.picture EVENTS OUT.svg`` replays a run as its terminal showed it.

Two moments: just after the healed replica's first outer step, and the end with its report.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from monarch_titan.control.events import OuterStep, RunStarted, from_json
from monarch_titan.view.report import print_report
from monarch_titan.view.summary import RunSummary
from monarch_titan.view.terminal import frame, note_line

FOLDER = "outputs/local"


def main(events: str, picture: str) -> int:
    console = Console(record=True, width=100, force_terminal=True, file=open(Path("/dev/null"), "w"))  # noqa: SIM115
    summary, shown, framed = RunSummary(), 0, False
    console.print("[bold]$ make demo[/]")
    for event in map(from_json, Path(events).read_text().splitlines()):
        summary(replace(event, dump_folder=FOLDER) if isinstance(event, RunStarted) else event)
        for note in summary.notes[shown:]:
            console.print(note_line(note))
        shown = len(summary.notes)
        if not framed and isinstance(event, OuterStep) and event.committed and not event.contributed:
            framed = True
            console.print(frame(summary, now=event.time, height=20))
    print_report(console, summary, FOLDER)
    console.save_svg(picture, title="monarch_titan")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

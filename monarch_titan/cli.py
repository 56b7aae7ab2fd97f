"""The command ``monarch-titan``: one function a verb.

Exit codes: 0 the run finished, 1 it failed, 2 what was asked for cannot be run, 128 and the signal's number when one
ended it (130 for Ctrl-C).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from monarch_titan.config.errors import ConfigError
from monarch_titan.control.controller import RunFailed

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer

PROGRAM = "monarch-titan"
OVERRIDES = "laid over the file: training.steps=100 compile.components=[model,loss] lr_scheduler.decay_ratio=null"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake and a failed run are one line on stderr."""
    options = _parser().parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # as python -m does: a user's own configuration functions are found
    # Until a run has its log files, its libraries' remarks have nowhere to go but the screen.
    logging.getLogger().addHandler(logging.NullHandler())
    return _guarded(options.verb, options)


def run_and_report(config: MonarchTrainer.Config) -> int:
    """Train with a view on the terminal, print what happened and return the exit code of ``monarch-titan train``."""
    return _guarded(_run_and_report, config)


# The verbs: the first line of each is its help ---------------------------------------------------------------------


def train(options: argparse.Namespace) -> int:
    """Train what a TOML file describes."""
    from monarch_titan.config.loader import load

    return _run_and_report(load(options.config, *options.overrides))


def demo(options: argparse.Namespace) -> int:
    """Train three small replicas on this machine's CPU, kill a process of one and watch it heal."""
    from monarch_titan.config.loader import load
    from monarch_titan.control.faults import Fault

    config = load(Path(__file__).with_name("configs") / "local.toml", *options.overrides)
    replica = min(1, config.monarch.num_replicas - 1)
    rank = min(1, config.monarch.ranks_per_replica - 1)
    return _run_and_report(config, faults=[Fault(replica=replica, rank=rank, step=config.training.steps // 2)])


def report(options: argparse.Namespace) -> int:
    """Show what happened in a run."""
    from rich.console import Console

    from monarch_titan.view.report import report

    return report(options.run_dir, Console())


# What they share ---------------------------------------------------------------------------------------------------


def _run_and_report(config: MonarchTrainer.Config, **injected: Any) -> int:
    from rich.console import Console

    from monarch_titan import run
    from monarch_titan.view.report import print_report
    from monarch_titan.view.terminal import TerminalView

    # The run sends this process's own output to a file; the view keeps a way to the terminal.
    with open(os.dup(1), "w") as terminal:
        console = Console(file=terminal)
        view = TerminalView(console)
        try:
            with view:
                run.train(config, observers=[view], **injected)
        finally:
            if view.summary.started is not None:
                print_report(console, view.summary, config.dump_folder)
    return 0


def _guarded(function: Callable[[Any], int], argument: Any) -> int:
    """The exit code of a function, with what it raises for the user told in one line."""
    try:
        return function(argument)
    except ConfigError as error:
        return _fail(error, 2)
    except RunFailed as failure:
        return _fail(failure, 1)
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", signal.SIGINT)
        return _fail(f"stopped by {number.name}", 128 + number)


def _fail(error: object, code: int) -> int:
    # TorchTitan's own messages may be several lines long.
    print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """argparse, with mistakes on one line."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: --") and "." in message:
            message += "; options are written without dashes, as training.steps=100"
        self.exit(_fail(f"{message} (see {self.prog} --help)", 2))


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"{PROGRAM} {importlib.metadata.version('monarch-titan')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Fault-tolerant training: TorchTitan replicas run by PyTorch Monarch.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = _add(verbs, train)
    verb.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, such as configs/local.toml")
    verb.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=OVERRIDES)
    verb = _add(verbs, demo)
    verb.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="as for train")
    verb = _add(verbs, report)
    verb.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the dump_folder of a run")
    return parser


def _add(verbs: Any, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    summary = (function.__doc__ or "").splitlines()[0]
    parser = verbs.add_parser(function.__name__, help=summary.rstrip("."), description=summary)
    parser.set_defaults(verb=function)
    return parser

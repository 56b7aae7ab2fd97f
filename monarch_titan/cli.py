"""The command ``monarch-titan``: one function a verb.

Exit codes: 0 the run finished, 1 it failed, 2 what was asked for cannot be run, 128 and the signal's number when one
ended it (130 for Ctrl-C).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from monarch_titan.config.errors import ConfigError
from monarch_titan.control.controller import RunFailed

if TYPE_CHECKING:
    from rich.console import Console

    from monarch_titan.control.events import Event
    from monarch_titan.training.trainer import MonarchTrainer
    from monarch_titan.view.summary import RunSummary

PROGRAM = "monarch-titan"
CONFIG = "a TOML file, such as configs/local.toml, or the name of a recipe"
OVERRIDES = (
    "laid over it: training.steps=100 compile.components=[model,loss] lr_scheduler.decay_ratio=null; "
    "for a recipe also group=option"
)

# A soak ends by its time: more steps than it will ever take.
CHAOS_STEPS = 10_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake and a failed run are one line on stderr."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        # argparse wants all of a verb's positional arguments in one place.
        if not hasattr(options, "overrides") or any(text.startswith("-") for text in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.overrides += rest
    sys.path.insert(0, os.getcwd())  # as python -m does: a user's own configuration functions are found
    # Until a run has its log files, its libraries' remarks have nowhere to go but the screen.
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao on torch 2.13 is warned about at import
    return _guarded(options.verb, options)


def run_and_report(config: MonarchTrainer.Config) -> int:
    """Train with a view on the terminal, print what happened and return the exit code of ``monarch-titan train``."""
    return _guarded(_run_and_report, config)


# The verbs: the first line of each is its help ---------------------------------------------------------------------


def train(options: argparse.Namespace) -> int:
    """Train what a TOML file or a recipe describes."""
    with _described(options) as config:
        return _run_and_report(config)


def validate(options: argparse.Namespace) -> int:
    """Check a TOML file or a recipe key by key and at full scale, without its hardware."""
    from rich.console import Console

    from monarch_titan.config.explain import examine, print_examination
    from monarch_titan.config.loader import find

    given = find(options.config, options.overrides)
    found = examine(given)
    print_examination(found, given.source, Console(highlight=False))
    for error in found.errors:
        _fail(error, 2)
    if found.lacks:
        print(f"It cannot be trained here: {found.lacks}")
    return 2 if found.errors else 0


def convert(options: argparse.Namespace) -> int:
    """Write a TOML file of TorchTitan 0.1 to 0.2 in TorchTitan 0.3's names."""
    from monarch_titan.config.convert import convert

    _write(options.output, convert(options.old))
    return 0


def recipes(options: argparse.Namespace) -> int:
    """List the published recipes and those on MONARCH_TITAN_RECIPES."""
    from monarch_titan.config.recipes import available

    found = available()
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        print(f"{recipe.name:<{width}}  {recipe.summary}")
    return 0


def recipes_show(options: argparse.Namespace) -> int:
    """Print a recipe as the TOML file that it is composed to."""
    print(_composed(options), end="")
    return 0


def recipes_copy(options: argparse.Namespace) -> int:
    """Write a recipe as a TOML file of your own."""
    _write(options.file, _composed(options))
    return 0


def demo(options: argparse.Namespace) -> int:
    """Train three small replicas on this machine's CPU, kill a process of one and watch it heal."""
    from monarch_titan.config.loader import load

    config = load(Path(__file__).with_name("configs") / "local.toml", *options.overrides)
    replica = min(1, config.monarch.num_replicas - 1)
    rank = min(1, config.monarch.ranks_per_replica - 1)
    step = config.training.steps // 2
    config.monarch.faults.schedule = [f"SIGKILL replica {replica} rank {rank} at step {step}"]
    return _run_and_report(config)


def chaos(options: argparse.Namespace) -> int:
    """Train with failures at random for some minutes, and judge what became of the training."""
    from monarch_titan.control.events import Step
    from monarch_titan.view.verdict import Soak, print_verdict

    soak, over = Soak(), threading.Event()

    def end() -> None:
        over.set()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(60 * options.minutes, end)

    def watch(event: Event) -> None:
        soak(event)
        if isinstance(event, Step) and timer.ident is None:
            timer.start()

    with _described(options) as config:
        config.training.steps = CHAOS_STEPS
        config.monarch.check_replicas = "outer_step"
        config.monarch.faults.mtbf_seconds = options.mtbf
        try:
            _run_in_view(config, lambda console, _: print_verdict(console, soak.verdict()), watch)
        except KeyboardInterrupt:
            if not over.is_set():
                raise
        finally:
            timer.cancel()
    return 0 if soak.verdict().sound else 1


def report(options: argparse.Namespace) -> int:
    """Show what happened in a run."""
    from rich.console import Console

    from monarch_titan.view.report import report

    return report(options.run_dir, Console())


def completion(options: argparse.Namespace) -> int:
    """Print what makes a shell complete this command, as in: eval "$(monarch-titan completion bash)"."""
    import argcomplete

    print(argcomplete.shellcode([PROGRAM], shell=options.shell))
    return 0


# What they share ---------------------------------------------------------------------------------------------------


def _composed(options: argparse.Namespace) -> str:
    from monarch_titan.config import recipes

    choices, rest = recipes.split(options.choices)
    if rest:
        raise ConfigError(f"{rest[0]!r} must be group=option; other options are for train and for the copied file.")
    return recipes.show(options.name, choices)


def _write(path: Path | None, text: str) -> None:
    """Write a new file, or to the terminal without one; a file that is there is somebody's."""
    if path is None:
        print(text, end="")
        return
    try:
        with open(path, "x") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} must be a new file that can be written: {error.strerror}.") from error


@contextlib.contextmanager
def _described(options: argparse.Namespace) -> Generator[MonarchTrainer.Config]:
    """The configuration of a file or a recipe. It says what is not applied, and where in it a later mistake is."""
    from monarch_titan.config.loader import find, load_given
    from monarch_titan.config.rows import ASKS_NOTHING, located

    given = find(options.config, options.overrides)
    loaded = load_given(given)
    for row in loaded.rows:
        if row.status == "not applied" and row.reason != ASKS_NOTHING:
            print(f"{PROGRAM}: {row.where}: {row.old} is not applied: {row.reason}", file=sys.stderr)
    for note in loaded.notes:
        print(f"{PROGRAM}: {note}", file=sys.stderr)
    with located(loaded.rows, given.source):
        yield loaded.config


def _run_and_report(config: MonarchTrainer.Config) -> int:
    from monarch_titan.view.report import print_report

    _run_in_view(config, lambda console, summary: print_report(console, summary, config.dump_folder))
    return 0


def _run_in_view(
    config: MonarchTrainer.Config,
    print_end: Callable[[Console, RunSummary], None],
    *observers: Callable[[Event], None],
) -> None:
    """Train with a view on the terminal; once that has begun, ``print_end`` follows however it ends."""
    from rich.console import Console

    from monarch_titan import run
    from monarch_titan.view.terminal import TerminalView

    # The run sends this process's own output to a file; the view keeps a way to the terminal.
    with open(os.dup(1), "w") as terminal:
        console = Console(file=terminal)
        view = TerminalView(console)
        try:
            with view:
                run.train(config, observers=[view, *observers])
        finally:
            if view.summary.started is not None:
                print_end(console, view.summary)


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
    parser = _Parser(
        prog=PROGRAM,
        description="Fault-tolerant training: TorchTitan replicas run by PyTorch Monarch.",
        epilog=f"{PROGRAM} VERB --help says more. Exit codes: 0 finished, 1 the run failed, 2 cannot be run as asked, "
        "128 + the signal's number when stopped.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for function in (train, validate):
        verb = _add(verbs, function)
        _completed(verb.add_argument("config", metavar="CONFIG", help=CONFIG), _configs)
        _overrides(verb, OVERRIDES)
    verb = _add(verbs, convert)
    verb.add_argument("old", type=Path, metavar="OLD.toml", help="a file with [model], [job] or other old sections")
    output = {"type": Path, "metavar": "NEW.toml", "help": "a file that does not exist yet; default: the terminal"}
    verb.add_argument("-o", "--output", **output)
    verb = _add(verbs, recipes)
    more = verb.add_subparsers(metavar="show | copy")
    for function, help_ in ((recipes_show, "to print"), (recipes_copy, "to start a file of your own from")):
        verb = _add(more, function, function.__name__.removeprefix("recipes_"))
        _completed(verb.add_argument("name", metavar="NAME", help=f"the recipe {help_}"), _recipes)
        if function is recipes_copy:
            verb.add_argument("file", type=Path, metavar="FILE", help="a TOML file that does not exist yet")
        choices = "which option of a group to take, as cluster=slurm"
        _completed(verb.add_argument("choices", nargs="*", default=[], metavar="GROUP=OPTION", help=choices), _choices)
    verb = _add(verbs, demo)
    _overrides(verb, "as for train")
    verb = _add(verbs, chaos)
    _completed(verb.add_argument("config", metavar="CONFIG", help=CONFIG), _configs)
    mtbf = "mean time between failures of the whole run, in seconds (default 60)"
    verb.add_argument("--mtbf", type=_positive, default=60.0, metavar="SECONDS", help=mtbf)
    minutes = "how long, from the first step on (default 30)"
    verb.add_argument("--minutes", type=_positive, default=30.0, metavar="MINUTES", help=minutes)
    _overrides(verb, OVERRIDES)
    verb = _add(verbs, report)
    verb.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the dump_folder of a run")
    verb = _add(verbs, completion)
    verb.add_argument("shell", choices=["bash", "zsh", "fish"], help="your shell")
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
    return number


def _add(verbs: Any, function: Callable[[argparse.Namespace], int], name: str = "") -> argparse.ArgumentParser:
    summary = (function.__doc__ or "").splitlines()[0]
    parser = verbs.add_parser(name or function.__name__, help=summary.rstrip("."), description=summary)
    parser.set_defaults(verb=function)
    return parser


def _overrides(verb: argparse.ArgumentParser, help_: str) -> None:
    argument = verb.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=help_)
    _completed(argument, lambda **asked: [*_choices(), *_own_options()])


# What a shell completes ----------------------------------------------------------------------------------------------


def _completed(argument: argparse.Action, completer: Callable[..., list[str]]) -> None:
    argument.completer = completer  # type: ignore[attr-defined]


def _configs(prefix: str = "", **_: Any) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return [*_recipes(), *FilesCompleter(["toml"])(prefix)]


def _recipes(**_: Any) -> list[str]:
    from monarch_titan.config.recipes import available

    return [recipe.name for recipe in available()]


def _choices(**_: Any) -> list[str]:
    from monarch_titan.config.recipes import options

    return [f"{group}={option}" for group, found in options().items() for option in found]


def _own_options(**_: Any) -> list[str]:
    """The options that are known without loading TorchTitan."""
    from monarch_titan.config.overlay import paths
    from monarch_titan.config.sections import FaultTolerance, Monarch

    sections = {"fault_tolerance": FaultTolerance(), "monarch": Monarch()}
    return [f"{name}.{path}=" for name, section in sections.items() for path in paths(section)]

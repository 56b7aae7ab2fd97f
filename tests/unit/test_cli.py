"""The command's exit codes, and what it prints."""

import os
import re
import signal
import subprocess
import sys

import pytest

from monarch_titan import run
from monarch_titan.cli import main, run_and_report
from monarch_titan.config.errors import ConfigError
from monarch_titan.control.events import RunFinished, RunStarted

STARTED = RunStarted(
    dump_folder="out",
    num_replicas=3,
    min_replicas=2,
    ranks_per_replica=2,
    steps=100,
    method="diloco",
    sync_steps=20,
    device="cpu",
    versions={},
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[torchtitan]\nmodule = "monarch_titan"\nconfig = "llama3_debug_diloco"\n')
    return str(path)


@pytest.fixture
def outcome(monkeypatch):
    """Replaces the run by one that starts and ends well or with an exception; returns what each run was given."""

    def outcome(error=None):
        runs = []

        def train(config, *, observers=(), faults=()):
            runs.append((config, faults))
            for observer in observers:
                observer(STARTED)
                observer(RunFinished(status="failed" if error else "succeeded", seconds=1.0, reason=str(error or "")))
            if error is not None:
                raise error

        monkeypatch.setattr(run, "train", train)
        return runs

    return outcome


def test_train_runs_the_file_with_its_overrides(outcome, file, capfd):
    runs = outcome()
    assert main(["train", file, "training.steps=40", "monarch.num_replicas=2"]) == 0
    assert [(config.training.steps, config.monarch.num_replicas) for config, _ in runs] == [(40, 2)]
    printed = capfd.readouterr()
    assert "succeeded after 1.0 s" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (run.RunFailed("replica 1 failed 16 times"), 1, "replica 1 failed 16 times"),
        (ConfigError("a must be b,\n  got c."), 2, "FILE: a must be b, got c."),
        (KeyboardInterrupt(), 130, "stopped by SIGINT"),
        (run.Interrupted(signal.SIGINT), 130, "stopped by SIGINT"),
        (run.Interrupted(signal.SIGTERM), 143, "stopped by SIGTERM"),
    ],
)
def test_ends_that_are_not_well_are_one_line(outcome, file, capfd, error, code, message):
    outcome(error)
    assert main(["train", file]) == code
    printed = capfd.readouterr()
    assert printed.err == f"monarch-titan: error: {message.replace('FILE', file)}\n"
    assert "Files in" in printed.out  # the report


def test_torchtitans_own_door_ends_with_the_same_codes(outcome, capfd):
    outcome(run.RunFailed("all lost"))
    assert run_and_report(run.MonarchTrainer.Config()) == 1
    assert capfd.readouterr().err == "monarch-titan: error: all lost\n"


def test_other_errors_are_bugs_and_keep_their_traceback(outcome, file):
    outcome(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["train", file])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: VERB (see monarch-titan --help)"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: CONFIG (see monarch-titan train --help)"),
        (["report"], "the following arguments are required: RUN_DIR"),
        (["train", "x.toml", "--training.steps", "4"], "options are written without dashes, as training.steps=100"),
        (["train", "x.toml", "--verbose"], "unrecognized arguments: --verbose (see"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr().err
    assert end.value.code == 2
    assert printed.startswith("monarch-titan: error: ")
    assert message in printed
    assert printed.count("\n") == 1


def test_mistake_in_the_configuration_is_one_line(file, capsys):
    assert main(["train", file, "training.step=4"]) == 2
    expected = "monarch-titan: error: command line: unknown option training.step; did you mean training.steps?\n"
    assert capsys.readouterr().err == expected


def test_demo_kills_a_rank_that_exists_before_the_last_outer_step(outcome):
    runs = outcome()
    assert main(["demo"]) == 0
    ((config, [fault]),) = runs
    assert fault.replica < config.monarch.num_replicas
    assert fault.rank < config.monarch.ranks_per_replica
    assert fault.step < config.training.steps - config.fault_tolerance.sync_steps


def test_demo_takes_overrides(outcome):
    runs = outcome()
    assert main(["demo", "training.steps=80"]) == 0
    assert [config.training.steps for config, _ in runs] == [80]


def test_train_injects_no_fault(outcome, file):
    runs = outcome()
    main(["train", file])
    assert [list(faults) for _, faults in runs] == [[]]


def test_report_of_a_folder_that_holds_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "RUN_DIR must be the dump folder of a run" in capsys.readouterr().err


def test_version(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.version", {"monarch-titan": "1.2.3"}.get)
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == "monarch-titan 1.2.3\n"


def test_help_names_all_verbs_and_loads_nothing_heavy():
    script = (
        "import sys\nfrom monarch_titan.cli import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    print(sorted({'torch', 'monarch', 'rich', 'hydra'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert re.findall(r"^    (\w+)(?= |$)", printed, re.M) == [
        "train",
        "validate",
        "convert",
        "recipes",
        "demo",
        "report",
        "completion",
    ]
    assert printed.endswith("[]\n")


def test_wrong_path_costs_no_import_of_torch():
    command = [sys.executable, "-X", "importtime", "-m", "monarch_titan", "train", "missing.toml"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    *imports, error = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert error == "monarch-titan: error: missing.toml: cannot read this file: No such file or directory."
    assert not {"torch", "monarch"} & {line.rpartition("|")[2].strip() for line in imports}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("monarch-titan va", ["validate"]),
        ("monarch-titan recipes co", ["copy"]),
        ("monarch-titan train llama3_deb", ["llama3_debug"]),
        ("monarch-titan train llama3_debug replicas=4x32", ["4x32x8"]),
        ("monarch-titan train llama3_debug monarch.num_rep", ["monarch.num_replicas="]),
        ("monarch-titan recipes show llama3_debug cluster=sl", ["slurm"]),
    ],
)
def test_the_shell_is_told_what_can_follow(tmp_path, line, expected):
    answer = tmp_path / "answer"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "_ARGCOMPLETE_SUPPRESS_SPACE": "0",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " =:",
    }
    command = [sys.executable, "-c", "from monarch_titan.cli import main; main([])"]
    subprocess.run(command, env=environment, cwd=tmp_path, timeout=60, check=False, capture_output=True)
    found = [word.strip() for word in re.split(r"[\v\013]", answer.read_text())]
    assert found == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_made_for_each_shell(capsys, shell):
    assert main(["completion", shell]) == 0
    assert "monarch-titan" in capsys.readouterr().out


def test_recipes_are_listed_shown_and_copied(tmp_path, capsys):
    assert main(["recipes"]) == 0
    assert re.search(r"^deepseek_v3_671b_float8 +DeepSeek-V3 671B in FP8", capsys.readouterr().out, re.M)
    assert main(["recipes", "show", "llama3_debug", "replicas=2x2"]) == 0
    shown = capsys.readouterr().out
    assert "num_replicas = 2" in shown
    file = tmp_path / "mine.toml"
    assert main(["recipes", "copy", "llama3_debug", str(file), "replicas=2x2"]) == 0
    assert file.read_text() == shown
    assert main(["validate", str(file)]) == 0
    assert main(["recipes", "copy", "llama3_debug", str(file)]) == 2
    assert "must be a new file that can be written: File exists." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "llama3_debg"], 'there is no recipe "llama3_debg"; did you mean llama3_debug'),
        (["train", "llama3_debug", "replicas=9"], "replicas must be one of "),
        (["train", "llama3_debug", "clustr=slurm"], 'command line: there is no group "clustr"; did you mean cluster?'),
        (["recipes", "show", "llama3_debug", "training.steps=1"], "'training.steps=1' must be group=option; other"),
        (["validate", "llama3_debug", "training.step=1"], "command line: unknown option training.step; did you mean"),
        (["validate", "no/such.toml"], "no/such.toml: cannot read this file: No such file or directory."),
    ],
)
def test_mistake_with_a_recipe_is_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"monarch-titan: error: {message}")

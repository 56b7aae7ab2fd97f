"""``validate`` says of every key what became of it, and goes on after the first mistake."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_titan.cli import main
from monarch_titan.config.base import native_paths
from monarch_titan.config.explain import examine
from monarch_titan.config.loader import find

NEW = '[torchtitan]\nmodule = "monarch_titan"\nconfig = "llama3_debug_diloco"\n'
OLD = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def statuses(found):
    return {row.old or row.new: row.status for row in found.rows}


def test_every_key_of_a_file_of_today(write):
    found = examine(find(write(NEW + "[training]\nsteps = 30\n"), ["monarch.num_replicas=2"]))
    assert found.config.training.steps == 30
    assert set(statuses(found)) == {"torchtitan.module", "torchtitan.config", "training.steps", "monarch.num_replicas"}
    assert set(statuses(found).values()) == {"applied"}
    assert found.errors == []


@pytest.mark.parametrize("base", [NEW, OLD])
def test_all_mistakes_are_found_at_once(write, base):
    text = '[training]\nsteps = "x"\nseq_len = 64\n[metrics]\nlogfreq = 1\n[monarch]\nnum_replicas = 1.5\n'
    found = examine(find(write(base + text)))
    assert found.config is None
    refused = {name for name, status in statuses(found).items() if status == "refused"}
    assert refused == {"training.steps", "metrics.logfreq", "monarch.num_replicas"}
    assert statuses(found)["training.seq_len"] == "applied"
    assert len(found.errors) == 3
    assert all(re.match(r".*run\.toml:\d+: ", error) for error in found.errors)


def test_mistake_of_two_keys_together_is_told_once(write):
    found = examine(find(write(NEW + "[compile]\nenable_async_tensor_parallel = true\n")))
    (error,) = found.errors
    assert "compile" in error


def test_base_that_is_wrong_is_told_once(write):
    found = examine(find(write(NEW.replace("diloco", "dilco") + '[training]\nsteps = "x"\n')))
    (error,) = found.errors
    assert "did you mean llama3_debug_diloco?" in error


@pytest.mark.parametrize(
    ("base", "text", "message"),
    [
        (NEW, "[training]\nsteps = 5\n", "run.toml:5: training.steps must be at least fault_tolerance.sync_steps (20)"),
        (OLD, "[training]\nlocal_batch_size = 0\n", "run.toml:5: training.local_batch_size must be at least 1, got 0."),
        (
            OLD,
            "[optimizer]\nlr = -1\n",
            "run.toml:5: optimizer.lr (optimizer.param_groups.0.optimizer_kwargs.lr now) must be what AdamW takes",
        ),
        (NEW, "[monarch]\nhosts_per_replica = 2\n", "run.toml:5: monarch.hosts_per_replica must be 1"),
    ],
)
def test_options_that_do_not_fit_are_placed_in_the_file(write, capsys, base, text, message):
    file = write(base + text)
    for verb in ("validate", "train"):
        assert main([verb, str(file)]) == 2
        assert f"{file.parent}/{message}" in capsys.readouterr().err


def test_the_file_is_named_where_the_option_is_not_in_it(write, capsys):
    file = write(NEW)
    assert (
        main(["validate", str(file), "training.steps=60", "fault_tolerance.sync_steps=7", "monarch.num_replicas=0"])
        == 2
    )
    assert "error: command line: monarch.num_replicas must be at least 1, got 0." in capsys.readouterr().err


def test_what_only_this_machine_lacks_is_no_error(write, capsys):
    file = write(NEW + '[monarch]\nscheduler = "slurm"\nhosts_per_replica = 2\n')
    assert main(["validate", str(file)]) == 0
    assert "It cannot be trained here: monarch.scheduler must be" in capsys.readouterr().out
    assert main(["train", str(file)]) == 2
    assert 'run.toml:5: monarch.scheduler must be "local" to train' in capsys.readouterr().err


def test_validate_writes_nothing(write, tmp_path, capsys):
    assert main(["validate", str(write(NEW)), f"dump_folder={tmp_path / 'out'}"]) == 0
    assert not (tmp_path / "out").exists()


def test_printed(write, capsys):
    main(["validate", str(write(OLD + "[training]\ndataset = 'c4'\n[validation]\nseq_len = 64\n"))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("run.toml: TOML era (TorchTitan 0.1 to 0.2), llama3 debugmodel")
    assert 'applied     training.dataset -> dataloader.dataset = "c4"' in lines
    assert "not applied validation.seq_len = 64   0.3.0 validates with training.seq_len" in lines
    assert "default     training.disable_cuda_graphs = true   default of the TOML era" in lines


# A wrong key, type or value anywhere ---------------------------------------------------------------------------------

KEYS = {  # an option of each type, by dialect, with a value that is of no type that it takes
    NEW: {
        "training.steps": "x",
        "training.dtype": "fp8",
        "metrics.enable_wandb": 3,
        "lr_scheduler.min_lr_factor": [1],
        "compile.components": "model",
        "dataloader.dataset": 5,
        "monarch.num_replicas": "x",
        "monarch.scheduler": "pbs",
        "monarch.recovery.respawns": 1.5,
        "fault_tolerance.sync_steps": True,
        "activation_checkpoint.debug": 3,
    },
    OLD: {
        "training.steps": "x",
        "training.dtype": "fp8",
        "metrics.enable_wandb": 3,
        "profiling.profile_freq": "x",
        "job.print_config": 3,
        "optimizer.lr": "x",
        "optimizer.implementation": "fastest",
        "lr_scheduler.lr_min": [1],
        "checkpoint.enable_checkpoint": "yes",
        "quantize.linear.float8.filter_fqns": "output",
        "fault_tolerance.sync_steps": True,
        "monarch.num_replicas": "x",
    },
}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_wrong_value_names_file_line_and_option(tmp_path_factory, data):
    base = data.draw(st.sampled_from([NEW, OLD]))
    key = data.draw(st.sampled_from(sorted(KEYS[base])))
    error = error_of(tmp_path_factory, base, key, KEYS[base][key])
    assert re.match(rf"{{file}}:5: (section )?{re.escape(key)}".replace("{file}", r".*any\.toml"), error), error
    assert "must be" in error


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_wrong_key_names_file_line_and_the_nearest_right_one(tmp_path_factory, data):
    base = data.draw(st.sampled_from([NEW, OLD]))
    key = data.draw(st.sampled_from(sorted(KEYS[base])))
    section, _, name = key.rpartition(".")
    place = data.draw(st.integers(1, len(name) - 1))
    slip = name[:place] + data.draw(st.sampled_from(["q", "zz"])) + name[place:]
    error = error_of(tmp_path_factory, base, f"{section}.{slip}", 1)
    assert re.match(rf".*any\.toml:5: unknown option {re.escape(section)}\.{slip}; did you mean ", error), error
    assert f"did you mean {key}" in error


def error_of(tmp_path_factory, base, key, value):
    """The one error of a file with one key."""
    file = tmp_path_factory.getbasetemp() / "any.toml"
    section, _, name = key.rpartition(".")
    file.write_text(f"{base}[{section}]\n{name} = {json.dumps(value)}\n")
    (error,) = examine(find(file)).errors
    return error


def test_keys_of_the_tests_are_options():
    assert set(KEYS[NEW]) - {key for key in KEYS[NEW] if key.startswith("activation")} <= native_paths()

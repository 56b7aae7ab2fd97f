"""A converted file says the same, keeps comments and order, and is never written over somebody's work."""

import json
import re
from pathlib import Path

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_titan.cli import main
from monarch_titan.config.convert import convert
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.loader import load

FILES = Path(__file__).parent / "toml_era"
MODEL = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'


def comparable(config):
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(config.to_dict(), sort_keys=True, default=repr))


@pytest.fixture
def write(tmp_path):
    def write(text, name="old.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", ["torchtitan_0_1", "torchtitan_0_2", "flux"])
def test_converted_file_gives_the_same_configuration(tmp_path, name):
    old, new = FILES / f"{name}.toml", tmp_path / "new.toml"
    new.write_text(convert(old))
    assert comparable(load(new)) == comparable(load(old))
    assert "torchtitan" in tomli.loads(new.read_text())


def test_comments_and_order_are_kept(write):
    old = write(
        "# for our cluster\n"
        "[training]\n"
        "steps = 1_000  # a day\n"
        "# more did not fit\n"
        "local_batch_size = 2\n\n"
        '[optimizer]\nlr = 3e-4 # tuned\n\n[model]\nname = "llama3"\nflavor = "8B"\n'
        "# the end\n"
    )
    lines = convert(old).splitlines()
    assert lines[0] == "# for our cluster"
    first = lines.index("[training]")
    assert lines[first : first + 4] == [
        "[training]",
        "steps = 1_000  # a day",
        "# more did not fit",
        "local_batch_size = 2",
    ]
    assert "lr = 3e-4  # tuned" in lines
    assert lines.index("[training]") < lines.index("[optimizer.param_groups.0.optimizer_kwargs]")
    assert "# the end" in lines


def test_what_is_left_out_stays_as_a_comment_with_its_reason(write):
    text = convert(write(f"{MODEL}[validation]\nseq_len = 64\n"))
    assert "# validation.seq_len = 64: 0.3.0 validates with training.seq_len" in text.splitlines()


def test_defaults_of_the_era_are_written_down(write):
    training = tomli.loads(convert(write(MODEL)))["training"]
    assert training == {"disable_cuda_graphs": True}


def test_list_whose_items_had_names_is_whole(write):
    text = convert(write(f"{MODEL}[optimizer]\nbeta2 = 0.99\n"))
    assert tomli.loads(text)["optimizer"]["param_groups"]["0"]["optimizer_kwargs"]["betas"] == [0.9, 0.99]


@pytest.mark.parametrize(
    "text",
    [
        "training.steps = 5\n" + MODEL,
        "training = {steps = 5, seq_len = 64}\n" + MODEL,
        "[training]\nsteps = 5\n" + MODEL + "[training.dataloader]\nnum_workers = 0\n",
        MODEL + "[[optimizer.param_groups]]\npattern = '.*'\noptimizer_name = 'Adam'\noptimizer_kwargs = {lr = 0.1}\n",
        MODEL + "[override]\nimports = [['a.b', {x = 1}]]\n",
        MODEL.replace("\n", "\r\n"),
        MODEL + '[job]\ndescription = """two\nlines # no comment"""\n',
    ],
)
def test_however_it_is_written(write, text):
    old = write(text)
    new = write(convert(old), "new.toml")
    assert comparable(load(new)) == comparable(load(old))


def test_bases_are_written_into_the_new_file(write):
    write("[training]\nsteps = 7\nseq_len = 64\n", "base.toml")
    text = convert(write(f'extends = "base.toml"\n{MODEL}[training]\nsteps = 8\n'))
    content = tomli.loads(text)
    assert "extends" not in content
    assert (content["training"]["steps"], content["training"]["seq_len"]) == (8, 64)


def test_variables_of_the_environment_stay_variables(write, monkeypatch):
    monkeypatch.setenv("MT_DATA", "/data")
    text = convert(write(MODEL + '[training]\ndataset_path = "${oc.env:MT_DATA}"\n'))
    assert 'dataset_path = "${oc.env:MT_DATA}"' in text


def test_todays_file_is_refused(write):
    with pytest.raises(ConfigError, match=r"old\.toml: this file is in TorchTitan 0\.3\.0's names already\."):
        convert(write('[torchtitan]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'))


def test_command(write, tmp_path, capsys):
    old, new = write(MODEL), tmp_path / "new.toml"
    assert main(["convert", str(old)]) == 0
    printed = capsys.readouterr().out
    assert main(["convert", str(old), "-o", str(new)]) == 0
    assert new.read_text() == printed
    assert main(["convert", str(old), "-o", str(old)]) == 2
    assert old.read_text() == MODEL
    assert f"{old} must be a new file that can be written: File exists." in capsys.readouterr().err


VALUES = {
    "job.description": st.text(st.characters(codec="ascii", exclude_characters="\\$"), max_size=10),
    "job.print_config": st.booleans(),
    "metrics.log_freq": st.integers(1, 50),
    "model.hf_assets_path": st.sampled_from(["a", "b/c"]),
    "model.tokenizer_path": st.sampled_from(["a/tokenizer.model", "b/c"]),
    "model.converters": st.lists(st.sampled_from(["float8", "quantize.grouped_mm.float8"]), max_size=2),
    "optimizer.lr": st.floats(1e-6, 1.0),
    "optimizer.beta1": st.floats(0.1, 0.9),
    "optimizer.beta2": st.floats(0.1, 0.99),
    "lr_scheduler.min_lr_factor": st.floats(0.0, 1.0),
    "training.dataset": st.sampled_from(["c4", "c4_test"]),
    "training.steps": st.integers(1, 10**6),
    "training.disable_cuda_graphs": st.booleans(),
    "parallelism.context_parallel_load_balancer": st.sampled_from(["headtail", "null"]),
    "parallelism.module_fqns_per_model_part": st.lists(st.lists(st.sampled_from(["layers.0", "output"])), max_size=2),
    "activation_checkpoint.mode": st.sampled_from(["selective", "full", "none"]),
    "activation_checkpoint.preserve_rng_state": st.booleans(),
    "quantize.linear.float8.filter_fqns": st.lists(st.sampled_from(["output", "wo"]), max_size=2),
    "fault_tolerance.sync_steps": st.integers(1, 100),
    "fault_tolerance.semi_sync_method": st.sampled_from(["diloco", "local_sgd"]),
    "monarch.num_replicas": st.integers(1, 8),
    "validation.dataset": st.sampled_from(["c4_validation", "c4_test"]),
    "debug.seed": st.integers(0, 10),
}


def as_toml(values):
    """Keys and values as a TOML file; JSON's values are TOML's."""
    tables = {"model": ['name = "llama3"', 'flavor = "debugmodel"']}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        tables.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    return "\n".join(line for section, lines in tables.items() for line in (f"[{section}]", *lines)) + "\n"


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_any_file_of_the_era_converts_to_the_same(tmp_path_factory, values):
    folder = tmp_path_factory.getbasetemp()
    old, new = folder / "any_old.toml", folder / "any_new.toml"
    old.write_text(as_toml(values))
    new.write_text(convert(old))
    assert comparable(load(new)) == comparable(load(old))

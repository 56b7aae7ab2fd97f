"""Files on top of files, and values from the environment."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_titan.config.errors import ConfigError
from monarch_titan.config.sources import gather


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_base_then_file_then_command_line(write):
    write("base.toml", "a = 1\nb = 1\nc = 1\n[t]\nx = 1\ny = 1\n")
    file = write("run.toml", 'extends = "base.toml"\nb = 2\nc = 2\n[t]\ny = 2\n')
    assert gather(file, ["c=3"]).plain() == {"a": 1, "b": 2, "c": 3, "t": {"x": 1, "y": 2}}


def test_later_bases_win_and_bases_have_bases(write):
    write("deep/ground.toml", "a = 0\nb = 0\nc = 0\n")
    write("deep/first.toml", 'extends = "ground.toml"\nb = 1\nc = 1\n')  # from its own folder
    write("second.toml", "c = 2\n")
    file = write("run.toml", 'extends = ["deep/first.toml", "second.toml"]\n')
    assert gather(file).plain() == {"a": 0, "b": 1, "c": 2}


def test_a_base_may_come_in_two_ways(write):
    write("ground.toml", "a = 0\n")
    write("first.toml", 'extends = "ground.toml"\n')
    write("second.toml", 'extends = "ground.toml"\n')
    assert gather(write("run.toml", 'extends = ["first.toml", "second.toml"]\n')).plain() == {"a": 0}


def test_a_value_is_placed_where_it_was_written(write):
    base = write("base.toml", "[t]\n\nx = 1\n")
    given = gather(write("run.toml", 'extends = "base.toml"\n[t]\ny = 1\n'))
    assert given.value["t"].value["x"].where == f"{base}:3"
    assert given.source.endswith("run.toml")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"run.toml": 'extends = "run.toml"\n'},
            "run.toml:1: extends must not lead back to a file that it came from, got run.toml -> run.toml.",
        ),
        (
            {
                "run.toml": 'extends = "a.toml"\n',
                "a.toml": 'x = 1\nextends = ["b.toml"]\n',
                "b.toml": 'extends = "../{here}/a.toml"\n',
            },
            "b.toml:1: extends must not lead back",
        ),
        (
            {"run.toml": 'x = 1\nextends = "no.toml"\n'},
            "run.toml:2: extends must name a file next to this one, got 'no.toml'",
        ),
        ({"run.toml": "extends = 5\n"}, "run.toml:1: extends must be a file or a list of files, got 5."),
        ({"run.toml": 'extends = ["a.toml", 5]\n', "a.toml": ""}, "extends must be a file or a list of files"),
        ({"run.toml": 'extends = "a.toml"\n', "a.toml": "x =\n"}, "a.toml:1:4: not TOML"),
    ],
)
def test_refused(write, tmp_path, files, message):
    for name, text in files.items():
        write(name, text.replace("{here}", tmp_path.name))
    with pytest.raises(ConfigError) as error:
        gather(tmp_path / "run.toml")
    assert message in str(error.value)


def test_environment_is_read_only_where_it_is_asked_for(write, monkeypatch):
    monkeypatch.setenv("MT_NUMBER", "4")
    monkeypatch.setenv("MT_TEXT", "a b")
    file = write("run.toml", 'n = "${oc.env:MT_NUMBER}"\nt = "x/${oc.env:MT_TEXT}/${oc.env:MT_NONE,y}"\np = "$HOME"\n')
    assert gather(file, ["q=${oc.env:MT_NUMBER}"]).plain() == {"n": 4, "t": "x/a b/y", "p": "$HOME", "q": 4}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${oc.env:MT_NONE}", "run.toml:1: ${oc.env:MT_NONE}: this environment variable is not set."),
        ("${other.key}", "run.toml:1: the one reference is ${oc.env:NAME}, an environment variable; got ${other.key}."),
        ("${oc.env:}", "run.toml:1: the one reference is"),
    ],
)
def test_other_references_are_refused(write, value, message):
    with pytest.raises(ConfigError) as error:
        gather(write("run.toml", f'x = "{value}"\n'))
    assert message in str(error.value)


# Any layers ----------------------------------------------------------------------------------------------------------

KEYS = ["steps", "training.seq_len", "training.steps", "monarch.recovery.respawns", "monarch.num_replicas"]
LAYER = st.dictionaries(st.sampled_from(KEYS), st.integers(0, 99), max_size=5)


@settings(max_examples=200, deadline=None)
@given(
    bases=st.lists(LAYER, max_size=3), file=LAYER, overrides=st.lists(st.tuples(st.sampled_from(KEYS), st.integers()))
)
def test_the_last_layer_that_says_something_counts(tmp_path_factory, bases, file, overrides):
    folder = tmp_path_factory.getbasetemp()
    for index, base in enumerate(bases):
        (folder / f"base_{index}.toml").write_text(as_toml(base))
    extends = f"extends = {json.dumps([f'base_{index}.toml' for index in range(len(bases))])}\n"
    (folder / "top.toml").write_text(extends + as_toml(file))
    expected = {}
    for layer in [*bases, file, *({key: value} for key, value in overrides)]:
        expected |= layer
    given_ = gather(folder / "top.toml", [f"{key}={value}" for key, value in overrides])
    assert dict(leaves_of(given_.plain())) == expected


def as_toml(layer):
    """A layer with dotted keys, which TOML takes as they are."""
    return "".join(f"{key} = {value}\n" for key, value in layer.items())


def leaves_of(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

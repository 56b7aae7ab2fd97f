"""Recipes compose to the tree of a TOML file, from the folders of users and of the package, or to one line of error."""

import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomlkit

from monarch_titan.config import recipes
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.recipes import available, compose, groups, is_recipe, search_path, show, split

ROOT = Path(__file__).parents[2]
PUBLISHED = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
PAGES = sorted((ROOT / "recipes").glob("*.md"))
GLOBAL = "# @package _global_\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without recipes to be in, and no others given."""
    monkeypatch.delenv(recipes.VARIABLE, raising=False)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file of a user's folder, which is on the search path."""
    folder = tmp_path / "it's mine, too"
    folder.mkdir()
    monkeypatch.setenv(recipes.VARIABLE, str(folder))

    def write(name, text):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def error(call, *arguments):
    with pytest.raises(ConfigError) as raised:
        call(*arguments)
    return str(raised.value)


# What is published ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipe_composes(name):
    tree = compose(name)
    monarch, steps = tree["monarch"], tree["fault_tolerance"]["sync_steps"]
    assert {"module", "config"} <= tree["torchtitan"].keys()
    assert tree["dump_folder"] == f"outputs/{name}"
    assert steps == 20
    assert tree.get("training", {}).get("steps", steps) >= steps
    assert monarch["hosts_per_replica"] == 1 or monarch["scheduler"] != "local"
    assert ("gpu" in monarch) == (tree.get("hf_assets_path") != "byte_tokenizer")


@pytest.mark.parametrize("group", ["cluster", "data", "float8", "replicas"])
def test_every_option_composes_and_says_something_of_its_own(group):
    options = groups("llama3_8b_diloco")[group]
    trees = [compose("llama3_8b_diloco", {group: option}) for option in options]
    assert all(trees.index(tree) == index for index, tree in enumerate(trees))


def test_every_model_is_used_by_a_recipe():
    texts = [(ROOT / "recipes" / f"{name}.yaml").read_text() for name in PUBLISHED]
    used = {re.search(r"^  - model: (\w+)$", text, re.M)[1] for text in texts}
    assert used == {path.stem for path in (ROOT / "recipes/model").glob("*.yaml")}


def test_large_layouts_have_the_size_they_are_named_for():
    for choices, ranks in (({}, 256), ({"replicas": "4x32x8"}, 1024)):
        monarch = compose("deepseek_v3_671b_float8", choices)["monarch"]
        assert monarch["num_replicas"] * monarch["hosts_per_replica"] * monarch["procs_per_host"] == ranks


@pytest.mark.parametrize("option", sorted(path.stem for path in (ROOT / "recipes/replicas").glob("*.yaml")))
def test_replicas_are_what_the_option_says(option):
    monarch = compose("llama3_debug", {"replicas": option})["monarch"]
    replicas, *hosts, procs = map(int, option.split("x"))
    assert (monarch["num_replicas"], monarch["procs_per_host"]) == (replicas, procs)
    assert monarch["hosts_per_replica"] == (hosts or [1])[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_page_has_the_command(name):
    page = (ROOT / "recipes" / f"{name}.md").read_text()
    assert re.search(rf"^monarch-titan train {name}( |$)", page, re.M)
    assert "## Measured, and not" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_names_no_option_that_does_not_exist(page):
    known = {path.parent.name: set() for path in (ROOT / "recipes").glob("*/*.yaml")}
    for group, options in known.items():
        options.update(path.stem for path in (ROOT / "recipes" / group).glob("*.yaml"))
    named = re.findall(rf"(?<![\w.])({'|'.join(known)})=(\w+)", page.read_text())
    assert [(group, option) for group, option in named if option not in known[group] | {"ours"}] == []


def test_index_has_every_recipe():
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.md\)", (ROOT / "recipes/README.md").read_text(), re.M)
    assert sorted(rows) == PUBLISHED


def test_example_of_the_index_composes(write):
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "recipes/README.md").read_text(), re.S)
    write("mine.yaml", example)
    tree = compose("mine", {"cluster": "local"})
    assert (tree["torchtitan"]["config"], tree["dump_folder"]) == ("llama3_8b", "outputs/mine")
    assert tree["dataloader"] == {"dataset": "local_text", "dataset_path": "/data/texts"}
    assert next(recipe.summary for recipe in available() if recipe.name == "mine") == "Llama 3.1 8B on our texts."


def test_everything_comes_inside_the_wheel():
    package = ROOT / "monarch_titan"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {path for pattern in patterns["monarch_titan"] for path in package.glob(pattern)}
    files = {path for folder in ("configs", "recipes") for path in (package / folder).rglob("*") if path.is_file()}
    assert files == shipped
    assert (package / "recipes").resolve() == ROOT / "recipes"


def test_list_has_names_pages_and_summaries():
    found = available()
    assert [recipe.name for recipe in found] == PUBLISHED
    assert all(recipe.page == recipe.path.with_suffix(".md") and recipe.summary for recipe in found)
    assert not any(recipe.summary.startswith("#") for recipe in found)


# Composition ---------------------------------------------------------------------------------------------------------


def test_choice_takes_the_place_of_an_option():
    tree = compose("deepseek_v3_671b_float8", {"cluster": "kubernetes", "float8": "linear"})
    assert tree["monarch"]["scheduler"] == "kubernetes"
    assert tree["torchtitan"]["converters"] == {"float8_linear": {"filter_fqns": ["lm_head", "router.gate"]}}
    assert "converters" not in compose("deepseek_v3_671b_float8", {"float8": "off"})["torchtitan"]


def test_recipe_goes_over_its_groups_and_its_groups_over_earlier_ones(write):
    write("first/a.yaml", GLOBAL + "x: 1\ny: 1\nz: 1\n")
    write("second/b.yaml", GLOBAL + "y: 2\nz: 2\n")
    write("mine.yaml", "defaults:\n  - first: a\n  - second: b\n  - _self_\nz: 3\n")
    assert compose("mine") == {"x": 1, "y": 2, "z": 3}


def test_tree_is_plain(write):
    write("mine.yaml", "a: null\nb: 3e-4\nc: [1, {d: null}]\n0: {1: x}\ne: ${b}\nf: 'null'\ng: 2x16x8\n")
    expected = {"a": None, "b": 3e-4, "c": [1, {"d": None}], "0": {"1": "x"}, "e": 3e-4, "f": "null", "g": "2x16x8"}
    tree = compose("mine")
    assert tree == expected
    assert {type(value) for value in tree.values()} == {type(None), float, list, dict, str}


def test_split_knows_groups_by_their_name():
    given = ["cluster=slurm", "training.steps=4", "dump_folder=x", "replicas=2x2", "cluster=local", "junk", "model.x=1"]
    choices, rest = split(given)
    assert choices == {"cluster": "local", "replicas": "2x2"}
    assert rest == ["training.steps=4", "dump_folder=x", "junk", "model.x=1"]


def test_what_is_shown_is_the_same_in_toml(write):
    write("mine.yaml", "a: {b: {c: 1}, d: null}\ntorchtitan: {module: m}\ne: [1, [2]]\nf: 'quotes \" and é'\n")
    text = show("mine")
    assert tomllib.loads(text) == {
        "a": {"b": {"c": 1}, "d": "null"},
        "torchtitan": {"module": "m"},
        "e": [1, [2]],
        "f": 'quotes " and é',
    }
    assert text.index("[torchtitan]") < text.index("[a]")


def test_what_is_shown_names_the_command():
    text = show("llama3_debug", {"replicas": "2x2", "data": "c4"})
    assert text.startswith(
        "# The recipe llama3_debug, composed.\n#\n#     monarch-titan train llama3_debug replicas=2x2 data=c4\n"
    )
    assert tomlkit.parse(text).unwrap() == compose("llama3_debug", {"replicas": "2x2", "data": "c4"})


# Where it is looked for ----------------------------------------------------------------------------------------------


def test_users_folders_come_first(tmp_path, elsewhere, monkeypatch):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b, elsewhere / "recipes"):
        folder.mkdir()
        for name in {a: "one", b: "one two", elsewhere / "recipes": "one two three llama3_debug"}[folder].split():
            (folder / f"{name}.yaml").write_text(f"here: {folder.name}\n")
    monkeypatch.setenv(recipes.VARIABLE, f"{a}:{b}:")
    assert search_path() == [a, b, elsewhere / "recipes", ROOT / "recipes"]
    names = ("one", "two", "three", "llama3_debug")
    assert [compose(name)["here"] for name in names] == ["a", "b", "recipes", "recipes"]
    assert "torchtitan" in compose("qwen3_debug")


def test_folder_counts_only_if_it_holds_recipes_or_options(elsewhere):
    (elsewhere / "recipes").mkdir()
    (elsewhere / "recipes/cake.txt").touch()
    assert search_path() == [ROOT / "recipes"]
    (elsewhere / "recipes/cluster").mkdir()
    (elsewhere / "recipes/cluster/ours.yaml").touch()
    assert search_path() == [elsewhere / "recipes", ROOT / "recipes"]


def test_folder_is_on_the_path_once(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert search_path() == [ROOT / "recipes"]


def test_own_option_for_a_published_recipe_and_published_options_for_an_own_one(write):
    write("cluster/ours.yaml", GLOBAL + "monarch: {scheduler: slurm, min_replicas: 3}\n")
    write("cluster/slurm.yaml", GLOBAL + "monarch: {scheduler: slurm, min_replicas: 4}\n")
    write("site/here.yaml", GLOBAL + "dump_folder: /scratch\n")
    write("mine.yaml", "defaults:\n  - model: llama3_8b\n  - replicas: 4x8\n  - site: here\n  - _self_\n")
    assert "ours" in groups("llama3_debug")["cluster"]
    assert compose("llama3_debug", {"cluster": "ours"})["monarch"]["min_replicas"] == 3
    assert compose("llama3_8b_diloco")["monarch"]["min_replicas"] == 4
    assert split(["site=here"]) == ({"site": "here"}, [])
    assert list(groups("mine")) == ["model", "replicas", "site"]
    assert compose("mine", {"model": "qwen3_debug"}) == {
        "torchtitan": {"module": "qwen3", "config": "qwen3_debugmodel"},
        "monarch": {"num_replicas": 4, "hosts_per_replica": 1, "procs_per_host": 8},
        "dump_folder": "/scratch",
    }


def test_own_recipe_without_a_page(write):
    path = write("mine.yaml", GLOBAL + "# What it trains.\nx: 1  # y\n")
    write("bare.yaml", "x: 1\n")
    found = {recipe.name: recipe for recipe in available()}
    assert (found["mine"].path, found["mine"].page, found["mine"].summary) == (path, None, "What it trains.")
    assert found["bare"].summary == ""


@pytest.mark.parametrize("name", ["README", "llama3_debug.yaml", "model/llama3_8b", "../recipes/llama3_debug", "", "x"])
def test_not_a_recipe(name):
    assert not is_recipe(name)
    assert is_recipe("llama3_debug")


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("llama3_debgu", {}, 'there is no recipe "llama3_debgu"; did you mean llama3_debug or llama3_405b?'),
        ("qwen3_moe", {}, 'there is no recipe "qwen3_moe"; did you mean qwen3_moe_debug?'),
        ("zzz", {}, f'there is no recipe "zzz"; there are: {", ".join(PUBLISHED)}.'),
        ("llama3_debug", {"cluser": "slurm"}, 'the recipe llama3_debug has no group "cluser"; did you mean cluster?'),
        (
            "llama3_debug",
            {"float8": "on"},
            'the recipe llama3_debug has no group "float8"; it has: cluster, data, model, replicas.',
        ),
        (
            "llama3_debug",
            {"cluster": "slrum"},
            'cluster must be one of kubernetes, local, skypilot, slurm, got "slrum".',
        ),
        ("llama3_debug", {"data": "null"}, 'data must be one of c4, local_text, got "null".'),
    ],
)
def test_wrong_name_is_one_line(name, choices, message):
    assert error(compose, name, choices) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults:\n  - model: lama\n", "Could not find 'model/lama'"),
        ("a: ${b}\n", "Interpolation key 'b' not found"),
        ("a: ???\n", "Missing mandatory value: a"),
        ("a: [1\n", "mine.yaml"),
        ("- 1\n", "must be a DictConfig"),
        ("1: a\n'1': b\n", "mine must have each key once, got 1, '1'."),
    ],
)
def test_wrong_file_is_one_line(write, text, message):
    write("mine.yaml", text)
    found = error(compose, "mine")
    assert "mine" in found
    assert message in found
    assert "\n" not in found


def test_folder_that_does_not_exist(monkeypatch):
    monkeypatch.setenv(recipes.VARIABLE, "/no/such")
    assert error(search_path) == 'MONARCH_TITAN_RECIPES must name folders that exist, got "/no/such".'


# Good manners --------------------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(elsewhere):
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    handlers = list(logging.getLogger().handlers)
    error(compose, "llama3_debug", {"cluster": "x"})
    assert compose("llama3_debug") == compose("llama3_debug")
    assert not GlobalHydra.instance().is_initialized()
    assert not HydraConfig.initialized()
    assert logging.getLogger().handlers == handlers
    assert list(elsewhere.iterdir()) == []


def test_process_that_uses_hydra_itself(write):
    import hydra
    from hydra import version
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import JobRuntime

    folder = write("theirs.yaml", "x: 1\n").parent
    with hydra.initialize_config_dir(str(folder), job_name="theirs", version_base="1.2"):
        before = GlobalHydra.instance(), GlobalHydra.instance().hydra
        compose("llama3_debug")
        error(compose, "llama3_debug", {"cluster": "x"})
        assert (GlobalHydra.instance(), GlobalHydra.instance().hydra) == before
        assert (str(version.getbase()), JobRuntime().get("name")) == ("1.2", "theirs")
        assert hydra.compose("theirs") == {"x": 1}


def test_nothing_heavy_is_loaded():
    code = (
        "import sys\nfrom monarch_titan.config import recipes\nfirst = {'hydra', 'tomlkit'} & set(sys.modules)\n"
        "recipes.compose('llama3_debug')\nprint(first | {'torch', 'torchtitan', 'monarch'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("set()\n", "")

"""The house holds: imports point downward, rooms import only what they may, and private names stay in upstream.py."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "monarch_titan"

# From the roof down. control needs nothing from the others, so it lies below config, whose sections hold its policy.
LAYERS = [
    ["__init__"],
    ["__main__", "train", "config_registry"],
    ["cli"],
    ["run"],
    ["view"],
    ["launch"],
    ["actors"],
    ["training"],
    ["float8"],
    ["config"],
    ["control"],
    ["upstream"],
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}

# Module -> the room above it that it may import all the same, and why.
STEPS_UP = {
    ("config.base", "training"): "turns TorchTitan's configuration into a MonarchTrainer.Config",
    ("config.checks", "training"): "asks the data loader whether it can read dataset_path",
    ("actors.preload", "config_registry"): "lists what trainers import, the user's choice of configuration included",
    ("run", "cli"): "TorchTitan's own main ends in the same report and exit code as ours",
}

# Room -> the only packages and modules it may import besides the standard library.
CONFINED = {
    "control": ("monarch_titan.control",),
    "view": ("monarch_titan.view", "monarch_titan.control.events", "rich"),
}

# Packages that are not named after what they are installed as.
DISTRIBUTIONS = {"hydra": "hydra-core", "monarch": "torchmonarch", "yaml": "pyyaml"}

UPSTREAM = {"torch", "torchft", "torchtitan", "monarch"}


@dataclass(frozen=True)
class Module:
    name: str
    """Below monarch_titan: ``actors.trainer``."""
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.split(".")[0]

    def imports(self) -> Iterator[str]:
        """Dotted names of all that is imported when the code runs, inside functions too."""
        for node in walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: imports are absolute"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that are executed, so not those under ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from walk(node)


def modules() -> list[Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths]
    return [Module(name, ast.parse(path.read_text())) for name, path in zip(names, paths, strict=True)]


def room_of(imported: str) -> str | None:
    """The room an import reaches into; the package itself counts as its roof."""
    top, _, rest = imported.partition(".")
    if top != "monarch_titan":
        return None
    room = rest.split(".")[0]
    return room if room in RANK else "__init__"


def steps_up() -> set[tuple[str, str]]:
    """All pairs of a module and the room above it that it imports."""
    return {
        (module.name, room)
        for module in modules()
        for room in map(room_of, module.imports())
        if room is not None and RANK[room] < RANK[module.room]
    }


def test_every_module_belongs_to_a_layer():
    assert {module.room for module in modules()} <= RANK.keys()


def test_imports_point_downward():
    assert sorted(steps_up() - STEPS_UP.keys()) == []


def test_no_exception_is_stale():
    assert sorted(STEPS_UP.keys() - steps_up()) == []


@pytest.mark.parametrize("room", CONFINED)
def test_room_imports_only_what_it_may(room):
    imports = {(module.name, name) for module in modules() if module.room == room for name in module.imports()}
    allowed = (*CONFINED[room], *sys.stdlib_module_names)
    assert sorted((who, what) for who, what in imports if not any(is_in(what, package) for package in allowed)) == []


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_imports(module: Module) -> Iterator[str]:
    for imported in module.imports():
        top, *parts = imported.split(".")
        if top in UPSTREAM and any(map(private, parts)):
            yield imported


def foreign_attributes(module: Module) -> Iterator[str]:
    """Private attributes that are neither made in this file nor the standard library's."""
    own = {name for node in ast.walk(module.tree) for name in made_by(node)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
            of = ast.unparse(node.value)
            if of.split(".")[0] not in sys.stdlib_module_names:
                yield f"{of}.{node.attr}"


def made_by(node: ast.AST) -> Iterator[str]:
    """The names a node gives to something of this file: definitions, and attributes of ``self``."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr


def test_only_upstream_touches_private_names():
    for module in modules():
        if module.room != "upstream":
            assert sorted({*private_imports(module), *foreign_attributes(module)}) == [], module.name


def test_private_names_are_seen():
    code = "import torch.distributed as dist\ndist._some(torch._C)\nfrom torchft._x import y\nself._own = os._exit"
    module = Module("training.example", ast.parse(code))
    assert sorted(foreign_attributes(module)) == ["dist._some", "torch._C"]
    assert list(private_imports(module)) == ["torchft._x.y"]


def test_what_is_imported_is_declared():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}
    imported = {name.split(".")[0] for module in modules() for name in module.imports()}
    foreign = imported - sys.stdlib_module_names - {"monarch_titan"}
    assert {DISTRIBUTIONS.get(name, name) for name in foreign} <= declared


def test_importing_the_package_loads_neither_torch_nor_monarch():
    code = "import sys, monarch_titan; print(*sorted({'torch', 'monarch', 'torchtitan', 'torchft'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.split() == []

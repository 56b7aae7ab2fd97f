"""Which checkpoint a run goes on from: never one that is not whole, and the same for all replicas."""

from __future__ import annotations

import inspect
import random

import numpy
import pytest
import torch
from torchtitan.components.checkpointer import CheckpointManager

from monarch_titan.control.checkpoints import Found, Seal, newest, seal_path
from monarch_titan.training.checkpoints import random_state, set_random_state


@pytest.fixture
def folders(tmp_path):
    return [tmp_path / f"replica_{replica}" / "checkpoint" for replica in range(2)]


def save(folder, step, *, state="a", ranks=2, replicas=2):
    """A replica's whole checkpoint."""
    part = folder / f"step-{step}"
    part.mkdir(parents=True)
    (part / ".metadata").write_bytes(b"metadata")
    for rank in range(ranks):
        (part / f"__{rank}_0.distcp").write_bytes(bytes([step, rank]) * 100)
        names = [f"__{rank}_0.distcp"] + [".metadata"] * (rank == 0)
        values = {"rank": rank, "ranks": ranks, "replicas": replicas, "outer_step": step // 5}
        Seal.of(part, names, state=f"{state}{rank}", **values).write(part)
    return part


def test_newest_step_of_all_replicas_is_chosen(folders):
    for folder in folders:
        for step in (10, 20, 100):
            save(folder, step)
    expected = Found(step=100, outer_step=20, replicas=[0, 1], saved_replicas=2, saved_ranks=2)
    assert newest(folders) == expected


def test_nothing_is_found_where_there_is_nothing(folders):
    assert newest(folders) == Found()
    save(folders[0], 10)
    assert newest(folders, step=20) == Found()


def test_step_that_was_asked_for_is_the_only_one_looked_at(folders):
    for folder in folders:
        save(folder, 10)
        save(folder, 20)
    assert newest(folders, step=10).step == 10


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoint_that_a_rank_was_writing_is_never_loaded(folders, rank):
    for folder in folders:
        save(folder, 10)
        save(folder, 20)
    part = folders[1] / "step-20"
    seal_path(part, rank).rename(seal_path(part, rank).with_suffix(".partial"))
    found = newest(folders)
    assert (found.step, found.replicas) == (10, [0, 1])
    assert found.ignored == [f"replica_1/checkpoint/step-20: rank {rank} had not finished writing a full state"]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damaged_file_makes_an_older_step_the_newest(folders, name, damage):
    for folder in folders:
        save(folder, 10)
        save(folder, 20)
    path = folders[0] / "step-20" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    match damage:
        case "flip":
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[:-1])
        case "lose":
            path.unlink()
    found = newest(folders)
    assert (found.step, found.replicas) == (10, [0, 1])
    why = "cannot be read (No such file or directory)" if damage == "lose" else "is not as it was written"
    assert found.ignored == [f"replica_0/checkpoint/step-20: {name} {why}"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"rank": 0}', "3"])
def test_damaged_seal_is_no_seal(folders, content):
    save(folders[0], 10)
    part = save(folders[0], 20)
    seal_path(part, 0).write_text(content)
    found = newest(folders[:1])
    assert (found.step, found.ignored) == (10, ["replica_0/checkpoint/step-20: seal-0.json cannot be read"])


def test_replica_that_has_no_part_of_any_step_is_left_to_heal(folders):
    save(folders[1], 10)
    save(folders[1], 20)
    found = newest(folders)
    assert (found.step, found.replicas, found.ignored) == (20, [1], [])


def test_older_step_of_all_goes_before_a_newer_one_of_some(folders):
    for folder in folders:
        save(folder, 10)
    save(folders[0], 20)
    assert newest(folders).step == 10


def test_parts_of_different_runs_are_not_taken_for_one(folders):
    three = [*folders, folders[0].parents[1] / "replica_2" / "checkpoint"]
    for folder, state in zip(three, ["old", "new", "new"], strict=True):
        save(folder, 20, state=state, replicas=3)
    found = newest(three)
    assert (found.step, found.replicas) == (20, [1, 2])
    assert found.ignored == ["replica_0/checkpoint/step-20: not of the same run as the others"]


def test_all_damaged_is_told_and_not_loaded(folders):
    part = save(folders[0], 10)
    (part / ".metadata").unlink()
    found = newest(folders)
    assert found.step == 0
    assert len(found.ignored) == 1


# What the checkpoints of a replica rely on in TorchTitan's


@pytest.mark.parametrize("hook", ["_save", "_load", "_should_save", "_find_load_step"])
def test_torchtitan_calls_the_hooks_that_are_overridden(hook):
    callers = [name for name, method in vars(CheckpointManager).items() if inspect.isfunction(method)]
    callers = [getattr(CheckpointManager, name) for name in ("save", "load", *callers) if name != hook]
    assert any(f"self.{hook}(" in inspect.getsource(caller) for caller in callers)


def test_torchtitan_puts_a_step_where_it_is_looked_for(tmp_path):
    assert "step-{step}" in inspect.getsource(CheckpointManager._create_checkpoint_id)


def test_random_numbers_go_on_where_they_were():
    def draw():
        return torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist()

    draw()
    saved = random_state()
    drawn = draw()
    set_random_state(saved)
    assert draw() == drawn

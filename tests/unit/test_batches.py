"""Batches and their counts: from any position that is known, and what everybody has drawn in one sum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_titan.training.batches import MARKS, Batches, SeenBatches
from tests.unit.numbers import Numbers


def draw(batches, count):
    return [next(batches) for _ in range(count)]


# Where a rank is


def test_batches_are_counted():
    batches = Batches(Numbers())
    assert draw(batches, 3) == [0, 1, 2]
    assert batches.drawn == 3


def test_a_replica_that_has_read_too_far_goes_back():
    batches = Batches(Numbers())
    draw(batches, 4)
    batches.mark()
    draw(batches, 3)
    batches.go_to(4)
    assert (batches.drawn, draw(batches, 2)) == (4, [4, 5])


def test_a_relaunched_replica_leaves_out_what_was_seen_after_its_last_known_position():
    loader = Numbers()
    batches = Batches(loader, marks={4: 4, 8: 8})
    batches.go_to(10)
    assert (batches.drawn, draw(batches, 2)) == (10, [10, 11])


def test_a_relaunched_replica_takes_an_earlier_position_where_the_newest_was_seen_by_nobody():
    batches = Batches(Numbers(), marks={4: 4, 8: 8})
    batches.go_to(4)
    assert draw(batches, 1) == [4]


def test_the_beginning_of_the_shard_is_always_a_position():
    batches = Batches(Numbers(), marks={8: 8})
    batches.go_to(2)
    assert draw(batches, 1) == [2]


def test_a_dataloader_that_resumed_is_counted_from_there():
    loader = Numbers()
    loader.load_state_dict(6)
    batches = Batches(loader, 6)
    draw(batches, 2)
    batches.go_to(6)
    assert draw(batches, 1) == [6]
    with pytest.raises(RuntimeError, match="no position in the data is known at or before batch 5"):
        batches.go_to(5)


def test_nothing_happens_where_we_already_are():
    batches = Batches(Numbers())
    draw(batches, 2)
    batches.through(lambda: pytest.fail("the iterator must not be made anew"))
    batches.go_to(2)
    assert draw(batches, 1) == [2]


def test_an_iterator_is_made_anew_after_a_jump():
    loader, made = Numbers(), []

    def make():
        made.append(loader.next)
        return iter(loader)

    batches = Batches(loader, marks={5: 5})
    batches.through(make)
    draw(batches, 2)
    batches.go_to(5)
    draw(batches, 1)
    assert made == [0, 5]


def test_memory_does_not_grow_with_the_run():
    batches = Batches(Numbers())
    for _ in range(50):
        draw(batches, 1)
        batches.mark()
    assert len(batches._marks) == MARKS


def test_the_end_of_the_data_is_the_end():
    batches = Batches(Numbers(end=2))
    draw(batches, 2)
    with pytest.raises(StopIteration):
        next(batches)


# What the global parameters have seen

COUNTS = st.integers(min_value=0, max_value=2**40)


@given(st.lists(COUNTS, min_size=1, max_size=8))
def test_counts_survive_a_float32_sum(drawn):
    seen = [SeenBatches(len(drawn), replica) for replica in range(len(drawn))]
    tails = [torch.zeros(each.size) for each in seen]
    for each, tail, count in zip(seen, tails, drawn, strict=True):
        each.write(tail, count)
    total = torch.stack(tails).sum(0)
    for each in seen:
        each.read(total)
        assert each.counts == drawn
    assert [each.own for each in seen] == drawn


def test_replica_that_is_not_in_the_quorum_keeps_its_count():
    seen = SeenBatches(3, 1)
    seen.load_state_dict({"counts": [7, 8, 9], "lineage": ""})
    tail = torch.zeros(seen.size)
    seen.write(tail, 10)
    seen.read(tail)
    assert seen.counts == [7, 10, 9]


def committed(*outer_steps: dict[int, int]) -> SeenBatches:
    """What a replica knows after outer steps of members with these counts."""
    seen = SeenBatches(3, 0)
    for members in outer_steps:
        tail = torch.zeros(seen.size)
        for replica, drawn in members.items():
            SeenBatches(3, replica).write(tail, drawn)
        seen.read(tail)
    return seen


def test_lineage_tells_states_apart_that_came_about_differently():
    first, all_, some = {0: 10, 1: 10, 2: 10}, {0: 20, 1: 20, 2: 20}, {0: 20, 1: 20}
    assert committed(first, all_).lineage == committed(first, all_).lineage
    lineages = [committed(*steps).lineage for steps in ([], [first], [first, all_], [first, some], [all_, first])]
    assert len(set(lineages)) == 5
    later = {0: 30, 1: 30, 2: 30}
    assert committed(first, all_, later).lineage != committed(first, some, later).lineage


def test_lineage_is_healed_with_the_state():
    seen = SeenBatches(3, 2)
    seen.load_state_dict(committed({0: 10, 1: 10}).state_dict())
    assert seen.lineage == committed({0: 10, 1: 10}).lineage

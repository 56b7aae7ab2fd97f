"""``events.jsonl``: one line an event, the same for years, read back as it was written."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest

from monarch_titan.control import events
from monarch_titan.control.events import Event, EventLog, ReplicaStarted, RunFinished, Step, from_json, to_json

# Other tools read these names: they may be added to, never changed.
NAMES = [
    "run_started",
    "lighthouse_started",
    "lighthouse_failed",
    "resumed",
    "replica_started",
    "step",
    "quorum",
    "outer_step",
    "replica_state",
    "replica_failed",
    "replica_lost",
    "replica_finished",
    "fault_injected",
    "run_finished",
]

SAMPLES: dict[str, Any] = {
    "int": 3,
    "float": 0.25,
    "bool": True,
    "str": "a \u00fcnicode\nline",
    "int | None": None,
    "str | None": "why",
    "list[int]": [0, 2],
    "list[str]": ["one", "two"],
    "dict[str, str]": {"torch": "2.13.0"},
    "dict[int, int]": {0: 100, 1: 101},
}


def sample(kind: type[Event]) -> Event:
    """An event with a value in every field."""
    return kind(**{field.name: SAMPLES[str(field.type)] for field in dataclasses.fields(kind)})


def step(**changes: Any) -> Step:
    return dataclasses.replace(Step(time=1.5, replica=0, step=7, loss=2.5, tokens=100, seconds=0.5), **changes)


def test_names_are_those_that_other_tools_know():
    assert list(Event.kinds) == NAMES


def test_name_is_the_class_in_snake_case():
    assert [kind.__name__ for kind in Event.kinds.values()] == [name.title().replace("_", "") for name in NAMES]


def test_no_event_class_is_left_out():
    defined = {value for value in vars(events).values() if isinstance(value, type) and issubclass(value, Event)}
    assert defined - {Event} == set(Event.kinds.values())


@pytest.mark.parametrize("name", NAMES)
def test_event_is_read_back_as_it_was_written(name):
    event = sample(Event.kinds[name])
    line = to_json(event)
    assert "\n" not in line
    assert from_json(line) == event


def test_time_and_name_come_first():
    assert to_json(step()).startswith('{"time": 1.5, "event": "step", "replica": 0, ')


def test_time_is_told_to_the_millisecond():
    assert json.loads(to_json(step(time=1.23456)))["time"] == 1.235


def test_event_knows_when_it_happened():
    before, event, after = (RunFinished(status="succeeded", seconds=1.0) for _ in range(3))
    assert before.time <= event.time <= after.time


def test_ranks_are_numbers_again():
    line = to_json(ReplicaStarted(replica=1, attempt=0, pids={0: 100, 1: 101}, actor_pid=99))
    assert json.loads(line)["pids"] == {"0": 100, "1": 101}
    assert from_json(line).pids == {0: 100, 1: 101}


def test_loss_that_is_no_number_is_read_back():
    assert math.isnan(from_json(to_json(step(loss=math.nan))).loss)


def test_unknown_event_is_an_error_that_names_it():
    message = re.escape("unknown event 'comet_seen'; this version knows run_started, ")
    with pytest.raises(ValueError, match=message):
        from_json('{"time": 1, "event": "comet_seen"}')


def test_field_of_a_newer_version_is_left_out():
    assert from_json(to_json(step()).replace("}", ', "moon": "full"}')) == step()


# The file ------------------------------------------------------------------------------------------------------------


def lines(path) -> list[Event]:
    return [from_json(line) for line in path.read_text().splitlines()]


def test_log_can_be_read_after_every_event(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(3):
        log(step(step=number))
        assert [event.step for event in lines(tmp_path / "events.jsonl")] == list(range(number + 1))
    log.close()


def test_log_of_an_earlier_run_is_kept(tmp_path):
    for number in range(2):
        log = EventLog(tmp_path / "events.jsonl")
        log(step(step=number))
        log.close()
    assert [event.step for event in lines(tmp_path / "events.jsonl")] == [0, 1]


def test_observers_see_each_event_in_order(tmp_path):
    seen = []
    log = EventLog(tmp_path / "events.jsonl", [lambda event: seen.append(("first", event.step))])
    log.observe(lambda event: seen.append(("second", event.step)))
    log(step(step=1))
    log(step(step=2))
    log.close()
    assert seen == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]


def test_observer_can_log_what_follows_from_an_event(tmp_path):
    seen = []
    log = EventLog(tmp_path / "events.jsonl", [seen.append])

    def react(event: Event) -> None:
        if isinstance(event, Step):
            log(RunFinished(time=2.0, status="failed", seconds=1.0))

    log.observe(react)
    log(step())
    log.close()
    assert [type(event) for event in seen] == [Step, RunFinished]
    assert lines(tmp_path / "events.jsonl") == seen


def test_loss_that_is_not_finite_is_null_in_the_file() -> None:
    line = to_json(Step(replica=0, step=1, loss=float("nan"), tokens=1, seconds=1.0))
    assert json.loads(line, parse_constant=lambda _: pytest.fail("not JSON"))["loss"] is None
    assert math.isnan(from_json(line).loss)

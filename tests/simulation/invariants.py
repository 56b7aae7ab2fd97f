"""What must hold of every run, whatever goes wrong in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from monarch_titan.control.events import (
    LighthouseFailed,
    LighthouseStarted,
    OuterStep,
    ReplicaFailed,
    ReplicaFinished,
    ReplicaLost,
    ReplicaStarted,
    ReplicaState,
    Step,
)
from monarch_titan.control.recovery import Action
from tests.simulation.cluster import Cluster, Logged, Story, play
from tests.simulation.replica import STOP, SimulatedReplica
from tests.simulation.schedule import LastWords, Schedule

END = 30.0
"""Virtual seconds within which a run that has failed has stopped everything: stopping takes parts of a second."""


def broken(schedule: Schedule) -> list[str]:
    """What a run on this schedule did that it must not do, in sentences; empty when all is well."""
    try:
        story = play(schedule)
    except AssertionError as error:
        return [f"assertion: {error}"]
    checks = (
        *(_nothing_left, _order, _failures, _relaunches, _giving_up, _end_in_time),
        *(_never_back, _no_divergence, _success),
    )
    found = [sentence for run in story.runs for sentence in run.complaints]
    found += [sentence for run in story.runs for check in checks for sentence in check(run)]
    return [*found, *_samples(story)]


def smallest(schedule: Schedule) -> Schedule:
    """What is left of a schedule that breaks something, once the faults are gone without which it still does."""
    for simpler in schedule.simpler():
        if broken(simpler):
            return smallest(simpler)
    return schedule


def told(seed: int, schedule: Schedule) -> str:
    """A failing schedule for a person to read: its seed, the faults that matter, and what they break."""
    least = smallest(schedule)
    return "\n".join([f"Schedule.draw({seed}) breaks with these faults:", str(least), *broken(least)])


def _nothing_left(cluster: Cluster) -> Iterator[str]:
    """Every replica and lighthouse that was started is stopped."""
    for replica in cluster.replicas:
        if not replica.stopped:
            yield f"replica {replica.launch.replica} attempt {replica.launch.attempt} is left running"
    for lighthouse in cluster.lighthouses:
        if not lighthouse.stopped:
            yield f"lighthouse {lighthouse.attempt} is left running"


def _order(cluster: Cluster) -> Iterator[str]:
    """A replica starts, then fails, then starts again; it finishes while it runs; nothing comes after its loss."""
    attempts = [0] * cluster.schedule.num_replicas
    started: set[tuple[int, int]] = set()
    lost: set[int] = set()
    lighthouses = 0
    late = cluster.schedule.last_words is LastWords.LATE
    for logged in cluster.log:
        if late and isinstance(logged.event, ReplicaStarted | Step | OuterStep | ReplicaState):
            continue  # the log has them in the order in which they came
        match event := logged.event:
            case ReplicaStarted():
                if event.attempt != attempts[event.replica]:
                    yield f"{event} during attempt {attempts[event.replica]}"
                started.add((event.replica, event.attempt))
            case ReplicaFailed():
                if event.attempt != attempts[event.replica]:
                    yield f"{event} during attempt {attempts[event.replica]}"
                attempts[event.replica] += 1
            case ReplicaFinished() if not late and (event.replica, attempts[event.replica]) not in started:
                yield f"{event} of a replica that does not run"
            case LighthouseStarted(attempt=attempt) if attempt != lighthouses:
                yield f"{event} after {lighthouses} failures"
            case LighthouseFailed():
                lighthouses += 1
        if getattr(event, "replica", None) in lost and not isinstance(event, ReplicaLost):
            yield f"{event} after its loss"
        if isinstance(event, ReplicaLost):
            lost.add(event.replica)


def _failures(cluster: Cluster) -> Iterator[str]:
    """Every attempt that ended by itself is one failure, and so is one that alone has an outer step; no other is."""
    told = {(e.replica, e.attempt) for e in _events(cluster, ReplicaFailed)}
    if len(told) != len(_events(cluster, ReplicaFailed)):
        yield "an attempt failed twice"
    died = {(r.launch.replica, r.launch.attempt) for r in cluster.replicas if r.cause}
    died |= {(launch.replica, launch.attempt) for launch in cluster.refused}
    condemned = {
        (event.replica, event.attempt)
        for event in _events(cluster, ReplicaFailed)
        if any(f"its state after outer step {step} is not" in event.cause for step in cluster.world.forks)
    }
    if told - died - condemned:
        yield f"failures of replicas that did not fail: {sorted(told - died - condemned)}"
    # Of a run that ends, the last deaths are nobody's business any more.
    if cluster.status == "succeeded" and (late := died - told - _newest(cluster)):
        yield f"failures not told: {sorted(late)}"


def _newest(cluster: Cluster) -> set[tuple[int, int]]:
    newest = {launch.replica: launch.attempt for _, launch in cluster.launches}
    return set(newest.items())


def _relaunches(cluster: Cluster) -> Iterator[str]:
    """After each failure comes the action of the policy for the failures in a row, after its wait and no later."""
    for replica in range(cluster.schedule.num_replicas):
        launches = [(at, launch) for at, launch in cluster.launches if launch.replica == replica]
        if launches and launches[0][1].action is not Action.START:
            yield f"replica {replica} began with {launches[0][1].action}"
        for at, failure, in_a_row in _failures_in_a_row(cluster, replica):
            following = [(then, launch) for then, launch in launches if launch.attempt == failure.attempt + 1]
            if failure.action == Action.GIVE_UP.value:
                if following:
                    yield f"replica {replica} relaunched after it was given up"
                continue
            if failure.action != _action(cluster.schedule, in_a_row).value:
                yield f"{failure} is followed by {failure.action} after {in_a_row} in a row"
            for then, launch in following:
                wait = 0.0 if in_a_row == 1 else min(60.0, cluster.schedule.backoff_seconds * 2 ** (in_a_row - 2))
                if not wait - 1e-6 <= then - at <= wait + STOP + 1e-6:
                    yield f"replica {replica} relaunched {then - at:.2f} s after {in_a_row} in a row, not {wait}"
                if launch.action.value != failure.action:
                    yield f"{failure.action} announced and {launch.action.value} done"


def _action(schedule: Schedule, in_a_row: int) -> Action:
    if in_a_row >= schedule.max_failures:
        return Action.GIVE_UP
    return Action.RESPAWN if in_a_row % schedule.respawns else Action.REALLOCATE


def _failures_in_a_row(cluster: Cluster, replica: int) -> Iterator[tuple[float, ReplicaFailed, int]]:
    in_a_row = 0
    for logged in cluster.log:
        match logged.event:
            case OuterStep(committed=True, contributed=True) as event if event.replica == replica:
                in_a_row = 0
            case ReplicaFailed() as event if event.replica == replica:
                in_a_row += 1
                yield logged.at, event, in_a_row


def _giving_up(cluster: Cluster) -> Iterator[str]:
    """A replica is lost after max_failures in a row or with the last state, and then only."""
    schedule = cluster.schedule
    lost = 0
    for replica in range(schedule.num_replicas):
        for _, failure, in_a_row in _failures_in_a_row(cluster, replica):
            if failure.action == Action.GIVE_UP.value:
                lost += 1
                holders = _at(cluster, failure).holders
                alone = schedule.num_replicas == 1 and schedule.checkpoint_every > 0
                if in_a_row < schedule.max_failures and (holders or alone):
                    yield f"replica {replica} given up after {in_a_row} failures while {holders} have a state"
    if lost != len(_events(cluster, ReplicaLost)):
        yield "replicas given up and replicas lost differ"
    left = schedule.num_replicas - lost
    if cluster.status == "succeeded" and left < schedule.min_replicas:
        yield f"the run succeeded with {left} of at least {schedule.min_replicas}"
    if cluster.status == "failed" and lost == 0:
        yield f"the run failed with all replicas left: {cluster.reason}"


def _at(cluster: Cluster, event: ReplicaFailed) -> Logged:
    return next(logged for logged in cluster.log if logged.event is event)


def _end_in_time(cluster: Cluster) -> Iterator[str]:
    """A run that has too few replicas left ends at once: the minimum lives as long as it goes on."""
    left = cluster.schedule.num_replicas
    for logged in cluster.log:
        left -= isinstance(logged.event, ReplicaLost)
        if left < cluster.schedule.min_replicas and not isinstance(logged.event, ReplicaFailed | ReplicaLost):
            since = next(e.at for e in reversed(cluster.log) if isinstance(e.event, ReplicaLost))
            if logged.at > since + END:
                yield f"{logged.event} {logged.at - since:.1f} s after too few replicas were left"


def _never_back(cluster: Cluster) -> Iterator[str]:
    """As long as a replica lives, it never goes back to an earlier outer step, nor to another state of the same one."""
    for replica in cluster.replicas:
        for before, after in itertools.pairwise(replica.states):
            if after.outer_step <= before.outer_step and after != before:
                yield f"replica {replica.launch.replica} goes from outer step {before.outer_step} to {after.outer_step}"


def _no_divergence(cluster: Cluster) -> Iterator[str]:
    """Replicas that live never hold two states of one outer step, and no run fails because they do."""
    for quorum in cluster.quorums.formed:
        if quorum.torn_apart:
            yield f"two states of outer step {quorum.newest}"
    if "differ" in cluster.reason:
        yield f"the run failed: {cluster.reason}"


def _success(cluster: Cluster) -> Iterator[str]:
    """Those that are left have trained all steps, and hold the same state of the same outer step."""
    if cluster.status != "succeeded":
        return
    finals = _finals(cluster)
    if len({replica.state for replica in finals}) != 1:
        yield f"they end with different states, after outer steps {[r.state and r.state.outer_step for r in finals]}"
    for replica in finals:
        if replica.windows_trained != cluster.schedule.outer_steps:
            yield f"replica {replica.launch.replica} ends after {replica.windows_trained} windows"


def _finals(cluster: Cluster) -> list[SimulatedReplica]:
    lost = {event.replica for event in _events(cluster, ReplicaLost)}
    newest = {replica.launch.replica: replica for replica in cluster.replicas}
    return [replica for number, replica in newest.items() if number not in lost]


def _samples(story: Story) -> Iterator[str]:
    """Every state has seen each shard from its beginning, no sample twice and none left out, and says how many."""
    for state in {state for run in story.runs for replica in run.replicas for state in replica.states}:
        for replica in range(story.world.schedule.num_replicas):
            position = 0
            for window in state.windows:
                if window.replica == replica:
                    if window.first != position:
                        what = "repeated" if window.first < position else "lost"
                        yield f"samples {what}: {window} after sample {position}"
                    position = window.end
            if state.seen(replica) != position:
                yield f"outer step {state.outer_step} counts {state.seen(replica)} of replica {replica}, not {position}"


def _events(cluster: Cluster, kind: type) -> list:
    return [logged.event for logged in cluster.log if isinstance(logged.event, kind)]

"""ReplicaManager: quorums that heal, wait, end or fail. TorchFT's part is played by a script."""

import inspect
from types import SimpleNamespace

import pytest
import torchft
from torchtitan.components.dataloader import DataloaderExhaustedError

from monarch_titan.config.sections import FaultTolerance, Monarch
from monarch_titan.control.events import Quorum, QuorumFormed, QuorumRequested
from monarch_titan.training import quorum
from monarch_titan.training.quorum import NEEDS_STATE, NeverCommits, PeersFinished, ReplicaManager
from monarch_titan.training.replica import ReplicaContext

TORCHFT_OPTIONS = inspect.signature(torchft.Manager.__init__).parameters


class Script:
    """What TorchFT answers: one entry a quorum, the last one again and again."""

    def __init__(self):
        self.quorums = ["nothing"]
        self.commits = [True]
        self.error = None
        self.participants = 2
        self.options = {}
        self.now = 0.0

    def next(self, entries):
        return entries.pop(0) if len(entries) > 1 else entries[0]


@pytest.fixture
def script(monkeypatch):
    """Take the network out of torchft.Manager and the waiting out of the clock."""
    script = Script()

    def init(self, **options):
        script.options = options
        self._client = SimpleNamespace(_quorum=None)
        self._load_state_dict_fns, self._user_state_dicts = {}, {}
        self._step = self._batches_committed = 0

    def start_quorum(self, allow_heal=True, shrink_only=False, timeout=None):
        script.now += 1.0
        answer = script.next(script.quorums)
        self.client.heal, self.client.quorum_id = answer != "nothing", self.client.quorum_id + 1
        if answer in ("heal", "heal from held"):
            # In TorchFT's order: its own state, then the registered functions as registered.
            self.load_state_dict({"step": 5, "batches_committed": 10})
            for load in self._load_state_dict_fns.values():
                load(answer == "heal from held")

    monkeypatch.setattr(torchft.Manager, "__init__", init)
    monkeypatch.setattr(torchft.Manager, "start_quorum", start_quorum)
    monkeypatch.setattr(torchft.Manager, "should_commit", lambda self, timeout=None: script.next(script.commits))
    monkeypatch.setattr(torchft.Manager, "errored", lambda self: script.error)
    monkeypatch.setattr(torchft.Manager, "num_participants", lambda self: script.participants)
    clock = SimpleNamespace(
        monotonic=lambda: script.now, sleep=lambda seconds: setattr(script, "now", script.now + seconds)
    )
    monkeypatch.setattr(quorum, "time", clock)
    return script


@pytest.fixture
def manager(script):
    """Make a ReplicaManager; what it reports is in ``manager.reports``."""

    def manager(attempt=0, rank=0, num_replicas=4, commit_retries=2, quorum_timeout_seconds=100):
        reports = []
        context = ReplicaContext(
            replica=1,
            attempt=attempt,
            rank=rank,
            lighthouse="http://lighthouse:1",
            lighthouse_attempt=0,
            hostname="host",
            report=reports.append,
        )
        monarch = Monarch(num_replicas=num_replicas, quorum_timeout_seconds=quorum_timeout_seconds)
        monarch.recovery.commit_retries = commit_retries
        made = ReplicaManager(FaultTolerance(process_group="gloo"), monarch, context)
        made.reports = reports
        return made

    return manager


def kinds(manager):
    return [type(report) for report in manager.reports]


# What TorchFT is told


def test_torchft_is_told_who_we_are_and_to_throw_no_window_away(manager, script):
    manager(num_replicas=4)
    assert script.options["replica_id"] == "attempt_0_replica_1"
    assert script.options["lighthouse_addr"] == "http://lighthouse:1"
    assert script.options["min_replica_size"] == 3  # the majority
    assert script.options["use_async_quorum"] is False
    assert script.options["init_sync"] is False


def test_torchft_knows_every_option_that_it_is_given(script, manager):
    manager()
    assert set(script.options) <= set(TORCHFT_OPTIONS)


# Healing


def test_a_first_attempt_takes_whatever_quorum_there_is(manager):
    first = manager(attempt=0)
    first.start_quorum()
    assert not first.needs_state and not first.healed
    assert first.current_step() == 0


def test_a_later_attempt_presents_itself_as_behind_everybody(manager):
    assert manager(attempt=1).current_step() == NEEDS_STATE < 0


def test_a_single_replica_has_nobody_to_heal_from(manager):
    alone = manager(attempt=1, num_replicas=1)
    alone.start_quorum()
    assert not alone.needs_state
    assert alone.current_step() == 0


def test_a_later_attempt_asks_until_it_is_healed(manager, script):
    script.quorums = ["nothing", "nothing", "heal", "nothing"]
    respawned = manager(attempt=1)
    respawned.start_quorum()
    assert respawned.healed and not respawned.needs_state
    assert respawned.client.quorum_id == 3
    assert respawned.current_step() == 5
    # From now on a quorum without healing is good enough.
    respawned.start_quorum()
    assert respawned.client.quorum_id == 4
    assert not respawned.healed


def test_a_later_attempt_gives_up_after_the_quorum_timeout(manager, script):
    respawned = manager(attempt=1, quorum_timeout_seconds=10)
    with pytest.raises(TimeoutError, match=r"monarch\.quorum_timeout_seconds \(10\)"):
        respawned.start_quorum()
    assert 10 < script.now < 13


def test_a_state_that_could_not_be_taken_fails_at_once(manager, script):
    script.quorums = ["failed"]
    script.error = SimpleNamespace(original_exception=ConnectionError("connection refused\n\nTraceback ..."))
    late = manager(attempt=0)
    with pytest.raises(RuntimeError, match=r"^could not take the state of a peer: connection refused$"):
        late.start_quorum()
    assert late.client.quorum_id == 1


def test_held_is_the_first_state_to_be_applied(manager):
    assert next(iter(manager()._load_state_dict_fns)) == "held"


def test_peers_that_had_trained_all_steps_end_the_training(manager, script):
    script.quorums = ["heal from held"]
    respawned = manager(attempt=1)
    with pytest.raises(PeersFinished) as raised:
        respawned.start_quorum()
    # TorchTitan's loop ends by this class without failing.
    assert isinstance(raised.value, DataloaderExhaustedError)
    assert respawned.healed and not respawned.needs_state


def test_a_peer_that_was_held_in_an_earlier_quorum_ends_nothing(manager, script):
    script.quorums = ["heal from held", "nothing", "heal"]
    respawned = manager(attempt=1)
    with pytest.raises(PeersFinished):
        respawned.start_quorum()
    respawned.start_quorum()
    respawned.start_quorum()
    assert respawned.healed


def test_peers_learn_whether_we_are_held(manager, script):
    replica = manager()
    save = replica._user_state_dicts["held"]
    assert save() is False
    replica.attend()
    assert save() is True


def test_attend_says_whether_it_was_we_who_healed(manager, script):
    script.quorums = ["nothing", "heal from held", "nothing"]
    held = manager()
    assert [held.attend() for _ in range(3)] == [False, True, False]


# Reports


def test_reports_of_a_quorum_in_order(manager):
    replica = manager(attempt=0)
    replica.start_quorum()
    assert kinds(replica) == [QuorumRequested, QuorumFormed, Quorum]
    requested, formed, event = replica.reports
    assert (requested.replica, requested.attempt, requested.rank) == (1, 0, 0)
    assert (formed.replica, formed.attempt, formed.rank) == (1, 0, 0)
    assert (event.replica, event.quorum_id, event.participants, event.healing) == (1, 1, 2, False)
    assert event.seconds == 1.0


def test_the_request_is_reported_before_it_is_made(manager, script):
    replica = manager()
    script.quorums = ["failed"]
    with pytest.raises(RuntimeError):
        replica.start_quorum()
    assert kinds(replica) == [QuorumRequested]


def test_every_try_to_heal_is_reported(manager, script):
    script.quorums = ["nothing", "heal"]
    respawned = manager(attempt=1)
    respawned.start_quorum()
    assert kinds(respawned) == [QuorumRequested, QuorumFormed, Quorum] * 2
    assert [report.healing for report in respawned.reports if isinstance(report, Quorum)] == [False, True]


def test_a_quorum_is_reported_with_whether_we_have_a_state_to_give(manager, script):
    def formed(replica):
        return [report.has_state for report in replica.reports if isinstance(report, QuorumFormed)]

    first = manager(attempt=0)
    first.start_quorum()
    assert formed(first) == [True]
    script.quorums = ["nothing", "heal"]
    respawned = manager(attempt=1)
    respawned.start_quorum()
    assert formed(respawned) == [False, True]


def test_only_rank_0_reports_the_event(manager):
    replica = manager(rank=1)
    replica.start_quorum()
    assert kinds(replica) == [QuorumRequested, QuorumFormed]


def test_held_replicas_ask_for_nothing(manager):
    held = manager()
    held.attend()
    assert kinds(held) == [Quorum]


# Commits


def test_gives_up_after_commit_retries_in_a_row_with_the_cause(manager, script):
    script.commits = [False]
    replica = manager(commit_retries=2)
    assert [replica.should_commit() for _ in range(2)] == [False, False]
    script.error = SimpleNamespace(original_exception=ConnectionError("connection reset by peer\nTraceback ..."))
    with pytest.raises(NeverCommits) as raised:
        replica.should_commit()
    assert str(raised.value) == (
        "3 outer steps in a row did not commit (monarch.recovery.commit_retries = 2); "
        "the last one: connection reset by peer"
    )


def test_a_commit_starts_the_count_again(manager, script):
    script.commits = [False, False, True, False, False, True]
    replica = manager(commit_retries=2)
    assert [replica.should_commit() for _ in range(6)] == [False, False, True, False, False, True]


def test_no_retries_means_that_the_first_failure_ends_it(manager, script):
    script.commits = [False]
    with pytest.raises(NeverCommits):
        manager(commit_retries=0).should_commit()


@pytest.mark.parametrize(
    ("error", "participants", "why"),
    [
        (RuntimeError("gloo said no"), 4, "gloo said no"),
        (RuntimeError(), 4, "RuntimeError"),
        (RuntimeError("x" * 500), 4, "x" * 300),
        (None, 2, "2 of at least 3 replicas took part"),
        (None, 3, "another rank of this replica voted against it"),
    ],
)
def test_why_not(manager, script, error, participants, why):
    script.error, script.participants = error, participants
    assert manager(num_replicas=4).why_not() == why

"""Word of peers that are gone, and groups whose collectives end with it: real gloo, and a peer that never comes."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torchft
from torch.distributed import AllreduceOptions, ReduceOp
from torchft.manager import extract_trailing_digits

from monarch_titan.config.sections import FaultTolerance
from monarch_titan.training import groups
from monarch_titan.training.groups import LosableGloo, MemberLost
from monarch_titan.training.members import Members, member_name

A, B, C = (member_name(replica, 0) for replica in range(3))

# A peer that is lost must be noticed long before this.
TIMEOUT = 30


# Members


@pytest.mark.parametrize(("replica", "attempt"), [(0, 0), (3, 12), (12, 3)])
def test_torchft_reads_the_replica_out_of_a_members_name(replica, attempt):
    assert extract_trailing_digits(member_name(replica, attempt)) == replica


def test_one_that_is_gone_is_lost_to_the_quorums_it_is_in():
    members = Members()
    members.enter([A, B])
    members.gone(C)
    assert not members.lost
    members.gone(B)
    assert members.lost
    members.enter([A, member_name(1, 1)])
    assert not members.lost, "its successor lives"
    members.enter([A, B])
    assert members.lost, "a quorum that formed with the dead one"


def test_watchers_are_told_once_and_of_their_own_quorum_only():
    members, told = Members(), []
    members.enter([A, B])
    members.watch(lambda: told.append("first"))
    members.enter([A, C])
    members.watch(lambda: told.append("second"))
    members.gone(B)
    assert told == []
    members.gone(C)
    assert told == ["second"]
    members.watch(lambda: told.append("late"))
    assert told == ["second", "late"]


# Gloo


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Rank:
    """A rank of a group of two, in this process."""

    def __init__(self, store, rank, members=None):
        self.store, self.rank = store, rank
        self.members = members or Members()
        self.members.enter([A, B])
        self.group = LosableGloo(timedelta(seconds=TIMEOUT), self.members)

    def configure(self, quorum_id=1, world_size=2):
        address = f"127.0.0.1:{self.store.port}/{quorum_id}"
        self.group.configure(address, "us", self.rank, world_size, quorum_id)

    def allreduce(self, tensor):
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM
        return self.group.allreduce([tensor], options)


@pytest.fixture
def pair(store):
    """Two ranks that are connected."""
    ranks = [Rank(store, 0), Rank(store, 1)]
    threads = [threading.Thread(target=rank.configure) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    return ranks


def gone_in(seconds, rank, member=B):
    threading.Timer(seconds, rank.members.gone, [member]).start()


def test_collectives_are_those_of_gloo(pair):
    tensors = [torch.full((3,), 1.0), torch.full((3,), 2.0)]
    works = [rank.allreduce(tensor) for rank, tensor in zip(pair, tensors, strict=True)]
    assert all(work.wait() for work in works)
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 3] * 2


def test_many_collectives_in_one_quorum_leave_nothing_behind(pair):
    for _ in range(200):
        for work in [rank.allreduce(torch.ones(1)) for rank in pair]:
            work.wait()
    assert len(pair[0].group._running) <= 1


def test_collective_ends_when_a_peer_is_gone_that_never_came(pair):
    ours, peer = pair
    begin = time.monotonic()
    work = ours.allreduce(torch.ones(8))
    gone_in(0.2, ours)
    with pytest.raises(MemberLost, match="a replica of the quorum failed"):
        work.wait()
    assert time.monotonic() - begin < TIMEOUT / 3
    with pytest.raises(MemberLost):
        ours.allreduce(torch.ones(1))
    # The next quorum does not wait for what still runs, and forgets it once it is over.
    begin = time.monotonic()
    ours.members.enter([A])
    ours.configure(quorum_id=2, world_size=1)
    assert time.monotonic() - begin < TIMEOUT / 3
    assert len(ours.group._abandoned) == 1
    alone = torch.ones(1)
    assert ours.allreduce(alone).wait() and alone.item() == 1.0
    peer.allreduce(torch.ones(8)).wait()
    work._work.wait()
    ours.configure(quorum_id=3, world_size=1)
    assert ours.group._abandoned == []


def test_word_of_another_replica_ends_nothing(pair):
    ours, peer = pair
    work = ours.allreduce(total := torch.ones(1))
    ours.members.gone(C)
    ours.members.gone(member_name(1, 1))
    peer.allreduce(torch.ones(1)).wait()
    assert work.wait()
    assert total.item() == 2.0


def test_connecting_ends_when_a_peer_is_gone_that_never_came(store):
    ours = Rank(store, 0)
    gone_in(0.2, ours)
    begin = time.monotonic()
    with pytest.raises(MemberLost):
        ours.configure()
    assert time.monotonic() - begin < TIMEOUT / 3


def test_connecting_fails_with_what_went_wrong(store):
    ours = Rank(store, 0)
    with pytest.raises(RuntimeError, match="rank"):
        ours.configure(world_size=-1)


def test_torchfts_gloo_cannot_be_aborted(store):
    """Contract: when this fails, LosableGloo can be as short as LosableNCCL."""
    group = torchft.ProcessGroupGloo(timedelta(seconds=2))
    peer = torchft.ProcessGroupGloo(timedelta(seconds=2))
    address = f"127.0.0.1:{store.port}/1"
    connects = threading.Thread(target=peer.configure, args=(address, "peer", 1, 2, 1))
    connects.start()
    group.configure(address, "us", 0, 2, 1)
    connects.join(TIMEOUT)
    options = AllreduceOptions()
    work = group.allreduce([torch.ones(1)], options)
    aborts = threading.Thread(target=group.abort, daemon=True)
    aborts.start()
    time.sleep(0.5)
    assert not work.is_completed(), "gloo's collectives end with an abort now: LosableGloo is not needed."
    with pytest.raises(RuntimeError):
        work.wait()
    aborts.join(TIMEOUT)


# Which one


@pytest.mark.parametrize(
    ("option", "accelerator", "chosen"),
    [
        ("auto", None, "gloo"),
        ("auto", "cuda", "nccl"),
        ("gloo", "cuda", "gloo"),
        ("nccl", None, "nccl"),
    ],
)
def test_process_group(monkeypatch, option, accelerator, chosen):
    monkeypatch.setattr(groups.upstream, "accelerator", lambda: accelerator)
    # torch for CPUs has no NCCL to make one with.
    monkeypatch.setattr(groups, "LosableGloo", lambda timeout, members: ("gloo", timeout.total_seconds()))
    monkeypatch.setattr(groups, "LosableNCCL", lambda timeout, members: ("nccl", timeout.total_seconds()))
    config = FaultTolerance(process_group=option, process_group_timeout_ms=1500)
    assert groups.process_group(config, Members()) == (chosen, 1.5)

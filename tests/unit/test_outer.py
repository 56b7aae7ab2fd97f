"""Outer steps: the arithmetic, whose turn it is, and what healing and failure leave behind."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchft
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchft.local_sgd import DiLoCo

from monarch_titan.config.sections import FaultTolerance
from monarch_titan.training.outer import OUTER_OPTIMIZERS, Fragment, OuterSync, split


class Peers:
    """Managers of several replicas whose collectives wait for each other, as in one quorum."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=20)
        self.buffers = [None] * count
        self.managers = [Manager(self, rank) for rank in range(count)]

    def together(self, calls):
        """Results of one call a replica, all running at once."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]


class Manager:
    """What OuterSync and TorchFT's DiLoCo use of a manager."""

    _use_async_quorum = False

    def __init__(self, peers, rank):
        self.peers, self.rank = peers, rank
        self.step = 0
        self.commits = True
        self.heal_from = None
        self.registered = {}

    def register_state_dict_fn(self, key, load_state_dict, state_dict):
        self.registered[key] = load_state_dict, state_dict

    def start_quorum(self):
        if self.heal_from is not None:
            self.step = self.heal_from.step
            for key, (load, _) in self.registered.items():
                load(self.heal_from.registered[key][1]())
            self.heal_from = None

    def allreduce(self, tensor, should_quantize=False, reduce_op=ReduceOp.AVG):
        buffers, barrier = self.peers.buffers, self.peers.barrier
        buffers[self.rank] = tensor.clone()
        barrier.wait()
        tensor.copy_(sum(buffers))
        if reduce_op == ReduceOp.AVG:
            tensor /= len(buffers)
        barrier.wait()
        return SimpleNamespace(wait=lambda: True)

    def should_commit(self):
        self.step += self.commits
        return self.commits

    def current_step(self):
        return self.step

    def num_participants(self):
        return len(self.peers.managers)

    def allow_state_dict_read(self):
        pass

    def disallow_state_dict_read(self):
        pass


class Replica:
    """A model, its manager and its OuterSync."""

    def __init__(self, manager, model, method="diloco", sync_steps=1, num_fragments=1):
        config = FaultTolerance(semi_sync_method=method, sync_steps=sync_steps, num_fragments=num_fragments)
        self.manager, self.model = manager, model
        self.sync = OuterSync(manager, [model], config)

    def train(self, value):
        """Pretend that inner steps brought all parameters to a value."""
        fill(self.model, value)

    def values(self):
        return [parameter.unique().tolist() for parameter in self.model.parameters()]


def fill(model, value):
    for parameter in model.parameters():
        parameter.detach().fill_(value)


def model(sizes=(1,), value=1.0, dtype=torch.float32):
    """Layers of the given numbers of weights, all of one value."""
    model = torch.nn.Sequential(*(torch.nn.Linear(size, 1, bias=False, dtype=dtype) for size in sizes))
    fill(model, value)
    return model


def replicas(count, sizes=(1,), dtype=torch.float32, **config):
    return [Replica(manager, model(sizes, dtype=dtype), **config) for manager in Peers(count).managers]


def outer_step(replicas, values):
    """Give every replica its value and let all join; their outcomes."""
    for replica, value in zip(replicas, values, strict=True):
        replica.train(value)
    return replicas[0].manager.peers.together([replica.sync.join for replica in replicas])


def fragment(value=1.0, size=2, **outer):
    """A fragment of one parameter, and the parameter."""
    parameter = torch.nn.Parameter(torch.full((size,), value))
    return Fragment([("p", parameter)], outer or OUTER_OPTIMIZERS["diloco"], torch.device("cpu")), parameter


# Arithmetic


def test_diloco_moves_the_global_parameter_from_1_to_0_601():
    # d = 1 - (0.8 + 0.6) / 2 = 0.3, Nesterov: 1 - 0.7 (0.3 + 0.9 * 0.3)
    pair = replicas(2)
    outcomes = outer_step(pair, [0.8, 0.6])
    for replica, outcome in zip(pair, outcomes, strict=True):
        torch.testing.assert_close(replica.sync.fragments[0].globals[0], torch.tensor([[0.601]]))
        torch.testing.assert_close(replica.model[0].weight.data, torch.tensor([[0.601]]))
        assert (outcome.committed, outcome.contributed, outcome.participants, outcome.bytes) == (True, True, 2, 8)
    assert pair[0].sync.digest() == pair[1].sync.digest()
    assert pair[0].sync.optimizer_digest() == pair[1].sync.optimizer_digest() != ""


def test_local_sgd_is_the_mean_of_the_parameters():
    three = replicas(3, method="local_sgd")
    for values in [(0.8, 0.6, 0.1), (2.0, -1.0, 0.5)]:
        outer_step(three, values)
        for replica in three:
            torch.testing.assert_close(replica.model[0].weight.item(), sum(values) / 3)


def run_inner_and_outer_steps(build, commits, num_fragments, count=2):
    """Train ``count`` replicas by ``build``'s synchronisation, 2 inner steps a window; their parameters."""
    models, peers = [], Peers(count)
    for rank, manager in enumerate(peers.managers):
        torch.manual_seed(0)
        models.append(net := torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(rank + 1)
        after_step = build(manager, net, inner, num_fragments)

        def one_step(net=net, inner=inner, data=data, after_step=after_step):
            inner.zero_grad()
            net(torch.randn(8, 3, generator=data)).square().mean().backward()
            inner.step()
            after_step()

        manager.one_step = one_step
    for commit in commits:
        for manager in peers.managers:
            manager.commits = commit
        for _ in range(2):
            peers.together([manager.one_step for manager in peers.managers])
    return [[parameter.detach().clone() for parameter in net.parameters()] for net in models]


def ours(manager, net, inner, num_fragments):
    config = FaultTolerance(sync_steps=2 * num_fragments, num_fragments=num_fragments)
    return OuterSync(manager, [net], config).end_step


def torchfts(manager, net, inner, num_fragments):
    parts = list(net) if num_fragments > 1 else [net]
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    DiLoCo(manager, parts, inner, outer, sync_every=2 * num_fragments).__enter__()  # its hooks stay on the optimizer
    return lambda: None


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_same_parameters_as_torchft_also_after_steps_that_did_not_commit(num_fragments):
    commits = [True, True, False, True, True, False, True]
    for mine, reference in zip(
        run_inner_and_outer_steps(ours, commits, num_fragments),
        run_inner_and_outer_steps(torchfts, commits, num_fragments),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-7)


def test_weight_0_neither_contributes_nor_dilutes():
    three = replicas(3)
    three[2].sync.fragments[0].contributes = False
    outcomes = outer_step(three, [0.8, 0.6, 1e6])
    assert [outcome.contributed for outcome in outcomes] == [True, True, False]
    without_it = replicas(2)
    outer_step(without_it, [0.8, 0.6])
    for replica in three:
        assert torch.equal(replica.model[0].weight, without_it[0].model[0].weight)
        assert torch.equal(replica.sync.fragments[0].momentum()[0], without_it[0].sync.fragments[0].momentum()[0])
    # Its next window is its own again.
    assert [outcome.contributed for outcome in outer_step(three, [0.5, 0.5, 0.5])] == [True, True, True]


def test_globals_stay_where_nobody_contributes():
    part, parameter = fragment(**OUTER_OPTIMIZERS["local_sgd"])
    part.contributes = False
    parameter.detach().fill_(9.0)
    part.step(part.pseudo_gradient())
    assert part.globals[0].tolist() == [1.0, 1.0]


def test_bf16_parameters_have_float32_globals():
    pair = replicas(2, dtype=torch.bfloat16)
    # Each outer step is far below the 2 ** -8 that bfloat16 can tell from 1.
    for _ in range(40):
        for replica in pair:
            part = replica.sync.fragments[0]
            buffer = torch.tensor([1e-4, 1.0])
            part.step(buffer)
            part.restore()
    for replica in pair:
        globals_ = replica.sync.fragments[0].globals[0]
        assert globals_.dtype == torch.float32
        assert replica.model[0].weight.dtype == torch.bfloat16
        assert 0.97 < globals_.item() < 0.98
        assert replica.model[0].weight.item() == globals_.to(torch.bfloat16).item()


def test_bf16_pseudo_gradient_is_taken_in_float32():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    part = Fragment([("p", parameter)], OUTER_OPTIMIZERS["diloco"], torch.device("cpu"))
    part.globals[0].fill_(1.0001)
    torch.testing.assert_close(part.pseudo_gradient(), torch.tensor([1e-4, 1e-4, 1e-4, 1.0]), rtol=1e-3, atol=0)


def test_calls_are_those_of_torchfts_manager():
    manager = create_autospec(torchft.Manager, instance=True)
    manager.current_step.return_value, manager.num_participants.return_value = 0, 1
    replica = Replica(manager, model())
    replica.train(0.0)
    assert replica.sync.join().committed
    manager.register_state_dict_fn.assert_called_once()
    assert replica.values() == [[pytest.approx(1 - 0.7 * 1.9)]]


# Shards


@pytest.fixture(params=[0, 1])
def mesh(request):
    """Device mesh of the two ranks of a replica, of which this process is one. Their collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def sharded(mesh, rows):
    """A model with one weight of so many rows, sharded by row as FSDP does."""
    net = torch.nn.Linear(2, rows, bias=False)
    weight = distribute_tensor(torch.ones(rows, 2), mesh, [Shard(0)], src_data_rank=None)
    net.weight = torch.nn.Parameter(weight)
    return net


@pytest.mark.parametrize(("rows", "local_rows"), [(4, (2, 2)), (3, (2, 1)), (1, (1, 0))])
def test_a_rank_keeps_and_moves_its_own_shard(mesh, rows, local_rows):
    here = local_rows[mesh.get_rank()]
    pair = [Replica(manager, sharded(mesh, rows)) for manager in Peers(2).managers]
    outcomes = outer_step(pair, [0.8, 0.6])
    assert [outcome.bytes for outcome in outcomes] == [4 * (2 * here + 1)] * 2
    for replica in pair:
        weight = replica.model.weight
        assert isinstance(weight, DTensor) and weight.shape == (rows, 2)
        torch.testing.assert_close(weight.to_local().detach(), torch.full((here, 2), 0.601))
    assert pair[0].sync.digest() == pair[1].sync.digest()
    assert pair[0].sync.optimizer_digest() == pair[1].sync.optimizer_digest()


def test_fragments_are_cut_alike_in_all_ranks(mesh):
    net = torch.nn.ModuleList(sharded(mesh, rows) for rows in (1, 2, 1, 4))
    assert [len(part) for part in split(list(net.named_parameters()), 2)] == [3, 1]


# Failure


def test_a_step_that_does_not_commit_loses_the_window_and_nothing_else():
    pair = replicas(2)
    outer_step(pair, [0.8, 0.6])
    before = [replica.sync.fragments[0].state_dict() for replica in pair]
    for replica in pair:
        replica.manager.commits = False
    outcomes = outer_step(pair, [5.0, float("nan")])
    assert [outcome.committed for outcome in outcomes] == [False, False]
    for replica, state in zip(pair, before, strict=True):
        part = replica.sync.fragments[0]
        torch.testing.assert_close(part.state_dict(), state, rtol=0, atol=0)
        assert torch.equal(replica.model[0].weight.data, part.globals[0])


def test_a_first_step_that_does_not_commit_makes_no_momentum():
    pair = replicas(2)
    for replica in pair:
        replica.manager.commits = False
    outer_step(pair, [0.8, 0.6])
    assert all(replica.sync.fragments[0].momentum() == [None] for replica in pair)
    assert all(replica.sync.optimizer_digest() == pair[0].sync.optimizer_digest() for replica in pair)


# Fragments

SIZES = (5, 1, 7, 3, 3, 9, 2, 2, 4, 4)


@pytest.mark.parametrize("num_fragments", range(1, len(SIZES) + 1))
def test_every_parameter_is_in_exactly_one_fragment_and_sizes_are_close(num_fragments):
    parameters = list(model(SIZES).named_parameters())
    fragments = split(parameters, num_fragments)
    assert len(fragments) == num_fragments
    assert [name for part in fragments for name, _ in part] == [name for name, _ in parameters]
    for part in fragments:
        size = sum(parameter.numel() for _, parameter in part)
        # A run may miss half a parameter, or have half of one too many, at either end.
        assert abs(size - sum(SIZES) / num_fragments) <= max(SIZES)


def test_fragments_of_equal_layers_are_equal():
    fragments = split(list(model((4,) * 6).named_parameters()), 3)
    assert [len(part) for part in fragments] == [2, 2, 2]


def test_tied_parameters_are_synchronised_once():
    tied = model((2, 2))
    tied[1].weight = tied[0].weight
    replica = Replica(Peers(1).managers[0], tied)
    assert [part.numel for part in replica.sync.fragments] == [2]


def test_end_step_joins_every_sync_steps_over_fragments():
    (replica,) = replicas(1, sizes=(2, 2), sync_steps=6, num_fragments=2)
    assert [replica.sync.end_step() is not None for _ in range(9)] == [False, False, True] * 3


def test_joining_early_starts_a_new_window():
    (replica,) = replicas(1, sync_steps=3)
    replica.sync.end_step()
    replica.sync.join()
    assert [replica.sync.end_step() is not None for _ in range(3)] == [False, False, True]


def test_turns_follow_the_outer_step():
    pair = replicas(2, sizes=(1, 1, 1), num_fragments=3, sync_steps=3, method="local_sgd")
    outer_step(pair, [2.0, 4.0])
    assert pair[0].values() == [[3.0], [2.0], [2.0]]
    for replica in pair:
        replica.manager.step = 2
    outer_step(pair, [2.0, 4.0])
    assert pair[0].values() == [[2.0], [2.0], [3.0]]
    # A fragment that did not commit has its turn again.
    for replica in pair:
        replica.manager.step, replica.manager.commits = 1, False
    outer_step(pair, [7.0, 8.0])
    for replica in pair:
        replica.manager.commits = True
    outer_step(pair, [7.0, 8.0])
    assert pair[1].values() == [[8.0], [7.5], [8.0]]


def test_more_fragments_than_parameters_leaves_empty_ones_that_still_take_their_turn():
    pair = replicas(2, sizes=(8,), num_fragments=3, sync_steps=3, method="local_sgd")
    assert [part.numel for part in pair[0].sync.fragments] == [0, 8, 0]
    outcomes = [outer_step(pair, [2.0, 4.0])[0] for _ in range(3)]
    assert [(outcome.committed, outcome.bytes) for outcome in outcomes] == [(True, 4), (True, 36), (True, 4)]
    assert pair[0].manager.step == 3


def test_an_empty_fragment_has_its_buffer_where_the_parameters_are():
    # NCCL reduces nothing that lies in the CPU's memory.
    elsewhere = torch.nn.Linear(8, 1, bias=False, device="meta")
    replica = Replica(Peers(1).managers[0], elsewhere, num_fragments=3)
    assert {part.pseudo_gradient().device.type for part in replica.sync.fragments} == {"meta"}


# Healing


def test_healed_fragments_contribute_from_their_own_next_turn_on():
    pair = replicas(2, sizes=(1, 1), num_fragments=2, sync_steps=2, method="local_sgd")
    healthy, healed = pair
    outer_step(pair, [0.0, 0.0])  # turn of fragment 0
    healed.manager.heal_from = healthy.manager

    def step(values):
        return [outcome.contributed for outcome in outer_step(pair, values)]

    assert step([2.0, 100.0]) == [True, False]  # fragment 1
    assert healed.values()[1] == healthy.values()[1] == [2.0]
    assert step([4.0, 100.0]) == [True, False]  # fragment 0: its window is still the peer's
    assert healed.values()[0] == healthy.values()[0] == [4.0]
    assert step([4.0, 6.0]) == [True, True]
    assert healed.values()[1] == healthy.values()[1] == [5.0]
    assert step([6.0, 8.0]) == [True, True]
    assert healed.values()[0] == healthy.values()[0] == [7.0]


def test_turn_is_taken_after_healing_has_moved_the_outer_step():
    pair = replicas(2, sizes=(1, 1), num_fragments=2, sync_steps=2, method="local_sgd")
    pair[0].manager.step = 1
    pair[1].manager.heal_from = pair[0].manager
    outer_step(pair, [2.0, 50.0])
    assert pair[1].values()[1] == [2.0]


@pytest.mark.parametrize("outer_steps", [0, 1, 3])
def test_state_round_trip_is_exact(outer_steps):
    pair = replicas(2, sizes=(3, 2))
    for _ in range(outer_steps):
        outer_step(pair, [0.8, 0.6])
    giver, fresh = pair[0].sync.fragments[0], replicas(1, sizes=(3, 2))[0].sync.fragments[0]
    state = giver.state_dict()
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh.state_dict(), state, rtol=0, atol=0)
    assert (fresh.momentum()[0] is None) == (outer_steps == 0)
    assert not fresh.contributes


def test_momentum_none_clears_what_the_healed_replica_had():
    untrained, _ = fragment()
    trained, _ = fragment()
    trained.step(torch.tensor([0.1, 0.1, 1.0]))
    assert trained.momentum()[0] is not None
    trained.load_state_dict(untrained.state_dict())
    assert trained.momentum() == [None]


def test_state_shares_no_memory_with_giver_or_taker():
    giver, _ = fragment()
    giver.step(torch.tensor([0.1, 0.1, 1.0]))
    taker, _ = fragment()
    state = giver.state_dict()
    taker.load_state_dict(state)
    before = [tensor.clone() for tensor in (*state["globals"], *state["momentum"])]
    for part in (giver, taker):
        part.step(torch.tensor([9.0, 9.0, 1.0]))
    assert all(map(torch.equal, before, (*state["globals"], *state["momentum"])))


def test_momentum_is_loaded_to_the_device_of_the_parameters():
    # TorchFT's transport delivers in the CPU's memory.
    giver, _ = fragment()
    giver.step(torch.tensor([0.1, 0.1, 1.0]))
    taker = Fragment([("p", torch.empty(2, device="meta"))], OUTER_OPTIMIZERS["diloco"], torch.device("meta"))
    taker.load_state_dict(giver.state_dict())
    assert taker.momentum()[0].device.type == "meta"


@pytest.mark.parametrize("method", ["diloco", "local_sgd"])
@pytest.mark.parametrize("outer_steps", [1, 2, 5])
def test_checkpoint_brings_back_globals_momentum_and_window(tmp_path, outer_steps, method):
    fragments = 3 if method == "diloco" else 1
    config = {"sizes": (3, 2, 2), "method": method, "num_fragments": fragments, "sync_steps": 6}
    replica, peer = replicas(2, **config)
    for step in range(outer_steps):
        outer_step([replica, peer], [0.1 * step, 0.2 * step + 0.3])
    replica.sync.end_step()  # in the middle of a window
    replica.sync.fragments[-1].contributes = False
    dcp.save({"sync": replica.sync.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    (resumed,) = replicas(1, **config)
    resumed.sync.expect(outer_steps)
    state = resumed.sync.state_dict()
    with torch.no_grad():
        dcp.load({"sync": state}, checkpoint_id=tmp_path, no_dist=True)
    resumed.sync.load_state_dict(state)
    assert resumed.sync.digest() == replica.sync.digest()
    assert resumed.sync.optimizer_digest() == replica.sync.optimizer_digest()
    assert [f.contributes for f in resumed.sync.fragments] == [True] * (fragments - 1) + [False]
    ends = [resumed.sync.state_dict()["steps"], replica.sync.state_dict()["steps"]]
    assert ends == [1, 1]

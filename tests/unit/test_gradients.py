"""Gradients averaged over replicas at every step, and an optimizer that waits for the commit."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp

from monarch_titan.training.batches import Batches, SeenBatches
from monarch_titan.training.gradients import GradientSync, Overtaken
from monarch_titan.training.replica import digest
from tests.unit.numbers import Numbers


class Manager:
    """What GradientSync uses of a manager; ``peers`` are the flat gradients of the other replicas."""

    def __init__(self, peers=(), refusals=0):
        self.peers, self.refusals = peers, refusals
        self.heals = []
        """Whether each quorum heals us; False when there are more."""
        self.healed = False
        self.calls, self.buffers = [], []

    def waiting(self):
        return contextlib.nullcontext()

    def start_quorum(self):
        self.calls.append("quorum")
        self.healed = bool(self.heals) and self.heals.pop(0)

    def allreduce(self, buffer, reduce_op):
        assert reduce_op == ReduceOp.SUM
        self.calls.append("allreduce")
        self.buffers.append(buffer.clone())
        # Changed by wait() only: reading the buffer before must not pass. Peers have drawn no batches.
        tails = torch.tensor([1.0] + TAIL * [0.0])
        total = torch.stack([buffer, *(torch.cat([peer, tails]) for peer in self.peers)]).sum(0)
        return SimpleNamespace(wait=lambda: buffer.copy_(total))

    def should_commit(self):
        self.calls.append("commit")
        committed = self.refusals == 0
        self.refusals -= not committed
        return committed

    def num_participants(self):
        return 1 + len(self.peers)


REPLICAS = 2
TAIL = 2 * REPLICAS


def sync_of(manager, parts):
    """A GradientSync whose outcomes are in ``outcomes``, with its ``batches`` and what it has ``seen``."""
    outcomes, batches, seen = [], Batches(Numbers()), SeenBatches(REPLICAS, 0)
    sync = GradientSync(manager, parts, batches, seen, outcomes.append)
    sync.outcomes, sync.batches, sync.seen = outcomes, batches, seen
    return sync


def two_layers(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3, dtype=dtype), torch.nn.Linear(3, 1, dtype=dtype))


def set_gradients(model, value):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


NUMEL = 2 * 3 + 3 + 3 + 1


def test_gradients_become_the_mean_over_replicas():
    model = two_layers()
    set_gradients(model, 1.0)
    ramp = torch.arange(NUMEL, dtype=torch.float32)
    sync_of(Manager([ramp, -2 * ramp]), [model]).average()
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    torch.testing.assert_close(flat, (1 - ramp) / 3)


def test_model_parts_travel_in_one_buffer():
    parts = [two_layers(), two_layers()]
    for part, value in zip(parts, (1.0, 2.0), strict=True):
        set_gradients(part, value)
    manager = Manager([torch.zeros(2 * NUMEL)])
    sync_of(manager, parts).average()
    assert manager.calls == ["allreduce", "commit"]
    assert [part[0].weight.grad[0, 0].item() for part in parts] == [0.5, 1.0]


def test_a_parameter_without_gradient_stays_without():
    model = two_layers()
    set_gradients(model, 1.0)
    model[0].bias.grad = None
    sync_of(Manager([torch.zeros(NUMEL - 3)]), [model]).average()
    assert model[0].bias.grad is None
    assert model[1].weight.grad.tolist() == [[0.5, 0.5, 0.5]]


def test_a_rank_without_gradients_takes_part():
    manager = Manager()
    sync = sync_of(manager, [two_layers()])
    sync.begin_step()
    sync.average()
    assert manager.calls == ["quorum", "allreduce", "commit"]
    sync.end_step()
    assert sync.outcomes[0].bytes == 4 * (1 + TAIL)


def test_bf16_gradients_are_averaged_in_float32():
    model = two_layers(torch.bfloat16)
    set_gradients(model, 1.0)
    manager = Manager([torch.full((NUMEL,), 1 + 2**-6)])
    sync_of(manager, [model]).average()
    assert manager.buffers[0].dtype == torch.float32
    assert model[0].weight.grad.dtype == torch.bfloat16
    assert model[0].weight.grad[0, 0].item() == 1 + 2**-7


def test_a_step_has_its_quorum_first_and_its_outcome_last():
    model = two_layers()
    manager = Manager([torch.full((NUMEL,), 3.0)])
    sync = sync_of(manager, [model])
    sync.begin_step()
    set_gradients(model, 1.0)
    sync.average()
    assert manager.calls == ["quorum", "allreduce", "commit"]
    assert not sync.outcomes
    sync.end_step()
    (outcome,) = sync.outcomes
    assert (outcome.committed, outcome.contributed, outcome.participants) == (True, True, 2)
    assert outcome.bytes == 4 * (NUMEL + 1 + TAIL)
    assert 0 <= outcome.seconds < 60


def test_same_gradients_are_averaged_again_when_a_peer_was_lost():
    model = two_layers()
    manager = Manager([torch.full((NUMEL,), 3.0)], refusals=2)
    sync = sync_of(manager, [model])
    sync.begin_step()
    set_gradients(model, 1.0)
    next(sync.batches)
    sync.average()
    sync.end_step()
    assert manager.calls == ["quorum", "allreduce", "commit"] * 3
    assert all(torch.equal(buffer, manager.buffers[0]) for buffer in manager.buffers)
    assert model[0].weight.grad[0, 0].item() == 2.0
    assert [outcome.committed for outcome in sync.outcomes] == [False, False, True]
    assert sync.seen.counts == [1, 0]


@pytest.mark.parametrize("counted", [True, False])
def test_one_whose_peers_have_committed_without_it_trains_their_next_step_in_the_same_quorum(counted):
    model = two_layers()
    manager = Manager([torch.zeros(NUMEL)], refusals=1)
    manager.heals = [False, True]
    sync = sync_of(manager, [model])
    sync.begin_step()
    set_gradients(model, 1.0)
    assert next(sync.batches) == 0
    sync.seen.load_state_dict({"counts": [int(counted), 1], "lineage": "the peers"})  # as healing does
    with pytest.raises(Overtaken):
        sync.average()
    sync.begin_step()
    assert manager.calls == ["quorum", "allreduce", "commit", "quorum"]
    assert next(sync.batches) == int(counted), "neither read twice nor left out"
    sync.average()
    sync.begin_step()
    assert manager.calls[-3:] == ["allreduce", "commit", "quorum"]


def test_one_that_heals_before_a_step_goes_on_in_its_data_where_the_peers_have_seen_it():
    manager = Manager()
    manager.heals = [True]
    sync = sync_of(manager, [two_layers()])
    sync.seen.load_state_dict({"counts": [5, 5], "lineage": "the peers"})
    sync.begin_step()
    assert next(sync.batches) == 5


def test_digest_tells_parameters_apart_by_any_bit():
    one, other = two_layers(), two_layers()
    syncs = [sync_of(Manager(), [model]) for model in (one, other)]
    assert syncs[0].digest() == syncs[1].digest()
    other[1].bias.detach().add_(1e-7)
    assert syncs[0].digest() != syncs[1].digest()
    assert syncs[0].optimizer_digest() == ""


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3,), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_digest_takes_any_tensor(shape, dtype):
    tensor = torch.ones(shape, dtype=dtype)
    assert digest([tensor]) == digest([tensor.clone()])
    if tensor.numel():
        assert digest([tensor]) != digest([tensor + 1])
    if tensor.ndim == 2:
        assert digest([tensor.T]) == digest([tensor.T.contiguous()])

"""Gradients averaged over replicas at every step, and an optimizer that waits for the commit."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp

from monarch_titan.training.gradients import CommittedOptimizers, GradientSync
from monarch_titan.training.replica import digest


class Manager:
    """What GradientSync uses of a manager; ``peers`` are the flat gradients of the other replicas."""

    def __init__(self, peers=(), commits=True):
        self.peers, self.commits = peers, commits
        self.calls, self.buffers = [], []

    def start_quorum(self):
        self.calls.append("quorum")

    def allreduce(self, buffer, reduce_op):
        assert reduce_op == ReduceOp.AVG
        self.calls.append("allreduce")
        self.buffers.append(buffer)
        # Changed by wait() only: reading the buffer before must not pass.
        mean = torch.stack([buffer, *self.peers]).mean(0)
        return SimpleNamespace(wait=lambda: buffer.copy_(mean))

    def should_commit(self):
        self.calls.append("commit")
        return self.commits

    def num_participants(self):
        return 1 + len(self.peers)


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
    GradientSync(Manager([ramp, -2 * ramp]), [model]).average()
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    torch.testing.assert_close(flat, (1 - ramp) / 3)


def test_model_parts_travel_in_one_buffer():
    parts = [two_layers(), two_layers()]
    for part, value in zip(parts, (1.0, 2.0), strict=True):
        set_gradients(part, value)
    manager = Manager([torch.zeros(2 * NUMEL)])
    GradientSync(manager, parts).average()
    assert manager.calls == ["allreduce"]
    assert [part[0].weight.grad[0, 0].item() for part in parts] == [0.5, 1.0]


def test_a_parameter_without_gradient_stays_without():
    model = two_layers()
    set_gradients(model, 1.0)
    model[0].bias.grad = None
    GradientSync(Manager([torch.zeros(NUMEL - 3)]), [model]).average()
    assert model[0].bias.grad is None
    assert model[1].weight.grad.tolist() == [[0.5, 0.5, 0.5]]


def test_nothing_to_reduce_without_gradients():
    manager = Manager()
    sync = GradientSync(manager, [two_layers()])
    sync.begin_step()
    sync.average()
    sync.commit()
    assert manager.calls == ["quorum", "commit"]
    assert sync.end_step().bytes == 0


def test_bf16_gradients_are_averaged_in_float32():
    model = two_layers(torch.bfloat16)
    set_gradients(model, 1.0)
    manager = Manager([torch.full((NUMEL,), 1 + 2**-6)])
    GradientSync(manager, [model]).average()
    assert manager.buffers[0].dtype == torch.float32
    assert model[0].weight.grad.dtype == torch.bfloat16
    assert model[0].weight.grad[0, 0].item() == 1 + 2**-7


@pytest.mark.parametrize("commits", [True, False])
def test_optimizer_steps_only_when_the_step_commits(commits):
    model = two_layers()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    manager = Manager([torch.full((NUMEL,), 3.0)], commits)
    sync = GradientSync(manager, [model])
    optimizers = CommittedOptimizers(optimizer, sync)

    sync.begin_step()
    optimizers.zero_grad()
    set_gradients(model, 1.0)
    sync.average()
    optimizers.step()
    outcome = sync.end_step()

    torch.testing.assert_close(model[0].weight.detach(), before - 2.0 * commits)
    assert manager.calls == ["quorum", "allreduce", "commit"]
    assert (outcome.committed, outcome.contributed, outcome.participants) == (commits, True, 2)
    assert outcome.bytes == 4 * NUMEL
    assert 0 <= outcome.seconds < 60


def test_a_step_that_ends_before_its_vote_has_no_outcome():
    sync = GradientSync(Manager(), [two_layers()])
    sync.begin_step()
    sync.commit()
    assert sync.end_step() is not None
    sync.begin_step()
    assert sync.end_step() is None


def test_committed_optimizers_are_the_optimizers_otherwise():
    optimizer = torch.optim.SGD(two_layers().parameters(), lr=0.25)
    optimizers = CommittedOptimizers(optimizer, GradientSync(Manager(), []))
    assert optimizers.param_groups is optimizer.param_groups
    assert optimizers.state_dict() == optimizer.state_dict()
    with pytest.raises(AttributeError):
        _ = optimizers.no_such_name


def test_digest_tells_parameters_apart_by_any_bit():
    one, other = two_layers(), two_layers()
    syncs = [GradientSync(Manager(), [model]) for model in (one, other)]
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

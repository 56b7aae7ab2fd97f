"""A healed replica is its peer, bit for bit."""

import copy
import io

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.trainer import Trainer

from monarch_titan.training import healing
from monarch_titan.training.replica import digest

KEYS = ["model", "optimizer", "lr_scheduler", "trainer"]


class Model(torch.nn.Module):
    """Two layers, one of which is only used on request, a buffer that is saved and one that is not."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.rare = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x, rare):
        self.seen += len(x)
        self.mean.lerp_(x.mean(0), 0.1)
        return self.rare(self.layer(x)) if rare else self.layer(x)


class FakeTrainer:
    """The parts of TorchTitan's trainer that healing moves, with TorchTitan's own optimizers and schedule."""

    state_dict, load_state_dict = Trainer.state_dict, Trainer.load_state_dict

    def __init__(self, seed=0, steps=0):
        self.model_parts = [Model(seed), Model(seed + 1)]
        groups = [
            ParamGroupConfig(pattern="bias", optimizer_name="Adam", optimizer_kwargs={"lr": 0.02}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "weight_decay": 0.1}),
        ]
        config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.optimizers = config.build(model_parts=self.model_parts)
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=10
        )
        self.step = self.ntokens_seen = 0
        for _ in range(steps):
            self.train_step()

    def train_step(self, rare=True):
        self.step += 1
        self.ntokens_seen += 8
        self.optimizers.zero_grad()
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step))
        for model in self.model_parts:
            model(data, rare).square().mean().backward()
        self.optimizers.step()
        self.lr_schedulers.step()

    def registered(self):
        """(load, save) functions by the key under which healing registers them, in order."""
        functions = {}

        class Manager:
            def register_state_dict_fn(self, key, load, save):
                functions[key] = load, save

        healing.register(Manager(), self)
        return functions

    def save(self):
        return {key: save() for key, (_, save) in self.registered().items()}

    def load(self, state):
        for key, (load, _) in self.registered().items():
            load(state[key])


def over_the_wire(state):
    """As TorchFT's transport does it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_same(one, other):
    """Everything that a trainer consists of is equal, to the last bit."""
    torch.testing.assert_close(one.save(), other.save(), rtol=0, atol=0)
    for mine, theirs in zip(one.model_parts, other.model_parts, strict=True):
        assert torch.equal(mine.seen, theirs.seen) and torch.equal(mine.mean, theirs.mean)
    for mine, theirs in zip(one.optimizers.optimizers, other.optimizers.optimizers, strict=True):
        for my_group, their_group in zip(mine.param_groups, theirs.param_groups, strict=True):
            assert my_group["lr"] == their_group["lr"]
            states = [
                [optimizer.state.get(parameter, {}) for parameter in group["params"]]
                for optimizer, group in ((mine, my_group), (theirs, their_group))
            ]
            torch.testing.assert_close(*states, rtol=0, atol=0)
    assert digest(healing.optimizer_tensors(one)) == digest(healing.optimizer_tensors(other))
    assert (one.step, one.ntokens_seen) == (other.step, other.ntokens_seen)


@pytest.mark.parametrize("peer_steps", [0, 1, 4])
@pytest.mark.parametrize("own_steps", [0, 2])
def test_a_healed_trainer_equals_its_peer_and_trains_on_equally(peer_steps, own_steps):
    peer, healed = FakeTrainer(seed=0, steps=peer_steps), FakeTrainer(seed=7, steps=own_steps)
    healed.load(over_the_wire(peer.save()))
    assert_same(healed, peer)
    for _ in range(3):
        peer.train_step()
        healed.train_step()
        assert_same(healed, peer)


def test_step_count_of_adam_is_the_peers():
    peer, healed = FakeTrainer(steps=4), FakeTrainer(seed=7)
    healed.load(over_the_wire(peer.save()))
    for optimizer in healed.optimizers.optimizers:
        assert {int(entry["step"]) for entry in optimizer.state.values()} == {4}


def test_learning_rates_are_those_of_the_peers_step():
    peer, healed = FakeTrainer(steps=2), FakeTrainer(seed=7)
    healed.load(over_the_wire(peer.save()))
    lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in healed.optimizers.optimizers]
    assert lrs == [[group["lr"] for group in optimizer.param_groups] for optimizer in peer.optimizers.optimizers]
    assert healed.lr_schedulers.state_dict()["last_epoch"] == 2


@pytest.mark.parametrize(("peer_rare", "own_rare"), [(True, False), (False, True), (False, False)])
def test_parameters_that_some_replica_has_never_used(peer_rare, own_rare):
    peer, healed = FakeTrainer(), FakeTrainer(seed=7)
    peer.train_step(rare=peer_rare)
    healed.train_step(rare=own_rare)
    healed.load(over_the_wire(peer.save()))
    assert_same(healed, peer)


def test_a_replica_whose_first_step_did_not_commit_heals():
    # Its optimizers have no state, its parameters have gradients.
    peer, healed = FakeTrainer(steps=2), FakeTrainer(seed=7)
    for model in healed.model_parts:
        model(torch.ones(1, 4), True).sum().backward()
    healed.load(over_the_wire(peer.save()))
    assert_same(healed, peer)


def test_a_replica_that_gave_its_untrained_state_can_heal_later():
    first, second = FakeTrainer(), FakeTrainer(seed=7)
    second.load(over_the_wire(first.save()))
    second.train_step()
    first.load(over_the_wire(second.save()))
    assert_same(first, second)


def test_saving_changes_nothing():
    trainer = FakeTrainer()
    trainer.save()
    assert not any(optimizer.state for optimizer in trainer.optimizers.optimizers)
    trained = FakeTrainer(steps=2)
    before = copy.deepcopy(trained.save())
    torch.testing.assert_close(trained.save(), before, rtol=0, atol=0)


def test_saved_tensors_are_copies():
    # TorchFT serves CPU tensors where they lie, while training goes on.
    trainer = FakeTrainer(steps=2)
    state = trainer.save()
    before = copy.deepcopy(state)
    trainer.train_step()
    torch.testing.assert_close(state, before, rtol=0, atol=0)


def test_loaded_tensors_are_copies():
    peer, healed = FakeTrainer(steps=2), FakeTrainer(seed=7)
    state = peer.save()
    before = copy.deepcopy(state)
    healed.load(state)
    healed.train_step()
    torch.testing.assert_close(state, before, rtol=0, atol=0)


def test_parameters_keep_their_identity():
    # FSDP and the optimizers hold on to them.
    peer, healed = FakeTrainer(steps=2), FakeTrainer(seed=7)
    before = [tensor.data_ptr() for model in healed.model_parts for tensor in model.parameters()]
    healed.load(over_the_wire(peer.save()))
    assert [tensor.data_ptr() for model in healed.model_parts for tensor in model.parameters()] == before
    assert list(healed.registered()) == KEYS

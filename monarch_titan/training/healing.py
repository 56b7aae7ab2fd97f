"""What a replica gives to a peer that heals: everything of the trainer but its place in the data.

TorchFT moves the state between the same ranks of two replicas, so plain local shards are enough, whatever the
parallelism inside the replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchtitan.components.optimizer.utils import init_optim_state

from monarch_titan.training.replica import host_copy, local

if TYPE_CHECKING:
    import torchft
    from torchtitan.trainer import Trainer

State = dict[str, Any]


def register(manager: torchft.Manager, trainer: Trainer) -> None:
    """Tell the manager how to take and give parameters, buffers, inner optimizers, schedule and step."""
    manager.register_state_dict_fn("model", lambda s: _load_model(trainer, s), lambda: _save_model(trainer))
    manager.register_state_dict_fn(
        "optimizer", lambda s: _load_optimizers(trainer, s), lambda: _save_optimizers(trainer)
    )
    schedulers = trainer.lr_schedulers
    manager.register_state_dict_fn("lr_scheduler", schedulers.load_state_dict, schedulers.state_dict)
    manager.register_state_dict_fn("trainer", trainer.load_state_dict, trainer.state_dict)


def _model_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = {}
    for part, model in enumerate(trainer.model_parts):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensors[f"{part}.{name}"] = local(tensor)
    return tensors


def _save_model(trainer: Trainer) -> State:
    return {name: host_copy(tensor) for name, tensor in _model_tensors(trainer).items()}


def _load_model(trainer: Trainer, state: State) -> None:
    for name, tensor in _model_tensors(trainer).items():
        tensor.copy_(state[name])


def _save_optimizers(trainer: Trainer) -> list[State]:
    states = []
    for optimizer in trainer.optimizers.optimizers:
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        moments = [
            {key: host_copy(value) if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
            # get() because looking up a missing entry would make it, and look like state to init_optim_state.
            for entry in (optimizer.state.get(parameter, {}) for parameter in _parameters(optimizer))
        ]
        states.append({"groups": groups, "moments": moments})
    return states


def _load_optimizers(trainer: Trainer, states: list[State]) -> None:
    for optimizer, state in zip(trainer.optimizers.optimizers, states, strict=True):
        # Tensors to load into, made anew: init_optim_state does nothing where there is a gradient or any state.
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        init_optim_state(optimizer)
        for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)
        for parameter, saved in zip(_parameters(optimizer), state["moments"], strict=True):
            if not saved:  # never used by the peer
                optimizer.state.pop(parameter, None)
                continue
            # Every value, because init_optim_state took a step, and Adam's bias correction counts it.
            entry = optimizer.state[parameter]
            for key, value in saved.items():
                if isinstance(value, torch.Tensor):
                    local(entry[key]).copy_(value)
                else:
                    entry[key] = value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters that have or will have state, in an order that is the same in every replica."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


def optimizer_tensors(trainer: Trainer) -> list[torch.Tensor]:
    """All state tensors of the inner optimizers, in a fixed order."""
    return [
        value
        for optimizer in trainer.optimizers.optimizers
        for parameter in _parameters(optimizer)
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    ]

"""Outer steps: replicas train alone and average what they have learned every ``sync_steps`` steps.

DiLoCo (https://arxiv.org/abs/2311.08105). With g the global parameters of the last outer step and p_i those of replica
i after its inner steps, each replica gives the pseudo-gradient d_i = g - p_i, and

    d = sum_i(w_i d_i) / sum_i(w_i)        one all-reduce of a flat buffer, weights at its end
    g <- outer_optimizer(g, d)             SGD, learning rate 0.7, Nesterov momentum 0.9
    p_i <- g

w_i is 1, or 0 for a replica that has just healed: its parameters are a copy of a peer's, which would count twice.
``local_sgd`` is the same with plain SGD at learning rate 1, where g - mean(g - p_i) is the mean of the parameters.

With F fragments (https://arxiv.org/abs/2501.18512) one of them takes its turn every ``sync_steps / F`` steps. The
flat buffer is float32, and so are the global parameters, which live on the parameters' device next to the momentum:
12 bytes a parameter and rank shard during an outer step, 8 between two. A step that fails leaves g as it was, and the
window's work is lost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp
from torchtitan.components.checkpointer.utils import canonical_fqn

from monarch_titan.training.replica import digest, host_copy, local, shard_like

if TYPE_CHECKING:
    from torchft import Manager

    from monarch_titan.config.sections import FaultTolerance

OUTER_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "diloco": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    "local_sgd": {"lr": 1.0},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt at an outer step ended."""

    committed: bool
    contributed: bool
    participants: int
    bytes: int
    seconds: float


class Fragment:
    """Parameters that are synchronised together, their global values and their outer optimizer.

    Args:
        parameters: (name, parameter) pairs, DTensor or not, any shape and float dtype; only local shards are used.
        outer: arguments of ``torch.optim.SGD``.
        device: where the parameters are; an empty fragment takes part in the all-reduce, too.
    """

    def __init__(self, parameters: list[tuple[str, torch.Tensor]], outer: dict[str, Any], device: torch.device) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._device = device
        self.globals = [local(parameter).to(torch.float32, copy=True) for parameter in self._parameters]
        self.optimizer = torch.optim.SGD(self.globals, **outer) if self.globals else None
        self.numel = sum(shard.numel() for shard in self.globals)
        self.contributes = True
        """False from healing until this fragment's next turn: its window is not this replica's own."""

    def pseudo_gradient(self) -> torch.Tensor:
        """Flat float32 buffer (numel + 1): the weighted pseudo-gradient of all parameters, then the weight."""
        buffer = torch.zeros(self.numel + 1, dtype=torch.float32, device=self._device)
        if self.contributes:
            for view, globals_, parameter in zip(self._views(buffer), self.globals, self._parameters, strict=True):
                torch.sub(globals_, local(parameter), out=view)
            buffer[-1] = 1.0
        return buffer

    def step(self, buffer: torch.Tensor) -> None:
        """Move the global parameters along the summed ``buffer``; nothing to learn from where all weights were 0."""
        if self.optimizer is None:
            return
        buffer[:-1] /= buffer[-1].clamp(min=1.0)
        for view, globals_ in zip(self._views(buffer), self.globals, strict=True):
            globals_.grad = view
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def restore(self) -> None:
        """Set the parameters to the global ones: the start of a new window."""
        for parameter, globals_ in zip(self._parameters, self.globals, strict=True):
            local(parameter).copy_(globals_)
        self.contributes = True

    def state_dict(self) -> dict[str, Any]:
        """Global parameters and momentum, as copies in the host's memory."""
        return {
            "globals": [host_copy(tensor) for tensor in self.globals],
            "momentum": [None if m is None else host_copy(m) for m in self.momentum()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a peer's global parameters and momentum; the running window is then no longer our own."""
        for globals_, saved, momentum in zip(self.globals, state["globals"], state["momentum"], strict=True):
            globals_.copy_(saved)
            if self.optimizer is not None:
                # TorchFT delivers in the CPU's memory.
                buffer = None if momentum is None else torch.empty_like(globals_).copy_(momentum)
                self.optimizer.state[globals_] = {} if buffer is None else {"momentum_buffer": buffer}
        self.contributes = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """Global parameters and momentum by name, laid out as the parameters; a checkpoint is loaded into them."""
        shards = {"globals": self.globals, "momentum": self.momentum()}
        return {
            f"{kind}.{name}": shard_like(parameter, shard)
            for kind, values in shards.items()
            for name, parameter, shard in zip(self._names, self._parameters, values, strict=True)
            if shard is not None
        }

    def expect_momentum(self) -> None:
        """Make room for the momentum of a fragment that has taken an outer step."""
        if self.optimizer is not None and self.optimizer.defaults["momentum"]:
            for globals_ in self.globals:
                self.optimizer.state[globals_] = {"momentum_buffer": torch.zeros_like(globals_)}

    def momentum(self) -> list[torch.Tensor | None]:
        """The outer optimizer's momentum of each parameter, None before its first step."""
        if self.optimizer is None:
            return []
        return [self.optimizer.state[tensor].get("momentum_buffer") for tensor in self.globals]

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        parts = buffer[: self.numel].split([tensor.numel() for tensor in self.globals])
        return [part.view(tensor.shape) for part, tensor in zip(parts, self.globals, strict=True)]


def split(parameters: list[tuple[str, torch.Tensor]], num_fragments: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Cut the parameters into ``num_fragments`` runs of about equal size, in model order.

    Every parameter is in exactly one fragment by construction. The cut depends on full shapes only, so it is the same
    in every replica. A fragment can be empty where a rank holds fewer parameters than there are fragments.
    """
    total = sum(parameter.numel() for _, parameter in parameters)
    fragments: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(num_fragments)]
    seen = 0
    for name, parameter in parameters:
        middle = seen + parameter.numel() / 2
        fragments[min(num_fragments - 1, int(middle * num_fragments / total))].append((name, parameter))
        seen += parameter.numel()
    return fragments


class OuterSync:
    """Takes an outer step with the peers every ``sync_steps / num_fragments`` inner steps.

    Args:
        manager: TorchFT's manager, with synchronous quorum.
        model_parts: the modules whose parameters are synchronised; tied parameters once.
    """

    def __init__(self, manager: Manager, model_parts: list[torch.nn.Module], config: FaultTolerance) -> None:
        self._manager = manager
        # named_parameters() gives a tied parameter once; pipeline stages on one rank never share any.
        parameters: list[tuple[str, torch.Tensor]] = [
            (canonical_fqn(name), parameter) for model in model_parts for name, parameter in model.named_parameters()
        ]
        outer = OUTER_OPTIMIZERS[config.semi_sync_method]
        device = parameters[0][1].device
        self.fragments = [Fragment(part, outer, device) for part in split(parameters, config.num_fragments)]
        self.interval = config.sync_steps // config.num_fragments
        """Inner steps between two outer steps, of whichever fragment."""
        self._steps = 0
        for index, fragment in enumerate(self.fragments):
            manager.register_state_dict_fn(f"outer_{index}", fragment.load_state_dict, fragment.state_dict)

    def begin_step(self) -> None:
        """Nothing: replicas are alone inside a window."""

    def end_step(self) -> Outcome | None:
        """Count an inner step; the outcome of the outer step when this was the last of its window."""
        self._steps += 1
        return self.join() if self._steps >= self.interval else None

    def join(self) -> Outcome:
        """Take an outer step with whoever is in the next quorum, now."""
        self._steps = 0
        self._manager.start_quorum()
        begin = time.monotonic()
        # After the quorum: healing changes the outer step, and with it whose turn it is.
        fragment = self.fragments[self._manager.current_step() % len(self.fragments)]
        contributed = fragment.contributes
        buffer = fragment.pseudo_gradient()
        self._manager.allreduce(buffer, reduce_op=ReduceOp.SUM).wait()
        committed = self._manager.should_commit()
        if committed:
            fragment.step(buffer)
        fragment.restore()
        return Outcome(
            committed=committed,
            contributed=contributed,
            participants=self._manager.num_participants(),
            bytes=buffer.numel() * buffer.element_size(),
            seconds=time.monotonic() - begin,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the model: where the window is, global parameters and momentum."""
        tensors = {name: tensor for fragment in self.fragments for name, tensor in fragment.tensors().items()}
        return {"steps": self._steps, "contributes": [f.contributes for f in self.fragments], **tensors}

    def expect(self, outer_step: int) -> None:
        """Have ``state_dict`` give the tensors of a checkpoint taken after so many outer steps, to be loaded into."""
        for fragment in self.fragments[:outer_step]:
            fragment.expect_momentum()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken; its tensors are loaded in place."""
        self._steps = state["steps"]
        for fragment, contributes in zip(self.fragments, state["contributes"], strict=True):
            fragment.contributes = contributes

    def digest(self) -> str:
        """Hash of the global parameters."""
        return digest(tensor for fragment in self.fragments for tensor in fragment.globals)

    def optimizer_digest(self) -> str:
        """Hash of the outer optimizer's momentum."""
        return digest(m for fragment in self.fragments for m in fragment.momentum() if m is not None)

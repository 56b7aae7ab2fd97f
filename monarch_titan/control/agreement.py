"""Whether replicas have the same state after each outer step, and which of them is wrong where they have not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from monarch_titan.control.events import ReplicaState

# Outer steps that are compared. A month of them would fill the memory.
KEPT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Replicas that have committed different states in one outer step."""

    outer_step: int
    rank: int
    right: tuple[int, ...]
    """Most of the replicas agree, these ones; empty where there is no such majority."""
    wrong: tuple[int, ...]
    """The others; all where there is no majority."""


class Agreement:
    """Compares hashes of global parameters and outer optimizers, rank by rank, as replicas report them.

    Two states of one outer step come about when a survivor alone has got the result of a broken all-reduce, when a
    replica was cut off from the lighthouse and trained on, or when hardware computes what is wrong.
    """

    def __init__(self) -> None:
        # (outer step, rank) -> replica -> hashes.
        self._states: dict[tuple[int, int], dict[int, tuple[str, str]]] = {}

    def forget(self, replica: int) -> None:
        """A replica's attempt is over. Its last outer step may have committed nowhere else: peers take that anew."""
        for states in self._states.values():
            states.pop(replica, None)

    def take(self, state: ReplicaState, voters: Collection[int]) -> Difference | None:
        """Note a replica's state after an outer step; a difference as soon as it is decided who is wrong.

        Args:
            voters: replicas that live and have a state.
        """
        states = self._states.setdefault((state.outer_step, state.rank), {})
        states[state.replica] = (state.global_parameters, state.outer_optimizer)
        self._states = {key: value for key, value in self._states.items() if key[0] > state.outer_step - KEPT}
        groups: dict[tuple[str, str], list[int]] = {}
        for replica in sorted(states):
            groups.setdefault(states[replica], []).append(replica)
        if len(groups) == 1:
            return None
        most = max(groups.values(), key=len)
        if 2 * len(most) > len(voters):
            right, wrong = most, [replica for replica in sorted(states) if replica not in most]
        elif states.keys() >= set(voters):
            right, wrong = [], sorted(states)
        else:
            return None
        return Difference(outer_step=state.outer_step, rank=state.rank, right=tuple(right), wrong=tuple(wrong))

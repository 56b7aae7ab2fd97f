"""Whether replicas have the same state after each outer step, and which of them is wrong where they have not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

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
    """Compares what replicas say of their states, rank by rank: their hashes, or by which outer steps they came about.

    Two states of one outer step come about when a survivor alone has got the result of a broken all-reduce, when a
    replica was cut off from the lighthouse and trained on, or when hardware computes what is wrong.
    """

    def __init__(self) -> None:
        # (outer step, rank) -> replica -> what it said.
        self._said: dict[tuple[int, int], dict[int, str]] = {}

    def forget(self, replica: int) -> None:
        """A replica's attempt is over. Its last outer step may have committed nowhere else: peers take that anew."""
        for said in self._said.values():
            said.pop(replica, None)

    def take(self, replica: int, rank: int, outer_step: int, state: str, voters: Collection[int]) -> Difference | None:
        """Note a replica's state after an outer step; a difference as soon as it is decided who is wrong.

        Args:
            voters: replicas that live and have a state.
        """
        said = self._said.setdefault((outer_step, rank), {})
        said[replica] = state
        self._said = {key: value for key, value in self._said.items() if key[0] > outer_step - KEPT}
        groups: dict[str, list[int]] = {}
        for each in sorted(said):
            groups.setdefault(said[each], []).append(each)
        if len(groups) == 1:
            return None
        most = max(groups.values(), key=len)
        if 2 * len(most) > len(voters):
            right, wrong = most, [each for each in sorted(said) if each not in most]
        elif said.keys() >= set(voters):
            right, wrong = [], sorted(said)
        else:
            return None
        return Difference(outer_step=outer_step, rank=rank, right=tuple(right), wrong=tuple(wrong))

"""Replicas on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.actor import HostMesh


class LocalJob:
    """The allocation of a replica that runs where the controller runs."""

    hostname = "localhost"
    """Name under which the replica's hosts reach the lighthouse and each other."""

    def hosts(self) -> HostMesh:
        """One host: this one. A new allocation is the same again."""
        from monarch.actor import this_host

        return this_host()

"""The process that runs TorchFT's quorum server."""

from __future__ import annotations

import asyncio
import os
import socket

from monarch.actor import Actor, concurrent_endpoint

from monarch_titan.config.sections import Lighthouse


class LighthouseActor(Actor):
    """Holds a ``LighthouseServer`` for as long as its process lives."""

    @concurrent_endpoint
    async def start(self, port: int, min_replicas: int, options: Lighthouse) -> int:
        """Serve on ``port`` (0: any) of all interfaces; returns the port."""
        from torchft.coordination import LighthouseServer

        self.server = LighthouseServer(
            bind=f"[::]:{port}",
            min_replicas=min_replicas,
            join_timeout_ms=options.join_timeout_ms,
            quorum_tick_ms=options.quorum_tick_ms,
            heartbeat_timeout_ms=options.heartbeat_timeout_ms,
        )
        return int(self.server.address().rpartition(":")[2])

    @concurrent_endpoint
    async def process(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()

    @concurrent_endpoint
    async def run(self) -> None:
        """Never returns: an outstanding call is how Monarch tells the caller that the process is gone."""
        await asyncio.Event().wait()

"""Run by test_forkserver.py: kills procs and clients under Monarch and writes what it saw as JSON."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from monarch_titan.actors.forkserver import ForkServer
from monarch_titan.upstream import set_monarch_environment

set_monarch_environment()
import monarch.actor  # noqa: E402
from monarch.actor import Actor, endpoint, shutdown_context, this_host  # noqa: E402

PRELOADED = "colorsys"  # a module that nobody else imports


class Sleeper(Actor):
    @endpoint
    async def about(self) -> dict:
        return {
            "pids": os.getpid(),
            "parents": os.getppid(),
            "preloaded": PRELOADED in sys.modules,
            "variable": os.environ["VARIABLE"],
        }

    @endpoint
    async def sleep(self) -> None:
        await asyncio.sleep(60)


def clients(server: ForkServer) -> list[int]:
    children = psutil.Process().children(recursive=True)
    return sorted(child.pid for child in children if child.cmdline()[:-1] == server.client_command[:-1])


async def lose(server: ForkServer, victim: str, seen: dict) -> None:
    """Kill one of two procs, or its client, in the middle of a call."""
    began = time.monotonic()
    mesh = this_host().spawn_procs({"gpus": 2}, bootstrap_command=server.bootstrap({"VARIABLE": "given"}))
    actors = mesh.spawn("sleeper", Sleeper)
    about = [answer for _, answer in await actors.about.call()]
    seen["seconds"] = time.monotonic() - began
    seen.update({key: [answer[key] for answer in about] for key in about[0]})
    call = asyncio.ensure_future(actors.sleep.call())
    await asyncio.sleep(0.5)
    killed = time.monotonic()
    os.kill(seen["pids"][1] if victim == "proc" else clients(server)[1], signal.SIGKILL)
    try:
        await asyncio.wait_for(call, 20)
        error = "none"
    except Exception as failure:  # noqa: BLE001 - the test looks at what it was
        error = type(failure).__name__
    seconds = time.monotonic() - killed
    await mesh.stop()
    deadline = time.monotonic() + 5
    while (left := psutil.Process(server.pid).children() + clients(server)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    seen[victim] = [error, seconds, [str(process) for process in left]]


async def main(output: Path) -> None:
    monarch.actor.unhandled_fault_hook = lambda failure: None  # the pending call tells
    server = ForkServer([PRELOADED])
    server.start()
    try:
        await server.ready(30)
        seen: dict = {"server": server.pid}
        for victim in ("proc", "client"):
            await lose(server, victim, seen)
        seen["pids"].append(server.pid)
    finally:
        await shutdown_context()
        server.stop()
    output.write_text(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

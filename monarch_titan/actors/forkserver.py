"""Trainer processes in a fraction of a second: one process imports TorchTitan and forks Monarch's procs on request.

Importing TorchTitan costs a process about 5 s of CPU time and 600 MB. A forked proc has the modules at once and
shares most of their memory. Three kinds of processes take part, one file each:

- the controller holds a :class:`ForkServer`, which starts the server and makes Monarch's bootstrap command;
- the server (``forkserver_main.py``) imports the modules and forks;
- a client (``forkserver_client.py``) for each proc is what Monarch starts, watches and kills in the proc's place.

Whatever the signal, none outlives the one before it: controller, server, procs. The server reads the controller's end
from a socket pair, the kernel kills procs whose server dies. A client ends as its proc does, and takes its proc along
when it is killed itself. This is for the CPU only: an accelerator's driver does not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CLIENT = Path(__file__).with_name("forkserver_client.py")
READY = b"ready"
STOP_SECONDS = 5.0


class ForkServerError(RuntimeError):
    """The fork server cannot serve; the message says why."""


class ForkServer:
    """Makes Monarch start procs by forking a process that has the modules loaded.

    Args:
        modules: what the server imports. Importing them must start no thread and must not import monarch.
        log: the file that receives what the server prints; by default it prints where the controller does.
    """

    def __init__(self, modules: Sequence[str], log: Path | None = None) -> None:
        self.modules = tuple(modules)
        self.log = log
        self._server: _Running | None = None
        self._ready = False
        self._waiting = asyncio.Lock()

    def start(self) -> None:
        """Start the server and return at once; it is ready some seconds later."""
        self.stop()
        self._server = _Running(self.modules, self.log)

    @property
    def pid(self) -> int | None:
        """The server's process id, None while it does not run."""
        return self._server.pid if self._server and self._server.exit_code is None else None

    async def ready(self, timeout: float = 120.0) -> None:
        """Return when procs can be forked; a server that died since it was last ready is started again.

        Raises:
            ForkServerError: the server could not import its modules, cannot fork after it has, or took longer than
                ``timeout`` seconds.
        """
        async with self._waiting:
            if self._server is None:
                raise ForkServerError("the fork server was not started")
            if self._ready and self.pid is None:
                logger.warning("the fork server died (exit code %s); starting it again", self._server.exit_code)
                self.start()
            if not self._ready:
                await self._server.ready(timeout)
                self._ready = True

    def bootstrap(self, env: Mapping[str, str]) -> Any:
        """The ``BootstrapCommand`` for ``spawn_procs(bootstrap_command=...)``, with ``env`` for the procs.

        Ask for it after :meth:`ready`. What a module reads from the environment at import is settled by then.
        """
        from monarch.actor import default_bootstrap_cmd

        command = default_bootstrap_cmd().with_env(dict(env))
        command.program, *command.args = self.client_command
        return command

    @property
    def client_command(self) -> list[str]:
        """The command line of a client: a proc to whoever starts it. Neither site packages nor PYTHON* reach it."""
        if self._server is None:
            raise ForkServerError("the fork server was not started")
        return [sys.executable, "-I", "-S", str(CLIENT), self._server.socket]

    async def exit_code(self, pid: int, timeout: float = 0.5) -> int | None:
        """How a forked proc ended, as ``subprocess`` puts it (-9: SIGKILL); None when it is not known in time."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._server is not None:
            if (code := self._server.ended().get(pid)) is not None:
                return code
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.02)
        return None

    def stop(self) -> None:
        """Kill the server and every proc it forked, and return when they are gone."""
        self._ready = False
        if self._server is not None:
            self._server.stop()
            self._server = None


class _Running:
    """One server process, its socket and the socket pair that tells it when the controller ends."""

    def __init__(self, modules: Sequence[str], log: Path | None) -> None:
        self.folder = tempfile.mkdtemp(prefix="monarch-titan-")  # mode 0700: who can connect can run code
        self.socket = os.path.join(self.folder, "fork")
        self.log = log
        self.lifeline, theirs = socket.socketpair()
        self.lifeline.setblocking(False)
        with theirs, open(log or os.devnull, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "monarch_titan.actors.forkserver_main", self.socket, *modules],
                stdin=theirs.fileno(),
                stdout=output if log else None,
                stderr=output if log else None,
                start_new_session=True,  # Ctrl-C reaches the procs through Monarch and their clients
            )
        self.pid = self.process.pid
        self._ended: dict[int, int] = {}
        self._unread = b""

    def ended(self) -> dict[int, int]:
        """Process id -> exit code of the procs that have ended."""
        with contextlib.suppress(BlockingIOError):
            while received := self.lifeline.recv(65536):
                self._unread += received
        *lines, self._unread = self._unread.split(b"\n")
        self._ended |= {int(pid): int(code) for pid, code in map(bytes.split, lines)}
        return self._ended

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    async def ready(self, timeout: float) -> None:
        """Return when the server has said so; raises ForkServerError otherwise."""
        try:
            async with asyncio.timeout(timeout):
                answer = await asyncio.get_running_loop().sock_recv(self.lifeline, 4096)
        except TimeoutError:
            raise ForkServerError(f"the fork server was not ready after {timeout:g} s") from None
        if answer != READY:
            cause = answer.decode() or "it died while importing its modules"
            raise ForkServerError(
                f"the fork server cannot start: {cause}" + (f" (log: {self.log})" if self.log else "")
            )

    def stop(self) -> None:
        self.lifeline.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

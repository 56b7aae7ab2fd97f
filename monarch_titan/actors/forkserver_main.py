"""The fork server's process: imports modules once, then forks a Monarch proc for each client that connects.

Started by :class:`monarch_titan.actors.forkserver.ForkServer` as ``python -m ... SOCKET MODULE...`` with one end of a
socket pair as standard input: it answers there when it is ready and sees there the controller's end.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import logging
import multiprocessing
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NoReturn, cast

from monarch_titan.actors.forkserver import READY, ForkServerError

logger = logging.getLogger(__name__)

PRELOAD_ENVIRONMENT = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator starts a thread when it is loaded
    "OMP_NUM_THREADS": "1",  # and so do the linear algebra libraries
}
REQUEST_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


@dataclass(kw_only=True, slots=True, frozen=True)
class Request:
    """What a client passes on to its proc."""

    folder: bytes
    environment: dict[bytes, bytes]
    streams: list[int]
    """File descriptors of standard input, output and error."""

    @classmethod
    def receive(cls, connection: socket.socket) -> Request:
        """Read what the client's ``send_request`` writes; raises OSError when the client dies or stalls."""
        header, streams, _, _ = socket.recv_fds(connection, 4, 3)
        try:
            folder, *variables = read_exactly(connection, int.from_bytes(header, "big")).split(b"\0")
        except OSError:
            close_all(streams)
            raise
        return cls(folder=folder, environment=dict(v.split(b"=", 1) for v in variables), streams=streams)


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes, at least one; raises ConnectionError when they do not come."""
    body = b""
    while not body or len(body) < size:
        chunk = connection.recv(size - len(body))
        if not chunk:
            raise ConnectionAbortedError("the client died before its request was complete")
        body += chunk
    return body


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@dataclass(kw_only=True, slots=True)
class Proc:
    """A forked proc and the client that stands in for it."""

    pid: int
    end: FileIO
    """Pid file descriptor, readable once the proc has ended."""
    client: socket.socket
    reaped: bool = False


class Server:
    """Forks procs and ties their lives to those of their clients, in one thread and one poll loop."""

    def __init__(self, lifeline: socket.socket, listener: socket.socket) -> None:
        self.lifeline = lifeline
        self.pid = os.getpid()
        self.orphaned = False
        self.procs: list[Proc] = []
        # Not epoll: its kernel object would be shared with the forked procs.
        self.events = selectors.PollSelector()
        self.events.register(lifeline, selectors.EVENT_READ, self._controller_ended)
        self.events.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def serve(self) -> None:
        """Fork procs until the controller ends, then kill those that are left."""
        while not self.orphaned:
            for key, _ in self.events.select():
                key.data()
        for proc in self.procs:
            os.kill(proc.pid, signal.SIGKILL)
        for proc in self.procs:
            os.waitpid(proc.pid, 0)

    def _controller_ended(self) -> None:
        self.orphaned = True

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        client.settimeout(REQUEST_SECONDS)  # a stopped client must not hold up the others
        try:
            proc = self._fork(client)
        except OSError as error:
            logger.warning("a proc was not forked: %s", error)
            client.close()
            return
        self.procs.append(proc)
        self.events.register(proc.end, selectors.EVENT_READ, partial(self._proc_ended, proc))
        self.events.register(client, selectors.EVENT_READ, partial(self._client_spoke, proc))

    def _fork(self, client: socket.socket) -> Proc:
        request = Request.receive(client)
        try:
            pid = os.fork()
            if pid == 0:
                client.close()
                become_proc(request, self)
        finally:
            close_all(request.streams)
        return Proc(pid=pid, end=FileIO(os.pidfd_open(pid)), client=client)

    def _proc_ended(self, proc: Proc) -> None:
        """Pass the proc's end on to its client."""
        _, status = os.waitpid(proc.pid, 0)
        proc.reaped = True
        self.procs.remove(proc)
        self.events.unregister(proc.end)
        proc.end.close()
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):  # the client ended first
            proc.client.send(code.to_bytes(2, "big", signed=True))
        with contextlib.suppress(OSError):  # a controller that never reads is not waited for
            self.lifeline.send(f"{proc.pid} {code}\n".encode(), socket.MSG_DONTWAIT)

    def _client_spoke(self, proc: Proc) -> None:
        """Pass signals on to the proc; a client that was killed takes the proc along."""
        try:
            signals = proc.client.recv(64)
        except ConnectionResetError:
            signals = b""
        if not signals:
            self.events.unregister(proc.client)
            proc.client.close()
        if not proc.reaped:
            for number in signals or [signal.SIGKILL]:
                os.kill(proc.pid, number)

    def close_in_fork(self) -> None:
        """Close the server's descriptors: an open copy in a proc would hide the end of another from its client."""
        for key in list(self.events.get_map().values()):
            cast(socket.socket | FileIO, key.fileobj).close()


def become_proc(request: Request, server: Server) -> NoReturn:
    """Turn a fork of the server into the proc its client asked for.

    It ends by ``os._exit``: the interpreter's orderly end would also run what the server registered for its own.
    """
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server.pid:  # else it died before the kernel knew that it matters
            server.close_in_fork()
            code = run_proc(request)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


def run_proc(request: Request) -> int:
    """The exit code of Monarch's main, run with what the client passed on."""
    from monarch_titan.upstream import monarch_bootstrap_main

    try:
        take_over(request)
        reseed()
        monarch_bootstrap_main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # as the interpreter does at the end of a main
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def take_over(request: Request) -> None:
    """Give this process the client's streams, environment, working directory and import path."""
    for target, stream in enumerate(request.streams):
        os.dup2(stream, target)
    close_all(request.streams)
    os.environb.clear()
    os.environb.update(request.environment)
    os.chdir(request.folder)
    sys.argv = ["monarch_bootstrap"]
    paths = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    # As in Monarch's own main: data loaders must not be forked from a process with Monarch's threads.
    multiprocessing.set_start_method("forkserver", force=True)


def reseed() -> None:
    """Use as many threads as the environment says, and make procs differ in their random numbers."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        torch.seed()


def preload(modules: Sequence[str]) -> None:
    """Import the modules and check that this process can be forked; raises ForkServerError."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ForkServerError(f"import of {name} failed: {error}") from error
    if "monarch" in sys.modules:
        raise ForkServerError(f"importing {', '.join(modules)} imports monarch, whose threads do not survive a fork")
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    if tasks:
        names = ", ".join((task / "comm").read_text().strip() for task in tasks)
        raise ForkServerError(f"importing {', '.join(modules)} started threads, which do not survive a fork: {names}")
    gc.collect()
    gc.freeze()  # the collector would write to, and so unshare, the memory that procs inherit


@contextlib.contextmanager
def interrupted_by_end_of(lifeline: socket.socket) -> Generator[None, None, None]:
    """Exit as soon as the other end of the socket pair is closed, although nobody reads from this one."""
    signal.signal(signal.SIGIO, lambda *_: sys.exit("the controller is gone"))
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        if select.select([lifeline], [], [], 0)[0]:  # closed before the kernel was told to say so
            sys.exit("the controller is gone")
        yield
    finally:
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def main(path: str, *modules: str) -> int:
    """Serve on a new socket at ``path`` until the controller ends, then remove the socket and its folder."""
    lifeline = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.update(PRELOAD_ENVIRONMENT)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)  # clients that come early wait
    try:
        with interrupted_by_end_of(lifeline):
            preload(modules)
        sys.stdout.flush()  # or each proc would print it again
        lifeline.send(READY)
        Server(lifeline, listener).serve()
    except ForkServerError as error:
        lifeline.send(str(error).encode())
        return 1
    finally:
        os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))
    return 0


if __name__ == "__main__":
    # Not sys.exit: taking the modules down again costs time and makes some of them complain.
    os._exit(main(*sys.argv[1:]))

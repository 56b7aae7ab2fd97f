"""Stands in for a forked proc where Monarch started and watches a process of its own.

Monarch runs this file by its path with ``python -I -S``, once for each proc. It asks the fork server for the real
proc, passes on what Monarch gave it (environment, working directory, standard streams, signals) and ends as the
proc ends: with its exit code, or by the signal that killed it. It stays small, 10 MB and 10 ms, because it imports
nothing but a few modules of the standard library; so it shares no code with the rest of the package.
"""

import os
import resource
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def run_proc(server: str) -> int:
    """The exit code of a proc forked by the server at this socket; minus the signal where one killed it."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(server)
        send_request(connection)
    except OSError as error:
        sys.exit(f"no fork server at {server}: {error.strerror}")
    for number in FORWARDED:
        signal.signal(number, lambda signum, _: connection.send(bytes([signum])))
    try:
        status = connection.recv(2)
    except ConnectionResetError:
        status = b""
    # Without a status the server is dead, and the kernel has killed its procs.
    return int.from_bytes(status, "big", signed=True) if status else -signal.SIGKILL


def send_request(connection: socket.socket) -> None:
    """Send the length of the request with the standard streams, then the working directory and the environment.

    The fields are joined by zero bytes, which neither a path nor a variable can hold.
    """
    variables = (name + b"=" + value for name, value in os.environb.items())
    request = b"\0".join([os.getcwdb(), *variables])
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(request)


def end(code: int) -> None:
    """Leave the way the proc did."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file is the proc's to leave, not ours
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    end(run_proc(sys.argv[1]))

"""The fork server with real processes: a client is a faithful stand-in for its proc, and nothing outlives its owner.

Most tests start clients themselves and give the proc a line of Python to run in place of Monarch's main; the last ones
go through Monarch.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from monarch_titan.actors.forkserver import ForkServer, ForkServerError

pytestmark = pytest.mark.integration

PROBE = """
import os, signal, sys, time
import monarch_titan.upstream as upstream
upstream.monarch_bootstrap_main = lambda: exec(os.environ["PROBE"], globals())
"""
SLEEP = "print(os.getpid(), flush=True); time.sleep(60)"


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.01)


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module for the server that makes procs run the code in their variable PROBE."""
    (tmp_path / "fork_probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fork_probe"


@pytest.fixture
def server(probe: str) -> Iterator[ForkServer]:
    server = ForkServer([probe])
    server.start()
    try:
        asyncio.run(server.ready(30))
        yield server
    finally:
        server.stop()


def client(server: ForkServer, code: str, **options) -> subprocess.Popen[str]:
    env = {**os.environ, "PROBE": code}
    pipe = subprocess.PIPE
    return subprocess.Popen(server.client_command, env=env, stdin=pipe, stdout=pipe, text=True, **options)


def sleeping_proc(server: ForkServer) -> tuple[subprocess.Popen[str], int]:
    """A client and the process id of its proc."""
    waiting = client(server, SLEEP)
    return waiting, int(waiting.stdout.readline())


@pytest.mark.parametrize(("code", "expected"), [("pass", 0), ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("1 / 0", 1)])
def test_client_exits_as_its_proc_does(server, code, expected):
    assert client(server, code).wait(10) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGPIPE])
def test_client_dies_by_the_signal_that_killed_its_proc(server, number):
    code = f"signal.signal({number:d}, 0) if {number:d} != 9 else 0; os.kill(os.getpid(), {number:d})"
    assert client(server, code).wait(10) == -number


def test_proc_has_what_its_client_was_given(server, tmp_path, monkeypatch):
    monkeypatch.setenv("GREETING", "hello\nworld")
    report = "import json; print(json.dumps([os.environ['GREETING'], os.getcwd(), sys.argv, sys.stdin.read()]))"
    out, _ = client(server, report, cwd=tmp_path).communicate("typed", timeout=10)
    assert json.loads(out) == ["hello\nworld", str(tmp_path), ["monarch_bootstrap"], "typed"]


def test_proc_does_not_see_the_servers_own_variables(server, monkeypatch):
    monkeypatch.delenv("JE_ARROW_MALLOC_CONF", raising=False)
    out, _ = client(server, "print('JE_ARROW_MALLOC_CONF' in os.environ)").communicate(timeout=10)
    assert out == "False\n"


def test_killed_client_takes_its_proc_along(server):
    waiting, pid = sleeping_proc(server)
    os.kill(pid, signal.SIGSTOP)  # even a proc that hangs
    waiting.kill()
    wait_until(lambda: not psutil.pid_exists(pid), 1.0)
    assert psutil.Process(server.pid).children() == []
    waiting.wait()


def test_client_forwards_signals(server):
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); " + SLEEP
    waiting = client(server, handler)
    waiting.stdout.readline()
    waiting.terminate()
    assert waiting.wait(10) == 7


def test_32_clients_at_once(server):
    code = "import random; print(os.getpid(), random.random())"
    began = time.monotonic()
    clients = [client(server, code) for _ in range(32)]
    lines = [each.communicate(timeout=20)[0].split() for each in clients]
    assert len({pid for pid, _ in lines}) == len({number for _, number in lines}) == 32
    assert [each.returncode for each in clients] == [0] * 32
    assert time.monotonic() - began < 10
    assert psutil.Process(server.pid).children() == []


def test_dead_server_takes_procs_and_clients_along_and_is_started_again(server):
    waiting, pid = sleeping_proc(server)
    old = server.pid
    os.kill(old, signal.SIGKILL)
    assert waiting.wait(5) == -signal.SIGKILL
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    wait_until(lambda: server.pid is None)
    assert client(server, "pass").wait(5) == 1
    asyncio.run(server.ready(30))
    assert server.pid != old
    assert client(server, "pass").wait(10) == 0


def test_stop_leaves_nothing(server):
    waiting, pid = sleeping_proc(server)
    old, folder = server.pid, Path(server.client_command[-1]).parent
    server.stop()
    assert not psutil.pid_exists(old) and not psutil.pid_exists(pid) and not folder.exists()
    assert waiting.wait(5) == -signal.SIGKILL


CONTROLLER = """
import asyncio, subprocess, sys
from monarch_titan.actors.forkserver import ForkServer
server = ForkServer([sys.argv[1]])
server.start()
print(server.pid, server.client_command[-1], flush=True)
asyncio.run(server.ready())
subprocess.run(server.client_command)
"""


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "importing"])
def test_nothing_outlives_a_killed_controller(probe, tmp_path, monkeypatch, ready):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PROBE", SLEEP)
    command = [sys.executable, "-c", CONTROLLER, probe if ready else "slow"]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid, socket = controller.stdout.readline().split()
    pids = [int(pid), int(controller.stdout.readline())] if ready else [int(pid)]
    wait_until(lambda: os.path.exists(socket))
    pids += [child.pid for child in psutil.Process(controller.pid).children()]
    controller.kill()
    controller.wait()
    wait_until(lambda: not any(running(pid) for pid in pids))
    wait_until(lambda: not os.path.exists(os.path.dirname(socket)))


def running(pid: int) -> bool:
    """Whether a process exists that is not just waiting for an indifferent parent to read its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "import of refused failed: No module named 'no_such_module'"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started threads"),
        ("import sys; sys.modules['monarch'] = sys", "imports monarch"),
        ("import os; os._exit(1)", "it died while importing"),
    ],
)
def test_module_that_cannot_be_forked_is_refused(probe, tmp_path, source, message):
    (tmp_path / "refused.py").write_text(source)
    server = ForkServer(["refused"], log=tmp_path / "fork.log")
    server.start()
    try:
        with pytest.raises(ForkServerError, match=message):
            asyncio.run(server.ready(30))
    finally:
        server.stop()


def test_ready_gives_up(probe, tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    server = ForkServer(["slow"])
    server.start()
    with pytest.raises(ForkServerError, match=r"not ready after 0\.1 s"):
        asyncio.run(server.ready(0.1))
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 3


@pytest.fixture(scope="module")
def monarch_run(tmp_path_factory) -> dict:
    """What ``forkserver_monarch.py`` saw, which runs by itself because Monarch lives as long as its process."""
    output = tmp_path_factory.mktemp("monarch") / "seen.json"
    command = [sys.executable, "-m", "tests.integration.forkserver_monarch", str(output)]
    subprocess.run(command, check=True, timeout=120)
    return json.loads(output.read_text())


def test_monarch_actors_live_in_forked_procs(monarch_run):
    assert monarch_run["parents"] == [monarch_run["server"]] * 2
    assert monarch_run["preloaded"] == [True, True] and monarch_run["variable"] == ["given", "given"]
    assert monarch_run["seconds"] < 5


@pytest.mark.parametrize("victim", ["proc", "client"])
def test_monarch_sees_a_sigkill(monarch_run, victim):
    error, seconds, left = monarch_run[victim]
    assert "SupervisionError" in error
    assert seconds < 3
    assert left == []


def test_monarch_leaves_nothing(monarch_run):
    assert not any(running(pid) for pid in monarch_run["pids"])

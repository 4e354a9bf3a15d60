"""What the launcher says of a process that starts slowly, and of a drain."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.isolated.process import outcome
from pdserve.launch import supervisor
from pdserve.launch.child import Child, StartFailed
from pdserve.launch.local import open_requests
from pdserve.launch.ports import HeldPorts, check_free, free_ports, is_free
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import ClusterSpec
from pdserve.launch.supervisor import Supervisor, drain_text

from .conftest import is_alive


def test_the_drain_says_what_it_waits_for() -> None:
    rest = "at most 70 s; a second signal ends everything at once"
    assert drain_text(0, 70.2) == f"draining: 0 requests, {rest}"
    assert drain_text(1, 70.2) == f"draining: 1 request, {rest}"
    assert drain_text(None, 70.2) == f"draining: {rest}"


async def test_a_router_that_is_gone_has_no_count() -> None:
    assert await open_requests(ClusterSpec(model="toy", port=1)) is None


def test_the_first_start_is_named_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "first start on a machine" in supervisor.slow_start(is_worker=True)
    supervisor._note_first_start()
    assert supervisor.slow_start(is_worker=True) == "still loading"
    assert supervisor.slow_start(is_worker=False) == "still starting"


# --- several processes ----------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], supervisor.SupervisedProcess]:
    def build(name: str, source: str) -> supervisor.SupervisedProcess:
        module = f"program_{name}"
        (tmp_path / f"{module}.py").write_text(source)
        path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
        return supervisor.SupervisedProcess(
            name=name, program=(module,), env=(("PYTHONPATH", path),), start_s=WAIT_S, drain_s=1.0, has_flags_file=True
        )

    return build


async def test_a_process_that_is_added_later_is_kept_until_it_is_ended(
    program: Callable[[str, str], supervisor.SupervisedProcess],
) -> None:
    started: list[str] = []
    processes = Supervisor(LauncherReport(), HeldPorts(), started.append)
    await processes.start(program("p0", WAITS))
    processes.keep()
    await processes.start(program("p1", WAITS))
    pid = processes._children["p1"].pid
    os.kill(pid, 9)
    await until(lambda: started.count("p1") == 2)
    pid = processes._children["p1"].pid
    await processes.end("p1")
    assert not is_alive(pid)
    assert started == ["p0", "p1", "p1"], "it is not started again"
    await processes.start(program("p1", WAITS))
    assert processes.drain_s("p1") == 1.0
    with pytest.raises(StartFailed):
        await processes.start(program("p2", "raise SystemExit(1)"))
    await processes.end("p2")
    await processes.release()
    await processes.stop(["p0", "p1"], is_graceful=True)
    processes.close()


async def test_a_start_that_must_succeed_is_repeated(
    program: Callable[[str, str], supervisor.SupervisedProcess], tmp_path: Path
) -> None:
    started: list[str] = []
    processes = Supervisor(LauncherReport(), HeldPorts(), started.append)
    processes.keep()
    waits_for = f"import pathlib\nassert pathlib.Path({str(tmp_path / 'ready')!r}).exists()\n"
    with pytest.raises(StartFailed):
        await processes.start(program("d0", waits_for + WAITS), is_retried=True)
    (tmp_path / "ready").touch()
    await until(lambda: started == ["d0"])
    await processes.end("d0")
    no_python = replace(program("d1", WAITS), python=str(tmp_path / "python"))
    with pytest.raises(OSError, match="python"):
        await processes.start(no_python, is_retried=True)
    (tmp_path / "python").symlink_to(sys.executable)
    await until(lambda: started == ["d0", "d1"])
    await processes.end("d1")
    processes.close()


# --- one process ----------------------------------------------------------------------------------------------
# One supervised process, with small real programs in its place.

WAIT_S = 60.0
Make = Callable[[str], Child]


async def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, lines: list[str]) -> Make:
    """A child that runs the given source as a module."""

    def build(source: str) -> Child:
        (tmp_path / "program.py").write_text(source)
        path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
        return Child("p0", ("program", "--flag=1"), {"PYTHONPATH": path}, lines.append)

    return build


LISTENS = "import sys, time; print('program p0 listening on 127.0.0.1:7', flush=True)\n"
#: In short sleeps, because Python calls no handler of a signal that came just before a sleep until that ends.
WAITS = LISTENS + "for _ in range(600):\n    time.sleep(0.1)\n"


async def test_a_start_ends_with_the_address_that_the_process_names(make: Make, lines: list[str]) -> None:
    child = make(WAITS)
    assert await child.start(WAIT_S) == "127.0.0.1:7"
    assert child.is_running
    await child.stop(1.0)
    assert not child.is_running
    assert lines == []


async def test_a_process_that_ends_early_is_a_failed_start(make: Make) -> None:
    child = make("from pdserve.core.errors import ModelError\nraise ModelError('model', '/x', 'a folder')\n")
    with pytest.raises(StartFailed, match=r"^p0 ended: model: got /x, expected a folder$"):
        await child.start(WAIT_S)


async def test_the_error_line_is_found_among_log_lines_after_it(make: Make) -> None:
    said = "router: port: got 5, expected 6\n12:00 ERROR log: failed\n12:01 INFO bye\n"
    child = make(f"import sys\nsys.stderr.write({said!r})\n")
    with pytest.raises(StartFailed, match=r"^p0 ended: port: got 5, expected 6$"):
        await child.start(WAIT_S)


async def test_a_fault_is_shown_with_its_class_rather_than_the_log_line_after_it(make: Make) -> None:
    child = make("import sys\ntry:\n    1 / 0\nfinally:\n    sys.excepthook(*sys.exc_info())\n")
    with pytest.raises(StartFailed, match="ZeroDivisionError: division by zero"):
        await child.start(WAIT_S)


async def test_what_a_library_writes_while_python_ends_hides_no_reason(make: Make) -> None:
    said = "d0: model: got Mamba, expected another\nError in sys.excepthook:\n\nOriginal exception was:\n"
    child = make(f"import sys\nsys.stderr.write({said!r})\n")
    with pytest.raises(StartFailed, match=r"ended: d0: model: got Mamba, expected another$"):
        await child.start(WAIT_S)


async def test_a_silent_process_is_ended(make: Make) -> None:
    child = make("import time; time.sleep(60)\n")
    with pytest.raises(StartFailed, match="did not listen within"):
        await child.start(0.5)
    assert not child.is_running


async def test_both_outputs_are_relayed_line_by_line(make: Make, lines: list[str]) -> None:
    child = make(LISTENS + "print('out'); sys.stderr.write('err\\n'); sys.stderr.flush(); time.sleep(60)\n")
    await child.start(WAIT_S)
    await until(lambda: sorted(lines) == ["err", "out"])
    await child.stop(0.0)


async def test_an_endless_line_does_not_stop_the_relay(make: Make, lines: list[str]) -> None:
    child = make(LISTENS + "print('x' * 300_000); print('after', flush=True); time.sleep(60)\n")
    await child.start(WAIT_S)
    await until(lambda: "after" in lines)
    await child.stop(0.0)


async def test_flags_reach_the_program(make: Make, lines: list[str]) -> None:
    child = make(LISTENS + "print(sys.argv[1:], flush=True); time.sleep(60)\n")
    await child.start(WAIT_S)
    await until(lambda: lines == ["['--flag=1']"])
    await child.stop(0.0)


async def test_a_process_that_ignores_sigterm_is_killed(make: Make) -> None:
    child = make("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS)
    await child.start(WAIT_S)
    await child.stop(0.2)
    assert outcome(await child.wait()) == "was ended by SIGKILL"


async def test_a_process_that_drains_is_not_killed(make: Make) -> None:
    child = make("import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + WAITS)
    await child.start(WAIT_S)
    await child.stop(WAIT_S)
    assert outcome(await child.wait()) == "ended with status 0"


def test_children_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WAITS)
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import asyncio\n"
        "from pdserve.launch.child import Child\n"
        "async def main():\n"
        "    child = Child('p0', ('program',), {}, print)\n"
        "    await child.start(20)\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])}
    with subprocess.Popen([sys.executable, str(launcher)], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
        process.wait(WAIT_S)
    asyncio.run(until(lambda: not is_alive(pid)))


def test_free_ports_are_different_and_below_the_ephemeral_range() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free("127.0.0.1", port) for port in ports)
    assert max(ports) < 32_768


def test_a_port_in_use_is_refused_by_name() -> None:
    import socket

    from pdserve.core.errors import ConfigError

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: got {port}"):
            check_free("port", "127.0.0.1", port)

"""The keeper of a detached cluster, with small programs in place of workers; and what a new launcher is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from pdserve.cli.background import port_of
from pdserve.cli.main import main
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.core.types import Role
from pdserve.launch.changes.plans import with_slots
from pdserve.launch.child import Child
from pdserve.launch.detached.link import KEEPER_SOCKET, Attached, DetachedCluster, KeeperLink, down, look
from pdserve.launch.detached.saved import SavedCluster, SavedLauncher
from pdserve.launch.ports import HeldPorts, free_ports, is_free
from pdserve.launch.settings import SettingsSource
from pdserve.owned_folder import OwnedFolder, sweep

from .conftest import is_alive

WAIT_S: Final = 30.0
LISTENS: Final = "import sys, time; print('program p0 listening on 127.0.0.1:7', flush=True)\n"
WAITS: Final = LISTENS + "time.sleep(600)\n"
ECHOES: Final = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGHUP, lambda *_: (sys.stderr.write('hangup\\n'), sys.stderr.flush()))\n" + WAITS
)


async def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


@pytest.fixture
def folder() -> OwnedFolder:
    return OwnedFolder.for_socket("sockets", KEEPER_SOCKET)


@pytest.fixture
async def start(folder: OwnedFolder) -> AsyncIterator[Callable[[float], Any]]:
    """Starts a keeper, which ends with the test."""
    links: list[KeeperLink] = []

    async def begin(orphan_s: float = 600.0) -> KeeperLink:
        links.append(await KeeperLink.start(folder, orphan_s, [folder]))
        return links[0]

    yield begin
    for link in links:
        if is_alive(link.parent_pid):
            os.kill(link.parent_pid, signal.SIGKILL)
        await link.close(ends=True)
    folder.remove()


def child(tmp_path: Path, source: str, link: KeeperLink, lines: list[str], name: str = "p0", **more: Any) -> Child:
    (tmp_path / f"{name}.py").write_text(source)
    path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    return Child(name, (name,), {"PYTHONPATH": path}, lines.append, spawner=link, **more)


async def attach(folder: OwnedFolder) -> tuple[KeeperLink, Attached]:
    return await KeeperLink.attach(folder.path / KEEPER_SOCKET)


# --- one launcher ---------------------------------------------------------------------------------------------


async def test_a_kept_process_is_like_a_child(start: Any, folder: OwnedFolder, tmp_path: Path) -> None:
    link, lines = await start(), list[str]()
    one = child(tmp_path, ECHOES, link, lines)
    assert await one.start(WAIT_S) == "127.0.0.1:7"
    assert one.is_running
    assert Path(f"/proc/{one.pid}/stat").read_text().split()[3] == str(link.parent_pid)
    await until(lambda: (one.signal(signal.SIGHUP), "hangup" in lines)[1])
    await one.stop(WAIT_S)
    assert (one.is_running, await one.wait()) == (False, -signal.SIGTERM)
    fails = child(tmp_path, "raise SystemExit('error: no')", link, lines, "p1")
    with pytest.raises(Exception, match="p1 ended: no"):
        await fails.start(WAIT_S)
    absent = Child("p2", ("x",), {}, lines.append, python=str(tmp_path / "python"), spawner=link)
    with pytest.raises(FileNotFoundError):
        await absent.start(WAIT_S)
    left = child(tmp_path, WAITS, link, lines, "p3")
    await left.start(WAIT_S)
    await link.close(ends=True)
    assert not is_alive(left.pid)
    assert not folder.path.exists()
    assert not is_alive(link.parent_pid)


async def test_a_killed_keeper_ends_its_processes(start: Any, tmp_path: Path) -> None:
    link, lost = await start(), asyncio.Event()
    link.on_lost = lost.set
    one = child(tmp_path, WAITS, link, [])
    await one.start(WAIT_S)
    os.kill(link.parent_pid, signal.SIGKILL)
    await asyncio.wait_for(lost.wait(), WAIT_S)
    await until(lambda: not is_alive(one.pid))
    assert not one.is_running
    with pytest.raises(OSError, match="keeper"):
        await child(tmp_path, WAITS, link, []).start(WAIT_S)


async def test_a_start_whose_launcher_dies_leaves_nothing(start: Any, folder: OwnedFolder, tmp_path: Path) -> None:
    link = await start()
    one = child(tmp_path, WAITS, link, [])
    await one.start(WAIT_S)
    await link.close(ends=False)
    await until(lambda: not folder.path.exists())
    assert not is_alive(one.pid)


# --- the next launcher ----------------------------------------------------------------------------------------


async def test_a_new_launcher_adopts_processes(start: Any, folder: OwnedFolder, tmp_path: Path) -> None:
    link, lines = await start(), list[str]()
    one = child(tmp_path, ECHOES, link, lines)
    await one.start(WAIT_S)
    ended = child(tmp_path, WAITS, link, lines, "p1")
    await ended.start(WAIT_S)
    link.save({"kept": [1, "ä"]})
    await link.close(ends=False)
    assert sweep() == [], "the folder has an owner"
    os.kill(one.pid, signal.SIGHUP)  # a line while there is no launcher
    os.kill(ended.pid, signal.SIGKILL)

    def seen() -> bool:
        return not is_alive(ended.pid)

    await until(seen)
    link, attached = await attach(folder)
    assert attached.state == {"kept": [1, "ä"]}
    assert attached.running.keys() == {"p0"}
    running = attached.running["p0"]
    assert (running.process.pid, running.address) == (one.pid, "127.0.0.1:7")
    again = Child("p0", (), {}, lines.append, spawner=link)
    again.adopt(running.process, running.address, running.start_s)
    running.process.on_line = again.take
    before = len(lines)
    again.signal(signal.SIGHUP)
    await until(lambda: len(lines) > before)
    assert set(attached.lines) <= {("p0", "hangup")}
    more = child(tmp_path, WAITS, link, lines, "p1")
    await more.start(WAIT_S)
    await again.stop(WAIT_S)
    assert await again.wait() == -signal.SIGTERM
    await link.close(ends=True)


async def test_a_launcher_that_runs_leaves_or_stays(start: Any, folder: OwnedFolder) -> None:
    link = await start()
    link.save({})
    link.on_leave = lambda: link.stays("it makes a change")
    with pytest.raises(Unavailable, match="it makes a change"):
        await attach(folder)
    assert (await look(folder.path / KEEPER_SOCKET)).launcher_pid == os.getpid()
    asked = asyncio.Event()
    link.on_leave = asked.set
    first = asyncio.create_task(attach(folder))
    await asked.wait()
    with pytest.raises(Unavailable, match="just taking over"):
        await attach(folder)
    await link.close(ends=False)
    other, _ = await first
    assert (await look(folder.path / KEEPER_SOCKET)).launcher_pid == os.getpid()
    await other.close(ends=True)


async def test_orphans_drain_in_their_order_and_end(start: Any, folder: OwnedFolder, tmp_path: Path) -> None:
    note = tmp_path / "order"
    source = (
        "import signal, sys, pathlib\n"
        f"def end(*_):\n    with open({str(note)!r}, 'a') as file:\n        file.write(__name__ and sys.argv[0])\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n" + WAITS
    )
    link = await start(0.1)
    for name, stage in (("d0", 1), ("r0", 0)):
        await child(tmp_path, source, link, [], name, stage=stage, drain_s=WAIT_S).start(WAIT_S)
    link.save({})
    await link.close(ends=False)
    await until(lambda: not folder.path.exists())
    assert [Path(one).stem for one in note.read_text().split(".py") if one] == ["r0", "d0"]


async def test_down_is_told_to_the_launcher(start: Any, folder: OwnedFolder) -> None:
    link, told = await start(), asyncio.Event()
    link.on_down = told.set
    ending = asyncio.create_task(down(folder.path / KEEPER_SOCKET))
    await told.wait()
    assert not ending.done()
    await link.close(ends=True)
    await ending


async def test_what_strangers_send_ends_only_their_connection(start: Any, folder: OwnedFolder) -> None:
    link = await start()
    for sent in (b"{\n", b"[]\n", b'{"ask": "reboot"}\n', b"x" * 100, b""):
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(str(folder.path / KEEPER_SOCKET))
            one.sendall(sent)
            one.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(one.recv, 1) == b""
    assert (await look(folder.path / KEEPER_SOCKET)).launcher_pid == os.getpid()
    assert is_alive(link.parent_pid)


async def test_ports_stay_held_without_a_launcher(start: Any, folder: OwnedFolder) -> None:
    link = await start()
    [port, released] = free_ports(2)
    held = HeldPorts()
    held.hold("port", "127.0.0.1", port)
    if port not in held.ports:
        pytest.skip("this kernel lets no server bind beside a held port")
    held.hold_with(link)
    held.hold("port", "127.0.0.1", released)
    link.save({})
    await link.close(ends=False)
    code = f"from pdserve.launch.ports import is_free; print(is_free('127.0.0.1', {port}))"
    HeldPorts.release(held)
    checked = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert checked.stdout == "False\n"
    link, attached = await attach(folder)
    assert {*attached.ports} == {port, released}
    again = HeldPorts()
    again.hold_with(link, attached.ports)
    assert {*again.ports} == {port, released}
    again.release([released])
    again.release()
    await until(lambda: is_free("127.0.0.1", port) and is_free("127.0.0.1", released))
    await link.close(ends=True)


# --- what it is told ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> SavedLauncher:
    source = SettingsSource(
        flags={"model": "toy", "decode": 2, "port": 0, "log_dir": "logs", "served_model_name": ("a", "b")},
        file=None,
        words=("worker.drain_s=3.5", "router.slo_ttft_s=7", "cluster=mine"),
        defaults={"log_level": "debug"},
    )
    monkeypatch.setenv("PDSERVE_TOKEN", "a token of some length")
    monkeypatch.setenv("PYTHONPATH", "/of/the/former")
    asked = source.read()
    spec = with_slots(replace(asked.spec, worker_ports=(7, 8, 9), port=10, launcher_socket="/x/launcher.sock"))
    overlay: Any = {"worker": {"max_batch": 8, "lora": ("a=b",), "async_scheduling": True}}
    cluster = SavedCluster(spec=spec, overlays={"p0": overlay, "d0": {}}, former={}, draining=("d1",))
    return SavedLauncher.of_this(asked, source, cluster, dict(os.environ))


def test_a_saved_launcher_is_read_back(saved: SavedLauncher) -> None:
    found = json.loads(json.dumps(saved.to_json()))
    assert SavedLauncher.from_json(found) == saved
    assert [one.role for one in saved.cluster.spec.slots] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert saved.source.read(saved.asked).spec.cluster == "mine"
    assert "PYTHONPATH" not in saved.environ, "a new launcher may have another installation"
    assert saved.environ["PDSERVE_TOKEN"] == "a token of some length"
    assert "a token" not in repr(saved)
    assert port_of(found) == 10
    assert port_of(None) is None


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"version": "99.0.0"}, "same MAJOR.MINOR"),
        ({"version": None}, "same MAJOR.MINOR"),
        ({"cluster": {"spec": {"model": "toy", "prefill": -1}}}, "prefill"),
        ({"cluster": {"spec": {"model": "toy", "unknown": 1}}}, "cannot be read"),
        ({"cluster": []}, "cannot be read"),
        ({"source": {}}, "cannot be read"),
        ({"environ": None}, "cannot be read"),
    ],
)
def test_another_state_is_refused(saved: SavedLauncher, wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SavedLauncher.from_json({**saved.to_json(), **wrong})


def test_a_cluster_that_is_starting_is_refused() -> None:
    with pytest.raises(ConfigError, match="still starting"):
        SavedLauncher.from_json(None)


def test_a_new_launcher_takes_folder_and_environment(
    saved: SavedLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"PATH": "/bin", "PYTHONPATH": "/of/the/new", "LATER": "x"}
    monkeypatch.setattr(os, "environ", environ)
    saved.restore()
    assert Path.cwd() == Path(saved.folder)
    assert environ["PYTHONPATH"] == "/of/the/new"
    assert "LATER" not in environ
    assert environ["PDSERVE_TOKEN"] == "a token of some length"


# --- which cluster --------------------------------------------------------------------------------------------


def running(monkeypatch: pytest.MonkeyPatch, *ports: int | None) -> None:
    """Clusters in the background; None: one that is still starting."""
    states = {Path(f"/{number}"): port for number, port in enumerate(ports)}

    async def look(path: Path) -> DetachedCluster:
        port = states[path]
        return DetachedCluster(path, 1, {}, None if port is None else {"cluster": {"spec": {"port": port}}})

    monkeypatch.setattr("pdserve.launch.detached.link.sockets", lambda: list(states))
    monkeypatch.setattr("pdserve.launch.detached.link.look", look)


@pytest.mark.parametrize(
    ("ports", "flags", "error"),
    [
        ((), (), "no cluster of this user runs in the background"),
        ((7, 8), (), "got nothing, expected --port with that of one of the clusters: 7, 8"),
        ((7, None), ("--port", "9"), "a cluster that was started with `up --detach`: 7, one that is still starting"),
    ],
)
@pytest.mark.parametrize("command", ["adopt", "down"])
def test_a_cluster_must_be_named(
    command: str,
    ports: tuple[int | None, ...],
    flags: tuple[str, ...],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    running(monkeypatch, *ports)
    assert main([command, *flags]) == 1
    assert error in capsys.readouterr().err


def test_the_only_cluster_needs_no_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[Path] = []

    async def end(path: Path) -> None:
        ended.append(path)

    monkeypatch.setattr("pdserve.launch.detached.link.down", end)
    running(monkeypatch, 7)
    assert main(["down"]) == 0
    running(monkeypatch, 7, 8)
    assert main(["down", "--port", "8"]) == 0
    assert ended == [Path("/0"), Path("/1")]
    assert "the cluster has ended" in capsys.readouterr().out

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
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

import pdserve.launch.serve as serve_module
from pdserve.cli.background import port_of
from pdserve.cli.main import main
from pdserve.config import LOG_LEVEL_ENV
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.core.types import Role
from pdserve.launch.changes.plans import with_slots
from pdserve.launch.child import Child
from pdserve.launch.detached.keeper import Keeper
from pdserve.launch.detached.link import KEEPER_SOCKET, Attached, DetachedCluster, KeeperLink, down, look
from pdserve.launch.detached.saved import SavedCluster, SavedLauncher
from pdserve.launch.ports import HeldPorts, free_ports, is_free
from pdserve.launch.report import LauncherReport
from pdserve.launch.settings import SettingsSource
from pdserve.owned_folder import OwnedFolder, sweep

from .conftest import is_alive

WAIT_S: Final = 60.0
LISTENS: Final = "import sys, time; print('program p0 listening on 127.0.0.1:7', flush=True)\n"
#: In short sleeps, because Python calls no handler of a signal that came just before a sleep until that ends.
WAITS: Final = LISTENS + "for _ in range(6000):\n    time.sleep(0.1)\n"
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


async def test_an_error_in_a_message_is_not_the_end_of_the_keeper(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, raised = await start(), list[str]()
    one = child(tmp_path, ECHOES, link, [])
    await one.start(WAIT_S)

    def fail(line: str, is_stdout: bool) -> None:
        raised.append(line)
        raise ValueError(line)

    [process] = link._processes.values()
    process.on_line = fail
    await until(lambda: (one.signal(signal.SIGHUP), bool(raised))[1])
    await one.stop(WAIT_S)
    assert "a message of the keeper has failed: line" in caplog.text


async def test_a_lost_connection_ends_the_keeper(start: Any, folder: OwnedFolder, tmp_path: Path) -> None:
    link, lost = await start(), asyncio.Event()
    link.on_lost = lost.set
    one = child(tmp_path, WAITS, link, [])
    await one.start(WAIT_S)
    link._reader.feed_data(b"no JSON\n")
    await asyncio.wait_for(lost.wait(), WAIT_S)
    await until(lambda: not is_alive(one.pid) and not folder.path.exists())


async def test_a_keeper_without_a_first_launcher_ends(folder: OwnedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(600.0)
    keeper.expect_launcher(0.0)
    await asyncio.wait_for(keeper.has_ended.wait(), WAIT_S)
    made, popen = list[subprocess.Popen[bytes]](), subprocess.Popen

    def make(*args: Any, **more: Any) -> subprocess.Popen[bytes]:
        made.append(popen(*args, **more))
        return made[0]

    async def fail(path: Path) -> None:
        raise Unavailable("it does not answer")

    monkeypatch.setattr(subprocess, "Popen", make)
    monkeypatch.setattr(KeeperLink, "attach", fail)
    with pytest.raises(Unavailable):
        await KeeperLink.start(folder, 600.0, [folder])
    assert made[0].returncode == -signal.SIGKILL
    folder.remove()


async def test_lines_that_wait_are_bounded_also_if_they_are_empty() -> None:
    keeper, kept = Keeper(600.0), SimpleNamespace(name="p0", address="127.0.0.1:7")
    for _ in range(40_000):
        keeper._line(cast(Any, kept), "", is_stdout=False)
    assert len(keeper._waiting) == (1 << 20) // 64


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
    async with asyncio.timeout(WAIT_S):
        while "p1" in (await look(folder.path / KEEPER_SOCKET)).pids:
            await asyncio.sleep(0.01)
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
    link.on_leave = lambda: "it makes a change"
    with pytest.raises(Unavailable, match="it makes a change"):
        await attach(folder)
    assert (await look(folder.path / KEEPER_SOCKET)).launcher_pid == os.getpid()
    asked = asyncio.Event()
    link.on_leave, link.on_go = str, asked.set
    first = asyncio.create_task(attach(folder))
    await asked.wait()
    with pytest.raises(Unavailable, match="just taking over"):
        await attach(folder)
    await link.close(ends=False)
    other, _ = await first
    assert (await look(folder.path / KEEPER_SOCKET)).launcher_pid == os.getpid()
    await other.close(ends=True)


async def test_a_launcher_stays_if_its_successor_gives_up(start: Any, folder: OwnedFolder) -> None:
    link, asked, gone = await start(), list[dict[str, Any]](), list[int]()
    link.save({})
    take = link._take
    link._take, link.on_leave, link.on_go = asked.append, str, lambda: gone.append(1)
    first = asyncio.create_task(attach(folder))
    await until(lambda: bool(asked))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(attach(folder))

    def is_second() -> bool:
        nonlocal second
        if second.done():  # the keeper has not noticed yet that the first one has gone
            assert "just taking over" in str(second.exception())
            second = asyncio.create_task(attach(folder))
        return len(asked) == 2

    await until(is_second)
    link._take = take
    take(asked[0])  # late, as after SIGCONT
    with pytest.raises(FileNotFoundError):  # this answer is behind the one to what was said late
        await Child("p2", ("x",), {}, lambda line: None, python=str(folder.path / "no"), spawner=link).start(WAIT_S)
    assert not gone
    take(asked[1])
    await until(lambda: bool(gone))
    await link.close(ends=False)
    other, _ = await second
    await other.close(ends=True)


async def test_a_successor_that_has_given_up_is_not_attached() -> None:
    keeper, reader, sent = Keeper(600.0), asyncio.StreamReader(), Unsent()
    keeper._state = {}
    keeper._orphaned = asyncio.get_running_loop().call_later(600.0, keeper.down)
    reader.feed_eof()
    await keeper._attach(1, reader, cast(Any, sent))
    assert sent.count == 0
    assert not keeper._orphaned.cancelled()
    keeper._orphaned.cancel()


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
    link.set_on_down(told.set)
    ending = asyncio.create_task(down(folder.path / KEEPER_SOCKET))
    await told.wait()
    assert not ending.done()
    await link.close(ends=True)
    await ending


async def test_down_is_not_forgotten(start: Any, folder: OwnedFolder, tmp_path: Path) -> None:
    """Its command has been interrupted, and the launcher dies before it has ended the cluster."""
    link, told = await start(), list[str]()
    one = child(tmp_path, WAITS, link, [])
    await one.start(WAIT_S)
    ending = asyncio.create_task(down(folder.path / KEEPER_SOCKET))
    await until(lambda: link._is_down)
    link.set_on_down(lambda: told.append("later"))
    assert told == ["later"]
    link.save({})
    await until(lambda: told == ["later"] * 2)
    ending.cancel()
    with pytest.raises(Unavailable, match="is ending"):
        await attach(folder)
    await link.close(ends=False)
    await until(lambda: not folder.path.exists())
    assert not is_alive(one.pid)


async def test_interrupted_commands_leave_room_for_others(start: Any, folder: OwnedFolder) -> None:
    await start()
    for _ in range(40):
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(str(folder.path / KEEPER_SOCKET))
            one.sendall(b'{"ask": "down"}\n')
            one.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(one.recv, 1) == b""
    assert (await look(folder.path / KEEPER_SOCKET)).launcher_pid == os.getpid()


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


# --- a launcher that adopts -----------------------------------------------------------------------------------


class AdoptedCluster:
    """What `_Serving.run` calls."""

    def __init__(self, saved: SavedLauncher, folder: Path) -> None:
        self.spec, self._saved, self.folder = saved.cluster.spec, saved.cluster, folder
        self.has_own_redis, self.running_change = True, ""
        self.on_change: Callable[[], None] = lambda: None
        reader = asyncio.StreamReader()
        self.link: Any = KeeperLink(reader, cast(Any, Unsent()))
        self.did: list[str] = []

    def saved(self) -> SavedCluster:
        return self._saved

    async def adopt(self) -> str:
        return "127.0.0.1:7"

    async def run(self, stop: asyncio.Event) -> None:
        self.did.append("run")
        await stop.wait()

    async def leave(self) -> None:
        self.did.append("leave")

    async def stop(self, *, is_graceful: bool) -> None:
        self.did.append("stop" if is_graceful else "kill")


class Unsent:
    count = 0

    def write(self, data: bytes) -> None:
        self.count += 1


@pytest.fixture
def serving(saved: SavedLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    async def nothing_missing(spec: Any, *, has_own_redis: bool) -> list[str]:
        return []

    monkeypatch.setattr(serve_module, "degradations", nothing_missing)
    monkeypatch.setattr(LauncherReport, "to_background", lambda self, path: None)
    return lambda: serve_module._Serving(replace(saved.asked, log_dir=tmp_path), saved.source)


async def adopts(serving: Any, cluster: AdoptedCluster) -> int:
    async with asyncio.timeout(WAIT_S):
        return cast(int, await serving.run(cast(Any, cluster), cluster.adopt, adopts=True))


async def test_a_launcher_that_fails_after_it_has_adopted_leaves(
    serving: Any, saved: SavedLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(self: LauncherReport, path: Path) -> None:
        raise ConfigError("log_dir", str(path), "one that can be written")

    monkeypatch.setattr(LauncherReport, "to_background", fail)
    cluster = AdoptedCluster(saved, tmp_path)
    with pytest.raises(ConfigError, match="log_dir"):
        await adopts(serving(), cluster)
    assert cluster.did == ["leave"]
    assert serve_module.NO_LAUNCHER in capsys.readouterr().err


async def test_a_launcher_goes_on_if_nobody_reads_that_it_is_ready(
    serving: Any, saved: SavedLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    cluster = AdoptedCluster(saved, tmp_path)
    monkeypatch.setattr(sys, "stdout", Broken())
    one = serving()
    running = asyncio.create_task(adopts(one, cluster))
    await until(lambda: bool(cluster.did))
    one.down()
    assert await running == 0
    assert cluster.did == ["run", "stop"]


@pytest.mark.parametrize(("is_down", "did"), [(False, ["leave"]), (True, ["run", "stop"])])
async def test_an_interrupted_adoption_leaves_the_cluster(
    serving: Any, saved: SavedLauncher, tmp_path: Path, is_down: bool, did: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, cluster = serving(), AdoptedCluster(saved, tmp_path)

    async def interrupt(spec: Any, *, has_own_redis: bool) -> list[str]:
        one.down() if is_down else one._stop.set()
        return []

    monkeypatch.setattr(serve_module, "degradations", interrupt)
    await adopts(one, cluster)
    assert cluster.did == did


async def test_a_launcher_that_cannot_be_replaced_here_stays(
    start: Any, folder: OwnedFolder, saved: SavedLauncher, tmp_path: Path
) -> None:
    link, asked = await start(), list[int]()
    link.on_leave = lambda: (asked.append(1), "")[1]
    link.save(replace(saved, folder=str(tmp_path / "deleted")).to_json())
    with pytest.raises(ConfigError, match="folder"):
        await serve_module.take_over(folder.path / KEEPER_SOCKET)
    assert not asked


async def test_a_launcher_says_that_the_cluster_has_none(
    start: Any, folder: OwnedFolder, saved: SavedLauncher, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("metrics", "1", "a free port")

    monkeypatch.setattr(SavedLauncher, "restore", lambda self: None)
    monkeypatch.setenv(LOG_LEVEL_ENV, "info")
    monkeypatch.setattr(serve_module, "_cluster", fail)
    link, left = await start(), list[asyncio.Task[None]]()
    link.on_leave, link.on_go = str, lambda: left.append(asyncio.create_task(link.close(ends=False)))
    link.save(saved.to_json())
    with pytest.raises(ConfigError, match="metrics"):
        await serve_module.take_over(folder.path / KEEPER_SOCKET)
    assert serve_module.NO_LAUNCHER in capsys.readouterr().err
    again, _ = await attach(folder)
    await again.close(ends=True)


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

"""Work in a child process ends at its limits, and the process tells how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdserve.isolated.child import CRASHED, LATE, SIZE, TOO_LARGE, TOO_LONG, pack, unpack
from pdserve.isolated.process import BlockingChild, ChildEnded

PROGRAM = """
import os, sys, time
from pdserve.isolated import child

def answer(asked):
    if asked["do"] == "spin":
        while True: pass
    if asked["do"] == "fill":
        return {"size": len("x" * asked["size"])}
    if asked["do"] == "sleep":
        time.sleep(60)
    if asked["do"] == "raise":
        raise ValueError
    if asked["do"] == "look":
        return {"environment": dict(os.environ), "files": os.listdir("/proc/self/fd")}
    return {"echo": asked["do"], "pid": os.getpid()}

child.send({"failed": None, "load": child.begin()})
child.serve(answer, 2**27, is_reused=IS_REUSED)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "reused_child.py").write_text(PROGRAM.replace("IS_REUSED", "True"))
    (tmp_path / "single_child.py").write_text(PROGRAM.replace("IS_REUSED", "False"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[3]}")
    return "reused_child"


def asked(do: str, cpu_s: float = 30.0, wall_s: float = 60.0, **more: int) -> dict[str, object]:
    return {"do": do, "cpu_s": cpu_s, "wall_s": wall_s, "more_bytes": 0, **more}


def wait_until_ended(group: int) -> None:
    """Ended processes stay until their new parent, a process of the host, has read their status."""
    ends_s = time.monotonic() + 60
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < ends_s, "a forked process is left"
        time.sleep(0.01)


def test_each_limit_ends_the_work_and_the_next_message_is_answered(module: str) -> None:
    answers = BlockingChild(module).ask_all(
        {"a": "ü\ud800"},
        asked("one"),
        asked("spin", cpu_s=0.05),
        asked("sleep", wall_s=0.05),
        asked("fill", size=2**26),
        asked("fill", size=2**28),
        asked("fill", size=2**28, more_bytes=2**28),
        asked("raise"),
        asked("two"),
    )
    first, one, *ends, two = answers
    assert first == {"failed": None, "load": {"a": "ü\ud800"}}
    assert ends == [
        {"ended": TOO_LONG},
        {"ended": LATE},
        {"size": 2**26},
        {"ended": TOO_LARGE},
        {"size": 2**28},
        {"ended": CRASHED},
    ]
    assert (one["echo"], two["echo"]) == ("one", "two")
    assert one["pid"] != two["pid"]


def test_bytes_of_a_message_are_carried_as_they_are() -> None:
    message = {"a": b"", "ids": bytes(range(256)), "text": "ü\ud800", "more": [1, None, {"b": 2.5}]}
    packed = pack(message)
    size = SIZE.unpack_from(packed)[0]
    assert len(packed) == SIZE.size + size
    assert message["ids"] in packed
    assert unpack(packed[SIZE.size :]) == message
    for cut in range(size):
        with pytest.raises(ValueError):
            unpack(packed[SIZE.size : SIZE.size + cut])


def test_a_lower_limit_of_the_host_is_kept(module: str) -> None:
    """As `ulimit -v` or a service manager sets it."""
    limit = 2**31
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
    code += "from pdserve.isolated.child import Limits, limit_loading, limit_memory\n"
    code += f"limit_loading(Limits(9.0, 9.0, {2 * limit})); limit_memory({2 * limit})\n"
    code += "print(resource.getrlimit(resource.RLIMIT_AS)[0])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(shown) == limit


def test_a_process_is_reused_only_if_asked_for(module: str) -> None:
    for name, num_processes in ((module, 1), ("single_child", 3)):
        answers = BlockingChild(name).ask_all({}, asked("a"), asked("b"), asked("c"))[1:]
        assert len({one["pid"] for one in answers}) == num_processes


def test_no_secret_and_no_file_is_inherited(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TOKEN", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        look = BlockingChild(module).ask_all({}, asked("look"))[1]
    finally:
        os.close(reader)
        os.close(writer)
    assert "secret" not in look["environment"].values()
    assert len(look["files"]) == 4  # the standard ones, and the folder that is listed


def test_a_child_that_hangs_is_ended_with_what_it_has_forked(module: str) -> None:
    child = BlockingChild(module)
    with pytest.raises(ChildEnded):
        child.ask_all({}, asked("spin"), limit_s=1.0)
    wait_until_ended(child.pid)


def test_forked_processes_end_with_their_parent(module: str) -> None:
    child = BlockingChild(module)
    os.kill(child.pid, signal.SIGKILL)
    child.end()
    wait_until_ended(child.pid)

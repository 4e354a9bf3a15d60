"""Two ranks of vLLM's worker: what they listen for, and how a step ends if one is gone."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pdserve.core.errors import InternalError, ModelError
from pdserve.core.types import Sampling
from pdserve.engine.interface import Row
from tests.models.conftest import open_vllm

GREEDY: Final = Sampling(temperature=0.0, max_tokens=32)


@pytest.fixture
def pair(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine of two ranks, where gloo's own settings name another interface."""
    for _, interface in socket.if_nameindex():
        if interface != "lo" and is_up(interface):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    opened = open_vllm(tiny("llama"), tensor_parallel=2, stall_s=10.0)
    yield opened
    opened.close()


def is_up(interface: str) -> bool:
    return "up" in Path(f"/sys/class/net/{interface}/operstate").read_text()


def test_ranks_listen_on_loopback_only(pair: Any) -> None:
    pids = [os.getpid(), pair._followers[0].pid]
    found = [listening(pid) for pid in pids]
    assert all(found), "gloo listens"
    assert {address for each in found for address in each} == {"0100007F"}  # 127.0.0.1


def listening(pid: int) -> list[str]:
    """The addresses on which the process accepts connections, in hexadecimal numbers."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except FileNotFoundError:
            continue  # closed meanwhile
    tables = (Path(f"/proc/{pid}/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()]
    return [words[1].rpartition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in sockets]


def row_of(tokens: list[int]) -> Row:
    return Row(tokens=tokens, start=0, blocks=[0], sample=GREEDY, history=tokens, prompt_len=len(tokens))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_rank_fails_the_step(pair: Any, how: signal.Signals) -> None:
    assert len(pair.step([row_of([5, 6, 7])])[0].sampled) == 1
    with pytest.raises(InternalError, match="outside the pool"):
        pair.step([Row(tokens=[5], start=0, blocks=[10**6])])
    assert len(pair.step([row_of([5, 6, 7])])[0].sampled) == 1, "a row that is refused reaches no rank"
    follower = pair._followers[0].pid
    os.kill(follower, how)
    try:
        began_s = time.monotonic()
        with pytest.raises(RuntimeError):
            pair.step([row_of([5, 6, 7])])
        assert time.monotonic() - began_s < 60.0
        with pytest.raises(InternalError, match="failed before"):
            pair.step([row_of([5, 6, 7])])
    finally:
        os.kill(follower, signal.SIGKILL)


def test_heads_that_cannot_be_divided_are_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="attention heads"):
        open_vllm(tiny("llama"), tensor_parallel=3)

"""Ranks find each other and agree on a number, over gloo between two threads."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, Unauthenticated
from pdserve.engine.model import collectives
from pdserve.engine.model.collectives import Ranks, make_store, memory_file, private_store
from pdserve.engine.model.parameters import Shard
from pdserve.engine.ranks import leader as parallel

Result = TypeVar("Result")
BUNDLED = Path(__file__).parents[3] / "pdserve/models/stdlib-5m"


@pytest.fixture
def store() -> Iterator[int]:
    descriptor = memory_file()
    yield descriptor
    os.close(descriptor)


def of_two(store: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """What the work of each rank returns."""

    def join(rank: int) -> Result:
        found = private_store(store, 2, timeout_s=20.0)
        return work(Ranks(Shard(rank, 2), found, torch.device("cpu"), 20.0))

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(join, (0, 1), timeout=60.0))


@pytest.mark.parametrize("numbers", [(7, 3), (3, 7), (2**40, 2**40 + 1)])
def test_ranks_agree_on_the_minimum(store: int, numbers: tuple[int, int]) -> None:
    assert of_two(store, lambda one: one.minimum(numbers[one.shard.rank])) == [min(numbers)] * 2


def test_closed_groups_leave_no_thread(store: int) -> None:
    """A thread of theirs that lives when the interpreter ends can abort the process."""
    before = gloo_threads()
    both = of_two(store, lambda one: one)
    assert gloo_threads() - before
    for one in both:
        one.close()
    assert not gloo_threads() - before


def gloo_threads() -> set[str]:
    """The ids of this process's threads that gloo has started."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ends meanwhile
            if "gloo" in (task / "comm").read_text():
                found.add(task.name)
    return found


def test_a_process_that_cannot_read_the_store_is_no_rank(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo accepts whatever connects to a port of a rank. Without a rendezvous, ranks have no other secret."""
    monkeypatch.setattr(collectives, "_session", lambda store, shard: b"what this side has read: %032d" % shard.rank)
    with pytest.raises(Unauthenticated, match="does not know the secret of the ranks"):
        of_two(store, lambda one: one)


def test_the_ranks_of_one_host_meet_in_a_memory_file(
    open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a port, another user could change what ranks read, or answer in place of a leader that has crashed."""
    stores: list[str] = []

    def start(config: WorkerConfig, rank: int, store: int, *_: Any) -> None:
        stores.append(os.readlink(f"/proc/self/fd/{store}"))
        raise ConfigError("tensor_parallel", "a test", "no process")

    monkeypatch.setattr(parallel, "Follower", start)
    with pytest.raises(ConfigError, match="expected no process"):
        open_engine(BUNDLED, tensor_parallel=2)
    assert stores == ["/memfd:pdserve-ranks (deleted)"]


def test_the_store_listens_on_loopback_only() -> None:
    """The store requires no proof. 127.0.0.2 stands for another address of the host."""
    leader = make_store(0, 2, is_leader=True, timeout_s=20.0)
    make_store(leader.port, 2, is_leader=False, timeout_s=20.0).set("key", "value")
    assert leader.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", leader.port), timeout=5.0)

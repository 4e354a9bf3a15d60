"""Ranks find each other and agree on a number, over gloo between two threads."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pdserve.engine.ranks import Ranks, make_store
from pdserve.engine.sharding import Shard


@pytest.mark.parametrize("numbers", [(7, 3), (3, 7), (2**40, 2**40 + 1)])
def test_ranks_agree_on_the_minimum(numbers: tuple[int, int]) -> None:
    leader = make_store(0, 2, is_leader=True, timeout_s=20.0)

    def agree(rank: int) -> int:
        store = make_store(leader.port, 2, is_leader=False, timeout_s=20.0) if rank else leader
        return Ranks(Shard(rank, 2), store, torch.device("cpu"), 20.0).minimum(numbers[rank])

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(agree, (0, 1), timeout=60.0)) == [min(numbers)] * 2


def test_closed_groups_leave_no_thread() -> None:
    """A thread of theirs that lives when the interpreter ends can abort the process."""
    leader = make_store(0, 2, is_leader=True, timeout_s=20.0)
    before = gloo_threads()

    def join(rank: int) -> Ranks:
        store = make_store(leader.port, 2, is_leader=False, timeout_s=20.0) if rank else leader
        return Ranks(Shard(rank, 2), store, torch.device("cpu"), 20.0)

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(join, (0, 1), timeout=60.0))
    assert gloo_threads() - before
    for ranks in both:
        ranks.close()
    assert not gloo_threads() - before


def gloo_threads() -> set[str]:
    """The ids of this process's threads that gloo has started."""
    tasks = Path("/proc/self/task").iterdir()
    return {task.name for task in tasks if "gloo" in (task / "comm").read_text()}


def test_the_store_listens_on_loopback_only() -> None:
    """The store requires no proof. 127.0.0.2 stands for another address of the host."""
    leader = make_store(0, 2, is_leader=True, timeout_s=20.0)
    make_store(leader.port, 2, is_leader=False, timeout_s=20.0).set("key", "value")
    assert leader.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", leader.port), timeout=5.0)

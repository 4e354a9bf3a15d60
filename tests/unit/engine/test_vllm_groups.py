"""The process groups that vLLM would make, between this process and another one, without vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pdserve.core.errors import Unauthenticated
from pdserve.engine.model.collectives import Ranks, memory_file, private_store
from pdserve.engine.model.parameters import Shard
from pdserve.engine.vllm.groups import Place, groups_of

WAIT_S = 60.0
OTHER = "from tests.unit.engine.test_vllm_groups import take_part; take_part({place})"


def place_of(descriptor: int, rank: int) -> tuple[Place, Ranks]:
    store, shard = private_store(descriptor, 2, timeout_s=WAIT_S), Shard(rank, 2)
    ranks = Ranks(shard, store, torch.device("cpu"), WAIT_S)
    return Place(shard, store, ranks), ranks


def take_part(descriptor: int) -> None:
    """The other process. Its second group does not know what the ranks have read."""
    place, ranks = place_of(descriptor, 1)
    with groups_of(place, "gloo", WAIT_S) as method:
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1], backend="gloo"))
        ranks._session = b"what another has read"
        print(method, flush=True)
        try:
            dist.new_group([0, 1], backend="gloo")
        except Unauthenticated:
            sys.stdin.read()  # until the first process has seen it, too
            sys.exit(7)


def test_groups_listen_on_loopback_and_prove_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo would listen where the host's name or its own variable say, and accept any process that connects first."""
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[0] if others else "none")
    descriptor, make_group = memory_file(), dist.new_group
    command = [sys.executable, "-c", OTHER.format(place=descriptor)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, pass_fds=[descriptor]) as other:
        place, _ = place_of(descriptor, 0)
        try:
            with groups_of(place, "gloo", WAIT_S) as method:
                total = torch.ones(1)
                dist.all_reduce(total, group=dist.new_group([0, 1], backend="gloo"))
                assert total.item() == 2
                assert {address.removeprefix("::ffff:") for address, _ in listening()} == {"127.0.0.1"}
                assert other.stdin is not None
                assert other.stdout is not None
                assert (method, other.stdout.readline().strip()) == ("rank:0", "rank:1"), "no shared memory of vLLM's"
                with pytest.raises(Unauthenticated, match="does not know the secret of the ranks"):
                    dist.new_group([0, 1], backend="gloo")
            assert dist.new_group is make_group
            other.stdin.close()
            assert other.wait(WAIT_S) == 7
        finally:
            other.kill()
            dist.destroy_process_group()


def listening() -> list[tuple[str, int]]:
    """The addresses at which this process accepts connections."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_socket():
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family != socket.AF_UNIX and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.append(one.getsockname()[:2])
    return found

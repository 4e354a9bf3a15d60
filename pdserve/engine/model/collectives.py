"""Communication between tensor-parallel ranks: reductions and gathers of tensors in a step, and orders between steps.

Orders are numbers over gloo on the CPU, without pickle. Tensors on GPUs use NCCL, others gloo. Every rank makes the
same calls in the same order; if one fails, all fail.
"""

# Shapes: T tokens, V vocabulary, W widest part of it.

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.access.proof import MAC_BYTES, NONCE_BYTES, ClusterSecret
from pdserve.core.errors import ConfigError, Unauthenticated
from pdserve.engine.model.parameters import Shard

LOOPBACK: Final = "127.0.0.1"
_FIRST_WORDS: Final = 4096  # numbers of an order in one message; 32 KiB
_dist: Any = torch.distributed  # its groups and stores are made in C++, and its stubs leave them out
_FOREVER: Final = timedelta(days=365)  # an idle rank waits for orders; it ends with its leader


def memory_file() -> int:
    """A descriptor for `private_store`. It is never closed, because NCCL's threads use the store until the process
    ends. Raises ConfigError on a system without memory files."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("tensor_parallel", "ranks", "1 on a system without memory files (memfd)")
    return os.memfd_create("pdserve-ranks")


def private_store(descriptor: int, size: int, *, timeout_s: float) -> Any:
    """The store at which the ranks of one host find each other, in a memory file. Only the leader and the processes
    that inherit the descriptor can open it, and nothing listens."""
    store = _dist.FileStore(f"/proc/self/fd/{descriptor}", size)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def make_store(port: int, size: int, *, is_leader: bool, timeout_s: float) -> Any:
    """The store at which ranks of several hosts find each other, on a free port of the leader. Raises RuntimeError.

    torch's store does not authenticate callers and would listen on every address of the host, so the leader passes it a
    socket that listens on the loopback.
    """
    timeout = timedelta(seconds=timeout_s)
    if not is_leader:
        return _dist.TCPStore(LOOPBACK, port, size, False, timeout, wait_for_workers=False)
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return _dist.TCPStore(
        LOOPBACK, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@final
class Ranks:
    """One rank's end of all groups. Raises RuntimeError if another rank is gone, or silent for `timeout_s`."""

    def __init__(
        self,
        shard: Shard,
        store: Any,
        device: torch.device,
        timeout_s: float,
        host: str = LOOPBACK,
        secret: ClusterSecret | None = None,
    ) -> None:
        """`host`: an address of this host that the others can reach. Each pair of ranks proves that both know `secret`,
        because gloo accepts any process that connects first. Without one, the store is private, and they prove that
        both have read it. Raises Unauthenticated."""
        self.shard = shard
        self._secret = secret
        self._has_nccl = device.type == "cuda"
        self._timeout = timeout = timedelta(seconds=timeout_s)
        self._orders: Any = _gloo(_dist.PrefixStore("orders", store), shard, _FOREVER, host)
        groups = {"orders": self._orders}
        self._tensors: Any
        if self._has_nccl:
            self._tensors = _nccl(_dist.PrefixStore("tensors", store), shard, timeout)
        else:
            self._tensors = groups["tensors"] = _gloo(_dist.PrefixStore("tensors", store), shard, timeout, host)
        self._session = _session(store, shard)
        for name, group in groups.items():
            self.prove(name, group)

    def prove(self, name: str, group: Any) -> None:
        """Raises Unauthenticated if a foreign process has taken the place of a rank in this gloo group of all ranks,
        and RuntimeError if the group fails. Every rank calls it, with the same name."""
        secret = self._secret or ClusterSecret(self._session.decode())
        _prove(group, self.shard, secret, (name, self._session), self._timeout)

    def sum(self, x: Tensor) -> Tensor:
        """Replaces the tensor by the sum over all ranks."""
        x = x.contiguous()
        self._tensors.allreduce([x]).wait()
        return x

    def concat_columns(self, x_TW: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenates the columns of all ranks: [T, sum of widths]; rank r has widths[r] of them."""
        widest = max(widths)
        mine = F.pad(x_TW, (0, widest - x_TW.shape[1])) if x_TW.shape[1] < widest else x_TW.contiguous()
        parts = [torch.empty_like(mine) for _ in widths]
        self._tensors.allgather([parts], [mine]).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, x: Tensor) -> None:
        """Replaces the tensor by the leader's."""
        self._tensors.broadcast([x], _from_leader()).wait()

    def minimum(self, count: int) -> int:
        """The minimum over all ranks."""
        one = torch.tensor([count], dtype=torch.int64)
        options = _dist.AllreduceOptions()
        options.reduceOp = _dist.ReduceOp.MIN
        self._orders.allreduce([one], options).wait()
        return int(one[0])

    def send_order(self, words: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Sends the leader's order, 64-bit numbers, to all other ranks.

        Without a time limit it could wait for ever for a rank that has died or does not read."""
        order = torch.zeros(_FIRST_WORDS, dtype=torch.int64)
        body = torch.from_numpy(np.asarray(words, np.int64))
        order[0] = len(words)
        order[1 : 1 + len(words)] = body[: _FIRST_WORDS - 1]
        self._broadcast_order(order, self._timeout)
        if len(words) >= _FIRST_WORDS:
            self._broadcast_order(body[_FIRST_WORDS - 1 :].clone(), self._timeout)

    def receive_order(self) -> list[int]:
        """Waits for the next order without a time limit."""
        order = torch.empty(_FIRST_WORDS, dtype=torch.int64)
        self._broadcast_order(order)
        num_words = int(order[0])
        words: list[int] = order[1 : 1 + num_words].tolist()
        if num_words >= _FIRST_WORDS:
            rest = torch.empty(num_words - (_FIRST_WORDS - 1), dtype=torch.int64)
            self._broadcast_order(rest)
            words += rest.tolist()
        return words

    def close(self) -> None:
        """Ends gloo's threads; call it when all ranks are about to end. If they still ran when the interpreter ends,
        Python would end them inside of C++ code that allows no exception, and the process would abort."""
        self._orders = None
        if not self._has_nccl:  # graphs may still hold NCCL's communicators
            self._tensors = None

    def _broadcast_order(self, x: Tensor, timeout: timedelta = _FOREVER) -> None:
        self._orders.broadcast([x], _from_leader(timeout)).wait()


def _from_leader(timeout: timedelta | None = None) -> Any:
    """`timeout` None: the group's."""
    options = _dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    if timeout is not None:
        options.timeout = timeout
    return options


def _gloo(store: Any, shard: Shard, timeout: timedelta, host: str) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return _dist.ProcessGroupGloo(store, shard.rank, shard.size, options)


def _nccl(store: Any, shard: Shard, timeout: timedelta) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)


def _session(store: Any, shard: Shard) -> bytes:
    """The same random bytes on every rank, new for each start of the worker."""
    if shard.rank == 0:
        store.set("session", secrets.token_hex(NONCE_BYTES))
    found: bytes = store.get("session")
    return found


def _prove(group: Any, shard: Shard, secret: ClusterSecret, about: tuple[str, bytes], timeout: timedelta) -> None:
    """Raises Unauthenticated if a foreign process has taken the place of a rank, and RuntimeError if the group
    fails."""
    others = [rank for rank in range(shard.size) if rank != shard.rank]
    heard = {rank: torch.empty(MAC_BYTES, dtype=torch.uint8) for rank in others}
    works = []
    for rank in others:
        mac = secret.mac("ranks", *about, f"{shard.rank} to {rank}")
        works += [group.send([torch.tensor(list(mac), dtype=torch.uint8)], rank, 0), group.recv([heard[rank]], rank, 0)]
    for work in works:
        work.wait(timeout)
    for rank, mac_M in heard.items():
        if not secret.matches(bytes(mac_M.tolist()), "ranks", *about, f"{rank} to {shard.rank}"):
            raise Unauthenticated(f"what connected as rank {rank} does not know the secret of the ranks")

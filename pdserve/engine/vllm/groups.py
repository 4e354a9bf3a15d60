"""The process groups of vLLM's worker, and its place among the ranks of tensor parallelism.

vLLM makes a dozen groups of torch, for one rank, too. It would meet at a port, and gloo would listen at whichever
address the host's name has; neither authenticates a caller, and vLLM reads pickles from its groups. Here the groups
find each other in the store of our ranks, listen on the loopback, and prove themselves before vLLM uses them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Final

import torch.distributed

from pdserve.engine.model.collectives import LOOPBACK, Ranks
from pdserve.engine.model.parameters import Shard
from pdserve.owned_folder import owned_folder

_GLOO: Final = "gloo"
_LOCAL: Final = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
_SOCKETS: Final = "VLLM_RPC_BASE_PATH"  # folder of a socket file of vLLM's ranks, which nothing here uses later
_dist: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class Place:
    """A rank of a worker, and what joins it to the others. A worker of one rank has neither store nor ranks."""

    shard: Shard = field(default_factory=partial(Shard, 0, 1))
    store: Any = None
    ranks: Ranks | None = None

    def minimum(self, count: int) -> int:
        """Over all ranks."""
        return count if self.ranks is None else self.ranks.minimum(count)

    def limit_waits(self, timeout_s: float) -> None:
        """From now on, limits each operation of the groups of this process, if there are others in them."""
        if self.ranks is not None:
            for group in _dist.distributed_c10d._world.pg_map:
                _dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextlib.contextmanager
def groups_of(place: Place, backend: str, timeout_s: float) -> Iterator[str]:
    """Yields vLLM's `distributed_init_method`. The groups that vLLM makes within connect the ranks of `place`."""
    shard, ranks, numbers = place.shard, place.ranks, count()
    store = _dist.HashStore() if place.store is None else _dist.PrefixStore("vllm", place.store)
    make_group = _dist.new_group

    def make_proven(*args: Any, **named: Any) -> Any:
        group = make_group(*args, **named)
        if group is not _dist.GroupMember.NON_GROUP_MEMBER:
            prove(group)
        return group

    def prove(group: Any) -> None:
        if ranks is not None and group.size() == shard.size and _dist.get_backend(group) == _GLOO:
            ranks.prove(f"vllm-{next(numbers)}", group)

    timeout = timedelta(seconds=timeout_s)
    with owned_folder("vllm") as private, _environment(_LOCAL | {_SOCKETS: str(private)}):
        if shard.size > 1 or not _dist.is_initialized():  # engines of one rank can share the groups of a process
            _dist.init_process_group(backend, store=store, rank=shard.rank, world_size=shard.size, timeout=timeout)
        _dist.new_group = make_proven
        try:
            prove(_dist.group.WORLD)
            # vLLM would reduce in shared memory if all ranks had one name here. It waits there without a time limit,
            # also for a rank that has died.
            yield f"rank:{shard.rank}"
        finally:
            _dist.new_group = make_group


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

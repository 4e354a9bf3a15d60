"""One engine on several ranks of one host: this process leads, a follower process computes beside it for each other.

The leader tells its followers the rows of each step, computes its own part and draws all tokens. On a CPU all ranks
store their heads in one pool of whole blocks, which the leader made: whoever moves, caches or names blocks sees those
of a worker without ranks. On GPUs, or with rank_pools=own, each rank has a pool of its own and moves its heads itself
(kvtransfer/rank_server.py). A failure of one rank in mid-step leaves the others waiting in a sum, so the engine is
broken from then on: the worker ends, and is started anew with all its ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final, final

from pdserve.config import SECRET_ENV, WorkerConfig, to_flags
from pdserve.core.errors import ConfigError, InternalError
from pdserve.core.stamps import BlockStamps
from pdserve.core.types import Role
from pdserve.engine.config import read_config
from pdserve.engine.device_defaults import with_device_defaults
from pdserve.engine.host_memory import HostMemory
from pdserve.engine.interface import EngineSpec, OnLayer, Row, RowOut
from pdserve.engine.memory_plan import MemoryPlan
from pdserve.engine.opening import choose_device, open_rank, shared_bytes, warmed, with_host_blocks
from pdserve.engine.pool import TorchPool
from pdserve.engine.ranks import Ranks, make_store
from pdserve.engine.row_words import to_words
from pdserve.engine.rows import check_rows
from pdserve.engine.sharding import Shard, rank_config
from pdserve.engine.torch_engine import TorchEngine
from pdserve.engine.weights import Progress

log = logging.getLogger(__name__)

MEET_S: Final = 120.0  # until all ranks stand; loading comes after
STOP: Final = 0  # orders: their first word
STEP: Final = 1
OWN: Final = "own"  # instead of a descriptor: each rank has a pool of its own
PROGRAM: Final = "pdserve.engine.follower"
MOVING_PROGRAM: Final = "kvtransfer.follower"  # that moves the rank's KV as well, from and to a pool of its own
_JOIN_S: Final = 5.0
_POLL_S: Final = 0.05
_TAIL_BYTES: Final = 2000


@final
class ParallelEngine:
    """`spec` and `pool` are the leader's: of whole blocks, or where ranks have pools of their own, of blocks that hold
    its heads only."""

    def __init__(
        self, engine: TorchEngine, ranks: Ranks, followers: Sequence[Follower], rank_addresses: Sequence[str] = ()
    ) -> None:
        """`rank_addresses`: HOST:PORT of each follower's RankService, where it has a pool of its own."""
        self._engine, self._ranks, self._followers = engine, ranks, followers
        self.rank_addresses = tuple(rank_addresses)
        self._stamps: BlockStamps | None = None
        self._broken = ""

    def tell_lives(self, stamps: BlockStamps) -> None:
        """From the next step on, ranks hear before they compute which blocks were handed out anew."""
        stamps.take_begun()  # counted from here on
        self._stamps = stamps

    @property
    def spec(self) -> EngineSpec:
        return self._engine.spec

    @property
    def pool(self) -> TorchPool:
        return self._engine.pool

    @property
    def memory(self) -> MemoryPlan | None:
        """The leader's rank."""
        return self._engine.memory

    @property
    def is_healthy(self) -> bool:
        """False once a rank has died, in a step or while all were idle."""
        return not self._broken and all(follower.is_alive for follower in self._followers)

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        """Raises InternalError for ever once a rank has failed in mid-step."""
        if self._broken:
            raise InternalError(f"a tensor-parallel rank failed before: {self._broken}")
        check_rows(self.spec, rows)
        if not rows:
            return []
        try:
            self._ranks.tell([STEP, *self._begun_words(), *to_words(rows)])
            if on_layer is None:
                return self._engine.step(rows)
            outs = self._engine.step(rows, _everywhere(on_layer))
            on_layer(self.spec.num_layers)
            return outs
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def _begun_words(self) -> list[int]:
        """How many numbers follow; the blocks that were handed out since the last step, each with its life."""
        begun = [] if self._stamps is None else self._stamps.take_begun()
        return [2 * len(begun), *(number for pair in begun for number in pair)]

    def close(self) -> None:
        try:
            if not self._broken:
                self._ranks.tell([STOP])
        except RuntimeError:
            log.warning("a tensor-parallel rank was gone already")
        for follower in self._followers:
            follower.end()
        self._engine.close()


def _everywhere(on_layer: OnLayer) -> OnLayer:
    """Ranks meet behind each layer's attention: when this one has stored a layer, all have stored those before it."""

    def stored(num_layers: int) -> None:
        if num_layers > 1:
            on_layer(num_layers - 1)

    return stored


@final
class Follower:
    """A rank's process. It ends with its leader, however that ends."""

    def __init__(self, config: WorkerConfig, rank: int, port: int, descriptor: int | None = None) -> None:
        """`descriptor`: of the memory file that ranks share, where they do."""
        self.rank = rank
        shared = () if descriptor is None else (descriptor,)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        pool = OWN if descriptor is None else str(descriptor)
        # Without a secret nobody could prove anything to the rank: it then computes, and its KV stays where it is.
        is_moving = descriptor is None and bool(config.cluster_secret)
        program = [MOVING_PROGRAM if is_moving else PROGRAM, str(rank), str(port), pool, *to_flags(config)]
        command = [sys.executable, "-m", "pdserve.launch.tether", str(os.getpid()), "module", *program]
        # A session of its own: a terminal's Ctrl-C is for the leader, which drains with all its ranks.
        environment = {**os.environ, SECRET_ENV: config.cluster_secret} if is_moving else None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=shared,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raises ConfigError with its last words where it has ended."""
        if not self.is_alive:
            raise ConfigError("tensor_parallel", f"rank {self.rank} ended: {self._last_words()}", "a rank that starts")

    def end(self) -> None:
        try:
            self._process.wait(_JOIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _TAIL_BYTES))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"


def open_parallel_engine(
    config: WorkerConfig, progress: Progress | None = None, role: Role = Role.DECODE
) -> ParallelEngine:
    """Starts the followers and loads this rank's part. Raises ConfigError and ModelError as one rank alone would."""
    size = config.tensor_parallel
    rank_config(read_config(Path(config.model)), Shard(0, size))  # before anything starts
    store = make_store(0, size, is_leader=True, timeout_s=MEET_S)
    device = choose_device(config.device)
    config = with_device_defaults(config, role, is_gpu=device.type == "cuda")
    if device.type == "cpu":
        config = with_host_blocks(config)
    each = dataclasses.replace(config, threads=max(1, config.threads // size) if config.threads else 0)
    is_shared = device.type == "cpu" and config.rank_pools != "own"
    memory = _shared_memory(config) if is_shared else None
    descriptor = None if memory is None else memory.descriptor
    followers = [Follower(each, rank, store.port, descriptor) for rank in range(1, size)]
    try:
        _meet(store, followers)
        shard = Shard(0, size)
        ranks = Ranks(shard, store, device, config.stall_s)
        engine = open_rank(each, progress, shard, ranks, memory)
        _meet(store, followers, "loaded", MEET_S + config.stall_s)
    except BaseException:
        for follower in followers:
            follower.kill()
        raise
    if memory is not None:
        engine.pool.seal()
    log.info("tensor-parallel ranks stand", extra={"ranks": size, "pids": [one.pid for one in followers]})
    addresses = (
        []
        if is_shared or not config.cluster_secret
        else [store.get(f"address/{one.rank}").decode() for one in followers]
    )
    together = ParallelEngine(engine, ranks, followers, addresses)
    return together if device.type == "cpu" else warmed(together)


def _shared_memory(config: WorkerConfig) -> HostMemory:
    memory = HostMemory(shared_bytes(config), is_sealed=False)
    if memory.descriptor is None:
        raise ConfigError("tensor_parallel", config.tensor_parallel, "1 on a system without memory files (memfd)")
    return memory


def _meet(store: Any, followers: Sequence[Follower], what: str = "here", timeout_s: float = MEET_S) -> None:
    """Waits until every follower has said so, or one has ended."""
    ends_s = time.monotonic() + timeout_s
    for follower in followers:
        while not store.check([f"{what}/{follower.rank}"]):
            follower.check()
            if time.monotonic() > ends_s:
                raise ConfigError("tensor_parallel", f"rank {follower.rank} silent for {timeout_s:.0f} s", "an answer")
            time.sleep(_POLL_S)

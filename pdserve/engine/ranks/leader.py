"""One engine on several ranks: this process is the leader, and each other rank is a follower process.

The leader starts the followers of its own host. Those of other hosts join at the rendezvous address, if there is one
(pdserve/engine/ranks/rendezvous.py).

The leader sends its followers the rows of each step, computes its own part and samples all tokens. On a CPU all ranks
store their heads in one pool of whole blocks, which the leader made, so transfers and caches see the blocks of a worker
without ranks. On GPUs, or with rank_pools=own, each rank has its own pool and transfers its heads itself
(kvtransfer/ranks/rank_server.py). If one rank fails during a step, the others wait in an all-reduce, so the engine is
unusable from then on: the worker exits and is started again with all its ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, final

import numpy as np
import torch

from pdserve.config import SECRET_ENV, WorkerConfig
from pdserve.config_flags import to_flags
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.errors import ConfigError, InternalError
from pdserve.core.kv.stamps import BlockStamps
from pdserve.core.types import Role
from pdserve.engine.gpu.plain_rows import Words
from pdserve.engine.interface import Engine, EngineSpec, Flight, KvPool, OnLayer, Row, RowOut
from pdserve.engine.load.build_engine import open_rank, plan_shared_pool, warmed
from pdserve.engine.load.device import choose_device
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.memory.plan import MemoryPlan, with_device_defaults
from pdserve.engine.model.collectives import LOOPBACK, Ranks, make_store, memory_file, private_store
from pdserve.engine.model.config import read_config
from pdserve.engine.model.parameters import Shard, rank_config
from pdserve.engine.ranks.rendezvous import Rendezvous
from pdserve.engine.rows import check_rows, to_words
from pdserve.isolated.tied_program import tied_command
from pdserve.tls.certificates import certificates_of

if TYPE_CHECKING:
    from pdserve.engine.gpu.engine import GraphEngine


# --- processes of the other ranks -----------------------------------------------------------------------------

OWN: Final = "own"  # in place of a descriptor: each rank has its own pool
PROGRAM: Final = "pdserve.engine.ranks.follower"
# the follower that also transfers the rank's KV from and to its own pool
MOVING_PROGRAM: Final = "kvtransfer.ranks.follower"
_JOIN_S: Final = 5.0
_TAIL_BYTES: Final = 2000


class RankProcess(Protocol):
    """Another rank's process, on this host or another."""

    rank: int

    @property
    def is_alive(self) -> bool: ...

    def check(self) -> None:
        """Raises ConfigError with its last output if it has ended."""
        ...

    def silence(self, timeout_s: float) -> ConfigError:
        """The error message if it has made no progress for so long."""
        ...

    def end(self) -> None:
        """Waits for its end."""
        ...

    def kill(self) -> None: ...


@final
class Follower:
    """A rank's process. It ends with its leader, even if the leader is killed."""

    def __init__(self, config: WorkerConfig, rank: int, store: int, descriptor: int | None = None) -> None:
        """`store`: its port, for a config with a rendezvous, otherwise its descriptor. `descriptor`: the memory file
        that ranks share, if they do."""
        self.rank = rank
        shared = [*([] if descriptor is None else [descriptor]), *([] if config.rendezvous else [store])]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        pool = OWN if descriptor is None else str(descriptor)
        # Without a secret no peer could authenticate to the rank: it then computes, but does not transfer its KV.
        is_moving = descriptor is None and bool(config.cluster_secret)
        program = MOVING_PROGRAM if is_moving else PROGRAM
        command = tied_command(program, str(rank), str(store), pool, *to_flags(config))
        # A separate session: a terminal's Ctrl-C must reach only the leader, which drains with all its ranks.
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
        """Raises ConfigError with its last output if it has ended."""
        if not self.is_alive:
            raise ConfigError("tensor_parallel", f"rank {self.rank} ended: {self._last_words()}", "a rank that starts")

    def silence(self, timeout_s: float) -> ConfigError:
        return ConfigError("tensor_parallel", f"rank {self.rank} silent for {timeout_s:.0f} s", "an answer")

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


# --- engine on several ranks ----------------------------------------------------------------------------------

log = logging.getLogger(__name__)

MEET_S: Final = 120.0  # time limit for all ranks to connect, before they load
STOP: Final = 0  # first number of an order
STEP: Final = 1
GRAPHS: Final = "graphs"  # key in the store: whether ranks run decode steps as graphs
_POLL_S: Final = 0.05
_ENDING_S: Final = 2.0  # between the end of a rank's groups and that of its process


class RankEngine(Engine, Protocol):
    """The engine of one rank."""

    @property
    def memory(self) -> MemoryPlan | None: ...


class _Leading:
    """Base of engines of several ranks. `spec` and `pool` are the leader's: of whole blocks or, if ranks have pools of
    their own, of blocks that hold only its heads."""

    def __init__(
        self,
        engine: RankEngine,
        ranks: Ranks,
        followers: Sequence[RankProcess],
        rank_addresses: Sequence[str] = (),
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """`rank_addresses`: HOST:PORT of each follower's RankService, if it has its own pool."""
        self._inner, self._ranks, self._followers = engine, ranks, followers
        self._rendezvous = rendezvous
        self.rank_addresses = tuple(rank_addresses)
        self._stamps: BlockStamps | None = None
        self._broken = ""
        self._is_sent = False  # the current computation

    def send_epochs(self, stamps: BlockStamps) -> None:
        """From the next step on, sends each rank the new epochs of reassigned blocks before it computes."""
        stamps.take_begun()  # counted from here on
        self._stamps = stamps

    @property
    def spec(self) -> EngineSpec:
        return self._inner.spec

    @property
    def pool(self) -> KvPool:
        return self._inner.pool

    @property
    def memory(self) -> MemoryPlan | None:
        """The memory of the leader's rank."""
        return self._inner.memory

    @property
    def is_healthy(self) -> bool:
        """False once a rank has died, in a step or while idle."""
        return not self._broken and all(follower.is_alive for follower in self._followers)

    @contextmanager
    def _all_ranks(self) -> Iterator[None]:
        """Wraps the computation of all ranks. After a rank has failed during a step, it always raises InternalError. A
        failure before the ranks have received the order has no effect."""
        self._check_whole()
        self._is_sent = False
        try:
            yield
        except Exception as error:
            if self._is_sent:
                self._broken = f"{type(error).__name__}: {error}"
            raise

    def _check_whole(self) -> None:
        if self._broken:
            raise InternalError(f"a tensor-parallel rank failed before: {self._broken}")

    def _order_step(self, words: Words) -> None:
        self._is_sent = True
        head = np.array([STEP, *self._begun_words()], np.int64)
        self._ranks.send_order(np.concatenate([head, np.asarray(words, np.int64)]))

    def _begun_words(self) -> list[int]:
        """The number of values that follow, then the blocks that were reassigned since the last step, each with its
        epoch."""
        begun = [] if self._stamps is None else self._stamps.take_begun()
        return [2 * len(begun), *(number for pair in begun for number in pair)]

    def close(self) -> None:
        try:
            if not self._broken:
                self._ranks.send_order([STOP])
        except RuntimeError:
            log.warning("a tensor-parallel rank was gone already")
        with ExitStack() as closing:  # each, also if another one raises; the followers first
            if not self._broken:
                closing.callback(self._ranks.close)
            closing.callback(self._inner.close)
            if self._rendezvous is not None:
                closing.callback(self._rendezvous.close)
            for follower in reversed(self._followers):
                closing.callback(follower.end)


@final
class ParallelEngine(_Leading):
    """Computes a step before it returns."""

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sequence[RowOut]:
        with self._all_ranks():
            check_rows(self.spec, rows)
            if not rows:
                return []
            self._order_step(to_words(rows))
            outs = self._inner.step(rows, None if on_layer is None else _everywhere(on_layer))
            if not self.pool.is_on_host:
                # Another rank may not even have launched the step, and what it is told to send waits only for what it
                # has launched. When the last sum of this rank is done, all ranks have stored.
                torch.cuda.current_stream().synchronize()
            if on_layer is not None:
                on_layer(self.spec.num_layers)
            return outs


@final
class ParallelFlight:
    """A launched step of all ranks."""

    def __init__(self, flight: Flight, engine: ParallelGraphEngine) -> None:
        self.flight, self._engine = flight, engine

    @property
    def unsampled(self) -> Sequence[int]:
        return self.flight.unsampled

    def sample(self, rows: Mapping[int, Row]) -> None:
        self._engine.sample(self.flight, rows)

    def wait(self) -> Sequence[RowOut]:
        return self._engine.wait(self.flight)


@final
class ParallelGraphEngine(_Leading):
    """Every rank replays the same graphs, and steps are scheduled asynchronously."""

    def __init__(self, engine: GraphEngine, *others: Any) -> None:
        super().__init__(engine, *others)
        self._graphs = engine
        engine.send_steps_to_ranks(self._order_step)

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sequence[RowOut]:
        """`on_layer` is called once for all layers, because only decode workers have graphs."""
        outs = self.launch(rows, None).wait()
        if on_layer is not None:
            on_layer(self.spec.num_layers)
        return outs

    def launch(self, rows: Sequence[Row], after: Flight | None) -> ParallelFlight:
        before = after.flight if isinstance(after, ParallelFlight) else None
        with self._all_ranks():
            return ParallelFlight(self._graphs.launch(rows, before), self)

    def sample(self, flight: Flight, rows: Mapping[int, Row]) -> None:
        """Only this rank samples; the others receive the tokens with the next step."""
        with self._all_ranks():
            self._is_sent = True
            flight.sample(rows)

    def wait(self, flight: Flight) -> Sequence[RowOut]:
        with self._all_ranks():
            self._is_sent = True
            return flight.wait()


def _everywhere(on_layer: OnLayer) -> OnLayer:
    """Ranks synchronise after each layer's attention: when this rank has stored a layer, all ranks have stored the
    previous ones."""

    def stored(num_layers: int) -> None:
        if num_layers > 1:
            on_layer(num_layers - 1)

    return stored


@final
class StartedRanks:
    """The followers of a worker from their start on, and this process's groups with them."""

    def __init__(
        self,
        config: WorkerConfig,
        device: torch.device,
        descriptor: int | None = None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`device`: on which the groups exchange tensors. `descriptor`: the memory file that the ranks share, if they
        do. `options`: what followers read from the store. Raises ConfigError if a rank does not start."""
        self._config = config
        self._is_shared = descriptor is not None
        self.shard = Shard(0, config.tensor_parallel)
        secret = ClusterSecret(config.cluster_secret) if config.rendezvous else None
        if secret is None:
            place = memory_file()
            self.store = private_store(place, self.shard.size, timeout_s=MEET_S)
        else:
            self.store = make_store(0, self.shard.size, is_leader=True, timeout_s=MEET_S)
            place = int(self.store.port)
        for name, value in options.items():
            self.store.set(name, value)
        # The rendezvous comes first: if its address cannot be used, nothing else has started.
        self.rendezvous: Rendezvous | None = None
        self.followers: list[RankProcess] = []
        with self.ended_on_error():
            if secret is not None:
                others = range(config.ranks_here, self.shard.size)
                tls = certificates_of(config, is_mutual=True)
                self.rendezvous = Rendezvous(config.rendezvous, secret, place, others, to_flags(config), tls)
            for rank in range(1, config.ranks_here):
                self.followers.append(Follower(config, rank, place, descriptor))
            if self.rendezvous is not None:
                self.followers += self.rendezvous.ranks.values()
            _meet(self.store, self.followers)
            self.ranks = Ranks(self.shard, self.store, device, config.stall_s, gloo_host(config), secret)

    @contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """Ends the ranks if the block raises. If one has ended before, its message is the error."""
        try:
            yield
        except BaseException as error:
            try:
                # Of a group, whose other end may be gone.
                if isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError):
                    _check_ended(self.followers)
            finally:
                for follower in self.followers:
                    follower.kill()
                if self.rendezvous is not None:
                    self.rendezvous.close()
            raise

    def check_loaded(self, weights_hash: str) -> None:
        """Waits until all ranks have loaded the same weights."""
        _meet(self.store, self.followers, "loaded", MEET_S + self._config.stall_s)
        check_weights(self.store, self.followers, weights_hash)
        log.info("tensor-parallel ranks are ready", extra={"ranks": self.shard.size, "here": self._config.ranks_here})

    def addresses(self) -> list[str]:
        """HOST:PORT of each follower's RankService, if it has its own pool."""
        if self._is_shared or not self._config.cluster_secret:
            return []
        return [self.store.get(f"address/{one.rank}").decode() for one in self.followers]


def open_parallel_engine(config: WorkerConfig, role: Role) -> ParallelEngine | ParallelGraphEngine:
    """Starts the followers and loads this rank's part. Raises ConfigError and ModelError like a single rank."""
    size, model_config = config.tensor_parallel, read_config(Path(config.model))
    rank_config(model_config, Shard(0, size))  # before anything starts
    device = choose_device(config.device)
    config = with_device_defaults(config, role, is_gpu=device.type == "cuda")
    pool_bytes = 0
    if device.type == "cpu":
        config, pool_bytes = plan_shared_pool(config)
    has_graphs = device.type == "cuda" and _gpu_builder().takes_graphs(config, role)
    each = of_each_rank(config)
    is_shared = device.type == "cpu" and config.rank_pools != "own" and not config.rendezvous
    memory = _shared_memory(size, pool_bytes) if is_shared else None
    descriptor = None if memory is None else memory.descriptor
    started = StartedRanks(each, device, descriptor, {GRAPHS: "on" if has_graphs else "off"})
    with started.ended_on_error():
        measure_graphs = _gpu_builder().graphs_meter(each) if has_graphs else None
        engine = open_rank(each, started.shard, started.ranks, memory, graphs=measure_graphs)
        started.check_loaded(engine.spec.weights_hash)
        graphs = _gpu_builder().open_graphs(engine, each) if has_graphs else None
        if memory is not None:
            engine.pool.seal()
        rest = (started.ranks, started.followers, started.addresses(), started.rendezvous)
        if graphs is not None:
            return warmed(ParallelGraphEngine(graphs, *rest))
        together = ParallelEngine(engine, *rest)
        return together if device.type == "cpu" else warmed(together)


def open_parallel_vllm(config: WorkerConfig, role: Role) -> ParallelEngine:
    """vLLM's worker on each rank, with a pool of its own. Raises ConfigError and ModelError like a single rank."""
    from pdserve.engine.vllm import checks, start  # in vLLM's environment only
    from pdserve.engine.vllm.groups import Place

    checks.installed_version()
    checks.check_settings(config)
    is_gpu = choose_device(config.device).type == "cuda"
    config = with_device_defaults(of_each_rank(config), role, is_gpu=is_gpu)
    started = StartedRanks(config, torch.device("cpu"))
    with started.ended_on_error():
        place = Place(started.shard, started.store, started.ranks)
        engine = start.open_rank(config, role, place)
        started.check_loaded(engine.spec.weights_hash)
        together = warmed(
            ParallelEngine(engine, started.ranks, started.followers, started.addresses()), config.worker_id
        )
        place.limit_waits(config.stall_s)  # not of the first steps, which compile
        return together


def of_each_rank(config: WorkerConfig) -> WorkerConfig:
    """The settings of one rank: the ranks of a host share its threads."""
    threads = max(1, config.threads // config.ranks_here) if config.threads else 0
    return dataclasses.replace(config, threads=threads)


def _gpu_builder() -> Any:
    from pdserve.engine.load import gpu_engine  # Triton is not available for CPUs

    return gpu_engine


def gloo_host(config: WorkerConfig) -> str:
    """The address of the leader's host at which its ranks' groups connect."""
    return config.rendezvous.rpartition(":")[0].strip("[]") or LOOPBACK


def check_weights(store: Any, followers: Sequence[RankProcess], weights_hash: str) -> None:
    """Raises ConfigError if ranks have different checkpoints, which would compute wrong results without an error."""
    for follower in followers:
        theirs = store.get(f"loaded/{follower.rank}").decode()
        if theirs != weights_hash:
            seen = f"a checkpoint on rank {follower.rank} ({theirs[:16]}) that is not rank 0's ({weights_hash[:16]})"
            raise ConfigError("model", seen, "the same files on every host")


def _check_ended(followers: Sequence[RankProcess]) -> None:
    """Raises ConfigError if a rank ends within a moment."""
    ends_s = time.monotonic() + _ENDING_S
    while time.monotonic() < ends_s:
        for follower in followers:
            follower.check()
        time.sleep(_POLL_S)


def _shared_memory(size: int, num_bytes: int) -> HostMemory:
    memory = HostMemory(num_bytes, is_sealed=False)
    if memory.descriptor is None:
        raise ConfigError("tensor_parallel", size, "1 on a system without memory files (memfd)")
    return memory


def _meet(store: Any, followers: Sequence[RankProcess], what: str = "here", timeout_s: float | None = None) -> None:
    """Waits until every follower has reported, or one has ended."""
    timeout_s = MEET_S if timeout_s is None else timeout_s
    ends_s = time.monotonic() + timeout_s
    waiting = list(followers)
    while waiting:
        waiting = [one for one in waiting if not store.check([f"{what}/{one.rank}"])]
        for follower in waiting:
            follower.check()
        if waiting and time.monotonic() > ends_s:
            raise waiting[0].silence(timeout_s)
        if waiting:
            time.sleep(_POLL_S)

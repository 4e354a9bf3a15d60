"""Two ranks give the tokens of one: real processes over gloo."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, InternalError, ModelError, Unauthenticated
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row, RowOut
from pdserve.engine.model import collectives
from pdserve.engine.model.collectives import Ranks, make_store, memory_file, private_store
from pdserve.engine.model.config import read_config
from pdserve.engine.model.parameters import Shard
from pdserve.engine.ranks import leader as parallel
from pdserve.engine.ranks.leader import ParallelEngine
from pdserve.engine.rows import from_words, to_words
from tests.oracle import Oracle
from tests.support.slow import slow_except
from tests.unit.engine.conftest import GREEDY, Request

BUNDLED = Path(__file__).parents[3] / "pdserve/models/stdlib-5m"
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=7, max_tokens=24)


def requests(vocab_size: int) -> list[Request]:
    """Prompts of several lengths that arrive while others decode."""
    made = []
    for index, (length, sampling) in enumerate([(5, GREEDY), (70, SEEDED), (33, GREEDY), (1, SEEDED)]):
        prompt = [3 + (index * 31 + at * 7) % (vocab_size - 3) for at in range(length)]
        made.append(Request(prompt=prompt, sampling=sampling, arrival=2 * index))
    return made


def assert_exact(engine: Engine, serve: Callable[..., list[list[int]]], oracle: Oracle) -> None:
    """Sums over ranks round in another order, so the oracle judges the answers instead of a comparison with one
    rank."""

    def guess(one: Request) -> list[int]:
        return [one.history[-1], 5] if len(one.outs) % 3 == 1 else []

    made = requests(engine.spec.vocab_size)
    limit = engine.spec.max_context_tokens
    assert all(len(one.prompt) + one.sampling.max_tokens < limit for one in made)
    tokens = serve(engine, made, chunk=16, guess=guess)
    assert [len(answer) for answer in tokens] == [one.sampling.max_tokens for one in made]
    oracle.assert_exact([one.prompt for one in made], tokens, sampling=[one.sampling for one in made])


# Shared heads (gemma3 has one kv head), experts, tied and biased weights, and an uneven division of the vocabulary.
@pytest.mark.parametrize("name", slow_except(["gemma3", "llama-tied-biased", "qwen3-moe"], "gemma3"))
def test_two_ranks_sample_the_same_tokens_as_one(
    name: str,
    tiny: Callable[[str], Path],
    open_engine: Callable[..., Any],
    serve: Callable[..., list[list[int]]],
    oracle_of: Callable[[Path], Oracle],
) -> None:
    folder = tiny(name)
    alone = open_engine(folder)
    together = open_engine(folder, tensor_parallel=2)
    try:
        assert isinstance(together, ParallelEngine)
        assert together.spec.num_blocks == alone.spec.num_blocks
        for engine in (together, alone):
            assert_exact(engine, serve, oracle_of(folder))
    finally:
        together.close()
        alone.close()


@pytest.fixture(scope="module")
def together(open_engine: Callable[..., Any]) -> Iterator[Any]:
    """Three ranks of the bundled model if they can divide its heads, otherwise two."""
    engine = open_engine(BUNDLED, tensor_parallel=2 if read_config(BUNDLED).num_kv_heads % 3 else 3)
    yield engine
    engine.close()


def test_three_ranks_score_and_sample_equally(
    together: Any,
    open_engine: Callable[..., Any],
    serve: Callable[..., list[list[int]]],
    oracle_of: Callable[[Path], Oracle],
) -> None:
    alone = open_engine(BUNDLED)
    try:
        assert (together.spec.block_bytes, together.spec.tp_degree) == (alone.spec.block_bytes, 1)
        for engine in (together, alone):
            assert_exact(engine, serve, oracle_of(BUNDLED))
        tokens = list(range(40, 60))
        row = Row(tokens=tokens, start=0, blocks=[3, 4], targets=tokens[1:], num_top=2)
        [mine], [theirs] = together.step([row]), alone.step([row])
        assert [one.token_id for one in mine.scored] == [one.token_id for one in theirs.scored]
        for one, other in zip(mine.scored, theirs.scored, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert all(len(one.top) == 2 for one in mine.scored)
        oracle_of(BUNDLED).assert_logprobs(tokens[:-1], 0, mine.scored)
    finally:
        alone.close()


def test_a_layer_is_reported_after_all_ranks_stored_it(together: Any) -> None:
    """After a layer is reported, or a step without sampling has ended, no rank still stores, so KV may be read."""
    num_layers, snapshots = together.spec.num_layers, []
    for turn in range(12):
        blocks = [2 * turn, 2 * turn + 1]
        tokens = [(7 * turn + 3 * at) % 4000 + 1 for at in range(2 * together.spec.block_size)]

        def look(count: int, blocks: list[int] = blocks) -> None:
            snapshots.append((count, blocks, whole(together)[blocks, :count]))

        together.step([Row(tokens=tokens, start=0, blocks=blocks)], look)
        look(num_layers)
    assert [count for count, *_ in snapshots] == [*range(1, num_layers + 1), num_layers] * 12
    time.sleep(0.2)
    for count, blocks, seen in snapshots:
        assert seen.equal(whole(together)[blocks, :count]), count


def test_a_step_on_devices_is_reported_when_all_ranks_have_stored_it(
    monkeypatch: pytest.MonkeyPatch, open_engine: Callable[..., Any]
) -> None:
    """A rank sends what it has launched. It may be ordered to send before it has launched anything of the step, unless
    the leader has waited for a sum of all ranks."""
    seen: list[object] = []
    spec = open_engine("toy").spec

    def launch(rows: Any, on_layer: Any = None) -> list[RowOut]:
        seen.append("launched")
        return [RowOut()]

    inner = SimpleNamespace(spec=spec, pool=SimpleNamespace(is_on_host=False), step=launch)
    ranks = SimpleNamespace(send_order=lambda words: seen.append("ordered"))
    stream = SimpleNamespace(synchronize=lambda: seen.append("computed"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    engine = ParallelEngine(inner, ranks, [])  # type: ignore[arg-type]
    row = Row(tokens=[5], start=0, blocks=[0])
    engine.step([row], seen.append)
    assert seen == ["ordered", "launched", "computed", spec.num_layers]
    engine.step([row])
    assert seen[4:] == ["ordered", "launched", "computed"]


def whole(engine: Any) -> Any:
    """The whole pool with all ranks' heads."""
    shape = engine.pool.shape
    inner = (shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return engine.pool.raw.view(shape.dtype).unflatten(1, inner)


def test_a_dead_rank_fails_the_engine_without_hanging(open_engine: Callable[..., Any]) -> None:
    engine = open_engine(BUNDLED, tensor_parallel=2, stall_s=120.0)
    row = Row(tokens=[5, 6, 7], start=0, blocks=[0], sample=GREEDY, history=[5, 6, 7], prompt_len=3)
    try:
        assert len(engine.step([row])[0].sampled) == 1
        with pytest.raises(InternalError, match="outside the pool"):
            engine.step([Row(tokens=[5], start=0, blocks=[10**6])])
        assert len(engine.step([row])[0].sampled) == 1, "a row that is refused reaches no rank"
        assert os.getsid(engine._followers[0].pid) != os.getsid(0), "a terminal's Ctrl-C would end it before its leader"
        os.kill(engine._followers[0].pid, signal.SIGKILL)
        began_s = time.monotonic()
        engine._followers[0].end()
        with pytest.raises(RuntimeError):
            engine.step([row])
        assert time.monotonic() - began_s < 60.0, "it waited for `stall_s`"
        with pytest.raises(InternalError, match="failed before"):
            engine.step([row])
    finally:
        engine.close()


def test_an_order_that_a_rank_does_not_read_fails(open_engine: Callable[..., Any]) -> None:
    engine = open_engine(BUNDLED, tensor_parallel=2, stall_s=1.0)
    follower = engine._followers[0].pid
    os.kill(follower, signal.SIGSTOP)
    try:
        with pytest.raises(RuntimeError, match="Timed out"):
            engine._ranks.send_order(np.zeros(4 * 2**20, np.int64))  # more than the sockets between them hold
    finally:
        os.kill(follower, signal.SIGKILL)
        engine.close()


def test_a_model_that_cannot_be_divided_is_refused_with_the_reason(
    open_engine: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, ModelError), match="query heads"):
        open_engine(BUNDLED, tensor_parallel=7)
    with pytest.raises((ConfigError, ModelError), match="config"):
        open_engine(tmp_path, tensor_parallel=2)
    with pytest.raises(ConfigError, match="toy"):
        open_engine("toy", tensor_parallel=2)


def test_a_rank_that_ends_while_it_loads_is_named(
    open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader notices it by a group that fails, perhaps within the code of another engine."""
    started: list[parallel.Follower] = []

    def start(*args: Any) -> parallel.Follower:
        started.append(parallel_follower(*args))
        return started[-1]

    def load(*_: Any, **__: Any) -> None:
        os.kill(started[0].pid, signal.SIGKILL)
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as error:
            raise ModelError("model", "name", "a model that is served: Connection closed by peer") from error

    parallel_follower = parallel.Follower
    monkeypatch.setattr(parallel, "Follower", start)
    monkeypatch.setattr(parallel, "open_rank", load)
    with pytest.raises(ConfigError, match="rank 1 ended: exit code -9"):
        open_engine(BUNDLED, tensor_parallel=2)


def test_rows_survive_encoding() -> None:
    rows = [
        Row(tokens=[4], start=9, blocks=[1, 2], sample=SEEDED, history=range(10), prompt_len=3, drafts=[7, 8]),
        Row(tokens=[1, 2, 3], start=0, blocks=[5], targets=[2, 3], num_top=4),
    ]
    again = from_words(to_words(rows))
    assert [(list(r.tokens), r.start, list(r.blocks), list(r.drafts)) for r in again] == [
        ([4], 9, [1, 2], [7, 8]),
        ([1, 2, 3], 0, [5], []),
    ]
    assert [r.num_samples for r in again] == [3, 0]
    assert (list(again[1].targets), again[1].num_top) == ([2, 3], 4)
    assert from_words([]) == []


# --- communication between ranks ------------------------------------------------------------------------------
# They find each other and agree on a number, over gloo between two threads.

Result = TypeVar("Result")


@pytest.fixture
def store() -> Iterator[int]:
    descriptor = memory_file()
    yield descriptor
    os.close(descriptor)


def of_two(store: int, work: Callable[[Ranks], Result]) -> list[Result]:
    """What the work of each rank returns."""

    def join(rank: int) -> Result:
        found = private_store(store, 2, timeout_s=60.0)
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
    leader = make_store(0, 2, is_leader=True, timeout_s=60.0)
    make_store(leader.port, 2, is_leader=False, timeout_s=60.0).set("key", "value")
    assert leader.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", leader.port), timeout=5.0)

"""Prefill and decode workers of one and of two tensor-parallel ranks: real engines and rank processes, real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvtransfer.protocol.grants import decode_grant
from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Engine
from pdserve.engine.load_engine import load_engine
from pdserve.v1 import worker_pb2
from tests.oracle import Oracle

BUNDLED = Path(__file__).parents[3] / "pdserve" / "models" / "stdlib-5m"
COMMON: dict[str, Any] = {
    "model": str(BUNDLED),
    "block_size": 16,
    "max_context_tokens": 512,
    "kv_blocks": 96,
    "threads": 1,
    "stall_s": 60.0,
    "profile": "h100-sxm.llama-3.1-8b.bf16",  # no worker measures itself first
}


def ids_of(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(text).ids
    return ids


LINES = "import os\nimport sys\n\n\nclass Path:\n    def __init__(self, name):\n        self.name = name\n\n"
# From less than a block to several steps of 32 tokens. The last two have a common prefix and end within a block.
PROMPTS = [ids_of(LINES[:12]), ids_of(LINES), ids_of(LINES * 3), ids_of(LINES * 3 + "    def exists(self):\n")]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(BUNDLED)


HOW: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11, "top_p": 0.95}]
SAMPLINGS = [Sampling(max_tokens=32, **HOW[index % 2]) for index in range(len(PROMPTS))]


async def answers(router: Any, ask: Any, name: str) -> list[list[int]]:
    """The answers to all prompts at once, greedy and seeded."""
    asked = [
        ask(f"{name}-{index}", prompt, max_tokens=32, ignore_eos=True, **HOW[index % 2])
        for index, prompt in enumerate(PROMPTS)
    ]
    found = list(await asyncio.gather(*map(router.remote, asked)))
    assert [len(tokens) for tokens in found] == [32] * len(PROMPTS)
    return found


# Ranks of prefill and decode workers.
DEGREES = ((1, 2), (2, 1), (2, 2), (2, 4), (4, 2))


@pytest.mark.parametrize(
    ("degrees", "transport", "kv_dtype", "push"),
    [  # `make test` takes one direction here and the other below
        (DEGREES[1:2], "shm", "auto", "layers"),
        pytest.param(DEGREES[:3], "shm", "auto", "layers", marks=pytest.mark.slow),
        pytest.param(DEGREES[:3], "tcp", "int8", "auto", marks=pytest.mark.slow),
    ],
)
async def test_any_pair_of_degrees_matches_float64(
    start: Any,
    attach: Any,
    ask: Any,
    oracle: Oracle,
    degrees: Sequence[tuple[int, int]],
    transport: str,
    kv_dtype: str,
    push: str,
) -> None:
    common = {**COMMON, "transport": transport, "kv_dtype": kv_dtype, "push": push}
    prefill = {ranks: start(Role.PREFILL, tensor_parallel=ranks, **common) for ranks in {one for one, _ in degrees}}
    decode = {ranks: start(Role.DECODE, tensor_parallel=ranks, **common) for ranks in {one for _, one in degrees}}
    specs = [worker.program.engine.spec for worker in (*prefill.values(), *decode.values())]
    assert all(one == specs[0] for one in specs), "a block is the same for any number of ranks"
    # Rounded KV changes a logit by some percent of the deviation. Sums over ranks change it only by float32 rounding.
    bounds = {"tie": 0.05, "most_ties": 0.1} if kv_dtype == "int8" else {}
    for ranks in degrees:
        router = await attach(prefill[ranks[0]], decode[ranks[1]], name=f"router-{ranks}")
        cold = await answers(router, ask, "cold")
        warm = await answers(router, ask, "warm")  # By the contents of both prefix caches.
        assert len({tuple(one) for one in cold}) == len(PROMPTS)
        oracle.assert_exact(PROMPTS * 2, [*cold, *warm], sampling=SAMPLINGS * 2, **bounds)
        moved = [one for one in router.all("transfer_ended") if one.is_committed and one.num_bytes]
        assert moved, "no KV travelled"


# Decode steps are asynchronous, as on GPUs. Ranks receive each step when it is computed.
ASYNC = {"speculation": "off", "async_scheduling": "on"}
OWN: dict[str, Any] = {**COMMON, **ASYNC, "rank_pools": "own", "kv_check": "step", "max_batch_tokens": 64}


@pytest.mark.parametrize(
    ("degrees", "transport", "kv_dtype", "push"),
    [
        (DEGREES[:1], "shm", "auto", "auto"),  # kvtransfer/test_rank_link.py compares all of them byte by byte.
        pytest.param(DEGREES, "tcp", "auto", "layers", marks=pytest.mark.slow),
        pytest.param(DEGREES, "shm", "int8", "chunk", marks=pytest.mark.slow),
    ],
)
async def test_ranks_with_separate_pools_match_float64(
    start: Any,
    attach: Any,
    ask: Any,
    oracle: Oracle,
    degrees: Sequence[tuple[int, int]],
    transport: str,
    kv_dtype: str,
    push: str,
) -> None:
    """Each prefill rank sends its heads to the decode ranks that have them, as ranks on GPUs do."""
    common = {**OWN, "transport": transport, "kv_dtype": kv_dtype, "push": push}
    prefill = {ranks: start(Role.PREFILL, tensor_parallel=ranks, **common) for ranks in {one for one, _ in degrees}}
    decode = {ranks: start(Role.DECODE, tensor_parallel=ranks, **common) for ranks in {one for _, one in degrees}}
    bounds = {"tie": 0.05, "most_ties": 0.1} if kv_dtype == "int8" else {}
    for theirs, own in degrees:
        d = decode[own]
        router = await attach(prefill[theirs], d, name=f"router-{theirs}-{own}")
        cold = await answers(router, ask, "cold")
        warm = await answers(router, ask, "warm")
        oracle.assert_exact(PROMPTS * 2, [*cold, *warm], sampling=SAMPLINGS * 2, **bounds)
        moved = [one for one in router.all("transfer_ended") if one.is_committed]
        assert len(moved) == 4 * len(PROMPTS), "each transfer ends once on both sides"
        assert sum(one.num_bytes for one in moved) % (d.program.engine.spec.block_bytes * own) == 0
    for ranks, d in decode.items():
        assert d.program._receiver.stats.failed == 0
        assert d.program._receiver.stats.verified >= ranks * 2 * len(PROMPTS)


async def test_a_prefill_worker_survives_a_decode_rank_that_dies_in_a_transfer(
    start: Any, attach: Any, ask: Any, oracle: Oracle
) -> None:
    """The part for the dead rank fails, the other part is aborted, and both prefill ranks free their blocks."""
    p, broken = (start(role, tensor_parallel=2, **OWN) for role in Role)
    router = await attach(p, broken)
    sequence = ask("r", PROMPTS[2], max_tokens=16)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    assert len(decode_grant(granted.grant).rank_endpoints) == 1
    kill_rank(broken)
    await broken.until_fatal()
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    ended = await router.next("transfer_ended", "r")
    assert not ended.is_committed
    await router.released("r", Role.PREFILL)
    await p.until(lambda program: program._sender.open_keys == [], "the end of every part")
    other = await attach(p, start(Role.DECODE, **OWN, worker_id="decode-1"), name="other")
    tokens = await other.remote(ask("r", PROMPTS[2], attempt=2, max_tokens=16, ignore_eos=True))
    oracle.assert_exact([PROMPTS[2]], [tokens])


async def test_a_decode_worker_survives_a_prefill_rank_that_dies_in_a_transfer(
    start: Any, attach: Any, ask: Any, oracle: Oracle
) -> None:
    broken, d = (start(role, tensor_parallel=2, **OWN) for role in Role)
    router = await attach(broken, d)
    prompt = (PROMPTS[3] * 4)[:480]  # Eight steps, whose blocks are sent as they are computed.
    sequence = ask("r", prompt, max_tokens=16)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    num_steps = broken.program.num_steps
    while broken.program.num_steps == num_steps:
        await asyncio.sleep(0)
    kill_rank(broken)
    await broken.until_fatal()
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="r", attempt=1))
    await router.released("r", Role.DECODE)
    await d.until(lambda program: program._receiver.open_keys == [], "the end of every part")
    other = await attach(start(Role.PREFILL, **OWN, worker_id="prefill-1"), d, name="other")
    tokens = await other.remote(ask("r", prompt, attempt=2, max_tokens=16, ignore_eos=True))
    oracle.assert_exact([prompt], [tokens])


@pytest.mark.slow  # test_a_decode_worker_survives_a_prefill_rank_that_dies_in_a_transfer also kills a prefill rank
async def test_a_killed_rank_of_a_prefill_worker_loses_nothing(
    start: Any, attach: Any, ask: Any, oracle: Oracle
) -> None:
    broken, d = start(Role.PREFILL, **COMMON, tensor_parallel=2), start(Role.DECODE, **COMMON)
    router = await attach(broken, d)
    prompt = (PROMPTS[3] * 4)[:480]  # Fifteen steps.
    sequence = ask("r", prompt, max_tokens=16)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    num_steps = broken.program.num_steps
    while broken.program.num_steps == num_steps:
        await asyncio.sleep(0)
    kill_rank(broken)
    failed = await router.next("failed", "r")
    assert failed.kind == worker_pb2.FAILURE_KIND_INTERNAL
    await broken.until_fatal()
    assert router.all("first_token", "r") == []
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="r", attempt=1))
    await router.released("r", Role.DECODE)
    other = await attach(start(Role.PREFILL, **COMMON, worker_id="prefill-1"), d, name="other")
    remote = await other.remote(ask("r", prompt, attempt=2, max_tokens=64, ignore_eos=True))
    local = await other.local(ask("l", prompt, max_tokens=64, ignore_eos=True))
    assert len(remote) == len(local) == 64
    oracle.assert_exact([prompt] * 2, [remote, local])


@pytest.mark.slow  # test_a_prefill_worker_survives_a_decode_rank_that_dies_in_a_transfer also kills an idle rank.
@pytest.mark.parametrize("role", Role)
async def test_an_idle_rank_that_dies_ends_the_worker(start: Any, role: Role) -> None:
    idle = start(role, **COMMON, tensor_parallel=2)
    kill_rank(idle)
    await idle.until_fatal()


async def test_a_killed_rank_of_a_decode_worker_loses_nothing(
    start: Any, attach: Any, ask: Any, oracle: Oracle
) -> None:
    p, broken = start(Role.PREFILL, **COMMON), start(Role.DECODE, **COMMON, tensor_parallel=2)
    router = await attach(p, broken)
    running = asyncio.create_task(router.remote(ask("r", PROMPTS[1], max_tokens=400, ignore_eos=True)))
    await router.wait_for(lambda: len(router.rows("r")) >= 4)
    kill_rank(broken)
    failed = await router.next("failed", "r")
    assert failed.kind == worker_pb2.FAILURE_KIND_INTERNAL
    await broken.until_fatal()
    running.cancel()
    told = [router.all("first_token", "r")[0].token.token_id, *router.text("r")]
    other = await attach(p, start(Role.DECODE, **COMMON, worker_id="decode-1"), name="other")
    again = ask("r", PROMPTS[1], attempt=2, output=tuple(told), max_tokens=len(told) + 120, ignore_eos=True)
    rest = await other.remote(again)
    assert len(rest) == 120
    oracle.assert_exact([PROMPTS[1]], [told + rest])


def kill_rank(worker: Any) -> None:
    os.kill(worker.program.engine._followers[0].pid, signal.SIGKILL)


class OwnPools:
    """An engine whose other ranks have separate pools for their heads, but no KV endpoint."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.spec = dataclasses.replace(engine.spec, tp_degree=2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def load_own_pools(config: WorkerConfig, role: Role) -> Any:
    return OwnPools(load_engine(config, role))


async def test_separate_pools_without_an_endpoint_are_rejected(
    start: Any, attach: Any, ask: Any, worker_config: Any
) -> None:
    """A prefill worker is rejected at its start. A decode worker only prefills locally and grants nothing."""
    p = start(Role.PREFILL, model="toy")
    with pytest.raises(ConfigError, match="tensor_parallel: got 2, expected 1 for KV transfer"):
        start(Role.PREFILL, load_own_pools, model="toy")
    d = start(Role.DECODE, load_own_pools, model="toy")
    router = await attach(p, d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", [5, 6, 7])))
    ended = await router.next("transfer_ended", "r")
    assert not ended.is_committed
    assert "tensor_parallel: got 2" in ended.error
    await router.released("r", Role.DECODE)
    assert router.all("granted", "r") == []
    assert len(await router.local(ask("l", [5, 6, 7], max_tokens=4))) == 4

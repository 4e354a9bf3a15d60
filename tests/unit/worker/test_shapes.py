"""A prefill and a decode worker with different block shapes, over real gRPC: tokens, bytes and cached prefixes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.memory.pool import quantise
from pdserve.engine.toy import answer
from pdserve.v1 import transfer_pb2, worker_pb2
from tests.support.slow import slow_except

BUNDLED = Path(__file__).parents[3] / "pdserve" / "models" / "stdlib-5m"
PROMPT = list(b"The quick brown fox jumps over it")  # 33 bytes.
SIZES = [(4, 8), (8, 4), (4, 6), (6, 4), (1, 5), (16, 64)]


@pytest.mark.parametrize(("prefill_size", "decode_size"), SIZES)
@pytest.mark.parametrize("transport", slow_except(["tcp", "shm"], "tcp"))
async def test_blocks_of_another_size_have_the_same_cells(
    start: Any, attach: Any, ask: Any, prefill_size: int, decode_size: int, transport: str
) -> None:
    p = start(Role.PREFILL, block_size=prefill_size, transport=transport)
    d = start(Role.DECODE, block_size=decode_size, transport=transport)
    router = await attach(p, d)
    tokens = await router.remote(ask("r", PROMPT, max_tokens=8))
    assert tokens == answer(PROMPT, 8, prefilled=len(PROMPT))
    [told_by_d] = [one for one in router.all("transfer_ended", "r") if one.num_bytes]
    assert told_by_d.num_bytes == -(-len(PROMPT) // decode_size) * d.program.engine.spec.block_bytes


@pytest.mark.parametrize(("prefill_size", "decode_size"), SIZES)
async def test_a_cached_prefix_is_counted_in_the_receivers_blocks(
    start: Any, attach: Any, ask: Any, prefill_size: int, decode_size: int
) -> None:
    p = start(Role.PREFILL, model="toy", block_size=prefill_size)
    d = start(Role.DECODE, model="toy", block_size=decode_size)
    router = await attach(p, d)
    assert await router.remote(ask("first", PROMPT)) == answer(PROMPT, 8)
    again = [*PROMPT, 65, 66]
    assert await router.remote(ask("again", again)) == answer(again, 8)
    moved = {
        one.request_id: one.num_bytes // d.program.engine.spec.block_bytes
        for one in router.all("transfer_ended")
        if one.num_bytes
    }
    held = len(PROMPT) // decode_size
    assert moved == {"first": -(-33 // decode_size), "again": -(-35 // decode_size) - held}
    # The prefill worker's cache counts in its own blocks.
    assert router.all("first_token", "again")[0].cached_tokens == 33 // prefill_size * prefill_size


async def test_many_requests_of_many_lengths_at_once(start: Any, attach: Any, ask: Any) -> None:
    p = start(Role.PREFILL, model="toy", block_size=4)
    d = start(Role.DECODE, model="toy", block_size=6)
    router = await attach(p, d)
    prompts = {f"r{n}": list(range(1, 5 + 3 * n)) for n in range(8)}
    tokens = await asyncio.gather(
        *(router.remote(ask(name, prompt, max_tokens=10 + n)) for n, (name, prompt) in enumerate(prompts.items()))
    )
    assert tokens == [answer(prompt, 10 + n) for n, prompt in enumerate(prompts.values())]


def ids_of(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(text).ids
    return ids


TEXT = ids_of(
    "import os\nimport sys\n\n\nclass Path:\n    def __init__(self, name):\n        self.name = name\n\n"
    "    def exists(self):\n        return os.path.exists(self.name)\n\n    def "
)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param({"block_size": 16}, {"block_size": 32}, marks=pytest.mark.slow),
        pytest.param({"block_size": 32}, {"block_size": 16}, marks=pytest.mark.slow),
        ({"block_size": 16, "kv_dtype": "int8"}, {"block_size": 32, "kv_dtype": "int8"}),
    ],
)
async def test_a_real_engine_continues_from_converted_blocks(
    start: Any, attach: Any, ask: Any, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    common: dict[str, Any] = {
        "model": str(BUNDLED),
        "max_context_tokens": 512,
        "kv_blocks": 32,
        "is_prefix_cache_on": False,
        "deterministic": "on",  # a float that rounds otherwise becomes another integer
        "profile": "h100-sxm.llama-3.1-8b.bf16",  # no worker measures itself first
    }
    p, d = start(Role.PREFILL, **{**common, **prefill}), start(Role.DECODE, **{**common, **decode})
    router = await attach(p, d)
    remote = await router.remote(ask("r", TEXT, max_tokens=24))
    assert remote == await router.local(ask("l", TEXT, max_tokens=24))
    assert len(set(remote)) > 4


def row_of(history: list[int], start: int, blocks: list[int]) -> Row:
    return Row(
        tokens=history[start:],
        start=start,
        blocks=blocks,
        sample=Sampling(temperature=0.0, max_tokens=64),
        history=list(history),
        prompt_len=len(TEXT),
    )


def decoded(engine: Engine, blocks: list[int], history: list[int], start: int, count: int) -> list[int]:
    while len(history) < len(TEXT) + count:
        [out] = engine.step([row_of(history, start, blocks)])
        start = len(history)
        history.append(out.sampled[0].token_id)
    return history[len(TEXT) :]


async def test_float32_sent_to_an_int8_pool_matches_its_engine(start: Any, attach: Any, ask: Any) -> None:
    common: dict[str, Any] = {
        "model": str(BUNDLED),
        "max_context_tokens": 512,
        "kv_blocks": 32,
        "is_prefix_cache_on": False,
        "deterministic": "on",  # a float that rounds otherwise becomes another integer
        "profile": "h100-sxm.llama-3.1-8b.bf16",  # no worker measures itself first
    }
    p = start(Role.PREFILL, block_size=16, **common)
    d = start(Role.DECODE, block_size=32, kv_dtype="int8", **common)
    router = await attach(p, d)
    remote = await router.remote(ask("r", TEXT, max_tokens=24))
    exact, small = p.program.engine, d.program.engine
    num_tokens = len(TEXT)

    def by_hand(prefill: Any, decode: Any) -> list[int]:
        """The expected answer: both workers' engines, with torch's rounding between their pools."""
        source, target = [3, 9, 1, 7, 5, 4], [8, 2, 6, 10]
        [first] = prefill.step([row_of(TEXT, 0, source)])
        decode.pool.clear([(block, 0) for block in target])
        shape = prefill.pool.shape
        x_LPTKD = torch.cat([prefill.pool.tensor[block] for block in source], dim=2)[:, :, :num_tokens]
        position_T = torch.arange(num_tokens)
        where_T = torch.tensor(target)[position_T // 32], position_T % 32
        for layer in range(shape.num_layers):
            decode.pool.write(layer, x_LPTKD[layer, 0], x_LPTKD[layer, 1], *where_T)
        return decoded(decode, target, [*TEXT, first.sampled[0].token_id], num_tokens, 24)

    assert -(-num_tokens // 16) <= 6
    expected = by_hand(exact, small)
    assert remote == expected
    # An engine that computes with int8 from the start rounds what its upper layers read, so only they may differ.
    local = await router.local(ask("l", TEXT, max_tokens=24))
    assert local == remote


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_floats_are_sent_as_int8_if_configured(start: Any, attach: Any, ask: Any, transport: str) -> None:
    """A third of the bytes, and the tokens of an engine that received rounded KV."""
    common: dict[str, Any] = {
        "model": str(BUNDLED),
        "max_context_tokens": 512,
        "block_size": 16,
        "kv_blocks": 32,
        "is_prefix_cache_on": False,
        "deterministic": "on",  # a float that rounds otherwise becomes another integer
        "profile": "h100-sxm.llama-3.1-8b.bf16",  # no worker measures itself first
        "transport": transport,
    }
    p, d = start(Role.PREFILL, kv_wire="int8", **common), start(Role.DECODE, **common)
    router = await attach(p, d)
    remote = await router.remote(ask("r", TEXT, max_tokens=24))
    [told_by_d] = [one for one in router.all("transfer_ended", "r") if one.is_committed and one.num_bytes]
    exact_bytes = -(-len(TEXT) // d.program.engine.spec.block_size) * d.program.engine.spec.block_bytes
    assert told_by_d.num_bytes < 0.3 * exact_bytes
    engine = d.program.engine
    blocks = list(range(20, 32))
    [first] = engine.step([row_of(TEXT, 0, blocks)])
    size = engine.spec.block_size
    for position in range(len(TEXT)):
        x_LPKD = engine.pool.tensor[blocks[position // size], :, :, position % size]
        whole, scale = quantise(x_LPKD.flatten(0, 1))
        x_LPKD.copy_((whole * scale[..., None]).view(x_LPKD.shape))
    assert remote == decoded(engine, blocks, [*TEXT, first.sampled[0].token_id], len(TEXT), 24)


async def test_inconvertible_shapes_fail_with_a_typed_error(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL, model="toy"), start(Role.DECODE, model="toy", block_size=8)
    router = await attach(p, d)
    sequence = ask("r", PROMPT)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    grant = transfer_pb2.Grant.FromString(granted.grant)
    grant.fingerprint.shape.head_dim = 2  # Of another model.
    prefill = worker_pb2.Prefill(sequence=sequence, grant=grant.SerializeToString())
    await router.send(Role.PREFILL, prefill=prefill)
    ended = await router.next("transfer_ended", "r", Role.PREFILL)
    assert "kv_shape.head_dim: got 1, expected 2" in ended.error
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="r", attempt=1))
    await router.released("r", Role.DECODE)
    grant.fingerprint.shape.block_size = 0  # Of no pool.
    for name, encoded, expected in (
        ("again", grant.SerializeToString(), "kv_shape.block_size: got 0"),
        ("nonsense", b"\xff\xff", "grant: got 2 bytes that do not parse"),
    ):
        await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=ask(name, PROMPT), grant=encoded))
        failed = await router.next("failed", name)
        assert expected in failed.message

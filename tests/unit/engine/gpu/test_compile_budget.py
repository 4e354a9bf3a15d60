"""No kernel is compiled after a worker is ready: Triton's cache has every kernel of any later step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.transports.common.on_device import OnDevice
from pdserve.config import WorkerConfig
from pdserve.core.types import Sampling
from pdserve.engine.gpu.graphs import StaticDecode
from pdserve.engine.gpu.kernels.fixed_shapes import buckets_for
from pdserve.engine.gpu.kernels.kv import relay
from pdserve.engine.gpu.resample import forbid_tokens, penalise
from pdserve.engine.interface import Row
from pdserve.engine.load import build_engine
from tests.gpu.compile_budget import count_compiled

pytestmark = pytest.mark.gpu_checks

NUM_STEPS = 24
LARGE_STEP = 8192  # prompt tokens
GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def open_triton(monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], Path]) -> Callable[..., Any]:
    """An engine on the CPU that uses the GPU's code path: products by torch, all other operations by kernels."""
    facts = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(build_engine, "is_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)

    def get(name: str, **settings: Any) -> Any:
        settings = {"kv_blocks": 4096, "block_size": 8, **settings}
        config = WorkerConfig(model=str(tiny(name)), worker_id="w", device="cpu", threads=1, **settings)
        return build_engine.open_torch_engine(config)

    return get


def row(rng: random.Random, blocks: Iterator[int], limit: int) -> Row:
    """A row with one token, a short tail, drafts or a chunk, after a context of any length."""
    count = rng.choice((1, 1, 1, rng.randint(2, 16), rng.randint(17, 100)))
    drafts = rng.choice((0, 0, rng.randint(1, 15))) if count == 1 else 0
    end = rng.choice((count, rng.randint(count, 64 + count), rng.randint(count, limit - drafts)))
    is_sampled = bool(drafts) or rng.random() < 0.8
    return Row(
        tokens=[1] * count,
        start=end - count,
        blocks=[next(blocks) for _ in range(-(-(end + drafts) // 8))],
        sample=GREEDY if is_sampled else None,
        history=[1] * end,
        prompt_len=end,
        drafts=[1] * drafts,
    )


@pytest.mark.parametrize(
    ("name", "kv_dtype", "block_size", "layout"),
    [("llama", "auto", 8, "tokens"), ("gemma2", "int8", 8, "tokens"), ("llama", "fp8", 64, "heads")],
)
def test_random_steps_compile_nothing(
    name: str,
    kv_dtype: str,
    block_size: int,
    layout: str,
    open_triton: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_GPU", f"layout={layout}")
    engine, rng = open_triton(name, kv_dtype=kv_dtype, block_size=block_size), random.Random(5)
    limit = engine.spec.max_context_tokens
    assert engine.pool.shape.heads_first == (layout == "heads")
    with count_compiled() as compiled:
        build_engine.warmed(engine)
        warmed = compiled.variants()
        assert warmed["_attend"] <= 2 * len(engine.model.heads.windows)
        assert warmed["_split"] <= len(engine.model.heads.windows)
        for _ in range(NUM_STEPS):
            blocks = iter(range(engine.spec.num_blocks))
            engine.follow([row(rng, blocks, limit) for _ in range(rng.choice((1, 2, 5)))])
            assert compiled.variants() == warmed
        blocks = iter(range(engine.spec.num_blocks))
        engine.follow([chunk(blocks, limit, block_size) for _ in range(LARGE_STEP // limit)])
        assert compiled.variants() == warmed


def chunk(blocks: Iterator[int], count: int, block_size: int) -> Row:
    """A whole prompt."""
    return Row(tokens=[1] * count, start=0, blocks=[next(blocks) for _ in range(-(-count // block_size))])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_redraws_compile_nothing_beyond_the_graphs(open_triton: Callable[..., Any], dtype: str) -> None:
    """Graphs sample from logits of the model's dtype. Resampling uses float32."""
    engine = open_triton("llama", dtype=dtype)
    with count_compiled() as compiled, torch.inference_mode():
        decode = StaticDecode(
            engine.model,
            engine.pool,
            most_rows=200,
            max_context_tokens=1024,
            vocab_size=engine.spec.vocab_size,
            num_processors=132,
        )
        decode.inputs.field("follows", 200).fill_(-1)
        for bucket in buckets_for(200):
            decode.run(bucket)
        redraw(decode, 1)
        captured = compiled.variants()
        assert captured["_attend"] == 1
        for num_rows in range(2, 201):
            redraw(decode, num_rows)
            assert compiled.variants() == captured, num_rows


def redraw(decode: StaticDecode, num_rows: int) -> None:
    """The launches after a graph for rows that are resampled: bans, penalties, and sampling."""
    size = decode.logits_BV.shape[1]
    row_S = torch.zeros(num_rows, dtype=torch.int64)
    logits_SV = decode.logits_BV.index_select(0, row_S).float()
    forbid_tokens(logits_SV, torch.zeros((num_rows, size // 32), dtype=torch.int32), row_S)
    penalise(logits_SV, torch.zeros((8, size), dtype=torch.int32), row_S, row_S, torch.zeros((3, num_rows)))
    decode.sampler.draw(logits_SV, decode.inputs.draws_of(row_S), parts=decode.sampler.most_parts)


def test_copies_of_blocks_compile_nothing() -> None:
    """Once a transport is prepared, copies and checksums of any number of blocks compile nothing."""
    raw, staging = torch.zeros((64, 4096), dtype=torch.uint8), torch.zeros((8, 4096), dtype=torch.uint8)
    with count_compiled() as compiled:
        OnDevice(lambda pool: Relays(raw, staging)).prepare(None)  # type: ignore[arg-type,return-value]
        assert compiled.variants() == {"_relay": 2}
        for count in range(1, 9):
            relay(raw, numbers(count), staging, numbers(count))
            relay(staging, numbers(count), raw, numbers(count))
            relay(raw, numbers(count))
        assert compiled.variants() == {"_relay": 2}


def numbers(count: int) -> Tensor:
    """Block numbers as in kvtransfer.devices.cuda, which begin at a multiple of 16 bytes."""
    return torch.zeros(count + -count % 4, dtype=torch.int32)[:count]


class Relays:
    """A device that only counts launches."""

    def __init__(self, raw: Tensor, staging: Tensor) -> None:
        self.raw, self.room = raw, staging

    def pool(self) -> Tensor:
        return self.raw

    def staging(self, num_blocks: int) -> Any:
        return SimpleNamespace(tensor=self.room[:num_blocks], close=lambda: None)

    def copy(self, source: Tensor, sources: list[int], target: Any, *rest: object) -> None:
        count = len(sources)
        relay(source, numbers(count), target and target.tensor, numbers(count) if target else None)

    def drain(self) -> None: ...


def test_the_budget_counts_what_triton_specialises() -> None:
    """Ones, multiples of sixteen, alignments and constants each select a separate kernel."""
    words_RW, row_S = torch.zeros((4, 2), dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    logits_SV = torch.zeros((4, 48))
    with count_compiled() as compiled:
        for num_rows in (1, 2, 4):
            forbid_tokens(logits_SV[:num_rows], words_RW[:num_rows], row_S[:num_rows])
        assert compiled.variants() == {"_forbid": 1}
        forbid_tokens(logits_SV, words_RW, row_S[1:5])
        assert compiled.variants() == {"_forbid": 2}, "a tensor that begins at 8 bytes"
        forbid_tokens(logits_SV[:, :47], words_RW, row_S[:4])
        assert compiled.variants() == {"_forbid": 3}, "a size that sixteen does not divide"

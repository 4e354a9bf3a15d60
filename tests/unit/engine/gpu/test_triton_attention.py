"""Mixed steps with Triton kernels: states, keys and values equal those of torch, for any rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine.gpu import triton_attention as prefill
from pdserve.engine.gpu.kernels.attention_plan import MOST_QUERIES
from pdserve.engine.gpu.triton_attention import FlashCall, takes_flash, triton_attention
from pdserve.engine.interface import Row
from pdserve.engine.model.attention import EagerAttention
from pdserve.engine.model.batch import pack

SIZE = 16
PROMPT = [3 + (31 * at) % 380 for at in range(60)]


def row_of(start: int, count: int, blocks: list[int], num_drafts: int = 0) -> Row:
    end = start + count
    return Row(
        tokens=PROMPT[start:end],
        start=start,
        blocks=blocks,
        targets=PROMPT[start + 1 : end + 1],  # So that every token's state is read.
        drafts=PROMPT[end : end + num_drafts],
    )


def steps() -> list[list[Row]]:
    """Three sequences: prompts in chunks, then a token, drafts and a long chunk in one step."""
    first, second, third = [9, 4, 11, 0, 7], [1, 2, 3], [20, 8, 22, 5, 6, 12, 13, 15]
    return [
        [row_of(0, 19, first), row_of(0, 17, second)],
        [row_of(19, 1, first), row_of(17, 3, second, num_drafts=2), row_of(0, 20, third), row_of(0, 1, [30])],
        [row_of(20, 18, third), row_of(20, 5, first)],
    ]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("gemma2", "int8"),
        *(pytest.param(one, "auto", marks=pytest.mark.slow) for one in ("qwen3", "llama", "mistral-window")),
    ],
)
def test_states_and_blocks_match_torch(
    name: str, kv_dtype: str, tiny: Callable[[str], Path], open_engine: Callable[..., Any], device: torch.device
) -> None:
    settings = {"kv_blocks": 32, "block_size": SIZE, "max_context_tokens": 128, "kv_dtype": kv_dtype}
    engine = open_engine(tiny(name), **settings, device=device.type, dtype="float32")
    other = open_engine(tiny(name), **settings, device=device.type, dtype="float32")
    model = engine.model
    make_attention = triton_attention(engine.pool, model.heads, torch.float32, 128, num_processors=4)
    with torch.inference_mode():
        for rows in steps():
            batch = pack(rows, SIZE, device, MOST_QUERIES)
            assert batch.short is None or batch.short.num_tokens == sum(
                row.num_queries for row in rows if row.num_queries <= 16
            )
            ours = model.hidden(make_attention(batch, None))
            plain = pack(rows, SIZE, device)
            theirs = other.model.hidden(EagerAttention(plain, other.pool, other.model.heads))
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() < (1e-4 if kv_dtype == "auto" else 0.2) * theirs.abs().max()
    for mine, expected in zip(values(engine.pool), values(other.pool), strict=True):
        assert (mine - expected).abs().max() < (1e-4 if kv_dtype == "auto" else 0.05) * expected.abs().max()


def flash(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, call: FlashCall, window: int | None, scale: float | None
) -> Tensor:
    """The operator's documented result in float64, and checks of its requirements."""
    for tensor in (call.query_B1, call.key_B1):
        assert (tensor.dtype, tensor.device, tensor.is_contiguous()) == (torch.int32, q_THD.device, True)
    assert q_THD.stride(-1) == k_SKD.stride(-1) == v_SKD.stride(-1) == 1
    queries, keys = call.query_B1.tolist(), call.key_B1.tolist()
    assert (queries[-1], keys[-1]) == (len(q_THD), len(k_SKD))
    outs = []
    for (first, end), (first_k, end_k) in zip(pairwise(queries), pairwise(keys), strict=True):
        assert end - first <= call.most_tokens
        assert end_k - first_k <= call.most_positions
        q_HTD = q_THD[first:end].double().transpose(0, 1)
        group = q_THD.shape[1] // k_SKD.shape[1]
        k_HSD, v_HSD = (x[first_k:end_k].double().transpose(0, 1).repeat_interleave(group, 0) for x in (k_SKD, v_SKD))
        # The mask is aligned to the lower right corner.
        asked = torch.arange(end - first)[:, None] + (end_k - first_k) - (end - first)
        key = torch.arange(end_k - first_k)[None]
        seen = (key <= asked) & (key >= asked - (window - 1) if window is not None else True)
        score = (q_HTD @ k_HSD.mT * (q_THD.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(
            ~seen, -torch.inf
        )
        outs.append((score.softmax(-1) @ v_HSD).transpose(0, 1))
    return torch.cat(outs).to(q_THD.dtype)


@pytest.mark.gpu_checks
@pytest.mark.parametrize(
    ("name", "most_positions", "most_calls"),
    [pytest.param("llama", 1024, 1, marks=pytest.mark.slow), ("mistral-window", 40, 2)],
)
def test_chunks_attend_with_one_call_per_layer(
    name: str,
    most_positions: int,
    most_calls: int,
    tiny: Callable[[str], Path],
    open_engine: Callable[..., Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"kv_blocks": 32, "block_size": SIZE, "max_context_tokens": 128}
    engine = open_engine(tiny(name), **settings, device=device.type, dtype="float32")
    other = open_engine(tiny(name), **settings, device=device.type, dtype="float32")
    calls = []
    monkeypatch.setattr(prefill, "flash", lambda *args: calls.append(args[3]) or flash(*args))
    heads = engine.model.heads
    make_attention = triton_attention(engine.pool, heads, torch.float32, 128, 4, most_positions)
    with torch.inference_mode():
        for rows in steps():
            calls.clear()
            num_chunks = sum(row.num_queries > MOST_QUERIES for row in rows)
            ours = engine.model.hidden(make_attention(pack(rows, SIZE, device, MOST_QUERIES), None))
            plain = pack(rows, SIZE, device)
            theirs = other.model.hidden(EagerAttention(plain, other.pool, other.model.heads))
            assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
            assert len(calls) <= most_calls * engine.pool.shape.num_layers
            assert sum(len(call.table_BP) for call in calls) == num_chunks * engine.pool.shape.num_layers


def test_torch_handles_cases_without_flash_attention(tiny: Callable[[str], Path], open_engine: Any) -> None:
    heads = open_engine(tiny("llama"), kv_blocks=8).model.heads
    assert takes_flash(heads, torch.bfloat16)
    assert not takes_flash(heads, torch.float32)
    assert not takes_flash(replace(heads, softcap=30.0), torch.bfloat16)
    assert not takes_flash(replace(heads, head_dim=260), torch.bfloat16)


def test_layers_are_reported_when_their_writes_are_queued(
    tiny: Callable[[str], Path], open_engine: Callable[..., Any], device: torch.device
) -> None:
    """The contents of a layer when on_layer reports it are those after the step."""
    engine = open_engine(tiny("llama"), kv_blocks=32, block_size=SIZE, device=device.type, dtype="float32")
    pool, heads = engine.pool, engine.model.heads
    engine._make_attention, engine._most_short = triton_attention(pool, heads, torch.float32, 128, 4), MOST_QUERIES
    engine._hidden = engine.model.hidden  # only steps of the CPU's attention are recorded
    every, seen = torch.arange(pool.num_blocks, device=device)[None], []

    def look(num_layers: int) -> None:
        seen.append((num_layers, [x.clone() for x in pool.read(num_layers - 1, every, torch.float32)]))

    for rows in steps():
        seen.clear()
        with torch.inference_mode():
            engine._states(rows, look)
        assert [count for count, _ in seen] == list(range(1, pool.shape.num_layers + 1))
        for count, stored in seen:
            for ours, left in zip(stored, pool.read(count - 1, every, torch.float32), strict=True):
                assert ours.equal(left)


def test_a_repeated_step_changes_no_byte(
    tiny: Callable[[str], Path], open_engine: Callable[..., Any], device: torch.device
) -> None:
    """Layers of the first try may be on their way to a receiver."""
    engine = open_engine(tiny("llama"), kv_blocks=32, block_size=SIZE, device=device.type, dtype="float32")
    pool, heads, seen = engine.pool, engine.model.heads, []
    engine._make_attention, engine._most_short = triton_attention(pool, heads, torch.float32, 128, 4), MOST_QUERIES
    engine._hidden = engine.model.hidden  # only steps of the CPU's attention are recorded
    for rows in steps():
        with torch.inference_mode():
            engine._states(rows)
            after = pool.raw.clone()
            engine._states(rows, lambda _, after=after: seen.append(pool.raw.equal(after)))
    assert seen == [True] * (len(steps()) * pool.shape.num_layers)


def values(pool: Any) -> list[torch.Tensor]:
    every = torch.arange(pool.num_blocks, device=pool.tensor.device)[None]
    return [x for layer in range(pool.shape.num_layers) for x in pool.read(layer, every, torch.float32)]

"""Deterministic mode: logits have the same bits for any batch, chunk size, block size and order of arrival."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.types import Sampling
from pdserve.engine import torch_engine
from pdserve.engine.interface import Engine
from pdserve.engine.sampling.sampler import Draw
from tests.support.slow import slow_except

BUNDLED = Path("pdserve/models/stdlib-5m").absolute()
Logits = dict[tuple[int, ...], bytes]


@pytest.fixture
def seen_logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """The bytes of every sampled row of logits, by the text before it. Two different values are an error."""
    seen: Logits = {}
    sample = torch_engine.sample

    def spy(logits_BV: Tensor, draws: Sequence[Draw], *rest: Any, **named: Any) -> Any:
        for draw, logits_V in zip(draws, logits_BV, strict=True):
            bits = logits_V.numpy().tobytes()
            assert seen.setdefault(tuple(draw.history), bits) == bits, f"position {len(draw.history)}"
        return sample(logits_BV, draws, *rest, **named)

    monkeypatch.setattr(torch_engine, "sample", spy)
    return seen


def requests_of(request_of: Any, make_prompt: Callable[..., list[int]], count: int, num_tokens: int) -> list[Any]:
    lengths = [1 + (7 * index * index) % 150 for index in range(count)]
    return [
        request_of(
            prompt=make_prompt(length, seed=index),
            sampling=Sampling(
                temperature=0.0 if index % 2 else 1.0, seed=index, max_tokens=num_tokens, ignore_eos=True
            ),
        )
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("llama", "float32", 20),
        ("qwen3", "int8", 16),
        ("mistral-window", "bfloat16", 16),
        pytest.param("llama", "float32", 100, marks=pytest.mark.slow),
        pytest.param("qwen3", "int8", 70, marks=pytest.mark.slow),
        pytest.param("mistral-window", "float32", 70, marks=pytest.mark.slow),
    ],
)
def test_requests_in_any_order_have_the_same_bits(
    name: str,
    dtype: str,
    count: int,
    tiny: Callable[[str], Path],
    open_engine: Callable[..., Engine],
    serve: Callable[..., list[list[int]]],
    request_of: Any,
    make_prompt: Callable[..., list[int]],
    seen_logits: Logits,
) -> None:
    before = torch.get_num_threads()
    answers = []
    for order in range(3):
        engine = open_engine(tiny(name), dtype=dtype, deterministic="on", kv_blocks=2000, threads=1 + order % 2)
        requests = requests_of(request_of, make_prompt, count, 6)
        for one in requests:
            one.arrival = random.Random(order).randrange(40) if order else 0
        served = serve(engine, requests, chunk=(10_000, 7, 64)[order], seed=order)
        answers.append(served)
        engine.close()
    torch.set_num_threads(before)
    assert answers[0] == answers[1] == answers[2]
    assert len(seen_logits) > 5 * count


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], "float32"))
def test_the_bundled_model_alone_and_in_a_batch(
    dtype: str,
    open_engine: Callable[..., Engine],
    serve: Callable[..., list[list[int]]],
    request_of: Any,
    make_prompt: Callable[..., list[int]],
    seen_logits: Logits,
) -> None:
    setting = "auto" if dtype == "bfloat16" else "on"
    engine = open_engine(BUNDLED, dtype=dtype, deterministic=setting, kv_blocks=600)
    together = serve(engine, requests_of(request_of, make_prompt, 12, 16), chunk=50, seed=1)
    alone = [serve(engine, [one], chunk=300, seed=2)[0] for one in requests_of(request_of, make_prompt, 12, 16)]
    assert together == alone
    assert len(seen_logits) >= 12 * 16


def test_other_modes_are_refused_by_name(tiny: Callable[[str], Path], open_engine: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match="deterministic"):
        open_engine(tiny("llama"), kv_dtype="fp8", deterministic="on")

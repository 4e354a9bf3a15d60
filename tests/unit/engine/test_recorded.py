"""A repeated step gives the bits of a computed one, and steps with operations of torch are not repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.core.types import Sampling
from pdserve.engine import torch_engine
from pdserve.engine.interface import Row
from pdserve.engine.load.cpu_engine import RecordedSteps
from pdserve.engine.model.rounded import has_int4_kernel
from pdserve.engine.torch_engine import TorchEngine

BUNDLED = str(Path("pdserve/models/stdlib-5m").absolute())
GREEDY = Sampling(temperature=0.0, max_tokens=64)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(histories: list[list[int]], starts: list[int]) -> list[Row]:
    return [
        Row(
            tokens=history[start:], start=start, blocks=range(8 * index, 8 * index + 8), sample=GREEDY,
            history=history, prompt_len=1,
        )
        for index, (history, start) in enumerate(zip(histories, starts, strict=True))
    ]  # fmt: skip


@pytest.fixture
def logits_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[TorchEngine, list[Row]], tuple[Tensor, list[int]]]:
    """A step's logits and tokens."""
    seen: list[Tensor] = []
    sample = torch_engine.sample

    def spy(logits_BV: Tensor, *rest: Any) -> Any:
        seen.append(logits_BV.clone())
        return sample(logits_BV, *rest)

    monkeypatch.setattr(torch_engine, "sample", spy)

    def get(engine: TorchEngine, rows: list[Row]) -> tuple[Tensor, list[int]]:
        outs = engine.step(rows)
        return seen.pop(), [out.sampled[0].token_id for out in outs]

    return get


@pytest.mark.parametrize(
    ("name", "dtype", "num_threads"),
    [(BUNDLED, "float32", 2), (BUNDLED, "bfloat16", 1), (BUNDLED, "int8", 2), (BUNDLED, "int4", 1),
     ("gemma2", "int4", 2), ("llama-tied-biased", "int4", 1), ("qwen2-window-by-layer", "bfloat16", 2),
     ("qwen3", "int4", 1), ("qwen3-moe", "float32", 2)],
)  # fmt: skip
def test_repeated_steps_match_computed_ones(
    tiny: Callable[[str], Path],
    open_engine: Any,
    make_prompt: Any,
    logits_of: Any,
    name: str,
    dtype: str,
    num_threads: int,
) -> None:
    engine: TorchEngine = open_engine(name if name == BUNDLED else tiny(name), dtype=dtype, threads=num_threads)
    recorded = engine._hidden
    histories = [make_prompt(length) for length in (3, 40, 17)]
    starts = [0, 0, 0]
    for step in range(6):
        rows = rows_of(histories, starts)[: 3 - step % 2]
        engine._hidden = engine.model.hidden
        expected, _ = logits_of(engine, rows)
        engine._hidden = recorded
        logits, tokens = logits_of(engine, rows)
        assert torch.equal(logits, expected)
        for index, token in enumerate(tokens):
            starts[index] = len(histories[index])
            histories[index].append(token)


@pytest.mark.skipif(not has_int4_kernel(), reason="products are torch's")
@pytest.mark.parametrize(
    ("name", "is_repeated"),
    [
        (BUNDLED, True),
        ("llama-tied-biased", True),
        ("qwen2-window-by-layer", True),
        ("qwen3", True),
        ("gemma3", True),
        ("qwen3-moe", False),
    ],
)
def test_steps_of_kernels_alone_are_repeated(
    tiny: Callable[[str], Path], open_engine: Any, make_prompt: Any, name: str, is_repeated: bool
) -> None:
    """With int4, because its kernel takes the tiny models' odd sizes."""
    engine: TorchEngine = open_engine(name if name == BUNDLED else tiny(name), dtype="int4", threads=1)
    engine.step(rows_of([make_prompt(5)], [4]))
    recorded = getattr(engine._hidden, "__self__", None)
    assert isinstance(recorded, RecordedSteps)
    assert (recorded._recorded[1] is not None) == is_repeated


@pytest.mark.skipif(not has_int4_kernel(), reason="products are torch's")
def test_steps_are_recorded_again_after_any_step_with_more_threads(
    open_engine: Callable[..., TorchEngine], make_prompt: Callable[[int], list[int]]
) -> None:
    """A step with more threads replaces the memory that kernels have for each of them."""
    engine = open_engine(BUNDLED, dtype="int4", threads=1)
    steps = getattr(engine._hidden, "__self__", None)
    assert isinstance(steps, RecordedSteps)
    history = make_prompt(40)
    engine.step(rows_of([history], [0]))
    history.append(5)
    engine.step(rows_of([history], [40]))
    before = steps._recorded[1]
    torch.set_num_threads(2)
    engine.step(rows_of([make_prompt(60)], [0]))  # is itself not recorded
    torch.set_num_threads(1)
    history.append(6)
    engine.step(rows_of([history], [41]))
    assert steps._recorded[1] is not before

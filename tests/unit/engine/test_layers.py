"""A step that reports stored layers: never too early, and with the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row, RowOut
from pdserve.engine.toy import ToyEngine

Tiny = Callable[[str], Path]
OpenEngine = Callable[..., Engine]
DRAWN = Sampling(temperature=0.0, max_tokens=4, logprobs=3)
PROMPT = [3 + (7 * i) % 300 for i in range(75)]  # A block of 16 is partly filled.


def rows(tokens: Sequence[int] = PROMPT) -> list[Row]:
    """A chunk that ends its prompt, one that does not, and an unrelated decode row."""
    return [
        Row(tokens=tokens, start=0, blocks=[9, 2, 7, 4, 30], sample=DRAWN, history=tokens, prompt_len=len(tokens)),
        Row(tokens=tokens[:32], start=0, blocks=[11, 12]),
        Row(tokens=tokens[:1], start=0, blocks=[20], sample=DRAWN, history=tokens[:1], prompt_len=1),
    ]


def written(step: Sequence[Row]) -> list[int]:
    return [block for row in step for block in row.blocks]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_reported_layers_are_final(name: str, tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny(name))
    spec = engine.spec
    layer_bytes, rest = divmod(spec.block_bytes, spec.num_layers)
    assert spec.num_layers > 1
    assert rest == 0
    told: list[int] = []
    seen: dict[tuple[int, int], bytes] = {}

    def on_layer(num_layers: int) -> None:
        told.append(num_layers)
        for block in written(step):
            for layer in range(num_layers):
                first = block * spec.block_bytes + layer * layer_bytes
                seen.setdefault((block, layer), bytes(engine.pool.buffer[first : first + layer_bytes]))

    step = rows()
    engine.step(step, on_layer)
    assert told == list(range(1, spec.num_layers + 1))
    for (block, layer), contents in seen.items():
        first = block * spec.block_bytes + layer * layer_bytes
        assert contents == engine.pool.buffer[first : first + layer_bytes], (block, layer)
        assert any(contents), "the layer was stored at all"


@pytest.mark.parametrize("settings", [{}, {"deterministic": "on"}, {"block_size": 32}])
def test_a_repeated_step_changes_no_byte(settings: dict[str, Any], tiny: Tiny, open_engine: OpenEngine) -> None:
    """Layers of the first try may be on their way to a receiver."""
    engine = open_engine(tiny("llama"), **settings)
    engine.pool.buffer[:] = b"\xff" * len(engine.pool.buffer)  # NaN, of earlier requests
    engine.step(rows())
    after, seen = bytes(engine.pool.buffer), []
    engine.step(rows(), lambda num_layers: seen.append(engine.pool.buffer == after))
    assert seen == [True] * engine.spec.num_layers
    [*_, last] = rows()[0].blocks[: -(-len(PROMPT) // engine.spec.block_size)]
    unused = engine.pool.tensor[last, :, :, len(PROMPT) % engine.spec.block_size :]
    assert unused.numel()
    assert not unused.any(), "the unused part is sent too, so it has nothing of earlier requests"


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"deterministic": "on"}])
def test_a_layer_callback_changes_no_bit(settings: dict[str, Any], tiny: Tiny, open_engine: OpenEngine) -> None:
    silent, listened = open_engine(tiny("llama"), **settings), open_engine(tiny("llama"), **settings)
    told: list[int] = []
    assert silent.step(rows()) == listened.step(rows(), told.append)
    for block in written(rows()):
        first, end = block * silent.spec.block_bytes, (block + 1) * silent.spec.block_bytes
        assert silent.pool.buffer[first:end] == listened.pool.buffer[first:end]
    assert told[-1] == listened.spec.num_layers


def test_an_indivisible_block_is_reported_whole(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("llama"), kv_dtype="int8")  # The scales of all layers are stored after all values.
    told: list[int] = []
    engine.step(rows(), told.append)
    assert (engine.spec.num_layers, told) == (1, [1])
    toy, toy_told = ToyEngine(), []
    out: list[RowOut] = toy.step([Row(tokens=[65, 66], start=0, blocks=[1])], toy_told.append)
    assert (out, toy.spec.num_layers, toy_told) == ([RowOut()], 1, [1])

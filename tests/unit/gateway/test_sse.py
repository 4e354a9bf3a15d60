"""Frames of a stream are lines, whatever ends a line for a client."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.gateway import sse
from pdserve.gateway.respond import PAUSE_BYTES, encoded
from pdserve.gateway.sse import SLICE, to_json, to_json_pieces

TEXT = 'a\x85b\u2028c\u2029d\n\x0b\x0c\x1c\x1d\x1ee\\u2028"é日'


@pytest.mark.parametrize("make", [sse.frame, sse.padded_frame])
def test_a_frame_is_one_line_for_every_client(make: object) -> None:
    assert callable(make)
    found: bytes = make({"text": TEXT})
    lines = found.decode().splitlines()
    assert lines[1:] == [""]
    assert json.loads(lines[0].removeprefix("data: "))["text"] == TEXT


def test_padding_counts_escaped_characters() -> None:
    sizes = {len(sse.padded_frame({"text": "\u2028" * count})) % sse.PADDED_BYTES for count in range(40)}
    assert len(sizes) == 1


def test_pieces_are_the_same_json() -> None:
    rows = [{"a": [1, {"b": []}], "c": None}, {"d": float("nan")}]
    value = {
        "empty": {},
        "none": [],
        "rows": rows,
        "long": list(range(3 * SLICE + 1)),
        "texts": ("x",) * (SLICE + 1),
        "deep": {"e": {"f": [[1], [2, [3]]]}},
    }
    assert b"".join(to_json_pieces(value)) == to_json(value)
    assert b"".join(to_json_pieces({"rows": iter(rows), "none": iter(())})) == to_json({"rows": rows, "none": []})
    assert asyncio.run(encoded(value)) == to_json(value)


def test_a_long_answer_is_made_while_it_is_encoded() -> None:
    made = 0

    def tokens() -> Iterator[dict[str, Any]]:
        nonlocal made
        for _ in range(20_000):
            made += 1
            yield {"token": "x", "top": [{"token": "y", "bytes": [1, 2]}] * 20}

    pieces = to_json_pieces({"choices": iter([{"logprobs": {"content": tokens()}}])})
    assert max(len(one) for one in itertools.islice(pieces, 1000)) < 4096
    assert made < 1000


def test_others_run_while_an_answer_is_encoded() -> None:
    turns = 0

    async def beside() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> int:
        task = asyncio.create_task(beside())
        found = await encoded({"tokens": list(range(500_000))})
        task.cancel()
        return len(found)

    num_bytes = asyncio.run(run())
    assert turns >= num_bytes // (PAUSE_BYTES + 4096) > 40

"""Frames of a stream are lines, whatever ends a line for a client."""

from __future__ import annotations

import json

import pytest

from pdserve.gateway import sse

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

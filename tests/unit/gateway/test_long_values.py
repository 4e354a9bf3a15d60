"""An error repeats at most a part of what the caller sent, whichever field or name is too long."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.core.errors import MAX_REPEATED_CHARS, InvalidRequest, NotFound, shortened
from pdserve.gateway.api.field_support import IGNORED, MODELS, REJECTED, Endpoint
from tests.unit.gateway.conftest import Served
from tests.unit.gateway.test_limits import exchange, post

MAX_ANSWER_BYTES = 2048  # with the head
LONG = "x" * 10_000
DIGITS = 10**299  # as many digits as a number may have
PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "responses": "/v1/responses",
}
VALID: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "add"}], "max_tokens": 1},
    "text": {"prompt": "add", "max_tokens": 1},
    "responses": {"input": "add", "max_output_tokens": 16},
}
FUNCTION = {"type": "function", "function": {"name": "add", LONG: 1}, "name": "add"}
VALUES: list[Any] = [
    LONG,
    DIGITS,
    -DIGITS,
    [LONG],
    [DIGITS],
    {LONG: LONG},
    {str(DIGITS): 1},
    {"type": LONG},
    {"regex": "(" + LONG},
    {"grammar": "start: " + LONG},
    [{"role": LONG, "content": "add", LONG: 1}],
    [{"role": "user", "content": [{"type": LONG}]}],
    [FUNCTION],
    FUNCTION | {"function": {"name": LONG}, "name": LONG},
]


@pytest.mark.parametrize("endpoint", PATHS)
def test_no_field_is_repeated_whole(endpoint: Endpoint, toy: Served, raw: Callable[[str], socket.socket]) -> None:
    found: dict[str, int] = {}
    for name in (*MODELS[endpoint].model_fields, *IGNORED[endpoint], *REJECTED[endpoint], LONG):
        for value in VALUES:
            body = json.dumps(VALID[endpoint] | {name: value}).encode()
            answer = exchange(raw(toy.address), post(body, PATHS[endpoint]))
            if not answer.startswith(b"HTTP/1.1 200"):
                found[name[:40]] = max(found.get(name[:40], 0), len(answer))
    assert len(found) > 30
    assert {name: size for name, size in found.items() if size > MAX_ANSWER_BYTES} == {}


@pytest.mark.parametrize("path", [f"/{LONG[:4000]}", f"/v1/models/{LONG[:4000]}", f"/ui/requests/{LONG[:4000]}"])
@pytest.mark.parametrize("method", ["GET", "POST", "M" * 100])
def test_no_path_is_repeated_whole(path: str, method: str, toy: Served, raw: Callable[[str], socket.socket]) -> None:
    answer = exchange(raw(toy.address), f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert 200 < len(answer) < MAX_ANSWER_BYTES


def test_a_message_has_the_beginning_of_a_long_value() -> None:
    assert shortened("short") == "short"
    assert shortened(LONG) == "x" * (MAX_REPEATED_CHARS - 3) + "..."
    assert shortened(10**5_000) == "an integer of thousands of digits"
    error = InvalidRequest(LONG, LONG, "a shorter text")
    assert error.field == shortened(LONG)
    assert error.message == f"{shortened(LONG)}: got {shortened(LONG)}, expected a shorter text"
    assert len(NotFound("path", "\x00" * 10_000).message) < 2 * MAX_REPEATED_CHARS

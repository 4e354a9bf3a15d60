"""Events of a stream, as servers send and split them."""

from __future__ import annotations

import json

import pytest

from simulator.bench.http_server import MAX_EVENT_BYTES, BrokenStream, EventReader, error_message, read_chunk


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_may_arrive_in_pieces(size: int) -> None:
    stream = b': ping\n\nevent: x\ndata: {"a": 1}\r\n\r\ndata:two\n\ndata: [DONE]\n\n'
    reader = EventReader()
    pieces = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
    assert [event for piece in pieces for event in reader.feed(piece)] == ['{"a": 1}', "two", "[DONE]"]


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(BrokenStream, match="more than"):
        list(EventReader().feed(b"data: " + b"x" * (MAX_EVENT_BYTES + 1)))


@pytest.mark.parametrize("event", ["no json", "[1]", "7", "[" * 100_000])
def test_other_data_is_no_event(event: str) -> None:
    with pytest.raises(BrokenStream):
        read_chunk(event)


@pytest.mark.parametrize(
    ("choice", "has_tokens"),
    [
        ({"text": "a", "finish_reason": None}, True),
        ({"text": "", "finish_reason": None}, True),  # a token whose character is incomplete
        ({"text": "", "finish_reason": "length"}, False),
        ({"text": "a", "finish_reason": "length"}, True),
        ({"text": "", "finish_reason": "stop", "token_ids": [4]}, True),
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, False),
        ({"delta": {"role": "assistant", "content": "a"}, "finish_reason": None}, True),
        ({"delta": {"content": ""}, "finish_reason": None}, True),
        ({"delta": {"reasoning_content": "hm"}, "finish_reason": "stop"}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_parts_with_tokens_are_told_from_others(choice: dict[str, object], has_tokens: bool) -> None:
    found = read_chunk(json.dumps({"choices": [choice]}))
    assert (found.has_tokens, found.is_end) == (has_tokens, choice["finish_reason"] is not None)


def test_usage_and_errors_are_read() -> None:
    usage = read_chunk('{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}')
    assert (usage.prompt_tokens, usage.output_tokens, usage.has_tokens) == (5, 7, False)
    cached = read_chunk('{"choices": [], "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}}')
    assert (cached.cached_tokens, usage.cached_tokens) == (4, None)
    assert read_chunk('{"error": {"message": "broken\\nworker"}}').error == "broken worker"
    assert read_chunk('{"choices": [], "usage": {"prompt_tokens": -1}}').prompt_tokens is None


def test_words_and_counts_of_a_server_are_bounded() -> None:
    assert error_message({"message": "\x1b]0;title\x07 no\n room"}) == "?]0;title? no room"
    assert len(error_message("x" * 100_000)) == 400
    assert read_chunk('{"usage": {"completion_tokens": 1' + "0" * 400 + "}}").output_tokens is None

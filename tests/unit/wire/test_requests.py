"""A message is limited in steps, not only in bytes: the parts of a large one are counted before it is parsed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.core import types
from pdserve.core.errors import InvalidRequest
from pdserve.v1 import cluster_pb2, inference_pb2, peer_pb2, rank_pb2, transfer_pb2, worker_pb2
from pdserve.wire import convert
from pdserve.wire.requests import has_few_parts
from tests.support.calls import calls_of

FILES = (cluster_pb2, inference_pb2, peer_pb2, rank_pb2, transfer_pb2, worker_pb2)
REQUESTS = {
    method.full_name: method.input_type
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
UNKNOWN = 1000  # a field's number
MOST = 600
NUM_PARTS = 5000


def fields_of(kind: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Each field of a message and of the messages within it, with the numbers of the fields that lead to it."""
    for field in kind.fields:
        yield path, field
        if field.message_type is not None and len(path) < 5:
            yield from fields_of(field.message_type, (*path, field.number))


def varint(number: int) -> bytes:
    found = b""
    while number >= 0x80:
        found, number = found + bytes([number & 0x7F | 0x80]), number >> 7
    return found + bytes([number])


def within(path: tuple[int, ...], data: bytes) -> bytes:
    for number in reversed(path):
        data = varint(number << 3 | 2) + varint(len(data)) + data
    return data


def hostile(kind: Any) -> Iterator[bytes]:
    """Many parts at each field of each message: empty ones, numbers, and fields that the message has not."""
    for path, field in fields_of(kind):
        yield within(path, (varint(field.number << 3 | 2) + b"\0") * NUM_PARTS)
        yield within(path, (varint(field.number << 3) + b"\1") * NUM_PARTS)
    for wire_type, value in ((0, b"\1"), (1, bytes(8)), (2, b"\0"), (5, bytes(4))):
        yield (varint(UNKNOWN << 3 | wire_type) + value) * NUM_PARTS


@pytest.mark.parametrize("method", REQUESTS)
def test_parts_are_counted_in_every_field(method: str) -> None:
    kind = REQUESTS[method]
    has_few_parts(b"", kind)
    for data in hostile(kind):
        found: list[bool] = []
        count = calls_of(lambda data=data, found=found: found.append(has_few_parts(data, kind, MOST)))
        assert found == [False]
        assert count < 4 * MOST


def test_numbers_of_many_bytes_count_as_many_steps() -> None:
    data = (b"\x78" + b"\xff" * 9 + b"\1") * NUM_PARTS
    assert calls_of(lambda: has_few_parts(data, inference_pb2.GetModelRequest.DESCRIPTOR, MOST)) < MOST


@pytest.mark.parametrize(
    "data",
    [b"\x80" * 20, b"\x0a\x05ab", b"\x1a\x02\x0a\x05abcdef", b"\x0b\x0c", b"\x0d\0", b"\x0a" + b"\xff" * 9 + b"\1"],
    ids=["endless number", "cut text", "message behind its end", "group", "cut number", "size of 2^63"],
)
def test_a_message_that_does_not_parse_is_not_counted(data: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        has_few_parts(data, inference_pb2.GenerateRequest.DESCRIPTOR)


def test_the_largest_requests_have_few_parts() -> None:
    """Every list at its limit, and a text and token ids of 4 MiB."""
    calls = [inference_pb2.ToolCall(id="a" * 200, name="f" * 200, arguments="{}" * 100)] * 2
    texts = dict.fromkeys(("role", "content", "name", "tool_call_id", "reasoning_content"), "x" * 200)
    assert 2 * types.MAX_MESSAGES == types.MAX_CHAT_CALLS
    chat = inference_pb2.ChatPrompt(
        messages=[inference_pb2.ChatMessage(tool_calls=calls, **texts)] * types.MAX_MESSAGES,
        tools=["x" * 4096] * types.MAX_TOOLS,
    )
    sampling = inference_pb2.SamplingParams(
        logit_bias={2**31 + number: 1.0 for number in range(types.MAX_LOGIT_BIASES)},
        stop=["x" * 200] * types.MAX_STOP_STRINGS,
        allowed_token_ids=range(types.MAX_ALLOWED_TOKEN_IDS),
        bad_words=["x" * 200] * types.MAX_BAD_WORDS,
        structured_output=inference_pb2.StructuredOutput(choice=inference_pb2.Choice(strings=["x" * 14] * 4096)),
        **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty"), 0.5),
    )
    for request in (
        inference_pb2.GenerateRequest(chat=chat, sampling=sampling),
        inference_pb2.GenerateRequest(text='\n\0\x12"' * 2**20),
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 2**22)),
    ):
        assert has_few_parts(request.SerializeToString(), request.DESCRIPTOR)


def test_long_bad_words_are_refused_before_they_are_copied() -> None:
    ids = inference_pb2.TokenIds(ids=[1] * 2**20)

    def convert_it() -> None:
        with pytest.raises(InvalidRequest, match="bad_words: got 1048576 tokens in a word"):
            convert.sampling_from_proto(inference_pb2.SamplingParams(bad_token_ids=[ids]))

    assert calls_of(convert_it) < 1000

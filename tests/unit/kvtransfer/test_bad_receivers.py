"""Invalid answers of a receiver: the transfer fails with a typed error, and the sender keeps no block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.protocol.frames import Frame, Kind, encode_text, tag_of
from kvtransfer.protocol.lease import Lease
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from pdserve.v1 import transfer_pb2_grpc
from tests.unit.kvtransfer.harness import GrpcHost, Heard, Pair, wait_for
from tests.unit.kvtransfer.raw import assert_still_serves

MakePair = Callable[..., Pair]


class Answering(transfer_pb2_grpc.TransferServiceServicer):
    """A receiver's servicer whose answer to Open is changed."""

    def __init__(self, pair: Pair, **changes: Any) -> None:
        self._servicer, self._changes = pair.receiver.servicer, changes

    async def Open(self, request: Any, context: Any) -> Any:
        answer = await self._servicer.Open(request, context)
        for name, value in self._changes.items():
            setattr(answer, name, value)
        return answer


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"transport": 0}, "chose transport 0, which was not offered"),
        ({"checksum": 0}, "it chose a checksum that was not offered"),
        ({"chunk_bytes": 0}, "it answered with chunks of 0 bytes, or a malformed ticket"),
        ({"chunk_bytes": 2**32 - 1}, "it answered with chunks of 4294967295 bytes, or a malformed ticket"),
        ({"ticket": b"short"}, "or a malformed ticket"),
    ],
)
def test_an_unusable_answer_to_open_fails_the_transfer(pair: Pair, changes: dict[str, Any], error: str) -> None:
    host, sent = GrpcHost(Answering(pair, **changes)), Heard()
    pair.sender.start(pair.grant((1,), endpoint=host.endpoint), sent)
    assert sent.wait().outcome is SendOutcome.FAILED
    assert error in sent.all[0].error
    host.stop()
    assert_still_serves(pair)


def say(pair: Pair, frame: Frame) -> str:
    """The end of a transfer whose receiver sends this message in the middle of it."""
    received, sent = pair.begin(grant := pair.grant((1, 2)))
    pair.sender.push(grant.key, [(0, 5)], False)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the first block")
    [connection] = pair.receiver._connections.values()
    connection.post(frame.encode())
    assert (sent.wait().outcome, sent.all[0].fault) == (SendOutcome.FAILED, "cut")
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert pair.sender.open_keys == []
    assert_still_serves(pair)
    error: str = sent.all[0].error
    return error


def test_a_frame_in_pieces_is_parsed_when_complete(make_pair: MakePair, transport: str) -> None:
    pair = make_pair(transport, lease=Lease(beat_s=1000.0, silence_s=2000.0))  # no beat comes between the pieces
    assert_still_serves(pair)
    received, sent = pair.begin(running := pair.grant((1, 2)))
    pair.sender.push(running.key, [(0, 5)], False)
    wait_for(lambda: pair.sender.stats.chunks == pair.receiver.stats.chunks == 2, "half of it, and its credit")
    outbound, _ = pair.sender.plain._transfers[running.key]
    [connection] = pair.receiver._connections.values()
    word = encode_text(Kind.REFUSE, tag_of(running.key), "because")
    connection.channel.socket.sendall(word[:-3])
    wait_for(lambda: len(outbound._decoder._data) == len(word) - 3, "the most of it")
    assert sent.all == []
    connection.channel.socket.sendall(word[-3:])
    assert sent.wait().error == "the receiver refused: because"
    pair.receiver.abort(running.key)
    assert received.wait().outcome is ReceiveOutcome.DRAINED


@pytest.mark.parametrize("kind", [Kind.ANNOUNCE, Kind.RETRACT])
def test_a_senders_word_from_a_receiver_ends_the_connection(pair: Pair, kind: Kind) -> None:
    tag = tag_of(pair.grant((1,)).key)
    assert say(pair, Frame(kind, tag)) == f"{pair.host.endpoint}: a {kind.name} frame from a receiver"


def test_a_credit_for_what_was_not_announced_ends_the_connection(pair: Pair, transport: str) -> None:
    expected = {"shm": "credit for slot 7, which is not in use", "tcp": "a CREDIT frame, which tcp does not use"}
    assert say(pair, Frame(Kind.CREDIT, tag_of(pair.grant((1,)).key), slot=7)).endswith(expected[transport])

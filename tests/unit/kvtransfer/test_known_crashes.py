"""Known failures of other systems, third kind: a late or repeated message of one request crashes the engine.

Each test names the issue that it reproduces. The messages arrive over real transports. What the workers' tables do with
them is tested under the same name in tests/unit/decode_worker/ and tests/unit/prefill_worker/.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest

from kvtransfer.link.channel import Channel
from kvtransfer.protocol.frames import Frame, Kind, encode_text, tag_of
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from pdserve.core.errors import InvalidRequest, Unavailable
from tests.unit.kvtransfer.harness import BLOCK_BYTES, Heard, Pair, wait_for
from tests.unit.kvtransfer.raw import RawSender, assert_still_serves, expected

MakePair = Callable[..., Pair]


def test_repeated_and_late_aborts_have_no_effect(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """vllm PR#25067, PR#26351, llm-d#187: an abort after the end raised KeyError and ended the engine."""
    grant = pair.grant((1, 2))
    assert pair.move(grant, (5, 6))[0].outcome is ReceiveOutcome.VERIFIED
    for _ in range(2):
        pair.receiver.abort(grant.key)
        pair.sender.abort(grant.key)
    received, sent = pair.begin(second := pair.grant((1, 2)), deadline_s=0.2)
    for _ in range(2):
        pair.receiver.abort(second.key)
        pair.sender.abort(second.key)
    assert received.wait().outcome in (ReceiveOutcome.DRAINED, ReceiveOutcome.FAILED)
    assert sent.wait().outcome is SendOutcome.FAILED
    assert_still_serves(pair)
    assert (len(received.all), len(sent.all)) == (1, 1)
    assert not [one for one in caplog.records if one.exc_info]


def test_an_abort_at_completion_gives_one_end(pair: Pair) -> None:
    """vllm#46240: an abort and both completions in one step tripped an assertion that killed every request."""
    for turn in range(40):
        received, sent = pair.begin(grant := pair.grant((1, 2)))
        threads = [
            threading.Thread(target=pair.sender.push, args=(grant.key, [(0, 5), (1, 6)], True)),
            threading.Thread(target=pair.receiver.abort, args=(grant.key,)),
            threading.Thread(target=pair.sender.abort, args=(grant.key,)),
        ]
        for thread in threads[turn % 2 :]:
            thread.start()
        for thread in threads[turn % 2 :]:
            thread.join()
        received.wait()
        sent.wait()
        assert len(received.all) == 1
        assert len(sent.all) == 1
    assert_still_serves(pair)


def test_messages_about_ended_transfers_are_counted(pair: Pair, raw: RawSender) -> None:
    """vllm#43226, PR#55286, PR#56089: a completion for a request that had gone was asserted on."""
    grant, tag, received = expected(pair, (1,))
    raw.announce(tag)
    raw.chunk(tag, 0, b"a" * BLOCK_BYTES, is_last=True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert raw.hear().kind is Kind.DONE
    raw.chunk(tag, 0, b"b" * BLOCK_BYTES, is_last=True)
    raw.send(encode_text(Kind.RETRACT, tag, "late"))
    raw.announce(tag)
    assert raw.hear().kind is Kind.REFUSE
    assert pair.receiver.stats.late_messages == 2
    pair.receiver.abort(grant.key)
    assert_still_serves(pair)
    assert len(received.all) == 1


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.REFUSE])
def test_repeated_answers_affect_no_other_transfer(make_pair: MakePair, transport: str, kind: Kind) -> None:
    """vllm PR#48616: a completion was reported twice, and the second report had no request any more."""
    pair = make_pair(transport)
    received, sent = pair.begin(running := pair.grant((1, 2)))
    pair.sender.push(running.key, [(0, 5)], False)
    gone = pair.grant((3,))
    assert pair.move(gone, (7,))[1].outcome is SendOutcome.SENT
    outbound, _ = pair.sender.plain._transfers[running.key]
    [connection] = pair.receiver._connections.values()
    word = Frame(kind, tag_of(gone.key)).encode() if kind is Kind.DONE else encode_text(kind, tag_of(gone.key), "no")
    for _ in range(3):
        connection.post(word)
    wait_for(lambda: outbound.stats.late_messages == 3, "the late answers")
    pair.sender.push(running.key, [(1, 6)], True)
    assert (received.wait().outcome, sent.wait().outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)


def test_a_reused_key_does_not_affect_its_owner(pair: Pair) -> None:
    """sglang#40125, vllm PR#49796: a reused id overwrote the first owner's entry: a crash here, a leak there."""
    received, sent = pair.begin(grant := pair.grant((1, 2)))
    with pytest.raises(InvalidRequest, match=r"grant\.key"):
        pair.receiver.expect(grant, Heard())
    with pytest.raises(InvalidRequest, match=r"grant\.key"):
        pair.sender.start(grant, Heard())
    pair.sender.push(grant.key, [(0, 5), (1, 6)], True)
    assert (received.wait().outcome, sent.wait().outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)


def test_close_waits_for_a_connection_that_is_ending(
    new_threads: Callable[[], list[threading.Thread]], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection left the receiver's tables before its thread ended, so close returned too early."""
    assert_still_serves(pair)
    close = Channel.close

    def slowly(channel: Channel) -> None:
        time.sleep(0.2)
        close(channel)

    monkeypatch.setattr(Channel, "close", slowly)
    pair.sender.close()
    wait_for(lambda: not pair.receiver.peers, "its end")
    pair.receiver.close()
    assert not [one for one in new_threads() if one.name.startswith("kv-")]


def test_after_close_nothing_touches_the_pools(new_threads: Callable[[], list[threading.Thread]], pair: Pair) -> None:
    """TensorRT-LLM#14565, PR#11715: threads used request and buffer after their end."""
    assert_still_serves(pair)
    heard = [pair.begin(pair.grant((index,))) for index in range(8)]
    heard.append(pair.begin(grant := pair.grant((20, 21))))
    pair.sender.push(grant.key, [(0, 5)], False)
    pair.sender.close()
    pair.receiver.close()
    for received, sent in heard:
        assert received.wait().outcome is ReceiveOutcome.FAILED
        assert sent.wait().outcome is SendOutcome.FAILED
    assert not [one for one in new_threads() if one.name.startswith("kv-")]
    with pytest.raises(Unavailable):
        pair.receiver.expect(pair.grant((1,)), Heard())
    with pytest.raises(Unavailable):
        pair.sender.start(pair.grant((1,)), Heard())


def test_a_replaced_peer_affects_no_other(pair: Pair) -> None:
    """vllm#49238: a prefill worker that came back after a restart took the decode worker down."""
    first = RawSender(pair, "p7")
    _, tag, received = expected(pair, (1, 2))
    first.announce(tag)
    first.chunk(tag, 0, b"a" * BLOCK_BYTES)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "half of it")
    second = RawSender(pair, "p7")  # The same worker after a restart.
    assert received.wait().outcome is ReceiveOutcome.FAILED
    _, tag, received = expected(pair, (1, 2))
    second.announce(tag)
    second.chunk(tag, 0, b"c" * BLOCK_BYTES + b"d" * BLOCK_BYTES, is_last=True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert pair.target.block(1) + pair.target.block(2) == b"c" * BLOCK_BYTES + b"d" * BLOCK_BYTES
    assert_still_serves(pair)
    first.close()
    second.close()


@pytest.mark.parametrize("deadline_s", [3e6, 1e300, math.inf])
def test_a_very_long_deadline_ends_no_thread(pair: Pair, deadline_s: float) -> None:
    """poll() takes at most 24 days; a longer one raised OverflowError, which ended the worker."""
    received, sent = pair.begin(grant := pair.grant((1, 2)), deadline_s)
    wait_for(lambda: pair.receiver.open_keys == [grant.key], "the grant is open")
    pair.sender.push(grant.key, [(0, 5), (1, 6)], True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert sent.wait().outcome is SendOutcome.SENT
    assert_still_serves(pair)


def test_an_ended_transfer_leaves_no_alarm(pair: Pair) -> None:
    """Alarms of ended transfers headed the heap until they expired, or until there were more than 64."""
    received, _ = pair.begin(grant := pair.grant((1,)), 600.0)
    pair.sender.push(grant.key, [(0, 5)], True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert pair.receiver._table.next_alarm_s is None

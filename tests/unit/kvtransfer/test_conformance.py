"""What every transport must do, over real sockets and shared memory."""

from kvtransfer.transport import ReceiveOutcome, SendOutcome


def test_a_transfer_equals_a_plain_copy(pair) -> None:
    grant = pair.grant(tuple(range(10, 50)))
    sources = tuple(range(5, 45))
    received, sent = pair.move(grant, sources)
    assert (received.outcome, sent.outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT), (received, sent)
    pair.assert_equal(grant, sources)

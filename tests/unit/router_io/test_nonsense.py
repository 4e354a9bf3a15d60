"""A worker's messages are checked before the router's state handles them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey
from pdserve.core.errors import InvalidRequest
from pdserve.core.types import TokenOut
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import decode_response
from router.service.worker_stream import WorkerStream
from router.service.workers import Workers
from tests.support.cluster_secret import ROUTER

NO_DURATIONS = [math.nan, math.inf, -1.0, 1e300]
ROW = {"request_id": "r", "attempt": 1}


def messages_with(field: str, seconds: float) -> dict[str, Any]:
    return {
        "retry_after_s": {"refused": worker_pb2.Refused(**ROW, retry_after_s=seconds)},
        "queue_s": {"first_token": worker_pb2.FirstToken(**ROW, queue_s=seconds)},
        "prefill_s": {"first_token": worker_pb2.FirstToken(**ROW, prefill_s=seconds)},
        "transfer_s": {"transfer_ended": worker_pb2.TransferEnded(**ROW, transfer_s=seconds)},
        "busy_s": {"transfer_ended": worker_pb2.TransferEnded(**ROW, busy_s=seconds)},
        "exposed_s": {"transfer_ended": worker_pb2.TransferEnded(**ROW, exposed_s=seconds)},
        "decode_s": {"tokens": worker_pb2.Tokens(rows=[worker_pb2.TokenRow(**ROW, decode_s=seconds)])},
    }[field]


@pytest.mark.parametrize("seconds", NO_DURATIONS)
@pytest.mark.parametrize(
    "field", ["retry_after_s", "queue_s", "prefill_s", "transfer_s", "busy_s", "exposed_s", "decode_s"]
)
def test_an_invalid_duration_names_its_field(field: str, seconds: float) -> None:
    message = worker_pb2.AttachResponse(**messages_with(field, seconds))
    with pytest.raises(InvalidRequest, match=f"^{field}: got .*, expected between 0 and 86400 seconds$"):
        decode_response("d0", message)


@pytest.mark.parametrize("field", ["block_size", "vocab_size", "num_blocks", "max_batch", "max_batch_tokens"])
async def test_a_worker_with_zero_capacity_is_rejected(field: str) -> None:
    facts = {"block_size": 16, "vocab_size": 256, "num_blocks": 8, "max_batch": 4, "max_batch_tokens": 64}
    hello = worker_pb2.WorkerHello(
        worker_id="d0",
        incarnation="1",
        role=worker_pb2.ROLE_DECODE,
        model="toy",
        max_context_tokens=128,
        inbox_depth=4,
        **{**facts, field: 0},
    )
    workers = Workers(worker_pb2.RouterHello, lambda event: None, identity=ROUTER, model_name="toy")
    session = WorkerStream("127.0.0.1:1", worker_pb2.RouterHello, workers, ROUTER)
    assert workers.attached(session, hello) == f"its {field} is 0, expected at least 1"


def test_invalid_messages_are_counted() -> None:
    workers = Workers(worker_pb2.RouterHello, lambda event: None, identity=ROUTER, model_name="toy")
    session = WorkerStream("127.0.0.1:1", worker_pb2.RouterHello, workers, ROUTER)
    session.worker_id = "d0"
    workers._attached["d0"] = session
    workers.received(session, worker_pb2.AttachResponse(**messages_with("queue_s", math.nan)))
    assert workers.num_invalid == 1


def test_plain_tokens_are_rows_of_one_token() -> None:
    plain = worker_pb2.PlainTokens(request_ids=["a", "b"], attempts=[1, 2], output_indexes=[7, 0], token_ids=[5, 6])
    event = decode_response("d0", worker_pb2.AttachResponse(tokens=worker_pb2.Tokens(plain=plain)))
    assert event == pr.TokensArrived(
        worker_id="d0",
        rows=(
            pr.TokenRow(key=AttemptKey("d0", "a", 1), output_index=7, tokens=(TokenOut(token_id=5),)),
            pr.TokenRow(key=AttemptKey("d0", "b", 2), output_index=0, tokens=(TokenOut(token_id=6),)),
        ),
    )


def test_plain_tokens_of_unequal_fields_are_refused() -> None:
    plain = worker_pb2.PlainTokens(request_ids=["a", "b"], attempts=[1, 1], output_indexes=[7, 0], token_ids=[5])
    with pytest.raises(InvalidRequest, match=r"^plain: got 2, 2, 2, 1 values, expected as many of each field$"):
        decode_response("d0", worker_pb2.AttachResponse(tokens=worker_pb2.Tokens(plain=plain)))

"""Messages between router and worker are equal after encoding and decoding, and each kind of message has a codec."""

from __future__ import annotations

import math

import pytest

from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey, FailureKind, RefusalReason
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv.tier_reads import MAX_SPEEDS, TierSpeed
from pdserve.core.types import FinishReason, TokenOut
from pdserve.v1 import worker_pb2
from pdserve.wire import protocol

KEY = AttemptKey("w0", "r", 3)
TOKEN = TokenOut(token_id=5, logprob=-0.5, top=((5, -0.5), (6, -1.25)))
ROW = pr.TokenRow(
    key=KEY,
    output_index=4,
    tokens=(TOKEN, TokenOut(token_id=7)),
    finish=FinishReason.STOP,
    decode_s=0.5,
    decode_queue_s=0.25,
    preempted_s=0.125,
    preemptions=2,
    queue_s=1.0,
    prefill_s=2.0,
    cached_tokens=16,
)
FROM_WORKERS: list[pr.WorkerMessage] = [
    pr.Load(worker_id="w0", steps=1, free_blocks=2, running=3, is_draining=True, is_drained=True),
    pr.Load(
        worker_id="w0",
        free_blocks=2,
        tiers=(
            TierSpeed(tier=1, block_s=0.5, is_at_once=True, most_given=64),
            TierSpeed(tier=2, block_s=0.25, fixed_s=1.0, queue_s=2.0),
        ),
    ),
    pr.BatchTimed(worker_id="w0", rows=3, prefill_tokens=0, prefill_token_context=0.0, context_tokens=99, step_s=0.5),
    pr.Granted(key=KEY),
    pr.Granted(key=KEY, grant=b""),
    pr.Granted(key=KEY, grant=b"opaque"),
    pr.Refused(key=KEY, reason=RefusalReason.NO_BLOCKS, retry_after_s=0.0),
    pr.FirstToken(key=KEY, token=TOKEN, queue_s=1.0, prefill_s=2.0, cached_tokens=16, finish=FinishReason.LENGTH),
    pr.TransferEnded(key=KEY, is_committed=True, transfer_s=1.0, busy_s=0.5, num_bytes=2**40, saved_bytes=3),
    pr.AttemptFailed(key=KEY, kind=FailureKind.TRANSFER, message="gone"),
    pr.Released(key=KEY),
]


@pytest.mark.parametrize("message", FROM_WORKERS, ids=lambda message: type(message).__name__)
def test_worker_messages_survive_the_wire(message: pr.WorkerMessage) -> None:
    data = protocol.encode_response(message).SerializeToString()
    assert protocol.decode_response("w0", worker_pb2.AttachResponse.FromString(data)) == message


def test_a_row_of_tokens_survives_the_wire() -> None:
    tokens = worker_pb2.Tokens(rows=[protocol.TOKEN_ROW.encode(ROW)])
    told = protocol.decode_response("w0", worker_pb2.AttachResponse(tokens=tokens))
    assert told == pr.TokensArrived(worker_id="w0", rows=(ROW,))


def test_plain_tokens_come_before_rows() -> None:
    plain = worker_pb2.PlainTokens(request_ids=["a"], attempts=[1], output_indexes=[7], token_ids=[9])
    tokens = worker_pb2.Tokens(plain=plain, rows=[protocol.TOKEN_ROW.encode(ROW)])
    told = protocol.decode_response("w0", worker_pb2.AttachResponse(tokens=tokens))
    first = pr.TokenRow(key=AttemptKey("w0", "a", 1), output_index=7, tokens=(TokenOut(token_id=9),))
    assert told == pr.TokensArrived(worker_id="w0", rows=(first, ROW))


def test_every_message_has_a_codec_or_is_read_elsewhere() -> None:
    responses = {field.name for field in worker_pb2.AttachResponse.DESCRIPTOR.oneofs_by_name["message"].fields}
    elsewhere = {"hello", "tokens", "kv_events", "prompt_scored", "batch", "kv_links", "log"}
    elsewhere |= {"adapters", "adapter_loaded"}
    assert set(protocol._BY_NAME) == responses - elsewhere
    requests = {field.name for field in worker_pb2.AttachRequest.DESCRIPTOR.oneofs_by_name["message"].fields}
    assert {name for name, _ in protocol._REQUESTS.values()} == requests - {
        "hello",
        "reserve",
        "prefill",
        "batch",
        "read_log",
        "set_pace",
    }


@pytest.mark.parametrize("command", [pr.Reserve(key=KEY, is_local=True), pr.Prefill(key=KEY, grant=b"opaque")])
def test_a_command_adds_the_sequence_without_changing_it(command: pr.Reserve | pr.Prefill) -> None:
    sequence = worker_pb2.Sequence(request_id="r", prompt_token_ids=[1, 2])
    kind = type(command)
    last = kind(**{**_fields(command), "output_token_ids": (8, 9), "deadline_s": 1.5, "reuse_within_s": 0.0})
    message = protocol.encode_request(last, sequence)
    sent = getattr(message, message.WhichOneof("message") or "").sequence
    assert (list(sent.prompt_token_ids), list(sent.output_token_ids)) == ([1, 2], [8, 9])
    assert (sent.request_id, sent.attempt, sent.deadline_s) == ("r", 3, 1.5)
    assert (sent.HasField("reuse_within_s"), sent.reuse_within_s) == (True, 0.0)
    assert sequence == worker_pb2.Sequence(request_id="r", prompt_token_ids=[1, 2])


def test_workers_learn_only_the_reuse_that_the_router_believes() -> None:
    sequence = worker_pb2.Sequence(request_id="r", reuse_within_s=86_400.0)
    message = protocol.encode_request(pr.Reserve(key=KEY, is_local=True), sequence)
    assert not message.reserve.sequence.HasField("reuse_within_s")


@pytest.mark.parametrize(
    "command",
    [
        pr.LoadAdapter(name="a", folder="/f", version=2**60),
        pr.DropLoad(name="a", version=1),
        pr.NamedAdapter(name="a", fingerprint="f" * 32, version=1, folder="/f"),
        pr.NamedAdapter(name="a", version=2),
    ],
)
def test_commands_about_adapters_survive_the_wire(command: pr.AdapterCommand) -> None:
    data = protocol.encode_request(command).SerializeToString()
    assert protocol.decode_adapter_command(worker_pb2.AttachRequest.FromString(data)) == command


def test_the_end_of_a_text_survives_the_wire() -> None:
    data = protocol.encode_request(pr.EndText(worker_id="w0", block_hashes=(b"a", b"b"))).SerializeToString()
    assert list(worker_pb2.AttachRequest.FromString(data).end_text.block_hashes) == [b"a", b"b"]


def test_an_older_router_reads_an_unknown_reason_as_a_full_inbox() -> None:
    refused = worker_pb2.Refused(request_id="r", attempt=1, reason=99)  # type: ignore[arg-type]  # of a newer worker
    message = protocol.decode_response("w0", worker_pb2.AttachResponse(refused=refused))
    assert isinstance(message, pr.Refused)
    assert message.reason is RefusalReason.INBOX_FULL


def test_a_grant_is_bounded_on_a_router() -> None:
    granted = worker_pb2.Granted(request_id="r", attempt=1, grant=bytes(protocol.MAX_GRANT_BYTES + 1))
    with pytest.raises(InvalidRequest, match="grant"):
        protocol.decode_response("w0", worker_pb2.AttachResponse(granted=granted))


def _fields(command: pr.Reserve | pr.Prefill) -> dict[str, object]:
    return {name: getattr(command, name) for name in type(command).__dataclass_fields__}


@pytest.mark.parametrize("field", ["block_s", "fixed_s", "queue_s"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1e-9, 1e9])
def test_speeds_of_tiers_are_bounded(field: str, seconds: float) -> None:
    load = worker_pb2.Load(free_blocks=1, tiers=[worker_pb2.TierSpeed(tier=2, **{field: seconds})])
    with pytest.raises(InvalidRequest, match=field):
        protocol.decode_response("w0", worker_pb2.AttachResponse(load=load))


def test_the_number_of_tiers_is_bounded() -> None:
    load = worker_pb2.Load(tiers=[worker_pb2.TierSpeed()] * (MAX_SPEEDS + 1))
    with pytest.raises(InvalidRequest, match="tiers"):
        protocol.decode_response("w0", worker_pb2.AttachResponse(load=load))

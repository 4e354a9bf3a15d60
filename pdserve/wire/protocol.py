"""Codecs of messages: those between router and worker with the Attach stream's envelopes, results, and the live view.
No I/O.

Two parts are written by hand: messages with a request's Sequence, which the router builds once and extends for each
attempt, and the columns of PlainTokens, which contain nearly all tokens and are the hot path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdserve.core import live
from pdserve.core import protocol as pr
from pdserve.core.attempt import Attempt, AttemptKey, FailureKind, PrefixSource, RefusalReason
from pdserve.core.cost.latency import CostPrior
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv.kv_shape import Fingerprint, KvShape
from pdserve.core.kv.tier_reads import MAX_SPEEDS, TierSpeed
from pdserve.core.live import LogLine
from pdserve.core.results import (
    CachedPrefix,
    ConversationView,
    Phases,
    SessionPage,
    SessionView,
    TaskView,
    Timings,
    Usage,
)
from pdserve.core.types import SamplingDefaults, TokenOut
from pdserve.v1 import cluster_pb2, inference_pb2, transfer_pb2, worker_pb2
from pdserve.wire.codec import Codec, Special
from pdserve.wire.convert import TOPS, sampling_from_proto, sampling_to_proto

MAX_GRANT_BYTES: Final = 2**20  # limit of one grant, which a router keeps until it is prefilled

# Sampled tokens have no rank; scores of a prompt have a message of their own.
TOKEN: Final = Codec(TokenOut, worker_pb2.Token, special={"top": TOPS}, given=("rank",))
TOKEN_ROW: Final = Codec(pr.TokenRow, worker_pb2.TokenRow, nested=(TOKEN,))
FINGERPRINT: Final = Codec(Fingerprint, transfer_pb2.Fingerprint, nested=(Codec(KvShape, transfer_pb2.KvShape),))
COST: Final = Codec(CostPrior, worker_pb2.CostPrior)
_SOURCE: Final = Codec(PrefixSource, worker_pb2.PrefixSource)
NAMED_ADAPTER: Final = Codec(pr.NamedAdapter, worker_pb2.Adapter)
ADAPTERS: Final = Codec(pr.Adapters, worker_pb2.Adapters, nested=(NAMED_ADAPTER,))
ADAPTER_LOADED: Final = Codec(pr.AdapterLoaded, worker_pb2.AdapterLoaded)
TIER_SPEED: Final = Codec(TierSpeed, worker_pb2.TierSpeed)
LOAD: Final = Codec(pr.Load, worker_pb2.Load, nested=(TIER_SPEED,), given=("worker_id",))
_CODECS: Final = (
    LOAD,
    Codec(pr.BatchTimed, worker_pb2.BatchTimed, given=("worker_id",)),
    Codec(pr.Granted, worker_pb2.Granted),
    Codec(pr.Refused, worker_pb2.Refused, unknown={"reason": RefusalReason.INBOX_FULL}),
    Codec(pr.FirstToken, worker_pb2.FirstToken, nested=(TOKEN,)),
    Codec(pr.TransferEnded, worker_pb2.TransferEnded),
    Codec(pr.PullEnded, worker_pb2.PullEnded),
    Codec(pr.AttemptFailed, worker_pb2.Failed, unknown={"kind": FailureKind.INTERNAL}),
    Codec(pr.Released, worker_pb2.Released),
)


def _by_kind(codecs: tuple[Codec[Any, Any], ...], envelope: Any) -> dict[type, tuple[str, Codec[Any, Any]]]:
    """Dataclass -> the name of its message in the envelope's oneof, and its codec."""
    names = {one.message_type: one.name for one in envelope.DESCRIPTOR.oneofs_by_name["message"].fields}
    return {one.kind: (names[one.message.DESCRIPTOR], one) for one in codecs}


_RESPONSES: Final = _by_kind(_CODECS, worker_pb2.AttachResponse)
_REQUESTS: Final = _by_kind(
    (
        Codec(pr.Admit, worker_pb2.Admit),
        Codec(pr.Cancel, worker_pb2.Cancel),
        Codec(pr.DrainWorker, worker_pb2.DrainWorker, given=("worker_id",)),
        Codec(pr.UndrainWorker, worker_pb2.UndrainWorker, given=("worker_id",)),
        Codec(pr.EndText, worker_pb2.EndText, given=("worker_id",)),
        Codec(pr.LoadAdapter, worker_pb2.LoadAdapter),
        Codec(pr.DropLoad, worker_pb2.DropLoad),
        NAMED_ADAPTER,
    ),
    worker_pb2.AttachRequest,
)
_ADAPTER_COMMANDS: Final[Mapping[str, Codec[Any, Any]]] = {
    name: codec for kind, (name, codec) in _REQUESTS.items() if kind in (pr.LoadAdapter, pr.DropLoad, pr.NamedAdapter)
}
_BY_NAME: Final[Mapping[str, Codec[Any, Any]]] = dict(_RESPONSES.values())


def encode_response(message: pr.WorkerMessage) -> worker_pb2.AttachResponse:
    """Encodes a worker's message; any type but TokensArrived."""
    name, codec = _RESPONSES[type(message)]
    return worker_pb2.AttachResponse(**{name: codec.encode(message)})


def decode_response(worker_id: str, response: worker_pb2.AttachResponse) -> pr.WorkerMessage | None:
    """Decodes on a router. None for messages that are not for the state: hello, prompt scores, KV events, adapters, and
    newer kinds.

    Raises InvalidRequest on an unknown enum value, and on a duration out of bounds.
    """
    name = response.WhichOneof("message")
    if name == "tokens":
        return _tokens(worker_id, response.tokens)
    codec = _BY_NAME.get(name or "")
    if codec is None:
        return None
    inner = getattr(response, name or "")
    if codec.kind is pr.Load and len(inner.tiers) > MAX_SPEEDS:
        raise InvalidRequest("tiers", len(inner.tiers), f"at most {MAX_SPEEDS}")
    if codec.kind in (pr.Load, pr.BatchTimed):
        return codec.decode(inner, worker_id=worker_id)  # type: ignore[no-any-return]
    if codec.kind is pr.Granted and len(inner.grant) > MAX_GRANT_BYTES:
        raise InvalidRequest("grant", f"{len(inner.grant)} bytes", f"at most {MAX_GRANT_BYTES}")
    return codec.decode(inner, worker_id)  # type: ignore[no-any-return]


def encode_request(
    command: pr.WorkerCommand | pr.AdapterCommand, sequence: worker_pb2.Sequence | None = None
) -> worker_pb2.AttachRequest:
    """Encodes a router's command. `sequence` is that of its request; only Reserve and Prefill need it."""
    match command:
        case pr.Reserve():
            request = worker_pb2.AttachRequest(reserve=worker_pb2.Reserve(is_local=command.is_local))
            _write_at(request.reserve.sequence, sequence, command)
            return request
        case pr.Prefill():
            request = worker_pb2.AttachRequest(prefill=worker_pb2.Prefill(grant=command.grant))
            _write_at(request.prefill.sequence, sequence, command)
            return request
        case _:
            name, codec = _REQUESTS[type(command)]
            return worker_pb2.AttachRequest(**{name: codec.encode(command)})


def decode_adapter_command(request: worker_pb2.AttachRequest) -> pr.AdapterCommand | None:
    """None: another message."""
    name = request.WhichOneof("message") or ""
    codec = _ADAPTER_COMMANDS.get(name)
    return None if codec is None else codec.decode(getattr(request, name))


def _write_at(now: worker_pb2.Sequence, sequence: worker_pb2.Sequence | None, command: pr.Reserve | pr.Prefill) -> None:
    """Writes the sequence, with the data of this attempt, where it will be sent: each copy of a long prompt counts."""
    assert sequence is not None, "the runtime keeps it as long as the request lives"
    now.CopyFrom(sequence)
    now.attempt = command.attempt
    now.output_token_ids.extend(command.output_token_ids)
    if command.deadline_s is not None:
        now.deadline_s = command.deadline_s
    now.waited_s = command.waited_s
    now.ClearField("reuse_within_s")  # the client's, which the router may not believe
    if command.reuse_within_s is not None:
        now.reuse_within_s = command.reuse_within_s
    if command.source is not None:
        now.source.CopyFrom(_SOURCE.encode(command.source))


def _tokens(worker_id: str, message: worker_pb2.Tokens) -> pr.TokensArrived:
    rows = _plain_rows(worker_id, message.plain)
    rows += [TOKEN_ROW.decode(row, worker_id) for row in message.rows]
    return pr.TokensArrived(worker_id=worker_id, rows=tuple(rows))


def _plain_rows(worker_id: str, message: worker_pb2.PlainTokens) -> list[pr.TokenRow]:
    columns = message.request_ids, message.attempts, message.output_indexes, message.token_ids
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise InvalidRequest("plain", f"{', '.join(map(str, lengths))} values", "as many of each field")
    return [
        pr.TokenRow(
            key=AttemptKey(worker_id, request_id, attempt),
            output_index=index,
            tokens=(TokenOut(token_id=token_id),),
        )
        for request_id, attempt, index, token_id in zip(*columns, strict=True)
    ]


# --- sequence -------------------------------------------------------------------------------------------------
# The data that a worker needs to compute a request's tokens.

# The worker computes the `given` fields from its clock, its hash seed and the `ignored` fields of the message.
SEQUENCE: Final = Codec(
    Attempt,
    worker_pb2.Sequence,
    nested=(_SOURCE,),
    special={"sampling": Special(sampling_to_proto, sampling_from_proto)},
    renamed={"prompt_ids": "prompt_token_ids", "output_ids": "output_token_ids"},
    given=("chain_key", "arrived_s", "deadline_at_s", "begun_at_s"),
    ignored=("deadline_s", "waited_s", "traceparent", "cache_salt"),
)


# --- results of a request -------------------------------------------------------------------------------------
# The router encodes them and the SDK decodes them.

SAMPLING_DEFAULTS: Final = Codec(SamplingDefaults, inference_pb2.SamplingDefaults)
USAGE: Final = Codec(Usage, inference_pb2.Usage)
PHASES: Final = Codec(Phases, inference_pb2.Phases, is_lenient=True)
TIMINGS: Final = Codec(Timings, inference_pb2.Timings, nested=(PHASES,), is_lenient=True)


_CONVERSATION: Final = Codec(
    ConversationView,
    inference_pb2.ConversationView,
    nested=(Codec(CachedPrefix, inference_pb2.CachedPrefix),),
    is_lenient=True,
)
_TASK: Final = Codec(TaskView, inference_pb2.TaskView, is_lenient=True)
SESSION: Final = Codec(SessionView, inference_pb2.SessionView, nested=(_CONVERSATION, _TASK), is_lenient=True)
SESSION_PAGE: Final = Codec(SessionPage, inference_pb2.ListSessionsResponse, nested=(SESSION,), is_lenient=True)


# --- frames of the live view ----------------------------------------------------------------------------------

#: Lenient, because the times of a router's clock have no bound.
FRAME: Final = Codec(
    live.LiveFrame,
    cluster_pb2.LiveFrame,
    nested=(
        Codec(live.LiveTotals, cluster_pb2.LiveTotals),
        Codec(live.LiveWorker, cluster_pb2.LiveWorker, is_lenient=True),
        Codec(
            live.LiveRequest,
            cluster_pb2.LiveRequest,
            nested=(Codec(live.LivePhases, cluster_pb2.LivePhases),),
            is_lenient=True,
        ),
    ),
    is_lenient=True,
)


# --- lines of a log -------------------------------------------------------------------------------------------

LOG_LINE: Final = Codec(LogLine, worker_pb2.LogLine, is_lenient=True)  # a time of day is no duration

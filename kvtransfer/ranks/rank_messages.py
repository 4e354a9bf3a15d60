"""Converts a rank's stream between the generated messages and kvtransfer.protocol.transport. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Final

from kvtransfer.protocol.grants import grant_from_proto, grant_to_proto
from kvtransfer.protocol.transport import Received, ReceiveOutcome, SendOutcome, Sent, Text, TransferStats
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.core.kv.stamps import BlockStamps
from pdserve.v1 import rank_pb2
from pdserve.wire.codec import Codec, Special

_STATS = frozenset(one.name for one in fields(TransferStats))


KEY: Final = Codec(TransferKey, rank_pb2.RankTransferKey)
_TEXT: Final = Codec(Text, rank_pb2.SequenceText)
RECEIVED: Final = Codec(
    Received,
    rank_pb2.RankTransferEnded,
    nested=(KEY,),
    special={"outcome": Special(attrgetter("value"), ReceiveOutcome)},
    ignored=("early_bytes", "exposed_s", "wire_dtype"),
    is_lenient=True,
)
SENT: Final = Codec(
    Sent,
    rank_pb2.RankTransferEnded,
    nested=(KEY,),
    special={"outcome": Special(attrgetter("value"), SendOutcome)},
    renamed={"send_s": "transfer_s"},
    is_lenient=True,
)


def expect_order(
    grant: Grant, epochs: Sequence[int], content_hashes: Sequence[int] | None, deadline_s: float | None
) -> rank_pb2.FollowRequest:
    return rank_pb2.FollowRequest(
        expect=rank_pb2.ExpectTransfer(
            grant=grant_to_proto(grant),
            epochs=epochs,
            content_hashes=content_hashes or (),
            has_content_hashes=content_hashes is not None,
            deadline_s=deadline_s,
        )
    )


def start_order(grant: Grant, deadline_s: float | None, text: Text | None, groups: int) -> rank_pb2.FollowRequest:
    sequence = None if text is None else _TEXT.encode(text)
    order = rank_pb2.StartTransfer(grant=grant_to_proto(grant), deadline_s=deadline_s, groups=groups, text=sequence)
    return rank_pb2.FollowRequest(start=order)


def push_order(
    key: TransferKey, blocks: Sequence[tuple[int, int]], stamps: BlockStamps, is_last: bool, groups: range | None
) -> rank_pb2.FollowRequest:
    """Includes the blocks' epochs and content hashes, which only the leader knows."""
    sources = [source for _, source in blocks]
    return rank_pb2.FollowRequest(
        push=rank_pb2.PushBlocks(
            key=KEY.encode(key),
            indices=[index for index, _ in blocks],
            blocks=sources,
            epochs=stamps.epochs(sources),
            content_hashes=stamps.content_hashes(sources),
            is_last=is_last,
            first_group=0 if groups is None else groups.start,
            end_group=0 if groups is None else groups.stop,
        )
    )


def give_up_order(key: TransferKey, error: str = "") -> rank_pb2.FollowRequest:
    return rank_pb2.FollowRequest(give_up=rank_pb2.GiveUpTransfer(key=KEY.encode(key), error=error))


def read_expect(order: rank_pb2.ExpectTransfer, num_blocks: int) -> tuple[Grant, tuple[int, ...] | None]:
    """The grant, and the content hashes that its blocks must have. Raises InvalidRequest."""
    grant = grant_from_proto(order.grant)
    check_blocks("grant.blocks", grant.blocks, num_blocks)
    if len(order.epochs) != len(grant.blocks):
        raise InvalidRequest(
            "epochs", f"{len(order.epochs)} epochs", f"{len(grant.blocks)}, one for each granted block"
        )
    return grant, tuple(order.content_hashes) if order.has_content_hashes else None


def read_text(order: rank_pb2.StartTransfer) -> Text | None:
    return _TEXT.decode(order.text) if order.HasField("text") else None


def read_push(order: rank_pb2.PushBlocks, num_blocks: int) -> tuple[list[tuple[int, int]], range | None]:
    """Blocks and layer groups. Raises InvalidRequest."""
    count = len(order.indices)
    if not len(order.blocks) == len(order.epochs) == len(order.content_hashes) == count:
        raise InvalidRequest("blocks", "lists of different lengths", "one index, block, epoch and hash for each block")
    check_blocks("blocks", order.blocks, num_blocks)
    groups = range(order.first_group, order.end_group) if order.end_group else None
    return list(zip(order.indices, order.blocks, strict=True)), groups


def check_blocks(field: str, blocks: Sequence[int], num_blocks: int) -> None:
    if blocks and max(blocks) >= num_blocks:
        raise InvalidRequest(field, max(blocks), f"0..{num_blocks - 1}")


def ended_report(end: Received | Sent, stats: TransferStats) -> rank_pb2.FollowResponse:
    ended = SENT.encode(end) if isinstance(end, Sent) else RECEIVED.encode(end)
    return rank_pb2.FollowResponse(ended=ended, stats=asdict(stats))


def read_stats(report: rank_pb2.FollowResponse) -> TransferStats:
    return TransferStats(**{name: count for name, count in report.stats.items() if name in _STATS})

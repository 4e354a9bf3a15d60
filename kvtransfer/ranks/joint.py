"""Transfers of workers whose ranks have separate pools: combines the results of a transfer's parts into one. Pure.

Each member transfers one part. A member of a receiver is a rank, with its heads of the granted blocks. A member of a
sender is a rank together with one rank of the receiver. A transfer is complete when all its parts are. The first part
that fails aborts all others. The result is reported when every part has ended, because a rank may use its blocks until
then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar, final

from kvtransfer.protocol.plan import shards_of
from kvtransfer.protocol.transport import Received, ReceiveOutcome, SendOutcome, Sent
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv.kv_shape import Grant, KvShape, TransferKey

Member = TypeVar("Member", bound=Hashable)
Result = TypeVar("Result", Received, Sent)

_WHOLE: Final = (ReceiveOutcome.VERIFIED, SendOutcome.SENT)


@dataclass(frozen=True, slots=True)
class EndPart(Generic[Member]):
    """End a member's part, because another part has failed or, if `error` is empty, because the transfer is not
    needed."""

    key: TransferKey
    member: Member
    error: str


@dataclass(frozen=True, slots=True)
class Opened:
    """Every member has opened its part."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class ReportJoint(Generic[Result]):
    """Report the result to the owner."""

    end: Result


@dataclass(slots=True)
class _Joint(Generic[Member, Result]):
    waiting: dict[Member, None]  # members whose parts have not ended, in order
    unopened: set[Member]
    results: list[Result] = field(default_factory=list)
    failure: str | None = None  # the error of the other members' parts; empty: these are not needed
    is_aborted: bool = False  # by the owner
    is_quarantined: bool = False


@final
class JointTransfers(Generic[Member, Result]):
    """All open transfers of one worker. `join` combines the parts' results (`join_received`, `join_sent`)."""

    def __init__(self, join: Callable[[TransferKey, Sequence[Result], bool], Result]) -> None:
        self._join: Callable[[TransferKey, Sequence[Result], bool], Result] = join
        self._open: dict[TransferKey, _Joint[Member, Result]] = {}

    @property
    def keys(self) -> list[TransferKey]:
        """Transfers that have not ended."""
        return list(self._open)

    def members(self, key: TransferKey) -> list[Member]:
        """The members whose parts of the transfer have not ended."""
        joint = self._open.get(key)
        return [] if joint is None else list(joint.waiting)

    def open(self, key: TransferKey, members: Sequence[Member], unopened: Iterable[Member] = ()) -> None:
        """The `unopened` members report later that they have opened their parts. Raises InvalidRequest on a key in
        use."""
        assert members, "a transfer without parts would never end"
        if key in self._open:
            raise InvalidRequest("grant.key", key, "one that is not open already")
        self._open[key] = _Joint(dict.fromkeys(members), set(unopened))

    def given_up(self, key: TransferKey) -> list[EndPart[Member]]:
        """Actions to repeat for members that had not begun when the transfer was given up."""
        joint = self._open.get(key)
        if joint is None or (joint.failure is None and not joint.is_aborted):
            return []
        return [EndPart(key, member, "" if joint.is_aborted else joint.failure or "") for member in joint.waiting]

    def forget(self, key: TransferKey) -> None:
        """No member has opened its part."""
        self._open.pop(key, None)

    def opened(self, key: TransferKey, member: Member) -> list[Opened]:
        joint = self._open.get(key)
        if joint is None or member not in joint.unopened:
            return []
        joint.unopened.discard(member)
        return [] if joint.unopened or self.given_up(key) else [Opened(key)]

    def ended(self, key: TransferKey, member: Member, end: Result) -> list[EndPart[Member] | ReportJoint[Result]]:
        """A member's part has ended, or (receivers, after an abort) is quarantined."""
        joint = self._open.get(key)
        if joint is None or member not in joint.waiting:
            return []
        if end.outcome is ReceiveOutcome.QUARANTINED:
            if joint.is_quarantined or not joint.is_aborted:
                return []
            joint.is_quarantined = True
            return [ReportJoint(replace(end, key=key))]
        del joint.waiting[member]
        joint.unopened.discard(member)
        joint.results.append(end)
        actions: list[EndPart[Member] | ReportJoint[Result]] = []
        if end.outcome not in _WHOLE and joint.failure is None and not joint.is_aborted:
            joint.failure = "" if end.is_cancelled else f"another rank's part failed: {end.error}"
            actions += self.given_up(key)
        if not joint.waiting:
            del self._open[key]
            actions.append(ReportJoint(self._join(key, joint.results, joint.is_aborted)))
        return actions

    def abort(self, key: TransferKey) -> list[EndPart[Member]]:
        """The owner aborts. No-op if the transfer has ended or was aborted before."""
        joint = self._open.get(key)
        if joint is None or joint.is_aborted:
            return []
        joint.is_aborted = True
        return self.given_up(key)


def join_received(key: TransferKey, results: Sequence[Received], is_aborted: bool) -> Received:
    if all(end.outcome is ReceiveOutcome.VERIFIED for end in results):
        outcome, cause = ReceiveOutcome.VERIFIED, results[0]
    else:
        outcome, cause = ReceiveOutcome.DRAINED if is_aborted else ReceiveOutcome.FAILED, _cause(results)
    return Received(
        key=key,
        outcome=outcome,
        num_bytes=sum(end.num_bytes for end in results),
        transfer_s=max(end.transfer_s for end in results),
        busy_s=max(end.busy_s for end in results),
        error=cause.error,
        fault=cause.fault,
    )


def join_sent(key: TransferKey, results: Sequence[Sent], is_aborted: bool) -> Sent:
    is_sent = all(end.outcome is SendOutcome.SENT for end in results)
    cause = results[0] if is_sent else _cause(results)
    return Sent(
        key=key,
        outcome=SendOutcome.SENT if is_sent else SendOutcome.FAILED,
        num_bytes=sum(end.num_bytes for end in results),
        send_s=max(end.send_s for end in results),
        busy_s=max(end.busy_s for end in results),
        exposed_s=max(end.exposed_s for end in results),
        early_bytes=sum(end.early_bytes for end in results),
        error=cause.error,
        fault=cause.fault,
        wire_dtype=next((end.wire_dtype for end in results if end.wire_dtype), ""),
    )


def _cause(results: Sequence[Result]) -> Result:
    """The first real failure or, if there is none, the first part that was abandoned."""
    failed = [end for end in results if end.outcome not in _WHOLE]
    return next((end for end in failed if not end.is_cancelled), failed[0])


# --- grants of pairs of ranks ---------------------------------------------------------------------------------
# Which pairs of ranks transfer parts of one grant, and the grant of each part.


def rank_pairs(source: KvShape, target: KvShape) -> list[tuple[int, int]]:
    """(sending rank, receiving rank) of each part. `tp_rank` of both shapes is ignored."""
    return [
        (shard.source_rank, rank)
        for rank in range(target.tp_degree)
        for shard in shards_of(source, replace(target, tp_rank=rank))
    ]


def rank_key(key: TransferKey, rank: int) -> TransferKey:
    """The key of one rank's part. Parts need different keys, because a sender may send parts to several ranks."""
    return replace(key, transfer_id=f"{key.transfer_id}/{rank}")


def rank_grant(grant: Grant, rank: int) -> Grant:
    """The grant of the receiving worker's rank `rank`: the same block numbers in its own pool, for its heads."""
    shape = grant.fingerprint.shape
    if shape.tp_degree == 1:
        return grant
    endpoint = (grant.endpoint, *grant.rank_endpoints)[rank]
    fingerprint = replace(grant.fingerprint, shape=replace(shape, tp_rank=rank))
    key = rank_key(grant.key, rank)
    return replace(grant, key=key, endpoint=endpoint, fingerprint=fingerprint, rank_endpoints=())

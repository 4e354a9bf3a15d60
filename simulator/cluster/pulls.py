"""Cached KV that simulated workers pull from each other: kvtransfer.pulls over the simulated network. Pure.

The bounds and the rule for a part are those of live workers (pdserve.core.kv.pulls), as are the waiting of the prompts
(Fetches) and what a source lends (KvCache). Only messages, answers and bytes are simulated. A pull is a transfer that
shares the bandwidth of both workers with all others. A source answers between two steps, or at once during a step that
lets a live worker answer between two layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from pdserve.core import protocol as pr
from pdserve.core.attempt import Attempt, AttemptKey, PrefixSource
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.fetch import Fetch, Fetches
from pdserve.core.kv.kv_shape import TransferKey
from pdserve.core.kv.pulls import ASK_S, is_part_worthwhile, may_give, num_pullable, pull_ends_at_s, reader
from simulator.cluster.agenda import Agenda
from simulator.cluster.network import Network, SimulatedGrant, Transfer
from simulator.model import WorkerShape

SENT: Final = ""
DRAINING: Final = "it drains"
BUSY: Final = "it gives KV to others"
MISSING: Final = "it has not all of the blocks"
RESTARTED: Final = "it has started again"


class Peer(Protocol):
    """The parts of a worker that pulls use."""

    shape: WorkerShape
    incarnation: str
    agenda: Agenda
    kv: KvCache
    fetches: Fetches | None
    flows: dict[TransferKey, Transfer]

    @property
    def is_draining(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def has_disk(self) -> bool: ...

    def post(self, action: Callable[..., None], *details: Any) -> None: ...

    def between_layers(self, action: Callable[..., None]) -> None:
        """Runs `action` between two steps, or two layers of a long one."""

    def forward(self, message: pr.AttemptMessage) -> None: ...

    def act(self, effects: Iterable[Any]) -> None: ...

    def expect_give_up(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Taken:
    """A pull by this worker."""

    fetch: Fetch
    end: Callable[[int], None]
    source: PrefixSource
    ends_at_s: float
    asked: _Asked | None = None  # the latest
    num_found: int = 0  # of the blocks that it asks for, as many as the source has said it has
    is_part: bool = False  # those that it had are asked for
    error: str = ""
    is_unreachable: bool = False
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class _Asked:
    """The leading blocks of a pull that the source is asked for."""

    taken: _Taken
    by: SimulatedPulls
    grant: SimulatedGrant
    is_answered: bool = False  # or nobody waits for an answer
    reader: Attempt | None = None  # reads the source's disk

    @property
    def hashes(self) -> Sequence[bytes]:
        return self.taken.fetch.hashes[: self.grant.num_blocks]


@final
class SimulatedPulls:
    """Both directions of one worker: a BlockSource for what it takes, and an End of the network."""

    name: Final = "peer"

    def __init__(
        self,
        peer: Peer,
        network: Network,
        message_s: float,
        block_size: int,
        pulls_of: Callable[[str], SimulatedPulls | None],
    ) -> None:
        """`pulls_of`: those of another worker, by its id; None if it is dead."""
        self.link, self.flows = peer.shape.link, peer.flows
        self._peer, self._network, self._message_s, self._pulls_of = peer, network, message_s, pulls_of
        self._agenda, self._block_size = peer.agenda, block_size
        self._block_bytes = block_size * peer.shape.kv_bytes_per_token
        self._taken: dict[int, _Taken] = {}  # by the number of the fetch
        self._num_granted = 0
        self._asked: deque[_Asked] = deque()
        self._reading: list[_Asked] = []
        self._num_readers = 0

    # -- what this worker takes ----------------------------------------------------------------------------------

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        taken = [len(one.fetch.blocks) for one in self._taken.values()]
        size, block_bytes = self._block_size, self._block_bytes
        return num_pullable(attempt, len(hashes), first, taken=taken, block_size=size, block_bytes=block_bytes)

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        assert attempt.source is not None, "something was found"
        return attempt.source.predicted_s

    def begin(self, fetch: Fetch, end: Callable[[int], None]) -> None:
        """`end` is called between two steps."""
        source = fetch.attempt.source
        assert source is not None, "something was found"
        taken = _Taken(fetch, end, source, pull_ends_at_s(fetch.attempt, self._agenda.now_s))
        self._taken[fetch.number] = taken
        self._ask_for(taken, len(fetch.blocks))

    def abort(self, number: int) -> None:
        taken = self._taken.get(number)
        if taken is not None:
            taken.is_given_up = True
            self._stop(taken, "it was given up")

    def _stop(self, taken: _Taken, error: str) -> None:
        """The network reports the end, if it is not about to."""
        asked = taken.asked
        assert asked is not None, "it was asked for"
        asked.is_answered = True
        taken.error = taken.error or error
        self._network.abort_receiving(asked.grant.key)

    def _ask_for(self, taken: _Taken, num_blocks: int) -> None:
        """The first blocks of the fetch."""
        agenda, shape, fetch = self._agenda, self._peer.shape, taken.fetch
        self._num_granted += 1
        name = f"{shape.worker_id}.{self._peer.incarnation}.pull.{self._num_granted}"
        grant = SimulatedGrant(
            key=TransferKey(transfer_id=name, attempt=1, generation=self._num_granted),
            worker_id=shape.worker_id,
            num_cached_blocks=fetch.first,
            num_blocks=num_blocks,
        )
        self._network.expect(self, fetch.attempt.key, grant, self._block_bytes)
        asked = taken.asked = _Asked(taken, self, grant)
        left_s = max(0.0, taken.ends_at_s - agenda.now_s)
        agenda.after(self._message_s, self._arrive, asked)
        agenda.after(min(left_s, ASK_S), self._no_answer, asked, left_s >= ASK_S)
        agenda.after(left_s, self._late, asked)

    def _arrive(self, asked: _Asked) -> None:
        pulls = self._pulls_of(asked.taken.source.worker_id)
        if pulls is None:
            self._agenda.after(self._message_s, self._no_answer, asked, True)
        else:
            pulls.ask(asked)

    def _no_answer(self, asked: _Asked, is_unreachable: bool) -> None:
        if not asked.is_answered:
            asked.taken.is_unreachable = is_unreachable
            self._stop(asked.taken, "it did not answer")

    def _late(self, asked: _Asked) -> None:
        if asked is asked.taken.asked and asked.taken.fetch.number in self._taken:
            self._stop(asked.taken, "it took too long")

    def answered(self, asked: _Asked, refusal: str, num_found: int) -> None:
        if asked.is_answered:
            return
        asked.is_answered = True
        if refusal != SENT:
            asked.taken.num_found = num_found
            self._stop(asked.taken, refusal)

    def _ended(self, transfer: TransferKey, is_whole: bool, busy_s: float, num_bytes: int, ended_s: float) -> None:
        taken = next(one for one in self._taken.values() if one.asked is not None and one.asked.grant.key == transfer)
        if not is_whole and self._asks_for_a_part(taken):
            return
        fetch, asked = taken.fetch, taken.asked
        assert asked is not None, "it was asked for"
        asked.is_answered = True
        del self._taken[fetch.number]
        num_blocks = asked.grant.num_blocks if is_whole else 0
        self._peer.forward(
            pr.PullEnded(
                key=fetch.attempt.key,
                source=taken.source.worker_id,
                num_tokens=num_blocks * self._block_size,
                num_bytes=num_bytes,
                busy_s=busy_s,
                pull_s=max(0.0, ended_s - fetch.started_s),
                error="" if is_whole else taken.error,
                is_unreachable=taken.is_unreachable,
            )
        )
        taken.end(num_blocks)

    def _asks_for_a_part(self, taken: _Taken) -> bool:
        """Asks the source once more, for the leading blocks that it has, if that is worthwhile."""
        count, fetch, fetches, asked = taken.num_found, taken.fetch, self._peer.fetches, taken.asked
        assert fetches is not None
        assert asked is not None
        if taken.is_given_up or taken.is_part or not 0 < count < asked.grant.num_blocks:
            return False
        now_s, size = self._agenda.now_s, self._block_size
        if not is_part_worthwhile(fetches, fetch, count, block_size=size, now_s=now_s, ends_at_s=taken.ends_at_s):
            return False
        taken.is_part, taken.error = True, ""
        self._ask_for(taken, count)
        return True

    # -- what this worker gives ----------------------------------------------------------------------------------

    def ask(self, asked: _Asked) -> None:
        self._asked.append(asked)
        self._peer.between_layers(self.answer)

    def answer(self) -> None:
        while self._asked:
            self._consider(self._asked.popleft())
        for asked in [one for one in self._reading if not self._is_waiting(one)]:
            self._reading.remove(asked)
            self._consider(asked)

    def give_up(self) -> None:
        """The time in which the worker reads its disk for another one may be over."""
        if self._reading and self._peer.fetches is not None:
            self._peer.act(self._peer.fetches.expire(self._agenda.now_s))
            self.answer()
            self._peer.expect_give_up()

    def end_given(self) -> None:
        """The worker drains: what it gives is no longer sent."""
        for key in list(self._peer.kv.lent):
            self._network.abort_sending(key)
        reading, self._reading = self._reading, []
        for asked in reading:
            self._consider(asked)

    def die(self) -> None:
        self._network.cut(self)
        for asked in (*self._asked, *self._reading):  # their calls break
            self._agenda.after(self._message_s, asked.by._no_answer, asked, True)
        self._asked.clear()
        self._reading.clear()

    def _is_waiting(self, asked: _Asked) -> bool:
        fetches = self._peer.fetches
        assert asked.reader is not None
        assert fetches is not None
        return not asked.is_answered and fetches.is_waiting(asked.reader.key)

    def _consider(self, asked: _Asked) -> None:
        """Begins to send, or to read the disk, or refuses."""
        refusal, num_found = (BUSY, 0) if asked.is_answered else self._decide(asked)
        if refusal is None:
            self._reading.append(asked)
            self._peer.expect_give_up()
            return
        if asked.reader is not None and self._peer.fetches is not None:
            self._peer.act(self._peer.fetches.leave(asked.reader.key))
        self._agenda.after(self._message_s, asked.by.answered, asked, refusal, num_found)

    def _decide(self, asked: _Asked) -> tuple[str | None, int]:
        """Begins to send, or returns why not, and how many of the leading blocks are here. None: the disk is read."""
        peer, hashes = self._peer, asked.hashes
        if peer.is_draining:
            return DRAINING, 0
        if asked.taken.source.incarnation != peer.incarnation:
            return RESTARTED, 0
        sizes = [*map(len, peer.kv.lent.values()), *(one.grant.num_blocks for one in self._reading)]
        if not may_give(sizes, len(hashes), self._block_bytes):
            return BUSY, 0
        # Each running sequence may need one more block before these are given back.
        blocks = peer.kv.lend(asked.grant.key, hashes, spare=peer.num_running)
        if blocks is None:
            return (None, 0) if self._reads(asked, hashes) else (MISSING, peer.kv.num_lendable(hashes))
        if not blocks:
            return BUSY, 0
        self._network.start(self, asked.taken.fetch.attempt.key, asked.grant)
        self._network.push(asked.grant.key, 0, len(blocks))
        return SENT, 0

    def _reads(self, asked: _Asked, hashes: Sequence[bytes]) -> bool:
        """Whether blocks of this worker's disk are read, as in kvtransfer.pulls."""
        peer, fetches = self._peer, self._peer.fetches
        if fetches is None or not peer.has_disk:
            return False
        if asked.reader is None:
            self._num_readers += 1
            asked.reader = reader(self._num_readers)
        peer.act(fetches.consider(asked.reader, hashes, self._agenda.now_s, spare=peer.num_running))
        return fetches.is_waiting(asked.reader.key)

    def _take_back(self, transfer: TransferKey) -> None:
        if transfer in self._peer.kv.lent:
            self._peer.kv.take_back(transfer)

    # -- called by the network -----------------------------------------------------------------------------------

    def moving(self, key: AttemptKey) -> None:
        """The blocks of a fetch are not counted as stranded."""

    def received(
        self, key: AttemptKey, transfer: TransferKey, transfer_s: float, busy_s: float, num_bytes: int
    ) -> None:
        self._peer.post(self._ended, transfer, True, busy_s, num_bytes, self._agenda.now_s)

    def not_received(self, key: AttemptKey, transfer: TransferKey, error: str) -> None:
        taken = next((one for one in self._taken.values() if one.asked and one.asked.grant.key == transfer), None)
        if taken is not None:
            taken.error = taken.error or error
            self._peer.post(self._ended, transfer, False, 0.0, 0, self._agenda.now_s)

    def sent(self, key: AttemptKey, transfer: TransferKey, is_whole: bool, error: str, exposed_s: float = 0.0) -> None:
        self._peer.post(self._take_back, transfer)

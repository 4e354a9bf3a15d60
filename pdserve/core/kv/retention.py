"""Which cached blocks leave first: those that are expected to save the fewest seconds per block and second. Pure: time
is passed as `now_s`.

The value of a block is that of reuse_rates.py, multiplied by the time to compute the block. It may rise with age, and
falls at last. So the least valuable block of a class is nearly always its oldest or its newest, and an eviction
compares two segments of each class.

Values are estimates from few texts, so those within a factor of two count as equal. Of equal ones, and as long as
nothing is learned, the least recently used blocks leave first.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, final

from pdserve.core.kv.reuse_rates import Kind, ReuseClass, ReuseRates, age_number

# --- blocks in the order in which they leave ------------------------------------------------------------------


Classes = tuple[ReuseClass, ReuseClass]  # of a part of a text, and of the end of the text


@dataclass(slots=True, eq=False)
class Segment:
    """Consecutive blocks of a text of one class, which were used last at the same time."""

    classes: Classes
    at_s: float
    order: int  # segments that were used earlier, or are deeper in the same text, have lower ones
    turn: int  # of the text
    uses: int
    length: int  # of the text, in blocks
    first_new: int  # of the text, the block with which it began to differ from those before
    cost: float  # of computing one of its blocks
    hashes: tuple[bytes, ...]
    num_known: int = 0  # its hashes that no newer segment has
    place: int = -1  # among all with known hashes

    @property
    def reuse_class(self) -> ReuseClass:
        return self.classes[0]


_LOWEST_RANK: Final = -2000


@final
class EvictionQueue:
    """Blocks of one tier that may leave, by their hashes."""

    def __init__(self, rates: ReuseRates) -> None:
        self._rates = rates
        self._segment_of: dict[bytes, Segment] = {}
        # The segments of each pair of classes, which differ in age only, in the order in which they came: how many of
        # their blocks are here, and where to look for the deepest.
        self._by_class: dict[Classes, OrderedDict[Segment, list[int]]] = {}
        self._chosen: tuple[Segment, float] | None = None

    def __len__(self) -> int:
        return len(self._segment_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._segment_of

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._segment_of)

    def add(self, hashes: Sequence[bytes], segment: Segment) -> None:
        """Blocks of the segment. None of them is in the queue."""
        self._segment_of.update(dict.fromkeys(hashes, segment))
        segments = self._by_class.get(segment.classes)
        if segments is None:
            segments = self._by_class[segment.classes] = OrderedDict()
        here = segments.get(segment)
        if here is None:
            segments[segment] = [len(hashes), len(segment.hashes)]
            self._chosen = None
        else:
            here[0] += len(hashes)

    def discard(self, block_hash: bytes) -> None:
        segment = self._segment_of.pop(block_hash, None)
        if segment is not None:
            here = self._by_class[segment.classes][segment]
            here[0] -= 1
            if here[0] == 0:
                self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        segments = self._by_class[segment.classes]
        del segments[segment]
        if not segments:
            del self._by_class[segment.classes]
        self._chosen = None

    def least(self, now_s: float) -> int:
        """The rank of the block that leaves first. The queue must not be empty."""
        return self.rank(self._choose(now_s), now_s)

    def rank(self, segment: Segment, now_s: float) -> int:
        """Of the value of its blocks; higher ones stay. A request that uses a text again also uses its
        beginning, without which no later block is found. So a segment is worth at least as much as what follows it."""
        age_s, (own, end) = now_s - segment.at_s, segment.classes
        value = self._rates.value(own, age_s)
        if end != own:
            value = max(value, self._rates.value(end, age_s))
        value *= segment.cost
        return math.frexp(value)[1] if value > 0.0 else _LOWEST_RANK + (value == 0.0)

    def pop(self, count: int, now_s: float) -> list[bytes]:
        """The least valuable blocks, in the order in which they leave. There must be as many."""
        popped: list[bytes] = []
        segment_of = self._segment_of
        while len(popped) < count:
            segment = self._choose(now_s)
            here = self._by_class[segment.classes][segment]
            hashes, at = segment.hashes, here[1]
            num_hashes, left = len(hashes), min(here[0], count - len(popped))
            here[0] -= left
            at = min(at, num_hashes)
            while left:
                at = (at or num_hashes) - 1
                block_hash = hashes[at]
                if segment_of.get(block_hash) is segment:
                    del segment_of[block_hash]
                    popped.append(block_hash)
                    left -= 1
            here[1] = at
            if here[0] == 0:
                self._remove(segment)
        return popped

    def _choose(self, now_s: float) -> Segment:
        if self._chosen is not None and self._chosen[1] == now_s:
            return self._chosen[0]
        least: tuple[int, int] | None = None
        chosen = None
        for segments in self._by_class.values():
            oldest, newest = next(iter(segments)), next(reversed(segments))
            for segment in (oldest,) if oldest is newest else (oldest, newest):
                key = (self.rank(segment, now_s), segment.order)
                if least is None or key < least:
                    least, chosen = key, segment
        assert chosen is not None, "no block may leave"
        self._chosen = (chosen, now_s)
        return chosen


# --- what is known of texts -----------------------------------------------------------------------------------

# Blocks that are watched, of those of all tiers: more of small ones, because most reuse comes after they have left.
WATCHED: Final = 2.5
WATCHED_OF_FEW: Final = 20.0
FEW_WATCHED: Final = 131_072
_COST_TOKENS: Final = 2048  # of a prompt, for the cost of one of its blocks
_FIRST_TEXTS: Final = 256  # before the first update of the rates
_LEARN_TEXTS: Final = 128  # between later ones, at least
_LEARN_SHARE: Final = 64  # one of so many segments
_MOST_SAMPLED: Final = 1024  # segments, for an update


def block_cost(prefill_s: Callable[[int, int], float], block_size: int) -> Callable[[int], float]:
    """Seconds to compute a block that follows so many others, as one of many: a block alone would mostly take the time
    to read the weights, whatever its depth."""
    return lambda first: prefill_s(_COST_TOKENS, first * block_size) * block_size / _COST_TOKENS


@final
class Retention:
    """`pool` and `host` have the blocks that may leave each tier. A block that is used is in neither, or only in
    `host`."""

    def __init__(
        self, num_blocks: int, computed_s: Callable[[int], float] | None = None, cached: Container[bytes] = ()
    ) -> None:
        """`num_blocks` of all tiers. `computed_s`: to compute a block, with others, that follows so many blocks; None:
        all alike. `cached`: the blocks of the pool, also those that are used."""
        self.rates = ReuseRates()
        self.pool, self.host = EvictionQueue(self.rates), EvictionQueue(self.rates)
        self.ahead: dict[bytes, None] = {}  # the next that leave the pool, in order; no longer in `pool`
        self._computed_s, self._cached = computed_s, cached
        self._most_known = round(max(WATCHED * num_blocks, min(WATCHED_OF_FEW * num_blocks, FEW_WATCHED)))
        self._known: dict[bytes, Segment] = {}
        self._segments: OrderedDict[Segment, None] = OrderedDict()  # with known hashes, nearly by the time of their use
        self._places: list[Segment] = []  # the same in any order
        self._draw = random.Random(0)
        self._num_added = 0  # segments and their hashes, since some were forgotten
        self._order = 0
        self._num_left = _FIRST_TEXTS  # before the next update of the rates

    def __len__(self) -> int:
        return len(self._known)

    def began(self, hashes: Sequence[bytes], now_s: float) -> None:
        """A text with these blocks is computed. Learns from those that are known, also if they have left."""
        segment, count = None, 0
        for block_hash in hashes:
            found = self._known.get(block_hash)
            if found is not segment:
                self._learn_use(segment, now_s, count)
                segment, count = found, 0
            if found is None:
                return
            count += 1
        self._learn_use(segment, now_s, count)

    def _learn_use(self, segment: Segment | None, now_s: float, count: int) -> None:
        if segment is not None:
            self.rates.used(segment.reuse_class, now_s - segment.at_s, count / segment.length)

    def released(self, hashes: Sequence[bytes], now_s: float, reuse_within_s: float | None = None) -> None:
        """A text no longer uses its cached blocks `hashes`, given in its order. They are not in `pool` yet."""
        if self._known.keys().isdisjoint(hashes):  # a new text, the most frequent case
            if hashes:
                reuse_class = _classify(1, 1, reuse_within_s)
                self._segment((reuse_class, reuse_class), now_s, 1, 1, len(hashes), 0, 0, tuple(hashes))
        else:
            self._used_again(hashes, now_s, reuse_within_s)
        self._num_left -= 1
        self._forget(now_s)
        if self._num_left <= 0:
            self._learn(now_s)

    def _used_again(self, hashes: Sequence[bytes], now_s: float, reuse_within_s: float | None) -> None:
        """Some of these blocks of a text are known."""
        runs: list[tuple[int, Segment | None]] = []  # first block, segment so far
        for at, block_hash in enumerate(hashes):
            found = self._known.get(block_hash)
            if not runs or runs[-1][1] is not found:
                runs.append((at, found))
        first_new = next((first for first, one in runs if one is None), len(hashes))
        last = next((one for _, one in reversed(runs) if one is not None), None)
        turn = 1
        if last is not None:
            if first_new > last.first_new:  # it has some of what was new in the text before, so it is a later turn
                turn = last.turn + 1
            elif last.reuse_class[0] is not Kind.SHARED:
                turn = last.turn
        parts: list[tuple[int, Classes, int]] = []  # first block, classes, uses
        end = _classify(1 if runs[-1][1] is None else runs[-1][1].uses + 1, turn, reuse_within_s)
        for first, one in runs:
            uses = 1 if one is None else one.uses + 1
            classes = _classify(uses, turn, reuse_within_s), end
            is_shared = classes[0][0] is Kind.SHARED and end[0] is not Kind.WITHIN
            if is_shared and one is not None and _is_announced(one, now_s):
                classes = classes[0], one.classes[1]  # of another text with this beginning, which will be used
            if not parts or parts[-1][1] != classes:
                parts.append((first, classes, uses))
        stop = len(hashes)
        for first, classes, uses in reversed(parts):
            self._segment(classes, now_s, turn, uses, len(hashes), first_new, first, tuple(hashes[first:stop]))
            stop = first

    def _learn(self, now_s: float) -> None:
        self._num_left = max(_LEARN_TEXTS, len(self._places) // _LEARN_SHARE)
        sampled = self._places
        if len(sampled) > _MOST_SAMPLED:
            sampled = self._draw.choices(sampled, k=_MOST_SAMPLED)
        weight = len(self._places) / max(1, len(sampled))
        self.rates.learn(
            (one.reuse_class, now_s - one.at_s, weight * one.num_known / one.length)
            for one in sampled
            if not self._is_used(one.hashes[0])
        )

    def end(self, hashes: Sequence[bytes], now_s: float) -> None:
        """The session of a text with these blocks, given in its order, has ended: its blocks from the first of them on
        leave first, without those that are used, or that several texts have used. Only the end of the text is its
        own, so only the segment of its last known block is considered."""
        segment = next((one for one in map(self._known.get, reversed(hashes)) if one is not None), None)
        if segment is None or segment.reuse_class[0] in (Kind.SHARED, Kind.ENDED):
            return
        first = next(one for one in hashes if self._known.get(one) is segment)
        rest = segment.hashes[segment.hashes.index(first) :]
        ended = tuple(one for one in rest if self._known.get(one) is segment and not self._is_used(one))
        if not ended:
            return
        self.rates.unused(segment.reuse_class, now_s - segment.at_s, len(ended) / segment.length)
        leaving = [one for one in ended if one in self.pool or one in self.ahead]
        for one in leaving:
            self.no_longer_leaves(one)
        turn, uses, length, first_new = segment.turn, segment.uses, segment.length, segment.first_new
        newer = self._segment(((Kind.ENDED, 0), (Kind.ENDED, 0)), now_s, turn, uses, length, first_new, 0, ended)
        newer.cost = segment.cost
        if leaving:
            self.pool.add(leaving, newer)

    def may_leave_pool(self, hashes: Iterable[bytes], now_s: float) -> None:
        """No text uses these cached blocks, the deepest first."""
        hashes = list(hashes)
        segments = [*map(self._known.get, hashes)]
        only = segments[0] if segments else None
        if only is not None and segments.count(only) == len(segments):
            self.pool.add(hashes, only)
            return
        for segment, alike in groupby(hashes, lambda one: self._known.get(one) or self._segment_of(one, now_s)):
            self.pool.add(list(alike), segment)

    def no_longer_leaves(self, block_hash: bytes) -> None:
        """A text uses the cached block, or it is wrong."""
        if block_hash in self.ahead:
            del self.ahead[block_hash]
        else:
            self.pool.discard(block_hash)

    def entered_host(self, block_hash: bytes, now_s: float) -> None:
        self.host.add((block_hash,), self._segment_of(block_hash, now_s))

    def is_worth_a_copy(self, block_hash: bytes, now_s: float) -> bool:
        """Whether the block is worth no less than the one that would leave the full host tier for it. False if none may
        leave."""
        if not self.host:
            return False
        rank = self.host.rank(self._segment_of(block_hash, now_s), now_s)
        return rank >= self.host.least(now_s)

    def leaves_after_pool(self, block_hash: bytes, now_s: float) -> bool:
        """Whether `pool` has a block of an ended session, and this is none. Others follow the blocks saved ahead, also
        if they are worth less: when many leave at once, they would leave without a copy."""
        pool = self.pool
        has_ended = len(pool) > 0 and pool.least(now_s) == _LOWEST_RANK
        return has_ended and pool.rank(self._segment_of(block_hash, now_s), now_s) > _LOWEST_RANK

    def expected_use(self, block_hash: bytes, now_s: float) -> tuple[float, float | None]:
        """Seconds to compute a block of its text, the mean of all, and the probability of another use of the block;
        0.0 and None: unknown."""
        segment = self._segment_of(block_hash, now_s)
        text_s = 0.0 if self._computed_s is None else self._computed_s(segment.length // 2)
        age_s = now_s - segment.at_s
        chances = [self.rates.chance(one, age_s) for one in segment.classes]
        return text_s, max([one for one in chances if one is not None], default=None)

    def drop(self, block_hash: bytes) -> None:
        """The contents of the block are wrong."""
        self.no_longer_leaves(block_hash)
        self.host.discard(block_hash)
        segment = self._known.pop(block_hash, None)
        if segment is not None:
            self._lose(segment)

    def check(self) -> None:
        """Raises AssertionError unless the tables agree."""
        counts: dict[Segment, int] = defaultdict(int)
        for segment in self._known.values():
            counts[segment] += 1
        assert all(one.num_known == counts[one] for one in self._segments), "numbers of blocks of segments are wrong"
        assert counts.keys() == self._segments.keys(), "segments are lost"
        assert [one.place for one in self._places] == [*range(len(self._segments))], "places are wrong"
        for queue in (self.pool, self.host):
            assert all(self._known.get(block_hash) is not None for block_hash in queue), "an unknown block"

    def _segment_of(self, block_hash: bytes, now_s: float) -> Segment:
        """One of its own, without a use, if it has none: its text has not ended, or it was forgotten."""
        found = self._known.get(block_hash)
        if found is None:
            found = self._segment(((Kind.PRIVATE, 0), (Kind.PRIVATE, 0)), now_s, 0, 0, 1, 0, 0, (block_hash,))
        return found

    def _segment(
        self,
        classes: Classes,
        now_s: float,
        turn: int,
        uses: int,
        length: int,
        first_new: int,
        first: int,
        hashes: tuple[bytes, ...],
    ) -> Segment:
        """`hashes` are blocks of the text from number `first` on. The cost of all is that of the middle one."""
        self._order += 1
        cost = 1.0 if self._computed_s is None else self._computed_s(first + len(hashes) // 2) or 1.0
        segment = Segment(classes, now_s, self._order, turn, uses, length, first_new, cost, hashes)
        known, host = self._known, self.host
        replaced = [] if known.keys().isdisjoint(hashes) else [*map(known.get, hashes)]
        known.update(dict.fromkeys(hashes, segment))
        for block_hash, old in zip(hashes, replaced, strict=False):
            if old is not None:
                self._lose(old)
                if block_hash in host:
                    host.discard(block_hash)
                    host.add((block_hash,), segment)
        segment.num_known = len(segment.hashes)
        segment.place = len(self._places)
        self._places.append(segment)
        self._segments[segment] = None
        self._num_added += 1 + len(segment.hashes)
        return segment

    def _lose(self, segment: Segment) -> None:
        """One of its hashes, which is not known any longer, or has a newer segment."""
        segment.num_known -= 1
        if segment.num_known == 0:
            del self._segments[segment]
            last = self._places.pop()
            if last is not segment:
                self._places[segment.place] = last
                last.place = segment.place

    def _forget(self, now_s: float) -> None:
        """Blocks that have left all tiers, those that were used first. Looks at no more than twice what was added since
        the last call, so that no text waits for long; more than half of what is known has left."""
        num_left, self._num_added = 2 * self._num_added, 0
        while num_left > 0 and len(self._known) > self._most_known:
            segment = next(iter(self._segments))
            num_left -= 1 + len(segment.hashes)
            known = [one for one in segment.hashes if self._known.get(one) is segment]
            kept = [one for one in known if one in self._cached or one in self.pool or one in self.host]
            gone = [one for one in known if one not in self._cached and one not in self.pool and one not in self.host]
            self._segments.move_to_end(segment)
            if 2 * len(kept) < len(segment.hashes):
                segment.hashes = tuple(kept)  # so that what is looked at is mostly known
            for one in gone:
                del self._known[one]
                self._lose(segment)
            if gone:
                self.rates.unused(segment.reuse_class, now_s - segment.at_s, len(gone) / segment.length)

    def _is_used(self, block_hash: bytes) -> bool:
        """Whether a text has the block now: its use is counted already."""
        return block_hash in self._cached and block_hash not in self.pool and block_hash not in self.ahead


def _is_announced(segment: Segment, now_s: float) -> bool:
    """Whether its text is announced to be used, within a time that is not over."""
    kind, number = segment.classes[1]
    return kind is Kind.WITHIN and age_number(now_s - segment.at_s) <= number


def _classify(uses: int, turn: int, reuse_within_s: float | None) -> ReuseClass:
    if uses > turn:
        return Kind.SHARED, min(uses.bit_length(), 9)
    if reuse_within_s is not None:
        return (Kind.WITHIN, age_number(reuse_within_s)) if reuse_within_s > 0.0 else (Kind.ENDED, 0)
    return Kind.PRIVATE, turn if turn < 4 else min(2 + turn.bit_length(), 9)

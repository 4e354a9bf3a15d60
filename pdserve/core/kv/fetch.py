"""Prompts that wait for blocks of a tier that is slower than memory: which fetch what, and for how long. Pure.

A waiting prompt may fetch the blocks that neither the pool nor the host tier has, if that is predicted to be sooner
than to compute them. It is not planned meanwhile, so later prompts go first. When the fetch has ended, its verified
blocks are in the prefix cache, where the prompt finds them like any others. A prompt waits for at most the time in
which it could have had its turn and computed the blocks, and then computes them. So a slow or broken source is a miss.
What is fetched until the turn of a prompt costs it nothing.

Some sources know only after a lookup which blocks they have. A prompt waits for it if that is worthwhile on average,
and for no longer than a lookup takes as a rule.

The fetch references its blocks until the source has reported that it no longer writes to them. Prompts that lack the
same blocks wait for the same fetch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, Protocol, final, runtime_checkable

from pdserve.core.attempt import Attempt, AttemptKey, blocks_for
from pdserve.core.kv.cache import KvCache, WaitingText
from pdserve.core.kv.host_tier import HostTier
from pdserve.core.kv.tier_reads import MOST_ALONE, Read, TierSpeed, best_read, saved_s

MOST_SHARE: Final = 0.25  # of the pool, for the blocks of several fetches
MOST_FETCHES: Final = 4  # one after the other, for one prompt
UNKNOWN_S: Final = 1.0  # the longest wait if the time to compute is unknown
LATE_LOOKUP: Final = 4.0  # times its prediction, a lookup is not waited for,
LATE_LOOKUP_S: Final = 0.1  # but for as long as a thread may wait for a core


class BlockSource(Protocol):
    """What is asked of a slower tier on the engine's thread. It answers at once, from what it knows."""

    @property
    def name(self) -> str:
        """A word, for metrics: unique among the sources of a worker."""
        ...

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        """How many of the leading `hashes` the source can supply; block `first` of the attempt's text is the first of
        them. The answer may depend on the attempt, for instance on where its message says that its prefix is."""
        ...

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        """Seconds to supply so many of them, with the fetches that the source does before; infinite if it hangs."""
        ...


@dataclass(frozen=True, slots=True)
class Lookup:
    """A source is looking for blocks."""

    seconds: float  # until it knows more, as predicted
    share: float  # of the blocks that lookups found so far


@runtime_checkable
class LookupSource(BlockSource, Protocol):
    """A source that cannot know at once which blocks it has. `Fetches.looked_up` must follow each lookup."""

    def lookup(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> Lookup | None:
        """Begins to look for the leading `hashes`, as of `num_found`. None: it knows, or there is no use in waiting."""
        ...


@runtime_checkable
class TierSource(BlockSource, Protocol):
    """A source that is a tier of the worker."""

    def tier_speed(self) -> TierSpeed | None:
        """As `predict_s`. None: the tier hangs."""
        ...


def tier_speeds(host: HostTier | None, sources: Iterable[BlockSource]) -> tuple[TierSpeed, ...]:
    """What a worker reports of its tiers."""
    speeds = [source.tier_speed() for source in sources if isinstance(source, TierSource)]
    if host is not None and host.loads_at_once:
        speeds.append(host.speed)
    return tuple([one for one in speeds if one is not None])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Blocks of a text that a source fills."""

    number: int  # never used again
    source: str
    attempt: Attempt  # for which it was started; others may wait for it too
    first: int  # the place of the first block in the text
    hashes: tuple[bytes, ...]  # of the blocks, in the order of the text
    blocks: tuple[int, ...]  # to fill; of no other use before `Fetches.ended`
    started_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class FetchStarted:
    """The source must fill the blocks, and report the end."""

    fetch: Fetch


@dataclass(frozen=True, slots=True)
class FetchAborted:
    """No prompt waits for the fetch any more. The source must stop soon, and still report the end."""

    number: int
    source: str


FetchEffect = FetchStarted | FetchAborted


@dataclass(slots=True)
class _Running:
    fetch: Fetch
    prefix: list[int]  # cached blocks before it, which must not leave meanwhile
    waiting: set[AttemptKey] = field(default_factory=set)
    is_aborted: bool = False


@dataclass(slots=True)
class _Wait:
    """What is known of a prompt that has been considered."""

    give_up_at_s: float
    number: int | None = None  # of the fetch that it waits for; None: for memory
    num_supplied: int = 0  # leading blocks of its text that are cached when that fetch has ended
    num_fetches: int = 0
    look_until_s: float = math.inf  # gives up before if only a lookup runs for it
    seen: int = -1  # number of ended fetches and lookups when it was considered last
    is_over: bool = False  # the prompt no longer waits, and is not considered again


@final
class Fetches:
    """The running fetches of a worker, and the prompts that wait for them. The schedulers call it between steps."""

    def __init__(
        self,
        kv: KvCache,
        sources: Sequence[BlockSource],
        prefill_s: Callable[[int, int], float],
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`prefill_s`: seconds to compute so many tokens after so many others; 0.0: unknown. `numbers`: of its fetches;
        none of them may have been used with these sources."""
        self.sources = tuple(sources)
        self._kv = kv
        self._lookups = tuple(one for one in sources if isinstance(one, LookupSource))
        self._prefill_s = prefill_s
        self._running: dict[int, _Running] = {}
        self._number_of: dict[bytes, int] = {}  # by the hash of each block that is being filled
        self._waits: dict[AttemptKey, _Wait] = {}
        self._num_held = 0  # blocks that are being filled
        self._numbers = count(1) if numbers is None else numbers
        self._num_changes = 0
        self.num_filled: Counter[str] = Counter()  # verified blocks, by source

    def __len__(self) -> int:
        return len(self._running)

    def is_waiting(self, key: AttemptKey) -> bool:
        """Whether the prompt must not be planned now. False after the end of its fetch, when it must be considered
        again before it is planned."""
        wait = self._waits.get(key)
        return wait is not None and not wait.is_over and (wait.number is not None or wait.seen == self._num_changes)

    def num_supplied(self, key: AttemptKey) -> int:
        """The leading blocks of the prompt's text that it will not compute if its running fetch succeeds."""
        wait = self._waits.get(key)
        return 0 if wait is None or wait.number is None else wait.num_supplied

    @property
    def next_give_up_s(self) -> float:
        """When the first prompt gives up; infinite if none waits."""
        return min((_give_up_s(one) for one in self._waits.values() if not one.is_over), default=math.inf)

    def held(self) -> Iterator[Sequence[int]]:
        """The blocks that fetches reference."""
        for one in self._running.values():
            yield one.prefix
            yield one.fetch.blocks

    def consider_all(
        self, waiting: Iterable[WaitingText], now_s: float, *, running_s: Callable[[], float], spare: int, growth: int
    ) -> list[FetchEffect]:
        """Considers all waiting prompts in their order. `running_s`: seconds to compute those that have started.

        A fetch leaves `spare` blocks available, and those of each earlier prompt that may start now with `growth` more.
        """
        effects: list[FetchEffect] = []
        ready: list[WaitingText] = []
        size = self._kv.block_size

        def ahead_s() -> float:
            return running_s() + sum(self.left_s(len(each.tokens), self._kv.tokens_found(each)) for each in ready)

        for each in waiting:
            key = each.attempt.key
            if not self._is_settled(self._waits.get(key)):
                effects += self.consider(each.attempt, each.reusable(size), now_s, ahead_s=ahead_s, spare=spare)
            if not self.is_waiting(key):
                ready.append(each)
                spare += blocks_for(len(each.tokens), size) + growth
        return effects

    def consider(
        self,
        attempt: Attempt,
        hashes: Sequence[bytes],
        now_s: float,
        *,
        ahead_s: Callable[[], float] = lambda: 0.0,
        spare: int = 0,
    ) -> Iterable[FetchEffect]:
        """Starts a fetch for a waiting prompt, or lets it wait for one, if that is worthwhile. `hashes` are those of
        the full blocks that need not be computed. `ahead_s`: seconds to compute the prompts before it. A fetch leaves
        `spare` blocks available. Costs little if nothing has changed for the prompt."""
        wait = self._waits.get(attempt.key)
        if self._is_settled(wait):
            return ()
        first = self._kv.num_found(hashes)
        missing = hashes[first:]
        if not missing:
            return self._decide(attempt, wait)
        number = self._number_of.get(missing[0])
        if number is not None:
            return self._join(self._running[number], attempt, missing, first, wait, now_s, ahead_s())
        return self._start(attempt, hashes, first, wait, now_s, ahead_s(), spare)

    def _is_settled(self, wait: _Wait | None) -> bool:
        """Whether nothing has changed for a prompt since it was considered."""
        return wait is not None and (wait.is_over or wait.number is not None or wait.seen == self._num_changes)

    def left_s(self, num_tokens: int, computed: int) -> float:
        """Seconds to compute what is left of a text."""
        return self._prefill_s(num_tokens - computed, computed)

    def ended(self, number: int, num_blocks: int) -> Fetch:
        """The source no longer writes to the blocks of the fetch, of which the first `num_blocks` are verified. Those
        are in the prefix cache then, also after an abort."""
        one = self._running.pop(number)
        fetch, size = one.fetch, len(one.fetch.blocks)
        assert 0 <= num_blocks <= size, f"{num_blocks} of {size} blocks"
        for block_hash in fetch.hashes:
            del self._number_of[block_hash]
        self._num_held -= size
        self._num_changes += 1
        self.num_filled[fetch.source] += num_blocks
        self._kv.commit(fetch.blocks, fetch.hashes, 0, num_blocks)
        self._kv.give_back([*one.prefix, *fetch.blocks])
        for key in one.waiting:
            wait = self._waits[key]
            wait.number = None
            # The others are considered again, as they may need more, or other blocks.
            wait.is_over = key == fetch.attempt.key and (num_blocks < size or wait.num_fetches >= MOST_FETCHES)
        return fetch

    def looked_up(self) -> None:
        """A lookup has ended, so the prompts that wait for none of the fetches are considered again."""
        self._num_changes += 1

    def leave(self, key: AttemptKey) -> Iterable[FetchEffect]:
        """The prompt has started or ended."""
        wait = self._waits.pop(key, None)
        return () if wait is None else self._no_longer(key, wait)

    def expire(self, now_s: float) -> list[FetchEffect]:
        """Prompts whose time is over compute their blocks."""
        effects: list[FetchEffect] = []
        for key, wait in self._waits.items():
            if not wait.is_over and now_s >= _give_up_s(wait):
                effects += self._no_longer(key, wait)
                wait.is_over = True
        return effects

    def check(self) -> None:
        """Raises AssertionError unless the tables agree. The allocator's check counts the references."""
        numbers = {block_hash: number for number, one in self._running.items() for block_hash in one.fetch.hashes}
        assert numbers == self._number_of, "hashes and fetches differ"
        assert self._num_held == sum(len(one.fetch.blocks) for one in self._running.values()), "counts do not add up"
        for number, one in self._running.items():
            assert one.is_aborted is not bool(one.waiting), f"fetch {number} runs for no prompt"
            assert all(self._waits[key].number == number for key in one.waiting), f"fetch {number}: {one.waiting}"
        for key, wait in self._waits.items():
            if wait.number is not None:
                assert not wait.is_over, key
                assert key in self._running[wait.number].waiting, key

    # -- decisions ----------------------------------------------------------------------------------------------

    def _start(
        self,
        attempt: Attempt,
        hashes: Sequence[bytes],
        first: int,
        wait: _Wait | None,
        now_s: float,
        ahead_s: float,
        spare: int,
    ) -> Iterable[FetchEffect]:
        missing = hashes[first:]
        asked = [self._look_up(one, attempt, missing, first, ahead_s) for one in self._lookups]
        lookups = [one for one in asked if one is not None]
        best: tuple[Read, BlockSource] | None = None
        for source in self.sources:
            count = source.num_found(attempt, missing, first)
            count = next((at for at in range(count) if missing[at] in self._number_of), count)
            if not count:  # then it cannot predict either
                continue
            found = best_read(
                partial(source.predict_s, attempt), partial(self._computed_s, first=first), count, ahead_s
            )
            if found is not None and (best is None or found.saved_s > best[0].saved_s):
                best = found, source
        if best is None:
            return self._wait_for(lookups, attempt, missing, first, wait, now_s, ahead_s)
        (num_read, _), source = best
        wait = wait or self._begin_wait(attempt.key, num_read, first, now_s + ahead_s)
        wait.seen = self._num_changes
        blocks = self._take_blocks(source, attempt, [*hashes[:first], *missing[:num_read]], first, ahead_s, spare)
        if blocks is None:
            if self._kv.num_found(hashes) < first:  # making room has displaced blocks that were found
                return self._start(attempt, hashes, self._kv.num_found(hashes), wait, now_s, ahead_s, spare)
            if not self._running:  # no end of a fetch will make room, so the prompt waits for memory like others
                if wait.num_fetches:
                    return self._decide(attempt, wait)
                del self._waits[attempt.key]
            return ()
        num_filled = len(blocks) - first
        fetch = Fetch(
            number=next(self._numbers),
            source=source.name,
            attempt=attempt,
            first=first,
            hashes=tuple(missing[:num_filled]),
            blocks=tuple(blocks[first:]),
            started_s=now_s,
            predicted_s=source.predict_s(attempt, num_filled),
        )
        self._running[fetch.number] = _Running(fetch, blocks[:first], {attempt.key})
        self._number_of.update(dict.fromkeys(fetch.hashes, fetch.number))
        self._num_held += num_filled
        wait.number, wait.num_supplied, wait.look_until_s = fetch.number, len(blocks), math.inf
        wait.num_fetches += 1
        return (FetchStarted(fetch),)

    def _look_up(
        self, source: LookupSource, attempt: Attempt, missing: Sequence[bytes], first: int, ahead_s: float
    ) -> Lookup | None:
        """A lookup that is worth a wait, if the source has what is missing as often as it had."""
        lookup = source.lookup(attempt, missing, first)
        if lookup is None:
            return None
        saved_s = self._saved_s(source, attempt, len(missing), first, ahead_s)
        return lookup if lookup.share * saved_s > max(0.0, lookup.seconds - ahead_s) else None

    def _wait_for(
        self,
        lookups: Sequence[Lookup],
        attempt: Attempt,
        missing: Sequence[bytes],
        first: int,
        wait: _Wait | None,
        now_s: float,
        ahead_s: float,
    ) -> Iterable[FetchEffect]:
        """No source is known to have a block."""
        if not lookups:
            return self._decide(attempt, wait)
        wait = wait or self._begin_wait(attempt.key, len(missing), first, now_s + ahead_s)
        if wait.look_until_s == math.inf:  # it is not extended
            late_s = LATE_LOOKUP * max(one.seconds for one in lookups)
            wait.look_until_s = now_s + max(ahead_s, late_s, LATE_LOOKUP_S)
        wait.seen = self._num_changes
        return ()

    def _take_blocks(
        self,
        source: BlockSource,
        attempt: Attempt,
        hashes: Sequence[bytes],
        first: int,
        ahead_s: float,
        spare: int,
    ) -> list[int] | None:
        """The first `first` blocks of `hashes`, then new ones for the rest, or for a part that is worth a fetch."""
        wanted = len(hashes) - first
        share = MOST_SHARE if self._running else MOST_ALONE
        most = min(wanted, int(share * self._kv.blocks.num_blocks) - self._num_held)
        blocks = self._kv.begin_fetch(hashes, first, most, spare=spare) if most > 0 else None
        if blocks is None:
            return None
        count = len(blocks) - first
        if count < wanted and self._saved_s(source, attempt, count, first, ahead_s) <= 0.0:
            self._kv.give_back(blocks)
            return None
        return blocks

    def _join(
        self,
        one: _Running,
        attempt: Attempt,
        missing: Sequence[bytes],
        first: int,
        wait: _Wait | None,
        now_s: float,
        ahead_s: float,
    ) -> Iterable[FetchEffect]:
        """The fetch `one` already fills the first of the missing blocks."""
        fetch = one.fetch
        shared = next(
            (at for at, block_hash in enumerate(missing) if self._number_of.get(block_hash) != fetch.number),
            len(missing),
        )
        computed_s = self._computed_s(shared, first)
        if one.is_aborted or fetch.started_s + fetch.predicted_s - now_s >= ahead_s + computed_s:
            return self._decide(attempt, wait)
        wait = wait or self._begin_wait(attempt.key, shared, first, now_s + ahead_s)
        wait.number, wait.num_supplied, wait.look_until_s = fetch.number, first + shared, math.inf
        one.waiting.add(attempt.key)
        return ()

    def _decide(self, attempt: Attempt, wait: _Wait | None) -> Iterable[FetchEffect]:
        """The prompt computes what it lacks."""
        if wait is None:
            wait = self._waits[attempt.key] = _Wait(math.inf)
        wait.is_over = True
        return ()

    def _no_longer(self, key: AttemptKey, wait: _Wait) -> Iterable[FetchEffect]:
        """The prompt no longer waits for its fetch, which is aborted if no other one does."""
        if wait.number is None:
            return ()
        one = self._running[wait.number]
        wait.number = None
        one.waiting.discard(key)
        if one.waiting:
            return ()
        one.is_aborted = True
        self._kv.give_back(one.prefix)  # only the source's blocks are written to
        one.prefix = []
        return (FetchAborted(one.fetch.number, one.fetch.source),)

    def _begin_wait(self, key: AttemptKey, num_blocks: int, first: int, turn_s: float) -> _Wait:
        """`turn_s`: when the prompt would be computed."""
        computed_s = self._computed_s(num_blocks, first)
        wait = self._waits[key] = _Wait(turn_s + (computed_s if computed_s < math.inf else UNKNOWN_S))
        return wait

    def _saved_s(self, source: BlockSource, attempt: Attempt, num_blocks: int, first: int, ahead_s: float) -> float:
        if num_blocks <= 0:
            return 0.0
        return saved_s(source.predict_s(attempt, num_blocks), self._computed_s(num_blocks, first), ahead_s)

    def _computed_s(self, num_blocks: int, first: int) -> float:
        size = self._kv.block_size
        return self._prefill_s(num_blocks * size, first * size) or math.inf


def _give_up_s(wait: _Wait) -> float:
    return min(wait.give_up_at_s, wait.look_until_s)

"""Random operations on sequences, compared with a model of the allocator."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.hashing import block_hashes
from pdserve.core.kv.host_tier import HostTier, LoadRule
from pdserve.core.kv.stamps import content_hash64
from pdserve.core.kv.tier_reads import Tier
from tests.support.examples import examples

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class Copies:
    """Host memory whose contents are hashes, as those of the pool are here."""

    room = 4  # of copies that are queued

    def __init__(self, sequences: Sequences, num_slots: int) -> None:
        self._sequences, self.num_slots, self._slots = sequences, num_slots, dict[int, bytes]()

    def save(self, block: int, slot: int) -> None:
        self._slots[slot] = self._sequences.contents[block]

    def load(self, slot: int, block: int) -> None:
        self._sequences.contents[block] = self._slots[slot]

    def flush(self) -> None:
        """Copies are made at once."""


class Lower:
    """A tier below memory, which stores what it has taken when it is told to."""

    room = 4

    def __init__(self) -> None:
        self.taken = dict[bytes, None]()  # a dict, because it keeps the order

    def take_block(self, block_hash: bytes, block: int) -> None:
        self.taken[block_hash] = None

    def take_copy(self, block_hash: bytes, slot: int) -> None:
        self.taken[block_hash] = None

    def start_copies(self) -> None:
        pass

    def drop(self, block_hash: bytes) -> None:
        self.taken.pop(block_hash, None)


class Sequences(RuleBasedStateMachine):
    """Sequences of one-token blocks over a two-letter alphabet: prefixes collide all the time."""

    held = Bundle("held")

    @initialize(
        num_blocks=st.integers(1, 20),
        num_slots=st.integers(0, 20),
        most_saved=st.integers(1, 8),
        is_queued=st.booleans(),
    )
    def start(self, num_blocks: int, num_slots: int, most_saved: int, is_queued: bool) -> None:
        self.lower = Lower()
        tier, copies = None, Copies(self, num_slots)
        if num_slots:
            load_rule, queued = LoadRule(0.0, lambda uncached, cached: 0.0), copies if is_queued else None
            tier = HostTier(copies, load_rule, most_saved, self.lower, queued=queued)
        self.allocator = BlockAllocator(num_blocks, tier=tier, lower=self.lower)
        self.holders: dict[int, list[int]] = {}
        self.contents: dict[int, bytes] = {}  # Block -> hash of its contents.
        self.index: dict[bytes, Tier] = {}  # What a reader of the changes knows.
        self.next_id = 0

    @rule(target=held, tokens=TOKENS)
    def begin(self, tokens: list[int]) -> int:
        hashes = block_hashes(tokens, 1, b"key")
        matched = self.allocator.match(hashes)
        assert [self.contents[block] for block in matched] == hashes[: len(matched)]
        expected, available = len(hashes) - len(matched), self.allocator.num_available
        fresh = self.allocator.allocate(expected)
        assert (fresh is None) == (expected > available)
        self.next_id += 1
        if fresh is None:
            self.allocator.release(matched)
            self.holders[self.next_id] = []
            return self.next_id
        in_use = {block for blocks in self.holders.values() for block in blocks} | set(matched)
        assert not in_use & set(fresh)
        rest = hashes[len(matched) :]
        found = 0
        if (tier := self.allocator.tier) is not None:
            found = tier.num_found(rest)
            for block in fresh:
                self.contents.pop(block, None)
            self.allocator.load(rest[:found], fresh)
            assert [self.contents[block] for block in fresh[:found]] == rest[:found]
        for block, one in zip(fresh[found:], rest[found:], strict=True):
            self.contents[block] = one
            self.allocator.stamps.mark(block, content_hash64(one))
            self.allocator.publish(block, one)
        self.holders[self.next_id] = matched + fresh
        return self.next_id

    @rule(which=consumes(held))
    def end(self, which: int) -> None:
        self.allocator.release(self.holders.pop(which))

    @rule(tokens=TOKENS)
    def end_session(self, tokens: list[int]) -> None:
        num_evictable = self.allocator.num_evictable
        self.allocator.end(block_hashes(tokens, 1, b"key"))
        assert self.allocator.num_evictable == num_evictable

    @rule()
    def save_ahead(self) -> None:
        num_evictable = self.allocator.num_evictable
        self.allocator.save_ahead()
        assert self.allocator.num_evictable == num_evictable

    @rule(which=held)
    def damage(self, which: int) -> None:
        """A block turns out to have wrong contents, so no later text may have them."""
        for block in self.holders.get(which, [])[-1:]:
            self.allocator.invalidate(block)
            again = self.allocator.match([self.contents[block]])  # another block may have the same tokens
            assert block not in again
            self.allocator.release(again)

    @rule(num_added=st.integers(0, 3), num_removed=st.integers(0, 3))
    def store(self, num_added: int, num_removed: int) -> None:
        """The lower tier reports what it has stored, and what has left it or was never there."""
        self.allocator.lower_changed(list(self.lower.taken)[:num_added], list(self.lower.taken)[-num_removed:])

    @rule()
    def tell(self) -> None:
        change = self.allocator.take_changes()
        if change is not None:
            assert not set(change.stored) & set(change.removed)
            told = dict(change.tiered())
            assert all(self.index.get(block_hash) is not tier for block_hash, tier in told.items())
            self.index.update(told)
            for block_hash in change.removed:
                del self.index[block_hash]
        assert self.index == dict(self.allocator.snapshot().tiered())

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check(holders=self.holders.values())


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)

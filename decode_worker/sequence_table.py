"""The sequences on a decode worker, by stage, with their blocks. Every change keeps the tables consistent. Pure.

The debug mode kv_check compares blocks with the texts of their sequences.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import final

from decode_worker.decode_sequence import DecodeMove, DecodeSequence, DecodeStage
from decode_worker.step import DeferredFree
from pdserve.core.attempt import AttemptKey, shareable_blocks
from pdserve.core.effects import BlocksDone, SendAborted
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.fetch import FetchEffect, Fetches
from pdserve.core.kv.stamps import BlockStamps, content_hash64

# --- debug mode kv_check --------------------------------------------------------------------------------------
# Checks that each block of a row has the content hash of the row's text. Another hash means that the block was
# reassigned, or filled for another text. Blocks are checked after each step, before its tokens are used, so no token
# that was sampled from a wrong block is sent.


@dataclass(frozen=True, slots=True)
class WrongBlock:
    index: int  # position among the sequence's blocks
    error: str


@final
class KvCheck:
    def __init__(self, stamps: BlockStamps) -> None:
        self._stamps = stamps

    def record_epochs(self, sequence: DecodeSequence) -> None:
        """Must be called after blocks were allocated to the sequence."""
        sequence.epochs = self._stamps.epochs(sequence.blocks)

    def find(self, sequence: DecodeSequence, block_size: int) -> WrongBlock | None:
        """The first block that was reassigned, or whose content hash does not match the sequence's tokens."""
        blocks, held = sequence.blocks, sequence.epochs
        sequence.epochs = epochs = self._stamps.epochs(blocks)
        if epochs[: len(held)] != held:
            index = next(index for index, epoch in enumerate(held) if epoch != epochs[index])
            return WrongBlock(index, f"block {blocks[index]} was reassigned while a sequence used it")
        full = sequence.computed // block_size
        expected = tuple(map(content_hash64, sequence.hashes[:full]))
        attempt = sequence.attempt
        if sequence.has_received and sequence.computed == attempt.num_tokens and sequence.preemptions == 0:
            # Includes the partly filled last block.
            expected = attempt.content_hashes(sequence.hashes, attempt.token_ids, block_size)
        content_hashes = self._stamps.content_hashes(blocks[: len(expected)])
        if content_hashes == expected:
            return None
        index = next(index for index, content_hash in enumerate(content_hashes) if content_hash != expected[index])
        return WrongBlock(
            index, f"block {blocks[index]} is stamped {content_hashes[index]:016x}, expected {expected[index]:016x}"
        )


# --- sequence table -------------------------------------------------------------------------------------------


@final
class SequenceTable:
    """`by_key` has all sequences in order of arrival. `running` and `waiting` are disjoint and ordered by age."""

    def __init__(self, kv: KvCache, check: KvCheck | None, fetches: Fetches | None = None) -> None:
        self.kv = kv
        self.fetches = fetches
        self.block_size = kv.block_size
        self.by_key: dict[AttemptKey, DecodeSequence] = {}
        self.running: list[DecodeSequence] = []
        self.waiting: list[DecodeSequence] = []  # a preempted sequence is the oldest here, so it restarts first
        self._effects: list[FetchEffect] = []
        self.deferred_free = DeferredFree(kv)
        self._check = check
        self.num_arrived = 0
        self.num_preemptions = 0
        self.num_with_tpot = 0  # running sequences with a TPOT target
        self.num_changes = 0  # changes whenever the set of sequences in the steps may change

    # -- membership ---------------------------------------------------------------------------------------------

    def add(self, sequence: DecodeSequence) -> None:
        """Adds a new sequence, whose stage is WAITING, or RECEIVING if its blocks are allocated."""
        self.num_arrived += 1
        self.by_key[sequence.key] = sequence
        if sequence.stage is DecodeStage.WAITING:
            self.waiting.append(sequence)
            self.num_changes += 1

    def start(self, sequence: DecodeSequence, now_s: float) -> None:
        """Starts a waiting sequence. Its blocks are allocated."""
        self.waiting.remove(sequence)
        self._no_fetch(sequence)
        sequence.computed = sequence.cached
        if sequence.started_s is None:
            sequence.started_s = now_s
        self._run(sequence, DecodeMove.STARTED)

    def join(self, sequence: DecodeSequence) -> None:
        """The KV of the sequence has arrived, so it decodes from the next step on."""
        self._run(sequence, DecodeMove.JOINED)

    def _run(self, sequence: DecodeSequence, move: DecodeMove) -> None:
        sequence.move(move)
        insort(self.running, sequence, key=_age)
        self._count(sequence, 1)
        self.num_changes += 1

    def _count(self, sequence: DecodeSequence, sign: int) -> None:
        self.num_with_tpot += sign * (sequence.attempt.tpot_s is not None)

    def preempt(self, sequence: DecodeSequence, now_s: float) -> None:
        """Frees the blocks of the sequence, which waits to be recomputed."""
        if sequence.preempted_at_s is None and sequence.decoding_since_s is not None:
            sequence.preempted_at_s = now_s
        self.deferred_free.give_back(sequence)
        sequence.epochs = ()
        sequence.computed = sequence.cached = sequence.plain_until = 0
        sequence.preemptions += 1
        sequence.unreported_preemptions += 1
        sequence.move(DecodeMove.PREEMPTED)
        self.running.remove(sequence)
        self._count(sequence, -1)
        insort(self.waiting, sequence, key=_age)
        self.num_preemptions += 1
        self.num_changes += 1

    def remove(self, sequence: DecodeSequence) -> None:
        self.deferred_free.release(sequence)
        del self.by_key[sequence.key]
        self._leave(sequence, DecodeMove.RELEASED)

    def _leave(self, sequence: DecodeSequence, move: DecodeMove) -> None:
        """The sequence is in no further step."""
        sequence.plain_until = 0
        sequence.move(move)
        if sequence in self.running:
            self.running.remove(sequence)
            self._count(sequence, -1)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._no_fetch(sequence)
        self.num_changes += 1  # another sequence may take its row or its blocks

    # -- sequences whose KV is sent: their blocks are allocated for all tokens, and they are never preempted -------

    def start_send(self, sequence: DecodeSequence, now_s: float) -> BlocksDone | None:
        """Starts a new sequence with its blocks. Returns the blocks that can be sent at once; None, without a change,
        if the cache lacks one. Takes no more memory than the answer had here, so no block is spared for others."""
        if not self.take_blocks(sequence, spare=0):
            return None
        full = shareable_blocks(len(sequence.tokens), self.block_size)
        if sequence.cached < full * self.block_size:
            self.kv.release(sequence.blocks)
            sequence.blocks, sequence.cached, sequence.epochs = [], 0, ()
            return None
        self.add(sequence)
        self.start(sequence, now_s)
        return self._blocks_done(sequence, self._first_sent(sequence), full, is_last=False)

    def send_rest(self, sequence: DecodeSequence) -> BlocksDone:
        """All tokens of the sequence are computed. Returns its last blocks, which may not be full."""
        size = self.block_size
        if sequence.computed % size:
            names = sequence.attempt.content_hashes(sequence.hashes, sequence.tokens, size)
            self.kv.mark(sequence.blocks[-1:], names[-1:])
        first = max(self._first_sent(sequence), sequence.cached // size)
        self._leave(sequence, DecodeMove.SAMPLED)
        return self._blocks_done(sequence, first, len(sequence.blocks), is_last=True)

    def abandon_send(self, sequence: DecodeSequence) -> list[SendAborted]:
        """The blocks stay in use until the sender reports the end of the transfer."""
        self._leave(sequence, DecodeMove.ABANDONED)
        return [SendAborted(key=sequence.key)]

    @staticmethod
    def _first_sent(sequence: DecodeSequence) -> int:
        assert sequence.sends_after is not None, "its KV is not sent"
        return sequence.sends_after

    def _blocks_done(self, sequence: DecodeSequence, first: int, end: int, *, is_last: bool) -> BlocksDone:
        skipped = self._first_sent(sequence)
        blocks = tuple((index - skipped, sequence.blocks[index]) for index in range(first, end))
        return BlocksDone(key=sequence.key, blocks=blocks, is_last=is_last)

    # -- blocks of slower tiers ---------------------------------------------------------------------------------

    def startable(self) -> list[DecodeSequence]:
        """The waiting sequences that do not wait for blocks of a slower tier."""
        fetches = self.fetches
        if fetches is None or not self.waiting:
            return self.waiting
        return [each for each in self.waiting if not fetches.is_waiting(each.key)]

    def fetch(self, now_s: float, *, is_starved: bool) -> None:
        """Starts fetches for waiting sequences; with `is_starved` none, because an older sequence lacks memory."""
        fetches = self.fetches
        if fetches is None or is_starved:
            return
        spare = len(self.running)  # one block more for each
        self._effects += fetches.consider_all(
            self.waiting, now_s, running_s=lambda: self._running_s(fetches), spare=spare, growth=1
        )

    def _running_s(self, fetches: Fetches) -> float:
        """Seconds to compute what is left of the prompts that have started."""
        return sum(fetches.left_s(len(each.tokens), each.computed) for each in self.running if each.remaining > 1)

    def _no_fetch(self, sequence: DecodeSequence) -> None:
        if self.fetches is not None:
            self._effects += self.fetches.leave(sequence.key)

    def take_effects(self) -> list[FetchEffect]:
        """What must be carried out for fetches."""
        effects, self._effects = self._effects, []
        return effects

    def computed_when_started(self, sequence: DecodeSequence) -> int:
        """How many positions of the text need not be computed, if it starts now. An estimate for a waiting one."""
        if sequence.stage is not DecodeStage.WAITING:
            return sequence.computed
        return self.kv.tokens_found(sequence)

    # -- memory -------------------------------------------------------------------------------------------------

    def take_blocks(self, sequence: DecodeSequence, spare: int | None = None) -> bool:
        """Allocates blocks for all of the sequence's tokens, using the prefix cache first, if `spare` more are left."""
        hashes = sequence.reusable(self.block_size)
        if spare is None:  # one for each running sequence; otherwise the new one would only cause preemptions
            spare = len(self.running)
        allocation = self.kv.allocate(len(sequence.tokens), hashes, spare=spare)
        if allocation is None:
            return False
        sequence.blocks, sequence.cached = allocation.blocks, allocation.cached_tokens
        if self._check is not None:
            self._check.record_epochs(sequence)
        return True

    def grow(self, sequence: DecodeSequence) -> bool:
        """Allocates one more block. Returns False if none is free."""
        fresh = self.kv.extend(1)
        if fresh is not None:
            sequence.blocks += fresh
        return fresh is not None

    def room_for(self, sequence: DecodeSequence, count: int) -> int:
        """Allocates blocks for drafts, and returns for how many of `count` there is room. Takes no block that a
        sequence needs in the next step."""
        while sequence.computed + 1 + count > len(sequence.blocks) * self.block_size:
            if self.kv.blocks.num_available <= len(self.running) or not self.grow(sequence):
                return len(sequence.blocks) * self.block_size - sequence.computed - 1
        return count

    def receive(self, sequence: DecodeSequence) -> None:
        """The granted blocks have the verified KV of all of the sequence's tokens."""
        sequence.has_received = True
        sequence.computed = len(sequence.tokens)
        granted = sequence.blocks[sequence.cached // self.block_size :]
        self.kv.mark(granted, self.content_hashes(sequence))
        self._publish(sequence, 0)

    def content_hashes(self, sequence: DecodeSequence) -> tuple[int, ...]:
        """The content hashes that the granted blocks of a sequence in stage RECEIVING will have."""
        names = sequence.attempt.content_hashes(sequence.hashes, sequence.tokens, self.block_size)
        return names[sequence.cached // self.block_size :]

    def advance(self, sequence: DecodeSequence, count: int) -> None:
        """`count` further positions of the text are computed."""
        full = sequence.computed // self.block_size
        sequence.computed += count
        if sequence.computed // self.block_size > full:
            self._publish(sequence, full)

    def _publish(self, sequence: DecodeSequence, first: int) -> None:
        """Adds the computed full blocks from number `first` on to the prefix cache."""
        full = sequence.computed // self.block_size
        if full > len(sequence.hashes):
            sequence.hashes = sequence.attempt.extend_hashes(sequence.hashes, sequence.tokens, self.block_size)
        self.kv.commit(sequence.blocks, sequence.hashes, first, full)

    def check(self) -> None:
        """Raises AssertionError unless the tables of attempts and blocks agree."""
        fetches = self.fetches
        held = [*self.deferred_free.held, *(() if fetches is None else fetches.held()), *self.kv.lent.values()]
        self.kv.blocks.check(holders=[*(each.blocks for each in self.by_key.values()), *held])
        if fetches is not None:
            fetches.check()
            assert {each.key for each in self.waiting} >= {key for key in self.by_key if fetches.is_waiting(key)}
        for sequence in self.by_key.values():
            stage, size = sequence.stage, self.block_size
            assert (sequence in self.running) == (stage is DecodeStage.RUNNING), sequence
            assert (sequence in self.waiting) == (stage is DecodeStage.WAITING), sequence
            assert not sequence.blocks or stage is not DecodeStage.WAITING, sequence
            assert len(sequence.blocks) * size >= sequence.computed, sequence
            assert stage is not DecodeStage.SENDING or sequence.is_sending, sequence
            assert not sequence.is_sending or stage is not DecodeStage.WAITING, sequence
            assert sequence.computed <= len(sequence.tokens), sequence
        assert self.num_with_tpot == sum(each.attempt.tpot_s is not None for each in self.running)
        for group in (self.running, self.waiting):
            assert [each.order for each in group] == sorted(each.order for each in group)
            assert all(self.by_key.get(each.key) is each for each in group)


def _age(sequence: DecodeSequence) -> int:
    return sequence.order

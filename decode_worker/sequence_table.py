"""The sequences on a decode worker, their groups and their blocks, which every change keeps consistent. Pure."""

from __future__ import annotations

from bisect import insort
from typing import final

from decode_worker.ahead import DeferredFree
from decode_worker.checking import KvCheck
from decode_worker.decode_sequence import DecodeSequence, Stage
from pdserve.core.attempt import AttemptKey, blocks_for, shareable_blocks
from pdserve.core.blocks import BlockAllocator
from pdserve.core.stamps import content_hash64


@final
class SequenceTable:
    """`residents` are all, in the order of arrival; `running` and `waiting` are ordered by age and disjoint."""

    def __init__(self, blocks: BlockAllocator, *, block_size: int, check: KvCheck | None) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.residents: dict[AttemptKey, DecodeSequence] = {}
        self.running: list[DecodeSequence] = []
        self.waiting: list[DecodeSequence] = []  # a preempted one is the oldest here, so it starts again first
        self.lending = DeferredFree(blocks)
        self._check = check
        self.num_arrived = 0
        self.num_preemptions = 0
        self.num_with_tpot = 0  # running ones with a TPOT target
        self.num_changes = 0  # while it does not change, neither do the members of the steps

    # -- membership ---------------------------------------------------------------------------------------------

    def add(self, resident: DecodeSequence) -> None:
        """Adds a new one; its stage is WAITING, or LANDING if it has its blocks already."""
        self.num_arrived += 1
        self.residents[resident.key] = resident
        if resident.stage is Stage.WAITING:
            self.waiting.append(resident)
            self.num_changes += 1

    def start(self, resident: DecodeSequence, now_s: float) -> None:
        """Starts the oldest waiting one, which has its blocks."""
        assert self.waiting[0] is resident, resident
        del self.waiting[0]
        resident.computed = resident.cached
        if resident.started_s is None:
            resident.started_s = now_s
        self._run(resident)

    def join(self, resident: DecodeSequence) -> None:
        """One whose KV has arrived decodes from the next step on."""
        self._run(resident)

    def _run(self, resident: DecodeSequence) -> None:
        resident.stage = Stage.RUNNING
        insort(self.running, resident, key=_age)
        self._count(resident, 1)
        self.num_changes += 1

    def _count(self, resident: DecodeSequence, sign: int) -> None:
        self.num_with_tpot += sign * (resident.attempt.tpot_s is not None)

    def preempt(self, resident: DecodeSequence, now_s: float) -> None:
        """Frees its memory; it waits to be computed again."""
        if resident.preempted_at_s is None and resident.decoding_since_s is not None:
            resident.preempted_at_s = now_s
        self.lending.release(resident)
        resident.epochs = ()
        resident.computed = resident.cached = resident.plain_until = 0
        resident.preemptions += 1
        resident.stage = Stage.WAITING
        self.running.remove(resident)
        self._count(resident, -1)
        insort(self.waiting, resident, key=_age)
        self.num_preemptions += 1
        self.num_changes += 1

    def remove(self, resident: DecodeSequence) -> None:
        self.lending.release(resident)
        resident.plain_until = 0
        del self.residents[resident.key]
        if resident in self.running:
            self.running.remove(resident)
            self._count(resident, -1)
        elif resident in self.waiting:
            self.waiting.remove(resident)
        self.num_changes += 1  # another sequence may take its blocks

    # -- memory -------------------------------------------------------------------------------------------------

    def take_blocks(self, resident: DecodeSequence) -> bool:
        """Allocates blocks for all of the resident's tokens, using the prefix cache first."""
        size, num_tokens = self.block_size, len(resident.tokens)
        shared = [] if resident.is_scored else resident.hashes[: shareable_blocks(num_tokens, size)]
        matched = self.blocks.match(shared)
        missing = blocks_for(num_tokens, size) - len(matched)
        # Leaves one block for each running sequence to grow; otherwise the new one only causes preemptions.
        fresh = self.blocks.allocate(missing) if missing + len(self.running) <= self.blocks.num_available else None
        if fresh is None:
            self.blocks.release(matched)
            return False
        resident.blocks = matched + fresh
        resident.cached = len(matched) * size
        if self._check is not None:
            self._check.hold(resident)
        return True

    def grow(self, resident: DecodeSequence) -> bool:
        """Allocates one more block; False if there is none."""
        fresh = self.blocks.allocate(1)
        if fresh is not None:
            resident.blocks += fresh
        return fresh is not None

    def room_for(self, resident: DecodeSequence, count: int) -> int:
        """How many of `count` drafts have blocks, allocated only from those that no sequence needs in the next step."""
        while resident.computed + 1 + count > len(resident.blocks) * self.block_size:
            if self.blocks.num_available <= len(self.running) or not self.grow(resident):
                return len(resident.blocks) * self.block_size - resident.computed - 1
        return count

    def land(self, resident: DecodeSequence) -> None:
        """The granted blocks have verified KV of all of the resident's tokens."""
        resident.has_landed = True
        resident.computed = len(resident.tokens)
        granted = resident.blocks[resident.cached // self.block_size :]
        for block, content_hash in zip(granted, self.content_hashes(resident), strict=True):
            self.blocks.stamps.mark(block, content_hash)
        self._publish(resident, 0)

    def content_hashes(self, resident: DecodeSequence) -> tuple[int, ...]:
        """The content hashes of the blocks that were granted to one in stage LANDING."""
        names = resident.attempt.content_hashes(resident.hashes, resident.tokens, self.block_size)
        return names[resident.cached // self.block_size :]

    def advance(self, resident: DecodeSequence, count: int) -> None:
        """`count` more positions of its text are computed."""
        full = resident.computed // self.block_size
        resident.computed += count
        if resident.computed // self.block_size > full:
            self._publish(resident, full)

    def _publish(self, resident: DecodeSequence, first: int) -> None:
        """Adds the computed full blocks from number `first` on to the prefix cache."""
        full = resident.computed // self.block_size
        if full > len(resident.hashes):
            resident.hashes = resident.attempt.extend_hashes(resident.hashes, resident.tokens, self.block_size)
        for index in range(first, full):
            self.blocks.stamps.mark(resident.blocks[index], content_hash64(resident.hashes[index]))
            self.blocks.publish(resident.blocks[index], resident.hashes[index])

    def check(self) -> None:
        """Raises AssertionError unless the tables of attempts and blocks agree."""
        self.blocks.check(holders=[*(each.blocks for each in self.residents.values()), *self.lending.lent])
        for resident in self.residents.values():
            stage, size = resident.stage, self.block_size
            assert (resident in self.running) == (stage is Stage.RUNNING), resident
            assert (resident in self.waiting) == (stage is Stage.WAITING), resident
            assert not resident.blocks or stage is not Stage.WAITING, resident
            assert len(resident.blocks) * size >= resident.computed, resident
            assert resident.computed <= len(resident.tokens), resident
        assert self.num_with_tpot == sum(each.attempt.tpot_s is not None for each in self.running)
        for group in (self.running, self.waiting):
            assert [each.order for each in group] == sorted(each.order for each in group)
            assert all(self.residents.get(each.key) is each for each in group)


def _age(resident: DecodeSequence) -> int:
    return resident.order

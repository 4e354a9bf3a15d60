"""Which sequences share a decode step, who waits, who is preempted, who may land. Pure: `now_s` comes in.

    remote:  LANDING -> RUNNING -> (gone)            LANDING until KV is verified and the first token is known
    local:   WAITING -> RUNNING -> (gone)
    memory ends: RUNNING -> WAITING                  the youngest; its tokens are recomputed later, none changes
    given up while somebody may write: -> ENDING     blocks are held until the receiver says that nobody does

A running sequence is one that has tokens to compute: one while it decodes, more while it reads its prompt. Decode
rows go first; what they leave of the budget is for prompt chunks. A step that reads no prompt may carry drafts
beside its decode rows; they take memory that nobody else is about to need, and never anybody's place.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

from decode_worker.ahead import Lending, step_after
from decode_worker.checking import KvCheck, Mistake
from decode_worker.chunking import ChunkRule
from decode_worker.drafting import DraftRule
from decode_worker.resident import Resident, Stage
from decode_worker.speculation import Guesser
from decode_worker.step import Step
from pdserve.core.attempt import (
    Attempt,
    AttemptKey,
    EndRule,
    FailureKind,
    RefusalReason,
    blocks_for,
    shareable_blocks,
)
from pdserve.core.blocks import BlockAllocator
from pdserve.core.effects import (
    DecodeEffect,
    Drawn,
    Failed,
    KvCommitted,
    KvMistaken,
    LandingHeld,
    Load,
    PromptScored,
    ReceiveAborted,
    Refused,
    Released,
    SeatHeld,
    StepAccount,
    TransferLost,
)
from pdserve.core.stamps import chain64
from pdserve.core.types import TokenOut
from pdserve.engine.interface import RowOut


@final
class DecodeBatching:
    def __init__(
        self,
        *,
        blocks: BlockAllocator,
        block_size: int,
        max_batch: int,
        chunks: ChunkRule,
        inbox_depth: int,
        end_rule: EndRule,
        drafting: DraftRule | None = None,
        check: KvCheck | None = None,
    ) -> None:
        self.blocks = blocks
        self._block_size = block_size
        self._max_batch = max_batch
        self._chunks = chunks
        self._inbox_depth = inbox_depth
        self._end_rule = end_rule
        self._drafting = drafting
        self._check = check
        self._residents: dict[AttemptKey, Resident] = {}
        self._running: list[Resident] = []  # by age
        self._waiting: list[Resident] = []  # by age, so that a preempted one is the first to start again
        self._lending = Lending(blocks)
        self._num_arrived = 0
        self._is_short = False  # memory ended in the last plan, so that nobody could start
        self._is_starved = False  # the oldest waiting one finds no memory
        self.num_preemptions = 0
        self.num_changes = 0  # while it stands still, so does the membership of the steps
        self.is_draining = False

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._residents

    def live(self) -> list[AttemptKey]:
        return list(self._residents)

    def stage(self, key: AttemptKey) -> Stage | None:
        resident = self._residents.get(key)
        return None if resident is None else resident.stage

    def has_landed(self, key: AttemptKey) -> bool:
        resident = self._residents.get(key)
        return resident is not None and resident.has_landed

    def num_held(self, key: AttemptKey) -> int:
        """Blocks that the attempt holds, shared ones included."""
        resident = self._residents.get(key)
        return 0 if resident is None else len(resident.blocks)

    def chains(self, key: AttemptKey) -> tuple[int, ...]:
        """What stamps will call the blocks that are granted for the attempt, once its KV has landed."""
        resident = self._residents[key]
        names = resident.attempt.chains(resident.hashes, resident.tokens, self._block_size)
        return names[resident.cached // self._block_size :]

    @property
    def has_work(self) -> bool:
        """Whether the next plan may have rows."""
        return bool(self._running or self._waiting)

    def load(self) -> Load:
        reading = [each.remaining for each in self._waiting]
        reading += [each.remaining for each in self._running if each.remaining > 1]
        return Load(
            free_blocks=self.blocks.num_free,
            evictable_blocks=self.blocks.num_evictable,
            running=len(self._running),
            waiting=len(self._residents) - len(self._running),
            context_tokens=sum(each.computed for each in self._running),
            pending_prefill_tokens=sum(reading),
        )

    # -- taking and ending attempts -----------------------------------------------------------------------------

    def offer(self, attempt: Attempt, *, is_local: bool, now_s: float) -> list[DecodeEffect]:
        """Holds a landing place or a seat for a new attempt, or says why not."""
        reason = self._refusal(attempt, is_local, now_s)
        if reason is not None:
            return [Refused(key=attempt.key, reason=reason)]
        tokens = list(attempt.token_ids)
        resident = Resident(
            attempt=attempt,
            key=attempt.key,
            ends_at=min(len(attempt.prompt_ids) + attempt.sampling.max_tokens, self._end_rule.max_context_tokens),
            order=self._num_arrived,
            is_local=is_local,
            stage=Stage.WAITING if is_local else Stage.LANDING,
            tokens=tokens,
            hashes=attempt.extend_hashes([], tokens, self._block_size),
        )
        if is_local:
            effect: DecodeEffect = SeatHeld(key=attempt.key)
            self._waiting.append(resident)
            self.num_changes += 1
        elif self._is_starved or not self._take_blocks(resident):
            return [Refused(key=attempt.key, reason=RefusalReason.NO_BLOCKS)]
        else:
            held = resident.cached // self._block_size
            effect = LandingHeld(key=attempt.key, blocks=tuple(resident.blocks[held:]), held_blocks=held)
        self._num_arrived += 1
        self._residents[attempt.key] = resident
        return [effect]

    def admit(self, key: AttemptKey, first_token: int, now_s: float) -> list[DecodeEffect] | None:
        """The prefill worker's token. None: nothing here waits for it."""
        resident = self._residents.get(key)
        if resident is None or resident.stage is not Stage.LANDING or resident.first_token is not None:
            return None
        resident.first_token = first_token
        return self._join(resident, now_s)

    def landed(
        self, key: AttemptKey, *, transfer_s: float, busy_s: float, num_bytes: int, now_s: float
    ) -> list[DecodeEffect]:
        """All granted blocks hold verified KV, and nobody writes any more."""
        resident = self._residents.get(key)
        if resident is None or resident.has_landed:
            return []
        if resident.stage is Stage.ENDING:
            return self._release(resident)
        resident.has_landed = True
        resident.computed = len(resident.tokens)
        for block, chain in zip(resident.blocks[resident.cached // self._block_size :], self.chains(key), strict=True):
            self.blocks.stamps.mark(block, chain)
        self._publish(resident, 0)
        committed = KvCommitted(
            key=key,
            transfer_s=transfer_s,
            busy_s=busy_s,
            num_bytes=num_bytes,
            held_blocks=resident.cached // self._block_size,
        )
        return [committed, *self._join(resident, now_s)]

    def lost(self, key: AttemptKey, error: str) -> list[DecodeEffect]:
        """The KV is not to be had, and nobody writes any more: after a failure, or drained after an abort."""
        resident = self._residents.get(key)
        if resident is None or resident.has_landed or resident.is_local:
            return []
        if resident.stage is Stage.ENDING:
            return self._release(resident)
        return [TransferLost(key=key, error=error), *self._release(resident)]

    def fail(self, key: AttemptKey, kind: FailureKind, message: str) -> list[DecodeEffect]:
        resident = self._residents.get(key)
        if resident is None or resident.stage is Stage.ENDING:
            return []
        return [Failed(key=key, kind=kind, message=message), *self.cancel(key)]

    def cancel(self, key: AttemptKey) -> list[DecodeEffect]:
        """Gives an attempt up at whatever stage. Idempotent; an unknown one is released already."""
        resident = self._residents.get(key)
        if resident is None:
            return [Released(key=key)]
        if resident.stage is Stage.ENDING:
            return []
        if resident.stage is Stage.LANDING and not resident.has_landed:
            resident.stage = Stage.ENDING
            return [ReceiveAborted(key=key)]
        return self._release(resident)

    def expire(self, now_s: float) -> list[DecodeEffect]:
        late = [
            key
            for key, resident in self._residents.items()
            if resident.attempt.deadline_at_s is not None and resident.attempt.is_late(now_s)
        ]
        return [effect for key in late for effect in self.fail(key, FailureKind.DEADLINE, "the deadline passed")]

    # -- steps --------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> tuple[Step, list[DecodeEffect]]:
        """The next step; the effects come before it. No rows: nothing can be computed now."""
        effects = self.expire(now_s)
        decoding, self._is_short = self._grow()
        context_tokens = sum(resident.computed for resident in decoding)
        tpot_s = min((each.attempt.tpot_s for each in decoding if each.attempt.tpot_s is not None), default=None)
        everyone_decodes = len(decoding) == len(self._running)
        unread = [] if everyone_decodes else [each for each in self._running[: self._max_batch] if each.remaining > 1]
        budget = self._chunks.tokens(
            rows=len(decoding),
            context_tokens=context_tokens,
            tpot_s=tpot_s,
            cached=unread[0].computed if unread else 0,
            held_share=context_tokens / (self.blocks.num_blocks * self._block_size),
        )
        reading: list[tuple[Resident, int]] = []
        for resident in self._readers(unread, now_s, may_start=not self._is_short):
            count = min(resident.remaining, budget)
            reading.append((resident, count))
            budget -= count
            if budget == 0:
                break
        drafts = None if reading else self._draft(decoding, context_tokens, tpot_s)
        account = StepAccount(
            decode_rows=len(decoding),
            context_tokens=context_tokens,
            prefill_tokens=sum(count for _, count in reading),
            prefill_token_context=sum(count * (resident.computed + count / 2) for resident, count in reading),
            draft_tokens=0 if drafts is None else sum(map(len, drafts)),
        )
        step = Step(decoding=decoding, drafts=drafts, reading=reading, account=account, block_size=self._block_size)
        return step, effects

    def apply(self, step: Step, outs: Sequence[RowOut], now_s: float) -> list[DecodeEffect]:
        """What the computed step means; sequences that left meanwhile are passed over."""
        self._lending.ended(step)
        effects: list[DecodeEffect] = []
        for (resident, count), out in zip(step.shares(), outs, strict=True):
            key = resident.key
            if self._residents.get(key) is not resident or resident.stage is not Stage.RUNNING:
                continue
            if self._check is not None and (wrong := self._check.find(resident, self._block_size)) is not None:
                effects.append(self._distrust(resident, wrong))
                continue
            start = resident.computed
            self._advance(resident, count)
            if out.scored:
                effects.append(PromptScored(key=key, first_position=start + 1, tokens=out.scored))
            for index, token in enumerate(out.drawn):
                if index > 0:  # the token before was a draft that proved right: its KV is there
                    self._advance(resident, 1)
                effects += self._draw(resident, token, now_s)
                if key not in self._residents:
                    break
        return effects

    # -- one step ahead: for engines that can take it ---------------------------------------------------------------

    def plan_after(self, step: Step) -> Step | None:
        """The step that follows the running `step`, before its draws are known; None where it must wait for them."""
        if self._drafting is not None or self._is_short or self._waiting:
            return None
        return step_after(step, self._running, self.blocks, block_size=self._block_size, max_batch=self._max_batch)

    def launched(self, step: Step) -> None:
        """The step runs: until `apply` or `dropped` is called for it, it may write into the blocks of its rows."""
        self._lending.launched(step)

    def dropped(self, step: Step) -> None:
        """A launched step has ended and its draws are not wanted; its positions will be computed again."""
        self._lending.ended(step)

    # -- many steps at once: for who has the time of a step in closed form, and no engine --------------------------

    def run_length(self, step: Step) -> int:
        """How many steps of exactly these rows may follow each other, this one included; 0: it is more than rows.

        Until the first of them ends or has filled a block, so that what a run changes for others, it changes in its
        last step. Nobody may join or leave meanwhile (`num_changes`), and no drawn token may end a text by itself.
        """
        decoding, size = step.decoding, self._block_size
        if step.reading or step.drafts is not None or self._is_short:
            return 0
        if len(decoding) != min(len(self._running), self._max_batch):
            return 0
        longest = size
        for each in decoding:
            if each.num_drawn == 0 and each.is_local:
                return 0  # its first token has things to tell
            left = min(size - each.computed % size, each.ends_at - len(each.tokens))
            if left < longest:
                longest = left
        return longest if decoding else 0

    def apply_run(self, step: Step, count: int, token: TokenOut, now_s: float) -> list[DecodeEffect]:
        """Of the decode rows what `count` times `plan` and `apply` would do, where each draws `token` each time; of
        the effects only those that say more than one more token. `count` is 1 or at most `run_length`."""
        effects: list[DecodeEffect] = []
        size = self._block_size
        drawn = [token.token_id] * count
        for resident in step.decoding:
            tokens, computed = resident.tokens, resident.computed
            if len(tokens) + count < resident.ends_at and resident.num_drawn and computed % size + count < size:
                tokens += drawn  # nearly every row of a run
                resident.num_drawn += count
                resident.computed = computed + count
                continue
            tokens += drawn[1:]
            resident.num_drawn += count - 1
            self._advance(resident, count)
            effects += self._draw(resident, token, now_s)
        return effects

    def check(self) -> None:
        """Raises AssertionError unless the books of attempts and blocks agree."""
        self.blocks.check(holders=[*(resident.blocks for resident in self._residents.values()), *self._lending.lent])
        for resident in self._residents.values():
            stage, size = resident.stage, self._block_size
            assert (resident in self._running) == (stage is Stage.RUNNING), resident
            assert (resident in self._waiting) == (stage is Stage.WAITING), resident
            assert not resident.blocks or stage is not Stage.WAITING, resident
            assert len(resident.blocks) * size >= resident.computed, resident
            assert resident.computed <= len(resident.tokens), resident
        for group in (self._running, self._waiting):
            assert [each.order for each in group] == sorted(each.order for each in group)
            assert all(self._residents.get(each.key) is each for each in group)

    # -- memory -------------------------------------------------------------------------------------------------

    def _refusal(self, attempt: Attempt, is_local: bool, now_s: float) -> RefusalReason | None:
        is_drawn_here = is_local or attempt.num_tokens < self._end_rule.max_context_tokens
        if blocks_for(attempt.num_tokens, self._block_size) > self.blocks.num_blocks or not is_drawn_here:
            return RefusalReason.TOO_LARGE
        if self.is_draining:
            return RefusalReason.DRAINING
        if attempt.is_late(now_s):
            return RefusalReason.DEADLINE
        if len(self._residents) - len(self._running) >= self._inbox_depth:
            return RefusalReason.INBOX_FULL
        return None

    def _take_blocks(self, resident: Resident) -> bool:
        """Blocks for all of the resident's tokens, those found in the prefix cache first."""
        size, num_tokens = self._block_size, len(resident.tokens)
        shared = [] if resident.is_scored else resident.hashes[: shareable_blocks(num_tokens, size)]
        matched = self.blocks.match(shared)
        missing = blocks_for(num_tokens, size) - len(matched)
        # One block for each running sequence to grow into, else the newcomer only causes preemptions.
        fresh = self.blocks.allocate(missing) if missing + len(self._running) <= self.blocks.num_available else None
        if fresh is None:
            self.blocks.release(matched)
            return False
        resident.blocks = matched + fresh
        resident.cached = len(matched) * size
        if self._check is not None:
            self._check.hold(resident)
        return True

    def _grow(self) -> tuple[list[Resident], bool]:
        """The sequences that decode in this step, each with a block for its next position; whether memory ended."""
        decoding: list[Resident] = []
        is_short = False
        size = self._block_size
        for resident in self._running[: self._max_batch]:  # the oldest first: it is the last to lose its memory
            if len(resident.tokens) - resident.computed != 1 or resident.stage is not Stage.RUNNING:
                continue
            while resident.computed == len(resident.blocks) * size:
                fresh = self.blocks.allocate(1)
                if fresh is not None:
                    resident.blocks += fresh
                    break
                is_short = True
                if len(self._running) == 1:
                    break  # landing ones hold the rest; they join or leave soon, so it waits and keeps its KV
                youngest = self._running[-1]
                self._preempt(youngest)
                if youngest is resident:
                    break
            if resident.computed < len(resident.blocks) * size:
                decoding.append(resident)
        return decoding, is_short

    def _preempt(self, resident: Resident) -> None:
        self._lending.release(resident)
        resident.lives = ()
        resident.computed = resident.cached = 0
        resident.preemptions += 1
        resident.stage = Stage.WAITING
        self._running.remove(resident)
        insort(self._waiting, resident, key=_age)
        self.num_preemptions += 1
        self.num_changes += 1

    def _distrust(self, resident: Resident, wrong: Mistake) -> DecodeEffect:
        """What the step drew for it is worth nothing; its text is read anew, into other blocks."""
        self.blocks.distrust(resident.blocks[wrong.index])
        self._preempt(resident)
        return KvMistaken(key=resident.key, error=wrong.error)

    def _readers(self, unread: list[Resident], now_s: float, *, may_start: bool) -> Iterator[Resident]:
        """Who reads a prompt: running ones first, then waiting ones, started as the caller asks for more."""
        yield from unread
        self._is_starved = not may_start and bool(self._waiting)
        while may_start and self._waiting and len(self._running) < self._max_batch:
            oldest = self._waiting[0]
            if not self._take_blocks(oldest):
                self._is_starved = True
                return  # nobody overtakes for being smaller
            oldest.computed = oldest.cached
            oldest.stage = Stage.RUNNING
            if oldest.started_s is None:
                oldest.started_s = now_s
            del self._waiting[0]
            insort(self._running, oldest, key=_age)
            self.num_changes += 1
            yield oldest

    def _draft(self, decoding: list[Resident], context_tokens: int, tpot_s: float | None) -> list[list[int]] | None:
        """Guesses for each decode row, with blocks for them; None where they do not pay."""
        rule = self._drafting
        if rule is None or not decoding:
            return None
        least = rule.least_chance(len(decoding))
        guesses: list[list[int]] = []
        chances: list[list[float]] = []
        for resident in decoding:
            if resident.guesser is None:
                resident.guesser = Guesser()
            resident.guesser.read(resident.tokens)
            chances.append(resident.guesser.chances(rule.most, least))
            guesses.append(self._cut(resident, resident.guesser.guess(resident.tokens, len(chances[-1]))))
            del chances[-1][len(guesses[-1]) :]
        counts = rule.counts(chances, context_tokens=context_tokens, tpot_s=tpot_s)
        if counts is None:
            return None
        for resident, guess, count in zip(decoding, guesses, counts, strict=True):
            del guess[self._extend(resident, count) :]
        return guesses if any(guesses) else None

    def _cut(self, resident: Resident, guess: list[int]) -> list[int]:
        """Without what would be drawn behind the text's end."""
        sampling = resident.attempt.sampling
        room = min(
            sampling.max_tokens - resident.num_output - 1, self._end_rule.max_context_tokens - len(resident.tokens) - 1
        )
        for index, token in enumerate(guess[: max(0, room)]):
            if self._end_rule.is_end(sampling, token):
                return guess[:index]
        return guess[: max(0, room)]

    def _extend(self, resident: Resident, count: int) -> int:
        """How many of `count` drafts there are blocks for, taking those that nobody will need in the next step."""
        while resident.computed + 1 + count > len(resident.blocks) * self._block_size:
            if self.blocks.num_available <= len(self._running):
                return len(resident.blocks) * self._block_size - resident.computed - 1
            resident.blocks += self.blocks.allocate(1) or ()
        return count

    def _advance(self, resident: Resident, count: int) -> None:
        """`count` more positions of its text are computed."""
        full = resident.computed // self._block_size
        resident.computed += count
        if resident.computed // self._block_size > full:
            self._publish(resident, full)

    def _publish(self, resident: Resident, first: int) -> None:
        """Makes the computed full blocks from number `first` on findable."""
        full = resident.computed // self._block_size
        if full > len(resident.hashes):
            resident.hashes = resident.attempt.extend_hashes(resident.hashes, resident.tokens, self._block_size)
        for index in range(first, full):
            self.blocks.stamps.mark(resident.blocks[index], chain64(resident.hashes[index]))
            self.blocks.publish(resident.blocks[index], resident.hashes[index])

    # -- sequences ----------------------------------------------------------------------------------------------

    def _join(self, resident: Resident, now_s: float) -> list[DecodeEffect]:
        """Begins to decode once KV and the first token are both there."""
        if not resident.has_landed or resident.first_token is None:
            return []
        resident.tokens.append(resident.first_token)
        ended = self._end_rule.finish(
            resident.attempt.sampling, resident.first_token, resident.num_output, len(resident.tokens)
        )
        if ended is not None:
            return self.fail(resident.key, FailureKind.INVALID, "first_token_id: it ends the text; nothing may follow")
        resident.stage = Stage.RUNNING
        resident.decoding_since_s = now_s
        insort(self._running, resident, key=_age)
        self.num_changes += 1
        return []

    def _draw(self, resident: Resident, token: TokenOut, now_s: float) -> list[DecodeEffect]:
        attempt = resident.attempt
        resident.tokens.append(token.token_id)
        resident.num_drawn += 1
        if resident.decoding_since_s is None:
            resident.decoding_since_s = now_s
        num_output = resident.num_output
        finish = self._end_rule.finish(attempt.sampling, token.token_id, num_output, len(resident.tokens))
        drawn = Drawn(key=attempt.key, output_index=num_output - 1, token=token, finish=finish)
        if resident.is_local and resident.num_drawn == 1:
            assert resident.started_s is not None
            drawn = replace(
                drawn,
                queue_s=resident.started_s - attempt.arrived_s,
                prefill_s=now_s - resident.started_s,
                cached_tokens=min(resident.cached, len(attempt.prompt_ids)),
            )
        if finish is None:
            return [drawn]
        drawn = replace(drawn, decode_s=now_s - resident.decoding_since_s, preemptions=resident.preemptions)
        return [drawn, *self._release(resident)]

    def _release(self, resident: Resident) -> list[DecodeEffect]:
        self._lending.release(resident)
        del self._residents[resident.key]
        for group in (self._running, self._waiting):
            if resident in group:
                group.remove(resident)
        self.num_changes += 1  # what it held, another may take
        return [Released(key=resident.key)]


def _age(resident: Resident) -> int:
    return resident.order

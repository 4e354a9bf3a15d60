"""Admits attempts to a decode worker and ends them. Pure: time is passed as `now_s`.

planning.py chooses the work of a step, step_results.py applies its results, and sequence_table.py manages blocks.

    remote:  LANDING -> RUNNING -> (gone)            LANDING until the KV is verified and the first token is known
    local:   WAITING -> RUNNING -> (gone)
    memory ends: RUNNING -> WAITING                  the youngest; its tokens are recomputed later, without changing
    abandoned while its blocks may be written: -> ENDING     held until the receiver reports the end
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from decode_worker.checking import KvCheck
from decode_worker.chunking import ChunkRule
from decode_worker.decode_sequence import DecodeSequence, Stage
from decode_worker.drafter import Drafter
from decode_worker.drafting import DraftRule
from decode_worker.planning import Planner
from decode_worker.sequence_table import SequenceTable
from decode_worker.step import Step
from decode_worker.step_results import StepResults
from pdserve.core.attempt import Attempt, AttemptKey, EndRule, FailureKind, RefusalReason, blocks_for
from pdserve.core.blocks import BlockAllocator
from pdserve.core.effects import (
    DecodeEffect,
    KvCommitted,
    LandingHeld,
    ReceiveAborted,
    TransferCancelled,
    TransferLost,
)
from pdserve.core.protocol import AttemptFailed, Granted, Load, Refused, Released
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
        self.sequences = SequenceTable(blocks, block_size=block_size, check=check)
        drafter = None if drafting is None else Drafter(drafting, self.sequences, end_rule)
        self._planner = Planner(self.sequences, max_batch=max_batch, chunks=chunks, drafter=drafter)
        self._residents = self.sequences.residents
        self._block_size = block_size
        self._inbox_depth = inbox_depth
        self._end_rule = end_rule
        self._results = StepResults(self.sequences, end_rule, check)
        self._expires_at_s = math.inf  # the earliest deadline
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
        """Number of blocks that the attempt holds, including shared ones."""
        resident = self._residents.get(key)
        return 0 if resident is None else len(resident.blocks)

    def content_hashes(self, key: AttemptKey) -> tuple[int, ...]:
        """The content hashes that the blocks granted to the attempt will have after its KV has arrived."""
        return self.sequences.content_hashes(self._residents[key])

    @property
    def has_work(self) -> bool:
        """Whether the next plan may have rows."""
        return bool(self.sequences.running or self.sequences.waiting)

    @property
    def num_changes(self) -> int:
        """While it does not change, neither do the members of the steps."""
        return self.sequences.num_changes

    @property
    def num_preemptions(self) -> int:
        return self.sequences.num_preemptions

    def load(self) -> Load:
        running, waiting = self.sequences.running, self.sequences.waiting
        reading = [each.remaining for each in waiting]
        reading += [each.remaining for each in running if each.remaining > 1]
        return Load(
            free_blocks=self.blocks.num_free,
            evictable_blocks=self.blocks.num_evictable,
            running=len(running),
            waiting=len(self._residents) - len(running),
            context_tokens=sum(each.computed for each in running),
            pending_prefill_tokens=sum(reading),
        )

    # -- taking and ending attempts -----------------------------------------------------------------------------

    def offer(self, attempt: Attempt, *, is_local: bool, now_s: float) -> list[DecodeEffect]:
        """Reserves blocks or a waiting place for a new attempt, or says why not."""
        reason = self._refusal(attempt, is_local, now_s)
        if reason is not None:
            return [Refused(key=attempt.key, reason=reason)]
        tokens = list(attempt.token_ids)
        resident = DecodeSequence(
            attempt=attempt,
            key=attempt.key,
            prompt_len=len(attempt.prompt_ids),
            ends_at=min(len(attempt.prompt_ids) + attempt.sampling.max_tokens, self._end_rule.max_context_tokens),
            order=self.sequences.num_arrived,
            is_local=is_local,
            stage=Stage.WAITING if is_local else Stage.LANDING,
            tokens=tokens,
            end_ids=self._end_rule.end_ids(attempt.sampling),
            hashes=attempt.extend_hashes([], tokens, self._block_size),
        )
        if is_local:
            effect: DecodeEffect = Granted(key=attempt.key)
        elif self._planner.is_starved or not self.sequences.take_blocks(resident):
            return [Refused(key=attempt.key, reason=RefusalReason.NO_BLOCKS)]
        else:
            held = resident.cached // self._block_size
            effect = LandingHeld(key=attempt.key, blocks=tuple(resident.blocks[held:]), held_blocks=held)
        self.sequences.add(resident)
        if attempt.deadline_at_s is not None:
            self._expires_at_s = min(self._expires_at_s, attempt.deadline_at_s)
        return [effect]

    def admit(self, key: AttemptKey, first_token: int, now_s: float) -> list[DecodeEffect] | None:
        """The prefill worker's token, which arrived at `now_s`. None: no attempt waits for it."""
        resident = self._residents.get(key)
        if resident is None or resident.stage is not Stage.LANDING or resident.first_token is not None:
            return None
        resident.first_token, resident.ready_s = first_token, max(resident.ready_s, now_s)
        resident.start_clock(len(resident.tokens) + 1, now_s)
        return self._join(resident)

    def landed(
        self, key: AttemptKey, *, transfer_s: float, busy_s: float, num_bytes: int, now_s: float
    ) -> list[DecodeEffect]:
        """All granted blocks have verified KV since `now_s`, and there are no writers any more."""
        resident = self._residents.get(key)
        if resident is None or resident.has_landed:
            return []
        if resident.stage is Stage.ENDING:
            return [TransferCancelled(key=key), *self._release(resident)]
        self.sequences.land(resident)
        resident.ready_s = max(resident.ready_s, now_s)
        committed = KvCommitted(
            key=key,
            transfer_s=transfer_s,
            busy_s=busy_s,
            num_bytes=num_bytes,
            held_blocks=resident.cached // self._block_size,
        )
        return [committed, *self._join(resident)]

    def lost(self, key: AttemptKey, error: str, *, is_cancelled: bool = False) -> list[DecodeEffect]:
        """The KV will not arrive, and there are no writers any more: after a failure, or drained after an abort.

        `is_cancelled`: its sender abandoned the transfer, because it is no longer needed.
        """
        resident = self._residents.get(key)
        if resident is None or resident.has_landed or resident.is_local:
            return []
        if resident.stage is Stage.ENDING:
            return [TransferCancelled(key=key), *self._release(resident)]
        return [TransferLost(key=key, error=error, is_cancelled=is_cancelled), *self._release(resident)]

    def fail(self, key: AttemptKey, kind: FailureKind, message: str) -> list[DecodeEffect]:
        resident = self._residents.get(key)
        if resident is None or resident.stage is Stage.ENDING:
            return []
        return [AttemptFailed(key=key, kind=kind, message=message), *self.cancel(key)]

    def cancel(self, key: AttemptKey) -> list[DecodeEffect]:
        """Abandons an attempt at any stage. Idempotent; an unknown attempt counts as released."""
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
        if now_s < self._expires_at_s:
            return []
        late = [key for key, resident in self._residents.items() if resident.attempt.is_late(now_s)]
        self._expires_at_s = min(
            (
                each.attempt.deadline_at_s
                for each in self._residents.values()
                if each.attempt.deadline_at_s is not None and not each.attempt.is_late(now_s)
            ),
            default=math.inf,
        )
        return [effect for key in late for effect in self.fail(key, FailureKind.DEADLINE, "the deadline passed")]

    # -- steps --------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> tuple[Step, list[DecodeEffect]]:
        """The next step; apply the effects first. No rows: nothing can be computed now."""
        effects = self.expire(now_s)
        return self._planner.plan(now_s), effects

    def apply(self, step: Step, outs: Sequence[RowOut], now_s: float) -> list[DecodeEffect]:
        """Applies the results of a step. Sequences that have ended in the meantime are skipped."""
        self.sequences.lending.ended(step)
        return self._results.apply(step, outs, now_s)

    # -- one step ahead: for engines that support it ---------------------------------------------------------------

    def plan_after(self, step: Step) -> Step | None:
        """The step after the running `step`, before its tokens are known; None if it must wait for them."""
        return self._planner.plan_after(step)

    def launched(self, step: Step) -> None:
        """The step was launched: until `apply` or `dropped` is called for it, it may write into the blocks of its
        rows."""
        self.sequences.lending.launched(step)

    def dropped(self, step: Step) -> None:
        """A launched step has ended and its results are discarded; its positions will be computed again."""
        self._planner.dropped()
        self.sequences.lending.ended(step)

    # -- many steps at once: for the simulator, which computes the time of steps in closed form ---------------------

    def run_length(self, step: Step) -> int:
        """How many steps of exactly these rows may follow each other, this one included; 0: the step also prefills or
        has drafts."""
        return self._planner.run_length(step)

    def apply_run(self, step: Step, count: int, token: TokenOut, now_s: float) -> list[DecodeEffect]:
        """Does what `count` times `plan` and `apply` would do for the decode rows, if each samples `token` each time.
        Returns only effects other than one more token. `count` is 1 or at most `run_length`."""
        return self._results.apply_run(step, count, token, now_s)

    def check(self) -> None:
        """Raises AssertionError unless the tables of attempts and blocks agree."""
        self.sequences.check()

    # -- attempts ------------------------------------------------------------------------------------------------

    def _refusal(self, attempt: Attempt, is_local: bool, now_s: float) -> RefusalReason | None:
        is_sampled_here = is_local or attempt.num_tokens < self._end_rule.max_context_tokens
        if blocks_for(attempt.num_tokens, self._block_size) > self.blocks.num_blocks or not is_sampled_here:
            return RefusalReason.TOO_LARGE
        if self.is_draining:
            return RefusalReason.DRAINING
        if attempt.is_late(now_s):
            return RefusalReason.DEADLINE
        if len(self._residents) - len(self.sequences.running) >= self._inbox_depth:
            return RefusalReason.INBOX_FULL
        return None

    def _join(self, resident: DecodeSequence) -> list[DecodeEffect]:
        """Begins to decode once the KV and the first token have both arrived."""
        if not resident.has_landed or resident.first_token is None:
            return []
        resident.tokens.append(resident.first_token)
        ended = self._end_rule.finish(
            resident.attempt.sampling, resident.first_token, resident.num_output, len(resident.tokens)
        )
        if ended is not None:
            return self.fail(resident.key, FailureKind.INVALID, "first_token_id: it ends the text; nothing may follow")
        self.sequences.join(resident)
        return []

    def _release(self, resident: DecodeSequence) -> list[DecodeEffect]:
        self.sequences.remove(resident)
        return [Released(key=resident.key)]

"""Admits attempts to a decode worker, and ends them. Pure: time is passed as `now_s`.

planning.py chooses the work of a step, step_results.py applies its results, and sequence_table.py manages blocks.

decode_sequence.py has the stages of an attempt. A remote attempt is RECEIVING until its KV is verified and its first
token is known. When memory is exhausted, the youngest sequence is preempted. An answer that leaves the worker becomes
an attempt whose KV is sent: it takes the answer's blocks from the prefix cache, computes one token, and keeps the
blocks until the transfer has ended. An attempt that is abandoned while a transfer may still use its blocks is ENDING
until the end of the transfer is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from decode_worker.decode_sequence import DecodeMove, DecodeSequence, DecodeStage
from decode_worker.planning import ChunkRule, Drafter, Planner
from decode_worker.sequence_table import KvCheck, SequenceTable
from decode_worker.speculation import DraftRule
from decode_worker.step import DecodeStep
from decode_worker.step_results import StepResults
from pdserve.core.attempt import Attempt, AttemptKey, EndRule, FailureKind, RefusalReason, blocks_for, grant_error
from pdserve.core.effects import (
    BlocksReserved,
    DecodeEffect,
    KvCommitted,
    ReceiveAborted,
    SendStarted,
    TransferCancelled,
    TransferLost,
)
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.fetch import Fetches
from pdserve.core.protocol import AttemptFailed, Granted, Load, Refused, Released
from pdserve.core.types import TokenOut
from pdserve.engine.interface import RowOut


@final
class DecodeScheduler:
    def __init__(
        self,
        *,
        kv: KvCache,
        max_batch: int,
        chunks: ChunkRule,
        inbox_depth: int,
        end_rule: EndRule,
        drafting: DraftRule | None = None,
        check: KvCheck | None = None,
        fetches: Fetches | None = None,
    ) -> None:
        self.blocks = kv.blocks
        self.sequences = SequenceTable(kv, check, fetches)
        drafter = None if drafting is None else Drafter(drafting, self.sequences, end_rule)
        self._planner = Planner(self.sequences, max_batch=max_batch, chunks=chunks, drafter=drafter)
        self._by_key = self.sequences.by_key
        self._block_size = kv.block_size
        self._inbox_depth = inbox_depth
        self._end_rule = end_rule
        self._results = StepResults(self.sequences, end_rule, check)
        self._expires_at_s = math.inf  # the earliest deadline
        self.is_draining = False

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._by_key

    def live(self) -> list[AttemptKey]:
        return list(self._by_key)

    def stage(self, key: AttemptKey) -> DecodeStage | None:
        sequence = self._by_key.get(key)
        return None if sequence is None else sequence.stage

    def has_received(self, key: AttemptKey) -> bool:
        sequence = self._by_key.get(key)
        return sequence is not None and sequence.has_received

    def num_held(self, key: AttemptKey) -> int:
        """Number of blocks that the attempt holds, including shared ones."""
        sequence = self._by_key.get(key)
        return 0 if sequence is None else len(sequence.blocks)

    def content_hashes(self, key: AttemptKey) -> tuple[int, ...]:
        """The content hashes that the blocks granted to the attempt will have after its KV has arrived."""
        return self.sequences.content_hashes(self._by_key[key])

    @property
    def has_work(self) -> bool:
        """Whether the next plan may have rows."""
        return bool(self.sequences.running or self.sequences.waiting)

    @property
    def num_changes(self) -> int:
        """Changes whenever the set of sequences in the steps may change."""
        return self.sequences.num_changes

    @property
    def num_preemptions(self) -> int:
        return self.sequences.num_preemptions

    def load(self) -> Load:
        running, waiting, fetches = self.sequences.running, self.sequences.waiting, self.sequences.fetches
        pending = [each.remaining for each in waiting]
        if fetches:  # what is being fetched keeps this worker from nothing
            pending += [-fetches.num_supplied(each.key) * self._block_size for each in waiting]
        pending += [each.remaining for each in running if each.remaining > 1]
        return Load(
            free_blocks=self.blocks.num_free,
            evictable_blocks=self.blocks.num_evictable,
            running=len(running),
            waiting=len(self._by_key) - len(running),
            context_tokens=sum(each.computed for each in running),
            pending_prefill_tokens=sum(pending),
            preemptions=self.num_preemptions,
        )

    # -- begin and end of attempts -----------------------------------------------------------------------------

    def offer(self, attempt: Attempt, *, is_local: bool, now_s: float) -> list[DecodeEffect]:
        """Reserves blocks or a place in the queue for a new attempt, or returns Refused with the reason."""
        self.sequences.kv.advance(now_s)
        reason = self._refusal(attempt, is_local, now_s)
        if reason is not None:
            return [Refused(key=attempt.key, reason=reason)]
        sequence = self._sequence(attempt, is_local=is_local)
        if is_local:
            effect: DecodeEffect = Granted(key=attempt.key)
        elif self._planner.is_starved or not self.sequences.take_blocks(sequence):
            return [Refused(key=attempt.key, reason=RefusalReason.NO_BLOCKS)]
        else:
            held = sequence.cached // self._block_size
            effect = BlocksReserved(key=attempt.key, blocks=tuple(sequence.blocks[held:]), num_cached_blocks=held)
        self.sequences.add(sequence)
        self._note_deadline(attempt)
        return [effect]

    def offer_send(
        self,
        attempt: Attempt,
        *,
        receiver_cached_blocks: int,
        num_granted: int,
        granted_size: int,
        now_s: float,
    ) -> list[DecodeEffect]:
        """Begins to send the KV of a text that the prefix cache has, except for what its last token or its last block
        lacks, which the next step computes. Returns Refused with the reason if the cache lacks more.

        The receiver's cached and granted blocks have `granted_size` tokens each. Also while the worker drains.
        """
        key, size = attempt.key, self._block_size
        self.sequences.kv.advance(now_s)
        reason = self._refusal(attempt, is_local=True, now_s=now_s, may_drain=True)
        if reason is not None:
            return [Refused(key=key, reason=reason)]
        error = grant_error(
            attempt.num_tokens, cached_blocks=receiver_cached_blocks, num_granted=num_granted, granted_size=granted_size
        )
        if error:
            return [AttemptFailed(key=key, kind=FailureKind.TRANSFER, message=error), Released(key=key)]
        sequence = self._sequence(attempt, is_local=True)
        sequence.ends_at = attempt.num_tokens + 1
        # A block that the receiver has only in part is sent whole.
        sequence.sends_after = receiver_cached_blocks * granted_size // size
        sequence.began_output(now_s)
        done = self.sequences.start_send(sequence, now_s)
        if done is None:
            return [Refused(key=key, reason=RefusalReason.NO_KV)]
        self._note_deadline(attempt)
        return [SendStarted(key=key, plan="cached"), *([done] if done.blocks else [])]

    def sent(
        self, key: AttemptKey, *, is_whole: bool, error: str = "", is_cancelled: bool = False
    ) -> list[DecodeEffect]:
        """The sender no longer reads blocks of the attempt: it has sent all of them, or has aborted.

        `is_cancelled`: the receiver abandoned the transfer because it is no longer needed.
        """
        sequence = self._by_key.get(key)
        if sequence is None or not sequence.is_sending:
            return []
        if sequence.stage is DecodeStage.ENDING or (is_whole and sequence.stage is DecodeStage.SENDING):
            return self._release(sequence)
        lost = TransferLost(key=key, error=error or "the sender ended early", is_cancelled=is_cancelled)
        return [lost, *self._release(sequence)]

    def admit(self, key: AttemptKey, first_token: int, now_s: float) -> list[DecodeEffect] | None:
        """The prefill worker's first token arrived at `now_s`. Returns None if no attempt waits for it."""
        sequence = self._by_key.get(key)
        if sequence is None or sequence.stage is not DecodeStage.RECEIVING or sequence.first_token is not None:
            return None
        sequence.first_token, sequence.ready_s = first_token, max(sequence.ready_s, now_s)
        sequence.began_output(now_s)
        return self._join(sequence)

    def received(
        self, key: AttemptKey, *, transfer_s: float, busy_s: float, num_bytes: int, now_s: float
    ) -> list[DecodeEffect]:
        """The KV of all granted blocks was verified at `now_s`, and nothing writes to them any more."""
        sequence = self._by_key.get(key)
        if sequence is None or sequence.has_received or sequence.is_local:
            return []
        if sequence.stage is DecodeStage.ENDING:
            return [TransferCancelled(key=key), *self._release(sequence)]
        self.sequences.receive(sequence)
        sequence.ready_s = max(sequence.ready_s, now_s)
        committed = KvCommitted(
            key=key,
            transfer_s=transfer_s,
            busy_s=busy_s,
            num_bytes=num_bytes,
            num_cached_blocks=sequence.cached // self._block_size,
        )
        return [committed, *self._join(sequence)]

    def lost(self, key: AttemptKey, error: str, *, is_cancelled: bool = False) -> list[DecodeEffect]:
        """The transfer failed or was aborted, and nothing writes to the blocks any more.

        `is_cancelled`: the sender abandoned the transfer because it is no longer needed.
        """
        sequence = self._by_key.get(key)
        if sequence is None or sequence.has_received or sequence.is_local:
            return []
        if sequence.stage is DecodeStage.ENDING:
            return [TransferCancelled(key=key), *self._release(sequence)]
        return [TransferLost(key=key, error=error, is_cancelled=is_cancelled), *self._release(sequence)]

    def fail(self, key: AttemptKey, kind: FailureKind, message: str) -> list[DecodeEffect]:
        sequence = self._by_key.get(key)
        if sequence is None or sequence.stage is DecodeStage.ENDING:
            return []
        return [AttemptFailed(key=key, kind=kind, message=message), *self.cancel(key)]

    def cancel(self, key: AttemptKey) -> list[DecodeEffect]:
        """Abandons an attempt at any stage. Idempotent; an unknown attempt counts as released."""
        sequence = self._by_key.get(key)
        if sequence is None:
            return [Released(key=key)]
        if sequence.stage is DecodeStage.ENDING:
            return []
        if sequence.stage is DecodeStage.RECEIVING and not sequence.has_received:
            sequence.move(DecodeMove.ABANDONED)
            return [ReceiveAborted(key=key)]
        if sequence.is_sending:
            return [*self.sequences.abandon_send(sequence)]
        return self._release(sequence)

    def expire(self, now_s: float) -> list[DecodeEffect]:
        fetches = self.sequences.fetches
        effects: list[DecodeEffect] = [] if fetches is None else [*fetches.expire(now_s)]
        if now_s < self._expires_at_s:
            return effects
        late = [key for key, sequence in self._by_key.items() if sequence.attempt.is_late(now_s)]
        self._expires_at_s = min(
            (
                each.attempt.deadline_at_s
                for each in self._by_key.values()
                if each.attempt.deadline_at_s is not None and not each.attempt.is_late(now_s)
            ),
            default=math.inf,
        )
        for key in late:
            effects += self.fail(key, FailureKind.DEADLINE, "the deadline passed")
        return effects

    # -- steps --------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> tuple[DecodeStep, list[DecodeEffect]]:
        """The next step. The caller must apply the effects first. Without rows, there is nothing to compute now."""
        self.sequences.kv.advance(now_s)
        effects = self.expire(now_s)
        step = self._planner.plan(now_s)
        return step, [*effects, *self.sequences.take_effects()]

    def apply(self, step: DecodeStep, outs: Sequence[RowOut], now_s: float) -> list[DecodeEffect]:
        """Applies the results of a step. Skips sequences that have ended in the meantime. The effects are in the order
        in which they must be sent."""
        self.sequences.kv.advance(now_s)
        self.sequences.deferred_free.ended(step)
        return self._results.apply(step, outs, now_s)

    # -- asynchronous scheduling: for engines that support it ---------------------------------------------------------

    def plan_after(self, step: DecodeStep) -> DecodeStep | None:
        """The step after the running `step`, before its tokens are known; None if it must wait for them."""
        return self._planner.plan_after(step)

    def launched(self, step: DecodeStep) -> None:
        """The step was launched. It may write to the blocks of its rows until `apply` or `dropped` is called for it."""
        self.sequences.deferred_free.launched(step)

    def dropped(self, step: DecodeStep) -> None:
        """A launched step has ended, and its results are discarded. Its positions will be computed again."""
        self._planner.dropped()
        self.sequences.deferred_free.ended(step)

    # -- many steps at once: for the simulator, which computes the time of steps in closed form ---------------------

    def run_length(self, step: DecodeStep) -> int:
        """How many steps with exactly these rows may follow each other, including this one; 0 if the step prefills or
        has drafts."""
        return self._planner.run_length(step)

    def apply_run(
        self, step: DecodeStep, count: int, token: TokenOut, now_s: float, outs: Sequence[RowOut] = ()
    ) -> list[DecodeEffect]:
        """Equals `count` calls of `plan` and `apply`. Each decode row samples `token` every time, and `outs` are the
        results of the prompts. Returns only effects other than a further token. `count` is 1 or at most `run_length`.
        """
        self.sequences.kv.advance(now_s)
        return self._results.apply_run(step, count, token, outs, now_s)

    def check(self) -> None:
        """Raises AssertionError unless the tables of attempts and blocks agree."""
        self.sequences.check()

    # -- attempts ------------------------------------------------------------------------------------------------

    def _sequence(self, attempt: Attempt, *, is_local: bool) -> DecodeSequence:
        tokens = list(attempt.token_ids)
        return DecodeSequence(
            attempt=attempt,
            key=attempt.key,
            prompt_len=len(attempt.prompt_ids),
            ends_at=min(len(attempt.prompt_ids) + attempt.sampling.max_tokens, self._end_rule.max_context_tokens),
            order=self.sequences.num_arrived,
            is_local=is_local,
            stage=DecodeStage.WAITING if is_local else DecodeStage.RECEIVING,
            tokens=tokens,
            end_ids=self._end_rule.end_ids(attempt.sampling),
            hashes=attempt.extend_hashes([], tokens, self._block_size),
        )

    def _note_deadline(self, attempt: Attempt) -> None:
        if attempt.deadline_at_s is not None:
            self._expires_at_s = min(self._expires_at_s, attempt.deadline_at_s)

    def _refusal(
        self, attempt: Attempt, is_local: bool, now_s: float, *, may_drain: bool = False
    ) -> RefusalReason | None:
        is_sampled_here = is_local or attempt.num_tokens < self._end_rule.max_context_tokens
        if blocks_for(attempt.num_tokens, self._block_size) > self.blocks.num_blocks or not is_sampled_here:
            return RefusalReason.TOO_LARGE
        if self.is_draining and not may_drain:
            return RefusalReason.DRAINING
        if attempt.is_late(now_s):
            return RefusalReason.DEADLINE
        if len(self._by_key) - len(self.sequences.running) >= self._inbox_depth:
            return RefusalReason.INBOX_FULL
        return None

    def _join(self, sequence: DecodeSequence) -> list[DecodeEffect]:
        """Lets the sequence decode, once its KV and its first token have arrived."""
        if not sequence.has_received or sequence.first_token is None:
            return []
        sequence.tokens.append(sequence.first_token)
        ended = self._end_rule.finish(
            sequence.attempt.sampling, sequence.first_token, sequence.num_output, len(sequence.tokens)
        )
        if ended is not None:
            return self.fail(
                sequence.key,
                FailureKind.INVALID,
                "first_token_id: this token ends the text, so nothing can be decoded after it",
            )
        self.sequences.join(sequence)
        return []

    def _release(self, sequence: DecodeSequence) -> list[DecodeEffect]:
        self.sequences.remove(sequence)
        return [*self.sequences.take_effects(), Released(key=sequence.key)]

"""Admits attempts to a decode worker, applies the results of steps, and ends attempts. Pure: time is passed as `now_s`.

planning.py chooses the work of a step, and sequence_table.py manages blocks.

decode_sequence.py has the stages of an attempt. A remote attempt is RECEIVING until its KV is verified and its first
token is known. When memory is exhausted, the youngest sequence is preempted. An attempt that is abandoned while a
transfer may still write to its blocks is ENDING until the receiver reports the end of the transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import final

from decode_worker.decode_sequence import DecodeMove, DecodeSequence, DecodeStage
from decode_worker.planning import ChunkRule, Drafter, Planner
from decode_worker.sequence_table import KvCheck, SequenceTable, WrongBlock
from decode_worker.speculation import DraftRule
from decode_worker.step import DecodeStep
from pdserve.core.attempt import Attempt, AttemptKey, EndRule, FailureKind, RefusalReason, blocks_for
from pdserve.core.effects import (
    BlocksReserved,
    DecodeEffect,
    KvCommitted,
    KvMistaken,
    PlainTokens,
    PromptScored,
    ReceiveAborted,
    TokensSampled,
    TransferCancelled,
    TransferLost,
)
from pdserve.core.kv.cache import KvCache
from pdserve.core.protocol import AttemptFailed, Granted, Load, Refused, Released, TokenRow
from pdserve.core.types import TokenOut
from pdserve.engine.interface import PlainOuts, RowOut, plain_out

# --- results of a step ----------------------------------------------------------------------------------------
# Sampled tokens, ends of texts, blocks with wrong content.


@final
class _Results:
    """The effects of a step, in the order in which they are sent.

    Prompt scores come first, then the tokens of all attempts, then all other effects. So an attempt's Released is never
    sent before its last tokens.
    """

    __slots__ = ("after", "plain", "rows", "scores")

    def __init__(self) -> None:
        self.scores: list[PromptScored] = []
        self.rows: list[TokenRow] = []
        self.plain: PlainTokens | None = None
        self.after: list[DecodeEffect] = []

    def effects(self) -> list[DecodeEffect]:
        if not self.rows and self.plain is None:
            return [*self.scores, *self.after]
        return [*self.scores, TokensSampled(rows=self.rows, plain=self.plain), *self.after]


@final
class StepResults:
    def __init__(self, sequences: SequenceTable, end_rule: EndRule, check: KvCheck | None) -> None:
        self._sequences = sequences
        self._block_size = sequences.block_size
        self._end_rule = end_rule
        self._check = check
        self._ended_s = 0.0  # end of the last step, as passed to `apply`
        self._begun_s = 0.0  # end of the step before it, which is the start of the last step

    def apply(self, step: DecodeStep, outs: Sequence[RowOut], now_s: float) -> list[DecodeEffect]:
        self._ended_at(now_s)
        results = _Results()
        shares: Iterable[tuple[DecodeSequence, int]] = step.shares()
        if isinstance(outs, PlainOuts) and not step.prefilling and self._check is None:
            results.plain, outs, shares = self._append_plain(step.decoding, outs.token_ids)
        self._apply_rows(shares, outs, now_s, results)
        return results.effects()

    def _apply_rows(
        self,
        shares: Iterable[tuple[DecodeSequence, int]],
        outs: Sequence[RowOut],
        now_s: float,
        results: _Results,
    ) -> None:
        for (sequence, count), out in zip(shares, outs, strict=True):
            key = sequence.key
            if self._sequences.by_key.get(key) is not sequence or sequence.stage is not DecodeStage.RUNNING:
                continue
            if self._check is not None and (wrong := self._check.find(sequence, self._block_size)) is not None:
                results.after.append(self._discard_wrong(sequence, wrong, now_s))
                continue
            start = sequence.computed
            self._sequences.advance(sequence, count)
            if out.scored:
                results.scores.append(PromptScored(key=key, first_position=start + 1, tokens=out.scored))
            if len(out.sampled) == 1:  # true for nearly every row
                self._append(sequence, out.sampled[0], now_s, results)
                continue
            for index, token in enumerate(out.sampled):
                if index > 0:  # the previous token was an accepted draft, so its KV is computed
                    self._sequences.advance(sequence, 1)
                self._append(sequence, token, now_s, results)
                if key not in self._sequences.by_key:
                    break

    def apply_run(
        self, step: DecodeStep, count: int, token: TokenOut, outs: Sequence[RowOut], now_s: float
    ) -> list[DecodeEffect]:
        results = _Results()
        self._ended_at(now_s)
        size = self._block_size
        sampled = [token.token_id] * count
        for sequence in step.decoding:
            tokens, computed = sequence.tokens, sequence.computed
            is_plain = sequence.decoding_since_s is not None and sequence.preempted_at_s is None
            if is_plain and len(tokens) + count < sequence.ends_at and computed % size + count < size:
                tokens += sampled  # the usual case in a run
                sequence.computed = computed + count
                continue
            tokens += sampled[1:]
            self._sequences.advance(sequence, count)
            self._append(sequence, token, now_s, results)
        self._apply_rows(step.prefilling, outs, now_s, results)
        return results.effects()

    def _discard_wrong(self, sequence: DecodeSequence, wrong: WrongBlock, now_s: float) -> DecodeEffect:
        """Discards the step's result for the sequence, which is prefilled again into other blocks."""
        self._sequences.kv.invalidate(sequence.blocks[wrong.index])
        self._sequences.preempt(sequence, now_s)
        return KvMistaken(key=sequence.key, error=wrong.error)

    def _append_plain(
        self, decoding: Sequence[DecodeSequence], token_ids: Sequence[int]
    ) -> tuple[PlainTokens | None, list[RowOut], list[tuple[DecodeSequence, int]]]:
        """Adds the tokens of rows that continue without further effects, which are most rows. Returns the outputs and
        sequences of the other rows, for `apply`."""
        continuing: list[DecodeSequence] = []
        plain_ids: list[int] = []
        outs: list[RowOut] = []
        shares: list[tuple[DecodeSequence, int]] = []
        for sequence, token_id in zip(decoding, token_ids, strict=True):
            tokens = sequence.tokens
            num_tokens = len(tokens)
            if num_tokens >= sequence.plain_until or token_id in sequence.end_ids:
                outs.append(plain_out(token_id))
                shares.append((sequence, 1))
                continue
            tokens.append(token_id)
            sequence.computed = num_tokens
            continuing.append(sequence)
            plain_ids.append(token_id)
        if not continuing:
            return None, outs, shares
        plain = PlainTokens(
            keys=[each.key for each in continuing],
            output_indexes=[each.computed - each.prompt_len for each in continuing],
            token_ids=plain_ids,
        )
        return plain, outs, shares

    def _append(self, sequence: DecodeSequence, token: TokenOut, now_s: float, results: _Results) -> None:
        attempt, tokens = sequence.attempt, sequence.tokens
        tokens.append(token.token_id)
        num_tokens = len(tokens)
        num_output = num_tokens - sequence.prompt_len
        finish = self._end_rule.finish(attempt.sampling, token.token_id, num_output, num_tokens)
        sampled = TokenRow(key=sequence.key, output_index=num_output - 1, tokens=(token,), finish=finish)
        results.rows.append(sampled)
        if sequence.decoding_since_s is None:
            self._begin(sequence, sampled, now_s)
        elif sequence.preempted_at_s is not None:
            sampled.decode_s = sequence.preempted_at_s - sequence.decoding_since_s
            sampled.preempted_s = now_s - sequence.preempted_at_s
            sequence.decoding_since_s, sequence.preempted_at_s = now_s, None
        if sequence.unreported_preemptions:
            sampled.preemptions = sequence.unreported_preemptions
            sequence.unreported_preemptions = 0
        if finish is None:
            size = self._block_size
            sequence.plain_until = min(num_tokens + -num_tokens % size, sequence.ends_at - 1)
            return
        assert sequence.decoding_since_s is not None
        sampled.decode_s = sampled.decode_s + now_s - sequence.decoding_since_s
        self._sequences.remove(sequence)
        results.after.append(Released(key=sequence.key))

    def _ended_at(self, now_s: float) -> None:
        """A step has ended. Steps that end at the same time count as one."""
        if now_s > self._ended_s:
            self._begun_s, self._ended_s = self._ended_s, now_s

    def _begin(self, sequence: DecodeSequence, sampled: TokenRow, now_s: float) -> None:
        """Adds the waiting time and the time of the prompt to the attempt's first row."""
        if not sequence.is_local:  # a remote attempt joined the step that has just ended
            sequence.decoding_since_s = max(sequence.ready_s, self._begun_s)
            sampled.decode_queue_s = sequence.decoding_since_s - sequence.ready_s
            return
        assert sequence.started_s is not None
        sequence.decoding_since_s = now_s
        sequence.began_output(now_s)
        sampled.queue_s = sequence.started_s - sequence.attempt.arrived_s
        sampled.prefill_s = now_s - sequence.started_s
        sampled.cached_tokens = sequence.cached


# --- scheduler ------------------------------------------------------------------------------------------------


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
    ) -> None:
        self.blocks = kv.blocks
        self.sequences = SequenceTable(kv, check)
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
        running, waiting = self.sequences.running, self.sequences.waiting
        pending = [each.remaining for each in waiting]
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
        reason = self._refusal(attempt, is_local, now_s)
        if reason is not None:
            return [Refused(key=attempt.key, reason=reason)]
        tokens = list(attempt.token_ids)
        sequence = DecodeSequence(
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
        if is_local:
            effect: DecodeEffect = Granted(key=attempt.key)
        elif self._planner.is_starved or not self.sequences.take_blocks(sequence):
            return [Refused(key=attempt.key, reason=RefusalReason.NO_BLOCKS)]
        else:
            held = sequence.cached // self._block_size
            effect = BlocksReserved(key=attempt.key, blocks=tuple(sequence.blocks[held:]), num_cached_blocks=held)
        self.sequences.add(sequence)
        if attempt.deadline_at_s is not None:
            self._expires_at_s = min(self._expires_at_s, attempt.deadline_at_s)
        return [effect]

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
        if sequence is None or sequence.has_received:
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
        return self._release(sequence)

    def expire(self, now_s: float) -> list[DecodeEffect]:
        if now_s < self._expires_at_s:
            return []
        late = [key for key, sequence in self._by_key.items() if sequence.attempt.is_late(now_s)]
        self._expires_at_s = min(
            (
                each.attempt.deadline_at_s
                for each in self._by_key.values()
                if each.attempt.deadline_at_s is not None and not each.attempt.is_late(now_s)
            ),
            default=math.inf,
        )
        return [effect for key in late for effect in self.fail(key, FailureKind.DEADLINE, "the deadline passed")]

    # -- steps --------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> tuple[DecodeStep, list[DecodeEffect]]:
        """The next step. The caller must apply the effects first. Without rows, there is nothing to compute now."""
        effects = self.expire(now_s)
        return self._planner.plan(now_s), effects

    def apply(self, step: DecodeStep, outs: Sequence[RowOut], now_s: float) -> list[DecodeEffect]:
        """Applies the results of a step. Skips sequences that have ended in the meantime. The effects are in the order
        in which they must be sent."""
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
        return self._results.apply_run(step, count, token, outs, now_s)

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
        return [Released(key=sequence.key)]

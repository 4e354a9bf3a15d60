"""Applies the results of a decode worker's step: sampled tokens, ends of texts, blocks with wrong content. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from decode_worker.decode_sequence import DecodeSequence, DecodeStage
from decode_worker.sequence_table import KvCheck, SequenceTable, WrongBlock
from decode_worker.step import DecodeStep
from pdserve.core.attempt import EndRule, FailureKind
from pdserve.core.effects import DecodeEffect, KvMistaken, PlainTokens, PromptScored, TokensSampled
from pdserve.core.protocol import AttemptFailed, FirstToken, Released, TokenRow
from pdserve.core.types import TokenOut
from pdserve.engine.interface import PlainOuts, RowOut, plain_out


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
                results.after += self._discard_wrong(sequence, wrong, now_s)
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

    def _discard_wrong(self, sequence: DecodeSequence, wrong: WrongBlock, now_s: float) -> list[DecodeEffect]:
        """Discards the step's result for the sequence, which is prefilled again into other blocks. One whose KV is sent
        ends."""
        key = sequence.key
        self._sequences.kv.invalidate(sequence.blocks[wrong.index])
        if sequence.is_sending:
            failed = AttemptFailed(key=key, kind=FailureKind.TRANSFER, message=wrong.error)
            return [KvMistaken(key=key, error=wrong.error), failed, *self._sequences.abandon_send(sequence)]
        self._sequences.preempt(sequence, now_s)
        return [KvMistaken(key=key, error=wrong.error)]

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
        if sequence.is_sending:
            self._send_rest(sequence, token, now_s, results)
            return
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

    def _send_rest(self, sequence: DecodeSequence, token: TokenOut, now_s: float, results: _Results) -> None:
        """The only token of an attempt whose KV is sent: its last blocks are final."""
        attempt, key = sequence.attempt, sequence.key
        assert sequence.started_s is not None, "it starts with its blocks"
        num_output, num_tokens = sequence.num_output + 1, len(sequence.tokens) + 1
        first = FirstToken(
            key=key,
            token=token,
            queue_s=sequence.started_s - attempt.arrived_s,
            prefill_s=now_s - sequence.started_s,
            cached_tokens=sequence.cached,
            finish=self._end_rule.finish(attempt.sampling, token.token_id, num_output, num_tokens),
        )
        if first.finish is not None:  # no decode worker needs the KV
            results.after += [first, *self._sequences.abandon_send(sequence)]
        else:
            results.after += [self._sequences.send_rest(sequence), first]

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

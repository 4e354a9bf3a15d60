"""Applies the results of a step: sampled tokens, ends of texts, blocks with wrong content. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from decode_worker.checking import KvCheck, WrongBlock
from decode_worker.decode_sequence import DecodeSequence
from decode_worker.lifecycle import DecodeStage
from decode_worker.sequence_table import SequenceTable
from decode_worker.step import DecodeStep
from pdserve.core.attempt import EndRule
from pdserve.core.effects import DecodeEffect, KvMistaken, PlainSampled, PromptScored
from pdserve.core.protocol import Released, TokenRow
from pdserve.core.types import TokenOut
from pdserve.engine.interface import PlainOuts, RowOut, plain_out


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
        effects: list[DecodeEffect] = []
        shares: Iterable[tuple[DecodeSequence, int]] = step.shares()
        if isinstance(outs, PlainOuts) and not step.prefilling and self._check is None:
            sampled, outs, shares = self._append_plain(step.decoding, outs.token_ids)
            if sampled.keys:
                effects.append(sampled)
        for (sequence, count), out in zip(shares, outs, strict=True):
            key = sequence.key
            if self._sequences.by_key.get(key) is not sequence or sequence.stage is not DecodeStage.RUNNING:
                continue
            if self._check is not None and (wrong := self._check.find(sequence, self._block_size)) is not None:
                effects.append(self._discard_wrong(sequence, wrong, now_s))
                continue
            start = sequence.computed
            self._sequences.advance(sequence, count)
            if out.scored:
                effects.append(PromptScored(key=key, first_position=start + 1, tokens=out.scored))
            if len(out.sampled) == 1:  # true for nearly every row
                self._append(sequence, out.sampled[0], now_s, effects)
                continue
            for index, token in enumerate(out.sampled):
                if index > 0:  # the previous token was an accepted draft, so its KV is computed
                    self._sequences.advance(sequence, 1)
                self._append(sequence, token, now_s, effects)
                if key not in self._sequences.by_key:
                    break
        return effects

    def apply_run(self, step: DecodeStep, count: int, token: TokenOut, now_s: float) -> list[DecodeEffect]:
        effects: list[DecodeEffect] = []
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
            self._append(sequence, token, now_s, effects)
        return effects

    def _discard_wrong(self, sequence: DecodeSequence, wrong: WrongBlock, now_s: float) -> DecodeEffect:
        """Discards the step's result for the sequence, which is prefilled again into other blocks."""
        self._sequences.blocks.invalidate(sequence.blocks[wrong.index])
        self._sequences.preempt(sequence, now_s)
        return KvMistaken(key=sequence.key, error=wrong.error)

    def _append_plain(
        self, decoding: Sequence[DecodeSequence], token_ids: Sequence[int]
    ) -> tuple[PlainSampled, list[RowOut], list[tuple[DecodeSequence, int]]]:
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
        sampled = PlainSampled(
            keys=[each.key for each in continuing],
            output_indexes=[each.computed - each.prompt_len for each in continuing],
            token_ids=plain_ids,
        )
        return sampled, outs, shares

    def _append(self, sequence: DecodeSequence, token: TokenOut, now_s: float, effects: list[DecodeEffect]) -> None:
        """Adds the token and returns its effects."""
        attempt, tokens = sequence.attempt, sequence.tokens
        tokens.append(token.token_id)
        num_tokens = len(tokens)
        num_output = num_tokens - sequence.prompt_len
        finish = self._end_rule.finish(attempt.sampling, token.token_id, num_output, num_tokens)
        sampled = TokenRow(key=sequence.key, output_index=num_output - 1, tokens=(token,), finish=finish)
        if sequence.decoding_since_s is None:
            sampled = self._begun(sequence, sampled, now_s)
        elif sequence.preempted_at_s is not None:
            decode_s = sequence.preempted_at_s - sequence.decoding_since_s
            sampled = replace(sampled, decode_s=decode_s, preempted_s=now_s - sequence.preempted_at_s)
            sequence.decoding_since_s, sequence.preempted_at_s = now_s, None
        if sequence.unreported_preemptions:
            sampled = replace(sampled, preemptions=sequence.unreported_preemptions)
            sequence.unreported_preemptions = 0
        if finish is None:
            size = self._block_size
            sequence.plain_until = min(num_tokens + -num_tokens % size, sequence.ends_at - 1)
            effects.append(sampled)
            return
        assert sequence.decoding_since_s is not None
        decode_s = sampled.decode_s + now_s - sequence.decoding_since_s
        effects.append(replace(sampled, decode_s=decode_s))
        self._sequences.remove(sequence)
        effects.append(Released(key=sequence.key))

    def _ended_at(self, now_s: float) -> None:
        """A step has ended. May be called twice for one step."""
        if now_s > self._ended_s:
            self._begun_s, self._ended_s = self._ended_s, now_s

    def _begun(self, sequence: DecodeSequence, sampled: TokenRow, now_s: float) -> TokenRow:
        """Adds the waiting time and the time of the prompt to the attempt's first row."""
        if not sequence.is_local:  # a remote attempt joined the step that has just ended
            sequence.decoding_since_s = max(sequence.ready_s, self._begun_s)
            return replace(sampled, decode_queue_s=sequence.decoding_since_s - sequence.ready_s)
        assert sequence.started_s is not None
        sequence.decoding_since_s = now_s
        sequence.began_output(now_s)
        return replace(
            sampled,
            queue_s=sequence.started_s - sequence.attempt.arrived_s,
            prefill_s=now_s - sequence.started_s,
            cached_tokens=min(sequence.cached, len(sequence.attempt.prompt_ids)),
        )

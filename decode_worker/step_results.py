"""Applies the results of a step: sampled tokens, ends of texts, blocks with wrong content. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from decode_worker.checking import KvCheck, Mistake
from decode_worker.decode_sequence import DecodeSequence, Stage
from decode_worker.sequence_table import SequenceTable
from decode_worker.step import Step
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
        self._begun_s = 0.0  # end of the step before it, when the last step began

    def apply(self, step: Step, outs: Sequence[RowOut], now_s: float) -> list[DecodeEffect]:
        self._ended_at(now_s)
        effects: list[DecodeEffect] = []
        shares: Iterable[tuple[DecodeSequence, int]] = step.shares()
        if isinstance(outs, PlainOuts) and not step.prefilling and self._check is None:
            sampled, outs, shares = self._draw_plain(step.decoding, outs.token_ids)
            if sampled.keys:
                effects.append(sampled)
        for (resident, count), out in zip(shares, outs, strict=True):
            key = resident.key
            if self._sequences.residents.get(key) is not resident or resident.stage is not Stage.RUNNING:
                continue
            if self._check is not None and (wrong := self._check.find(resident, self._block_size)) is not None:
                effects.append(self._distrust(resident, wrong, now_s))
                continue
            start = resident.computed
            self._sequences.advance(resident, count)
            if out.scored:
                effects.append(PromptScored(key=key, first_position=start + 1, tokens=out.scored))
            if len(out.sampled) == 1:  # nearly every row
                self._draw(resident, out.sampled[0], now_s, effects)
                continue
            for index, token in enumerate(out.sampled):
                if index > 0:  # the previous token was an accepted draft, so its KV exists
                    self._sequences.advance(resident, 1)
                self._draw(resident, token, now_s, effects)
                if key not in self._sequences.residents:
                    break
        return effects

    def apply_run(self, step: Step, count: int, token: TokenOut, now_s: float) -> list[DecodeEffect]:
        effects: list[DecodeEffect] = []
        self._ended_at(now_s)
        size = self._block_size
        sampled = [token.token_id] * count
        for resident in step.decoding:
            tokens, computed = resident.tokens, resident.computed
            is_plain = resident.decoding_since_s is not None and resident.preempted_at_s is None
            if is_plain and len(tokens) + count < resident.ends_at and computed % size + count < size:
                tokens += sampled  # the usual case in a run
                resident.computed = computed + count
                continue
            tokens += sampled[1:]
            self._sequences.advance(resident, count)
            self._draw(resident, token, now_s, effects)
        return effects

    def _distrust(self, resident: DecodeSequence, wrong: Mistake, now_s: float) -> DecodeEffect:
        """The step's result for it is discarded; its text is prefilled again into other blocks."""
        self._sequences.blocks.distrust(resident.blocks[wrong.index])
        self._sequences.preempt(resident, now_s)
        return KvMistaken(key=resident.key, error=wrong.error)

    def _draw_plain(
        self, decoding: Sequence[DecodeSequence], token_ids: Sequence[int]
    ) -> tuple[PlainSampled, list[RowOut], list[tuple[DecodeSequence, int]]]:
        """Adds tokens that only lengthen a text, the usual case. Returns the other rows' outputs, and their sequences,
        for `apply`."""
        told: list[DecodeSequence] = []
        plain_ids: list[int] = []
        outs: list[RowOut] = []
        shares: list[tuple[DecodeSequence, int]] = []
        for resident, token_id in zip(decoding, token_ids, strict=True):
            tokens = resident.tokens
            num_tokens = len(tokens)
            if num_tokens >= resident.plain_until or token_id in resident.end_ids:
                outs.append(plain_out(token_id))
                shares.append((resident, 1))
                continue
            tokens.append(token_id)
            resident.computed = num_tokens
            told.append(resident)
            plain_ids.append(token_id)
        sampled = PlainSampled(
            keys=[each.key for each in told],
            output_indexes=[each.computed - each.prompt_len for each in told],
            token_ids=plain_ids,
        )
        return sampled, outs, shares

    def _draw(self, resident: DecodeSequence, token: TokenOut, now_s: float, effects: list[DecodeEffect]) -> None:
        """Adds the effects of the token."""
        attempt, tokens = resident.attempt, resident.tokens
        tokens.append(token.token_id)
        num_tokens = len(tokens)
        num_output = num_tokens - resident.prompt_len
        finish = self._end_rule.finish(attempt.sampling, token.token_id, num_output, num_tokens)
        sampled = TokenRow(key=resident.key, output_index=num_output - 1, tokens=(token,), finish=finish)
        if resident.decoding_since_s is None:
            sampled = self._begun(resident, sampled, now_s)
        elif resident.preempted_at_s is not None:
            decode_s = resident.preempted_at_s - resident.decoding_since_s
            sampled = replace(sampled, decode_s=decode_s, preempted_s=now_s - resident.preempted_at_s)
            resident.decoding_since_s, resident.preempted_at_s = now_s, None
        if finish is None:
            size = self._block_size
            resident.plain_until = min(num_tokens + -num_tokens % size, resident.ends_at - 1)
            effects.append(sampled)
            return
        assert resident.decoding_since_s is not None
        decode_s = sampled.decode_s + now_s - resident.decoding_since_s
        effects.append(replace(sampled, decode_s=decode_s, preemptions=resident.preemptions))
        self._sequences.remove(resident)
        effects.append(Released(key=resident.key))

    def _ended_at(self, now_s: float) -> None:
        """A step has ended. May be called twice for one step."""
        if now_s > self._ended_s:
            self._begun_s, self._ended_s = self._ended_s, now_s

    def _begun(self, resident: DecodeSequence, sampled: TokenRow, now_s: float) -> TokenRow:
        """The attempt's first token here: how long it waited, and how long its prompt took."""
        if not resident.is_local:  # it took part only in the step that has just ended
            resident.decoding_since_s = max(resident.ready_s, self._begun_s)
            return replace(sampled, decode_queue_s=resident.decoding_since_s - resident.ready_s)
        assert resident.started_s is not None
        resident.decoding_since_s = now_s
        resident.start_clock(len(resident.tokens), now_s)
        return replace(
            sampled,
            queue_s=resident.started_s - resident.attempt.arrived_s,
            prefill_s=now_s - resident.started_s,
            cached_tokens=min(resident.cached, len(resident.attempt.prompt_ids)),
        )

"""Chooses the drafts of decode rows: n-grams from their own text, if they pay, fit into memory and are allowed.
Pure."""

from __future__ import annotations

from typing import final

from decode_worker.decode_sequence import DecodeSequence
from decode_worker.drafting import DraftRule
from decode_worker.sequence_table import SequenceTable
from decode_worker.speculation import NgramProposer
from pdserve.core.attempt import EndRule


@final
class Drafter:
    def __init__(self, rule: DraftRule, sequences: SequenceTable, end_rule: EndRule) -> None:
        self._rule = rule
        self._sequences = sequences
        self._end_rule = end_rule

    def draft(
        self, decoding: list[DecodeSequence], context_tokens: int, tpot_s: float | None
    ) -> list[list[int]] | None:
        """The drafts of each decode row, with allocated blocks; None if drafts do not pay."""
        least = self._rule.least_probability(len(decoding))
        drafts: list[list[int]] = []
        probabilities: list[list[float]] = []
        for sequence in decoding:
            if sequence.proposer is None:
                sequence.proposer = NgramProposer()
            sequence.proposer.read(sequence.tokens)
            probabilities.append(sequence.proposer.accept_probabilities(self._rule.most, least))
            drafts.append(self._cut(sequence, sequence.proposer.propose(sequence.tokens, len(probabilities[-1]))))
            del probabilities[-1][len(drafts[-1]) :]
        counts = self._rule.counts(probabilities, context_tokens=context_tokens, tpot_s=tpot_s)
        if counts is None:
            return None
        for sequence, draft, count in zip(decoding, drafts, counts, strict=True):
            del draft[self._sequences.room_for(sequence, count) :]
        return drafts if any(drafts) else None

    def _cut(self, sequence: DecodeSequence, draft: list[int]) -> list[int]:
        """Cuts drafts after a token that ends the text."""
        sampling = sequence.attempt.sampling
        room = min(
            sampling.max_tokens - sequence.num_output - 1, self._end_rule.max_context_tokens - len(sequence.tokens) - 1
        )
        for index, token in enumerate(draft[: max(0, room)]):
            if self._end_rule.is_end(sampling, token):
                return draft[:index]
        return draft[: max(0, room)]

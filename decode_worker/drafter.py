"""Chooses the drafts of decode rows: repetitions in their text, as far as they pay, fit into memory and are allowed.
Pure."""

from __future__ import annotations

from typing import final

from decode_worker.decode_sequence import DecodeSequence
from decode_worker.drafting import DraftRule
from decode_worker.sequence_table import SequenceTable
from decode_worker.speculation import Guesser
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
        """Drafts for each decode row, with blocks for them; None if they do not pay."""
        least = self._rule.least_chance(len(decoding))
        guesses: list[list[int]] = []
        chances: list[list[float]] = []
        for sequence in decoding:
            if sequence.guesser is None:
                sequence.guesser = Guesser()
            sequence.guesser.read(sequence.tokens)
            chances.append(sequence.guesser.chances(self._rule.most, least))
            guesses.append(self._cut(sequence, sequence.guesser.guess(sequence.tokens, len(chances[-1]))))
            del chances[-1][len(guesses[-1]) :]
        counts = self._rule.counts(chances, context_tokens=context_tokens, tpot_s=tpot_s)
        if counts is None:
            return None
        for sequence, guess, count in zip(decoding, guesses, counts, strict=True):
            del guess[self._sequences.room_for(sequence, count) :]
        return guesses if any(guesses) else None

    def _cut(self, sequence: DecodeSequence, guess: list[int]) -> list[int]:
        """Without drafts after the end of the text."""
        sampling = sequence.attempt.sampling
        room = min(
            sampling.max_tokens - sequence.num_output - 1, self._end_rule.max_context_tokens - len(sequence.tokens) - 1
        )
        for index, token in enumerate(guess[: max(0, room)]):
            if self._end_rule.is_end(sampling, token):
                return guess[:index]
        return guess[: max(0, room)]

"""Masks of one row at a time: the matcher that has consumed its output is found by the output, or made again.

Matchers of one grammar share its lexer, whose states count against a limit. So a matcher that fails is made again from
a fresh compilation before its row fails: the states of another request must not cause a failure.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np

from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import Grammar

if TYPE_CHECKING:  # a machine without llguidance serves requests without a grammar
    from llguidance import LLMatcher

    from pdserve.structured.compile import Compiler

MAX_COMPILED: Final = 64  # grammars
MAX_MATCHERS: Final = 512  # each takes some 150 bytes per output token
MAX_ROW_S: Final = 0.5  # of CPU for a row in one step: beyond it the row fails, because the other rows wait for it
MAX_STEP_TOKENS: Final = 17  # tokens that one step may add to a row: one, and the accepted drafts


@dataclass(frozen=True, slots=True)
class RowMasks:
    """One bit per token, little-endian, for each sampled position of a row, up to the first draft that the grammar
    forbids."""

    masks: tuple[bytes | memoryview, ...] = ()
    failed: str | None = None  # why no token can be sampled


@final
class Matchers:
    """Compiled grammars and matchers, least recently used first."""

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self.num_words = 0 if compiler is None else compiler.num_words  # of 32 tokens, in a mask
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._matchers: OrderedDict[tuple[Grammar, tuple[int, ...]], LLMatcher] = OrderedDict()
        self.num_replays = 0

    def take(self, grammar: Grammar, output: tuple[int, ...]) -> LLMatcher | None:
        """The matcher that has consumed exactly `output`, for the caller alone."""
        return self._matchers.pop((grammar, output), None)

    def give(self, grammar: Grammar, output: tuple[int, ...], matcher: LLMatcher) -> None:
        """Stores a matcher that has consumed `output`."""
        self._matchers[grammar, output] = matcher

    def masks(self, grammar: Grammar, output: tuple[int, ...], drafts: Sequence[int]) -> RowMasks:
        began_s = time.thread_time()
        try:
            matcher = self._at(grammar, output)
            masks = () if matcher is None else self._masks(matcher, drafts)
            if matcher is None or not masks:
                matcher = self._replayed(grammar, output, is_fresh=True)
                masks = self._masks(matcher, drafts)
        except InvalidRequest as error:
            return RowMasks(failed=str(error))
        if not masks:
            from pdserve.structured.compile import why_stuck

            return RowMasks(failed=f"{grammar.field}: stuck after {len(output)} tokens: {why_stuck(matcher)}")
        spent_s = time.thread_time() - began_s
        if spent_s > MAX_ROW_S:
            return RowMasks(failed=f"{grammar.field}: {spent_s:.1f} s for a mask, where {MAX_ROW_S:g} s are allowed")
        if not matcher.is_error():
            self._matchers[grammar, output] = matcher
        while len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        return RowMasks(masks)

    def _at(self, grammar: Grammar, output: tuple[int, ...]) -> LLMatcher | None:
        """A matcher that has consumed `output`; None if the shared lexer has reached its limit."""
        for num_new in range(min(MAX_STEP_TOKENS, len(output)) + 1):
            matcher = self._matchers.pop((grammar, output[: len(output) - num_new]), None)
            if matcher is not None:
                return matcher if matcher.consume_tokens(list(output[len(output) - num_new :])) else None
        matcher = self._replayed(grammar, output, is_fresh=False)
        return None if matcher.is_error() else matcher

    def _replayed(self, grammar: Grammar, output: tuple[int, ...], *, is_fresh: bool) -> LLMatcher:
        compiled = None if is_fresh else self._compiled.pop(grammar, None)
        if compiled is None:
            if self._compiler is None:
                raise InvalidRequest(grammar.field, "a grammar", "none: this model's tokens cannot be masked")
            compiled = self._compiler.compile(grammar)
        self._compiled[grammar] = compiled
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        matcher = compiled.deep_copy()
        if output:
            self.num_replays += 1
            matcher.consume_tokens(list(output))
        return matcher

    def _masks(self, matcher: LLMatcher, drafts: Sequence[int]) -> tuple[bytes, ...]:
        """Leaves the matcher at the same position, or in an error state. No mask if no token is allowed."""
        word_W = np.empty(self.num_words, np.int32)
        masks: list[bytes] = []
        num_consumed = 0
        for draft in (*drafts, None):
            matcher.unsafe_compute_mask_ptr(word_W.ctypes.data, word_W.nbytes)
            if matcher.is_error() or not word_W.any():
                break  # after some drafts: the row fails only if it gets here
            mask = word_W.tobytes()
            masks.append(mask)
            if draft is None or matcher.is_stopped() or not _is_allowed(mask, draft):
                break
            if not matcher.consume_token(draft):
                break
            num_consumed += 1
        if num_consumed:
            matcher.rollback(num_consumed)
        return tuple(masks)


def _is_allowed(mask: bytes, token_id: int) -> bool:
    return token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)

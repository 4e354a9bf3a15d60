"""Which tokens a row's grammar allows next: a function of the grammar and the row's output so far.

No state that affects results is kept between steps. A matcher has consumed some output and is kept only to save work:
the next step advances it by the sampled tokens. If there is none (after preemption, migration or recovery), it is made
again by replaying the output, which gives the same mask.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.grammar import Grammar
from pdserve.engine.interface import EngineSpec, Row

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from pdserve.structured.compile import Compiler


# --- matchers and the masks of one row ------------------------------------------------------------------------
# The matcher that has consumed a row's output is found by the output, or made again.
#
# Matchers of one grammar share its lexer, whose states count against a limit. So a matcher that fails is made again
# from a fresh compilation before its row fails: the states of another request must not cause a failure.

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


# --- masks of a step ------------------------------------------------------------------------------------------

MAX_THREADS: Final = 8  # threads that compute the masks of a step
FEWEST_TOGETHER: Final = 4  # rows from which on several threads are used
FIRST_WORDS: Final = 64  # of a mask, which nearly always allow a token


log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Cursor:
    """A text that was masked in recent steps, identified by its list of tokens, to which tokens are only appended."""

    history: Sequence[int]  # kept so that its identity is not reused
    grammar: Grammar
    num_tokens: int  # number of tokens of the list that its matcher has consumed
    matcher: LLMatcher | None  # None: it must be found by the output, or built again


Moves = tuple[Sequence[Cursor | None], Sequence[int]]  # of rows: cursors, and the tokens that were appended since


@dataclass(frozen=True, slots=True)
class Filled:
    cursors: Sequence[Cursor | None]  # for the next step: of each row, None if it has no mask
    failed: dict[int, str]  # by row number: why no token can be sampled; the row's mask has no meaning


@dataclass(slots=True)
class _Batch:
    """Texts of one call that each have a matcher: in the next call they probably advance by one token each."""

    cursors: Sequence[Cursor | None]
    matchers: list[LLMatcher]
    pairs: list[tuple[LLMatcher, int]]  # matchers and their rows
    num_steps: int = 0  # tokens that each matcher has consumed since, which its cursor does not count yet


@final
class Grammars:
    """Used by the engine's thread only. On a GPU its work overlaps with the kernels that were launched before."""

    def __init__(self, compiler: Compiler | None) -> None:
        """None if grammars are not supported; every row with a grammar then fails."""
        self.matchers = Matchers(compiler)
        self.num_words = self.matchers.num_words  # of 32 tokens, in a mask
        self._cursors: OrderedDict[int, Cursor] = OrderedDict()  # by identity of the list
        self._executor: LLExecutor | None = None
        self._words_RW = np.zeros((0, 0), np.int32)
        self._batch: _Batch | None = None

    def masks_of(self, rows: Sequence[Row]) -> dict[int, RowMasks]:
        """The masks of the rows with a grammar that sample, by row number. They are valid until the next call."""
        bound = {index: row for index, row in enumerate(rows) if row.sample is not None and row.sample.grammar}
        if bound:
            self._dissolve()
        masks = {index: self._by_output(row) for index, row in bound.items() if row.drafts}
        together = [index for index in bound if index not in masks]
        if together:
            if len(self._words_RW) < len(together):
                self._words_RW = np.zeros((len(together), self.num_words), np.int32)
            words_RW = self._words_RW[: len(together)]
            failed = self.fill(lambda at: rows[together[at]], words_RW).failed
            views, size = self._words_RW.data.cast("B"), 4 * self.num_words
            for at, index in enumerate(together):
                view = views[size * at : size * (at + 1)]
                masks[index] = RowMasks(failed=failed[at]) if at in failed else RowMasks((view,))
        return masks

    def fill(self, row_at: Callable[[int], Row], words_RW: Any, moves: Moves | None = None) -> Filled:
        """Writes the masks of rows with a grammar and without drafts: int32 [R, num_words], contiguous.

        One library call advances all matchers and another writes all masks, both with several threads. `moves` has for
        each row the cursor that the last call returned for it, if any, and the token that was appended since. `row_at`
        is called with the numbers of the other rows, and of those whose matcher cannot continue.
        """
        batch = self._batch
        if batch is not None and moves is not None and moves[0] is batch.cursors:  # nearly every step
            if self._step(batch, moves[1], words_RW):
                return Filled(batch.cursors, {})
            moves = None  # some have consumed their token: look at all of them
        self._dissolve()
        cursors, matchers = self._move(row_at, len(words_RW), moves)
        is_done = self._compute(list(zip(matchers.values(), matchers, strict=True)), words_RW)
        failed: dict[int, str] = {}
        for index in [index for index, done in enumerate(is_done) if not done]:
            row = row_at(index)
            masks = self._by_output(row)
            if masks.masks:
                words_RW[index] = np.frombuffer(masks.masks[0], np.int32)
                cursors[index] = self._cursors[id(row.history)]
            else:
                failed[index] = masks.failed or ""
        while len(self._cursors) > MAX_MATCHERS:
            self._cursors.popitem(last=False)
        if len(cursors) >= FEWEST_TOGETHER:
            together = [one.matcher for one in cursors if one is not None and one.matcher is not None]
            if len(together) == len(cursors):
                self._batch = _Batch(cursors, together, list(zip(together, range(len(together)), strict=True)))
        return Filled(cursors, failed)

    def _step(self, batch: _Batch, token_ids: Sequence[int], words_RW: Any) -> bool:
        """Whether every matcher of the batch has consumed its token, and every mask was written."""
        allowed = self._threads().consume_token_par(list(zip(batch.matchers, token_ids, strict=True)))
        if all(allowed):
            batch.num_steps += 1
            return all(self._compute(batch.pairs, words_RW))
        for cursor, is_allowed in zip(batch.cursors, allowed, strict=True):
            if cursor is not None:
                cursor.num_tokens += is_allowed
        return False

    def _dissolve(self) -> None:
        """Ends the batch. From now on its cursors are advanced one by one."""
        batch, self._batch = self._batch, None
        for cursor in () if batch is None else batch.cursors:
            if batch is not None and cursor is not None:
                cursor.num_tokens += batch.num_steps
                self._remember(cursor)

    def _remember(self, cursor: Cursor) -> None:
        """As the text that was masked last."""
        key = id(cursor.history)
        self._cursors[key] = cursor
        self._cursors.move_to_end(key)

    def _move(
        self, row_at: Callable[[int], Row], count: int, moves: Moves | None
    ) -> tuple[list[Cursor | None], dict[int, LLMatcher]]:
        """Cursors and matchers of texts that were masked before, advanced to their ends, by row number. Those of the
        other rows must be found by their outputs."""
        cursors: list[Cursor | None] = [None] * count
        matchers: dict[int, LLMatcher] = {}
        steps: list[tuple[LLMatcher, int]] = []
        moving: list[tuple[int, Cursor]] = []
        given, token_ids = ([None] * count, [0] * count) if moves is None else moves
        for index, (cursor, token) in enumerate(zip(given, token_ids, strict=True)):
            if cursor is None or cursor.matcher is None:
                row = row_at(index)
                cursor = self._cursor_of(row)
                if cursor is None:
                    continue
                if cursor.matcher is None or len(row.history) != cursor.num_tokens + 1:
                    if (matcher := self._advanced(row, cursor)) is not None:
                        cursors[index], matchers[index] = cursor, matcher
                    continue
                token = row.history[-1]
            steps.append((cursor.matcher, token))
            moving.append((index, cursor))
        for (index, cursor), (matcher, _), is_allowed in zip(moving, steps, self._consume(steps), strict=True):
            if is_allowed:
                cursor.num_tokens += 1
                self._remember(cursor)
                cursors[index], matchers[index] = cursor, matcher
        return cursors, matchers

    def _cursor_of(self, row: Row) -> Cursor | None:
        cursor = self._cursors.get(id(row.history))
        grammar = None if row.sample is None else row.sample.grammar
        if cursor is None or (cursor.grammar is not grammar and cursor.grammar != grammar):
            return None
        return cursor

    def _advanced(self, row: Row, cursor: Cursor) -> LLMatcher | None:
        """The matcher of a text to which any number of tokens was appended; None if it must be found by its output."""
        if len(row.history) < cursor.num_tokens:
            return None
        if cursor.matcher is None:
            output = tuple(row.history[row.prompt_len : cursor.num_tokens])
            cursor.matcher = self.matchers.take(cursor.grammar, output)
        matcher = cursor.matcher
        new = list(row.history[cursor.num_tokens :])
        if matcher is None or len(new) > MAX_STEP_TOKENS or (new and not matcher.consume_tokens(new)):
            return None
        cursor.num_tokens = len(row.history)
        self._cursors.move_to_end(id(row.history))
        return matcher

    def _consume(self, steps: list[tuple[LLMatcher, int]]) -> list[bool]:
        """Advances each matcher by one token; whether its grammar allows that token."""
        if len(steps) < FEWEST_TOGETHER:
            return [matcher.consume_token(token) for matcher, token in steps]
        return self._threads().consume_token_par(steps)

    def _compute(self, pairs: list[tuple[LLMatcher, int]], words_RW: Any) -> list[bool]:
        """Whether each row's mask was written. It was not if no token is allowed or a matcher took too long: such rows
        are handled one by one. `pairs`: matchers and their rows."""
        is_done = [False] * len(words_RW)
        if not pairs:
            return is_done
        began_s, size = time.perf_counter(), 4 * self.num_words
        first = words_RW.ctypes.data
        if len(pairs) < FEWEST_TOGETHER:
            for matcher, index in pairs:
                matcher.unsafe_compute_mask_ptr(first + size * index, size)
        else:
            self._threads().unsafe_compute_mask_ptr(pairs, first, size, len(words_RW))
        if time.perf_counter() - began_s > MAX_ROW_S:
            return is_done
        has_any = words_RW[:, :FIRST_WORDS].any(axis=1).tolist()
        for matcher, index in pairs:
            is_done[index] = (has_any[index] or bool(words_RW[index].any())) and not matcher.is_error()
        return is_done

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            self._executor = make_threads()
        return self._executor

    def _by_output(self, row: Row) -> RowMasks:
        """Finds the matcher by the output, or makes it again; the next step may find it by the list."""
        assert row.sample is not None
        grammar = row.sample.grammar
        assert grammar is not None
        cursor = self._cursors.pop(id(row.history), None)
        output = tuple(row.history[row.prompt_len :])
        if cursor is not None and cursor.matcher is not None and not cursor.matcher.is_error():
            self.matchers.give(grammar, output[: cursor.num_tokens - row.prompt_len], cursor.matcher)
        masks = self.matchers.masks(grammar, output, row.drafts)
        # Removed immediately: many texts begin with the same tokens, and each needs its own matcher.
        matcher = self.matchers.take(grammar, output)
        self._cursors[id(row.history)] = Cursor(
            history=row.history, grammar=grammar, num_tokens=len(row.history), matcher=matcher
        )
        return masks


def make_threads() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))))


def open_grammars(folder: Path, spec: EngineSpec) -> Grammars:
    try:
        from pdserve.structured.compile import Compiler

        return Grammars(Compiler(folder, spec.vocab_size, spec.eos_token_ids))
    except (ModelError, ModuleNotFoundError) as error:
        # The model is served without grammars; the router rejects them for the same reason.
        log.warning("no grammar can be followed", extra={"reason": str(error)})
        return Grammars(None)

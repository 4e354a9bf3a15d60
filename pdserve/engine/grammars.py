"""Which tokens a row's grammar allows next: a function of the grammar and the row's output so far.

No state that affects results is kept between steps. A matcher has consumed some output and is kept only to save work:
the next step advances it by the sampled tokens. If there is none (after preemption, migration or recovery), it is made
again by replaying the output, which gives the same mask.

Matchers of one grammar share its lexer, whose states count against a limit. So a matcher that fails is made again from
a fresh compilation before its row fails: the states of another request must not cause a failure.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import numpy as np

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.grammar import Grammar
from pdserve.engine.interface import EngineSpec, Row

if TYPE_CHECKING:  # a machine without llguidance serves requests without a grammar
    from llguidance import LLExecutor, LLMatcher

    from pdserve.structured.compile import Compiler

MAX_COMPILED: Final = 64  # grammars
MAX_MATCHERS: Final = 512  # each takes some 150 bytes per output token
MAX_ROW_S: Final = 0.5  # of CPU for a row in one step: beyond it the row fails, because the other rows wait for it
MAX_THREADS: Final = 8  # threads that compute the masks of a step
MAX_STEP_TOKENS: Final = 17  # tokens that one step may add to a row: one, and the accepted drafts


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowMasks:
    """One bit per token, little-endian, for each sampled position of a row, up to the first draft that the grammar
    forbids."""

    masks: tuple[bytes | memoryview, ...] = ()
    failed: str | None = None  # why no token can be sampled


@dataclass(slots=True, kw_only=True)
class _Going:
    """A text that was masked in recent steps, identified by its list of tokens, to which tokens are only appended."""

    history: Sequence[int]  # kept so that its identity is not reused
    grammar: Grammar
    num_tokens: int  # number of tokens of the list that its matcher has consumed
    matcher: LLMatcher | None  # None: the matcher is still stored by its output


@final
class Grammars:
    """Used by the engine's thread only. On a GPU its work overlaps with the kernels that were launched before."""

    def __init__(self, compiler: Compiler | None) -> None:
        """None if grammars are not supported; every row with a grammar then fails."""
        self._compiler = compiler
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._matchers: OrderedDict[tuple[Grammar, tuple[int, ...]], LLMatcher] = OrderedDict()
        self._going: OrderedDict[int, _Going] = OrderedDict()  # by identity of the list
        self._executor: LLExecutor | None = None
        self._words_RW = np.zeros((0, 0), np.int32)
        self.num_replays = 0

    def masks_of(self, rows: Sequence[Row]) -> dict[int, RowMasks]:
        """The masks of the rows with a grammar that sample, by row number. They are valid until the next call.

        Rows without drafts whose token list has grown since the last step are masked together, by several threads.
        """
        masks: dict[int, RowMasks] = {}
        together: dict[int, LLMatcher] = {}
        for index, row in enumerate(rows):
            sampling = row.sample
            if sampling is None or sampling.grammar is None:
                continue
            matcher = None if row.drafts else self._advanced(row, sampling.grammar)
            if matcher is not None:
                together[index] = matcher
            else:
                masks[index] = self._by_output(row, sampling.grammar)
        for index, mask in zip(together, self._compute(list(together.values())), strict=True):
            grammar = self._going[id(rows[index].history)].grammar
            masks[index] = self._by_output(rows[index], grammar) if mask is None else mask
        while len(self._going) > MAX_MATCHERS:
            self._going.popitem(last=False)
        return masks

    def _advanced(self, row: Row, grammar: Grammar) -> LLMatcher | None:
        """The matcher of a text that was masked before, advanced to its end; None if it must be found by its output."""
        going = self._going.get(id(row.history))
        if going is None or going.grammar != grammar or len(row.history) < going.num_tokens:
            return None
        if going.matcher is None:
            going.matcher = self._matchers.pop((grammar, tuple(row.history[row.prompt_len : going.num_tokens])), None)
        matcher = going.matcher
        new = list(row.history[going.num_tokens :])
        if matcher is None or len(new) > MAX_STEP_TOKENS or (new and not matcher.consume_tokens(new)):
            return None
        going.num_tokens = len(row.history)
        self._going.move_to_end(id(row.history))
        return matcher

    def _by_output(self, row: Row, grammar: Grammar) -> RowMasks:
        """Finds the matcher by the output or makes it again. The next step may find it by the token list."""
        going = self._going.pop(id(row.history), None)
        output = tuple(row.history[row.prompt_len :])
        if going is not None and going.matcher is not None and not going.matcher.is_error():
            self._matchers[grammar, output[: going.num_tokens - row.prompt_len]] = going.matcher
        masks = self.masks(grammar, output, row.drafts)
        self._going[id(row.history)] = _Going(
            history=row.history, grammar=grammar, num_tokens=len(row.history), matcher=None
        )
        return masks

    def _compute(self, matchers: Sequence[LLMatcher]) -> list[RowMasks | None]:
        """None if no token is allowed or a matcher took too long: such rows are handled one by one."""
        if not matchers:
            return []
        assert self._compiler is not None
        num_words = self._compiler.num_words
        if len(self._words_RW) < len(matchers):
            self._words_RW = np.zeros((len(matchers), num_words), np.int32)
        words_RW = self._words_RW[: len(matchers)]
        began_s = time.perf_counter()
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(words_RW.ctypes.data, 4 * num_words)
        else:
            if self._executor is None:
                self._executor = _executor()
            pairs = [(matcher, index) for index, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, words_RW.ctypes.data, 4 * num_words, len(matchers))
        if time.perf_counter() - began_s > MAX_ROW_S:
            return [None] * len(matchers)
        most_R: list[int] = words_RW.view(np.uint32).max(axis=1).tolist()  # faster than any()
        views = words_RW.data.cast("B")
        size = 4 * num_words
        return [
            RowMasks((views[size * index : size * (index + 1)],)) if most and not matcher.is_error() else None
            for index, (matcher, most) in enumerate(zip(matchers, most_R, strict=True))
        ]

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
        assert self._compiler is not None
        word_W = np.empty(self._compiler.num_words, np.int32)
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


def _executor() -> LLExecutor:
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


def _is_allowed(mask: bytes, token_id: int) -> bool:
    return token_id < 8 * len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)

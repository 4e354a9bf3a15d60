"""Which tokens a row's grammar allows next: a function of the grammar and the row's output so far.

Nothing that decides lives here between steps. A matcher stands after some output and is kept only to save work: the
next step moves it on by the drawn tokens. Where it is gone, or was never here (preempted, moved, recovered), it is
made again by replaying the output, which gives the same mask.

Matchers of one grammar share its lexer, which counts the states it has met against a limit. So one that fails is made
again from a fresh compilation before its row is given up: what another request has met decides nothing.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.grammar import Grammar
from pdserve.engine.interface import EngineSpec, Row

if TYPE_CHECKING:  # a machine without llguidance serves what has no grammar
    from llguidance import LLMatcher

    from pdserve.structured.compile import Compiler

MAX_COMPILED: Final = 64  # grammars
MAX_MATCHERS: Final = 512  # some 150 bytes for each token of output
MAX_ROW_S: Final = 0.5  # of CPU for a row in one step: over it the row is given up, as the others wait for it
MAX_STEP_TOKENS: Final = 17  # that one step may have added to a row: one, and the accepted drafts


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowMasks:
    """One bit per token, little-endian, for each of a row's draws that counts: none behind a draft that cannot be."""

    masks: tuple[bytes, ...] = ()
    failed: str | None = None  # why no token can be drawn


@final
class Grammars:
    """For one thread: the engine's. On a GPU its work overlaps with the kernels that were launched before."""

    def __init__(self, compiler: Compiler | None) -> None:
        """None where no grammar can be followed: each row that brings one fails."""
        self._compiler = compiler
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._matchers: OrderedDict[tuple[Grammar, tuple[int, ...]], LLMatcher] = OrderedDict()
        self.num_replays = 0

    def masks_of(self, rows: Sequence[Row]) -> dict[int, RowMasks]:
        """By number of the row, of those that draw under a grammar."""
        masks = {}
        for index, row in enumerate(rows):
            if row.sample is not None and row.sample.grammar is not None:
                output = tuple(row.history[row.prompt_len :])
                masks[index] = self.masks(row.sample.grammar, output, row.drafts)
        return masks

    def masks(self, grammar: Grammar, output: tuple[int, ...], drafts: Sequence[int]) -> RowMasks:
        began_s = time.thread_time()
        try:
            matcher = self._at(grammar, output)
            masks = () if matcher is None else _masks(matcher, drafts)
            if matcher is None or not masks:
                matcher = self._replayed(grammar, output, is_fresh=True)
                masks = _masks(matcher, drafts)
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
        """A matcher that stands after `output`; None where the shared lexer refuses to go there."""
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


def open_grammars(folder: Path, spec: EngineSpec) -> Grammars:
    try:
        from pdserve.structured.compile import Compiler

        return Grammars(Compiler(folder, spec.vocab_size, spec.eos_token_ids))
    except (ModelError, ModuleNotFoundError) as error:
        # The model is served all the same; the router refuses grammars for the same reason.
        log.warning("no grammar can be followed", extra={"reason": str(error)})
        return Grammars(None)


def _masks(matcher: LLMatcher, drafts: Sequence[int]) -> tuple[bytes, ...]:
    """Leaves the matcher where it stands, or in error. No mask at all where nothing may follow."""
    masks: list[bytes] = []
    num_consumed = 0
    for draft in (*drafts, None):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            break  # behind some drafts: the row fails when it comes here, if it ever does
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

"""Rows that need more than the graph's sampling get the eager engine's tokens: alone, mixed, and asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pdserve.core.errors import InternalError
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.core.types import Sampling
from pdserve.engine.gpu.engine import GraphFlight
from pdserve.engine.gpu.resample import Bans
from pdserve.engine.interface import PENDING, Engine, Flight, Row
from pdserve.engine.sampling.grammars import Cursor, Filled, Moves, RowMasks

GRAMMAR = Grammar(GrammarKind.REGEX, "any")
STUCK = Grammar(GrammarKind.REGEX, "none")
#: Logits are so close that every counted token changes which token is next.
RIVALS = {"logit_bias": ((5, 60.0), (9, 59.5), (12, 59.0), (14, 58.5))}
SEEDED = {"temperature": 0.9, "seed": 5}
WITHOUT_HISTORY: tuple[dict[str, Any], ...] = (
    {"logprobs": 3},
    {},
    {"logit_bias": ((5, 30.0), (9, 29.5), (383, -100.0)), "logprobs": 0, **SEEDED},
    {"min_tokens": 4, "stop_token_ids": tuple(range(3, 67)), **SEEDED},
    {"allowed_token_ids": tuple(range(40, 60)), "top_k": 5, "logprobs": 64, **SEEDED},
    {"logit_bias": ((7, 1.0),), "min_p": 0.1, **SEEDED},
    {"repetition_penalty": 1.4, "logprobs": 1, **RIVALS},
    {"presence_penalty": 0.9, "frequency_penalty": 0.6, **RIVALS, **SEEDED},
    {"top_n_sigma": 1.2, **SEEDED, "temperature": 50.0},
)
WITH_HISTORY: tuple[dict[str, Any], ...] = (
    {"grammar": GRAMMAR, **SEEDED},
    {"grammar": GRAMMAR, "allowed_token_ids": tuple(range(300)), "logit_bias": ((6, 9.0),), "logprobs": 2},
    {"grammar": GRAMMAR, "repetition_penalty": 0.8, "frequency_penalty": 0.3, **RIVALS, **SEEDED},
    {"bad_token_ids": (*((token,) for token in range(3, 100)), (120, 121)), **SEEDED},
    # Sometimes these ban every token, and the grammar then takes precedence.
    {"grammar": GRAMMAR, "allowed_token_ids": (383,)},
)


class EveryThird:
    """Replaces Grammars: two of three tokens are allowed, depending on the last token."""

    num_words = 12

    def __init__(self) -> None:
        self.num_moves = 0

    def fill(self, row_at: Callable[[int], Row], words_RW: Any, moves: Moves | None = None) -> Filled:
        rows, failed = [row_at(index) for index in range(len(words_RW))], {}
        for row, cursor, token in zip(rows, *moves, strict=True) if moves is not None else ():
            if cursor is not None:
                self.num_moves += 1
                assert (id(cursor.history), token) == (id(row.history), row.history[-1])
        for index, masks in self.masks_of(rows).items():
            if masks.failed is not None:
                failed[index] = masks.failed
            else:
                words_RW[index].view(np.uint8)[:] = np.frombuffer(masks.masks[0].ljust(48, b"\0"), np.uint8)
        cursors = [
            Cursor(history=row.history, grammar=GRAMMAR, num_tokens=len(row.history), matcher=None) for row in rows
        ]
        return Filled(list(cursors), failed)

    def masks_of(self, rows: Sequence[Row]) -> dict[int, RowMasks]:
        masks = {}
        for index, row in enumerate(rows):
            if row.sample is None or row.sample.grammar is None:
                continue
            if row.sample.grammar == STUCK:
                masks[index] = RowMasks(failed="nothing meets it")
            else:
                masks[index] = RowMasks(tuple(self._masks(row)))
        return masks

    def _masks(self, row: Row) -> Iterator[bytes]:
        last = row.history[-1]
        for draft in (*row.drafts, None):
            is_allowed = (np.arange(384) + last) % 3 > 0
            # Shorter than the vocabulary: the remaining tokens are banned.
            yield np.packbits(is_allowed, bitorder="little").tobytes()[:47]
            if draft is None or draft >= 376 or not is_allowed[draft]:
                return
            last = draft


class Text:
    """One sequence on one engine."""

    def __init__(self, number: int, sampling: Sampling) -> None:
        self.sampling, self.blocks = sampling, list(range(4 * number, 4 * number + 4))
        self.prompt = [3 + (31 * number + 7 * at) % 380 for at in range(3 + 2 * (number % 13))]
        self.tokens = list(self.prompt)
        self.outs: list[Any] = []

    def row(self, num_pending: int = 0, follows: int | None = None) -> Row:
        start = len(self.tokens) - 1 + num_pending
        first = not self.outs and not num_pending
        return Row(
            tokens=self.tokens if first else (PENDING,) if num_pending else self.tokens[-1:],
            start=0 if first else start,
            blocks=self.blocks,
            sample=self.sampling,
            history=self.tokens,
            prompt_len=len(self.prompt),
            follows=follows,
        )

    def take(self, out: Any) -> None:
        assert out.failed is None
        self.outs += out.sampled
        self.tokens.append(out.sampled[0].token_id)


def texts_of(engine: Engine, kinds: Sequence[dict[str, Any]]) -> list[Text]:
    """Texts with their first token."""
    kinds = [{"temperature": 0.0, "max_tokens": 16, **kind} for kind in kinds]
    texts = [Text(number, Sampling(**kind)) for number, kind in enumerate(kinds)]
    for text in texts:
        text.take(engine.step([text.row()])[0])
    return texts


def assert_same(ours: Text, theirs: Text) -> None:
    assert ours.tokens == theirs.tokens, ours.sampling
    for mine, other in zip(ours.outs, theirs.outs, strict=True):
        assert (mine.logprob is None) == (other.logprob is None)
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]
        assert [logprob for _, logprob in mine.top] == pytest.approx([logprob for _, logprob in other.top], abs=1e-4)


def test_resampled_rows_match_the_eager_engine(make_pair: Callable[..., Any]) -> None:
    eager, graph = make_pair("llama", most_rows=14, grammars=EveryThird())
    kinds = (*WITHOUT_HISTORY, *WITH_HISTORY)
    ours, theirs = texts_of(graph, kinds), texts_of(eager, kinds)
    for _ in range(3):
        flight = graph.launch([text.row() for text in ours], None)
        assert isinstance(flight, GraphFlight)
        for text, out in zip(ours, flight.wait(), strict=True):
            text.take(out)
        for text, out in zip(theirs, eager.step([text.row() for text in theirs]), strict=True):
            text.take(out)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
    assert all(40 <= token < 60 for token in ours[4].tokens[len(ours[4].prompt) :])


@pytest.mark.slow  # the test below has the same rows and others
def test_resampled_rows_run_asynchronously(make_pair: Callable[..., Any]) -> None:
    eager, graph = make_pair("llama", most_rows=9)
    run_asynchronously(eager, graph, WITHOUT_HISTORY, num_unsampled=0)


def test_rows_that_need_the_last_token_are_sampled_late(make_pair: Callable[..., Any]) -> None:
    """Together with rows that do not. All rows that are resampled wait with them."""
    grammars = EveryThird()
    eager, graph = make_pair("llama", most_rows=14, grammars=grammars)
    kinds = (*WITHOUT_HISTORY, *WITH_HISTORY)
    run_asynchronously(eager, graph, kinds, num_unsampled=len(kinds) - 2)
    assert grammars.num_moves == 3, "only its row with a grammar, in the asynchronous steps"


def run_asynchronously(eager: Any, graph: Any, kinds: Sequence[dict[str, Any]], num_unsampled: int) -> None:
    theirs, ours = texts_of(eager, kinds), texts_of(graph, kinds)
    for _ in range(4):
        for text, out in zip(theirs, eager.step([text.row() for text in theirs]), strict=True):
            text.take(out)
    flight: Flight = graph.launch([text.row() for text in ours], None)
    order = list(range(len(ours)))
    for step in range(3):
        before, was = flight, order
        order = order[1:] + order[:1] if step % 2 else order[::-1]
        flight = graph.launch([ours[which].row(1, was.index(which)) for which in order], before)
        assert abs(len(flight.unsampled) - num_unsampled) <= 1  # min_tokens applies only at first.
        for which, out in zip(was, before.wait(), strict=True):
            ours[which].take(out)
        if num_unsampled:
            flight.sample({index: ours[order[index]].row() for index in flight.unsampled})
    for which, out in zip(order, flight.wait(), strict=True):
        ours[which].take(out)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)


def test_a_step_is_sampled_before_it_is_waited_for_or_followed(make_pair: Callable[..., Any]) -> None:
    """An ended sequence is not sampled, and the other row samples the same as alone."""
    eager, graph = make_pair("llama", grammars=EveryThird())
    kinds: tuple[dict[str, Any], ...] = ({"grammar": GRAMMAR, **SEEDED}, {"grammar": GRAMMAR}, {})
    theirs, ours = texts_of(eager, kinds), texts_of(graph, kinds)
    for _ in range(3):
        for text, out in zip(theirs, eager.step([text.row() for text in theirs]), strict=True):
            text.take(out)
    before = graph.launch([text.row() for text in ours], None)
    flight = graph.launch([text.row(1, index) for index, text in enumerate(ours)], before)
    assert list(flight.unsampled) == [0, 1]
    for text, out in zip(ours, before.wait(), strict=True):
        text.take(out)
    with pytest.raises(InternalError, match="2 rows were not sampled"):
        flight.wait()
    with pytest.raises(InternalError, match="before the next launch"):
        graph.launch([ours[2].row(1, 2)], flight)
    flight.sample({1: ours[1].row()})
    following = graph.launch([ours[which].row(1, which) for which in (1, 2)], flight)
    outs = flight.wait()
    for which in (1, 2):
        ours[which].take(outs[which])
    following.sample({0: ours[1].row()})
    for which, out in zip((1, 2), following.wait(), strict=True):
        ours[which].take(out)
        assert_same(ours[which], theirs[which])


def test_a_row_with_a_stuck_grammar_fails_alone(make_pair: Callable[..., Any]) -> None:
    eager, graph = make_pair("llama", grammars=EveryThird())
    [plain, bound] = texts_of(graph, [{}, {"grammar": GRAMMAR}])
    [other, _] = texts_of(eager, [{}, {"grammar": GRAMMAR}])
    bound.sampling = Sampling(temperature=0.0, grammar=STUCK)
    first, second = graph.step([plain.row(), bound.row()])
    assert (second.sampled, second.failed) == ((), "nothing meets it")
    plain.take(first)
    other.take(eager.step([other.row()])[0])
    assert_same(plain, other)


def test_only_constant_bans_are_cached() -> None:
    bans = Bans(70, (2,), 1)

    def row(num_output: int, **sampling: Any) -> Row:
        tokens = [5] * (1 + num_output)
        sample = Sampling(temperature=0.0, **sampling)
        return Row(tokens=[5], start=num_output, blocks=[0], sample=sample, history=tokens, prompt_len=1)

    one = row(0, min_tokens=1)
    words = bans.words(one, None)
    assert words is bans.words(one, None)
    assert list(words) == [0xFFFFFFFB, 0xFFFFFFFF, 0x3F]
    later = Row(tokens=[5], start=1, blocks=[0], sample=one.sample, history=[5, 5], prompt_len=1)
    assert bans.words(later, None) is None
    only = bans.words(row(0, allowed_token_ids=(33, 69)), None)
    assert list(only) == [0, 2, 0x20]
    assert bans.words(one, None) is not words, "one is kept"
    assert bans.words(row(0), b"\xff" * 99) is not None
    assert list(bans.words(row(0), b"\x01" + b"\xff" * 98)) == [0xFFFFFF01, 0xFFFFFFFF, 0xFFFFFFFF]
    assert list(bans.words(row(1, bad_token_ids=((5, 7),)), None)) == [0xFFFFFF7F, 0xFFFFFFFF, 0x3F]

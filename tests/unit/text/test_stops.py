from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.stops import ReleasedText, StopMatcher

LETTERS = st.text("ab\n", max_size=40)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: Sequence[str], is_stop_included: bool) -> tuple[str, str | None]:
    """Reads character by character: the first stop string to be complete wins, the longest of several."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if is_stop_included else end - len(stop)], stop
    return text, None


def streamed(pieces: Sequence[str], stops: Sequence[str], is_stop_included: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, is_stop_included=is_stop_included)
    out = ""
    for text in pieces:
        piece = matcher.push(text)
        out += piece.text
        if piece.stop is not None:
            return out, piece.stop
    return out + matcher.finish(), None


@given(st.lists(LETTERS, max_size=12), STOPS, st.booleans())
def test_stop_strings_match_a_naive_search(pieces: list[str], stops: list[str], is_stop_included: bool) -> None:
    assert streamed(pieces, stops, is_stop_included) == naive("".join(pieces), stops, is_stop_included)


@given(LETTERS, STOPS, st.booleans())
def test_pieces_do_not_change_the_result(text: str, stops: list[str], is_stop_included: bool) -> None:
    assert streamed([text], stops, is_stop_included) == streamed(list(text), stops, is_stop_included)


@given(st.lists(LETTERS, max_size=12), STOPS)
def test_sent_text_never_contains_part_of_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    """Only a possible prefix is held back, and never more than the longest stop less one character."""
    matcher, out, given_text = StopMatcher(stops), "", ""
    for text in pieces:
        given_text += text
        piece = matcher.push(text)
        out += piece.text
        if piece.stop is not None:
            return
        held = given_text[len(out) :]
        assert given_text.startswith(out)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_over_three_pieces_is_held_back_then_dropped() -> None:
    matcher = StopMatcher(["###"])
    assert [matcher.push(text) for text in ("ab#", "#", "#cd")] == [
        ReleasedText("ab"),
        ReleasedText(""),
        ReleasedText("", "###"),
    ]


def test_a_partial_stop_string_is_released() -> None:
    matcher = StopMatcher(["###"])
    assert [matcher.push(text) for text in ("ab##", "c")] == [ReleasedText("ab"), ReleasedText("##c")]


def test_an_included_stop_string_delays_nothing() -> None:
    matcher = StopMatcher(["###"], is_stop_included=True)
    assert [matcher.push(text) for text in ("ab#", "##cd")] == [ReleasedText("ab#"), ReleasedText("##", "###")]


def test_text_before_min_tokens_neither_ends_nor_begins_a_stop() -> None:
    matcher = StopMatcher(["##"])
    assert matcher.push_unmatched("a##b#") == ReleasedText("a##b#")
    assert matcher.push("#c") == ReleasedText("#c")


def test_without_stop_strings_text_is_sent_at_once() -> None:
    assert StopMatcher([]).push("anything") == ReleasedText("anything")

"""Guesses equal those of a plain search, and their odds follow what came true."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.speculation import LONGEST_COMPARED, MOST_PLACES, Guesser, Odds

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def longest_match(tokens: list[int]) -> tuple[int, int]:
    """(place, length) of the longest run that ends the text and stands earlier in it, the latest of equals."""
    best = (0, 0)
    for place in range(2, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= 2 and length >= best[1]:
            best = (place, length)
    return best


def search(tokens: list[int]) -> tuple[int, int]:
    """The same among the latest places only, with different lengths up to a limit."""
    pair = tokens[-2:]
    places = [place for place in range(2, len(tokens)) if tokens[place - 2 : place] == pair][-MOST_PLACES:]
    best = (0, 0)
    for place in reversed(places):
        length = 0
        while length < min(place, LONGEST_COMPARED) and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length > best[1]:
            best = (place, length)
    return best


def guesser_of(tokens: list[int], first: int) -> Guesser:
    """One that has read a prompt of `first` tokens, and then token by token."""
    guesser = Guesser()
    for end in range(first, len(tokens) + 1):
        guesser.read(tokens[:end])
    return guesser


@given(tokens=TEXTS, first=st.integers(1, 60))
def test_the_match_equals_that_of_a_plain_search(tokens: list[int], first: int) -> None:
    first = min(first, len(tokens))
    source, length = search(tokens[:first]) if first >= 2 else (0, 0)
    for end in range(first + 1, len(tokens) + 1):
        if source and tokens[source] == tokens[end - 1]:
            source, length = source + 1, length + 1
        else:
            source, length = search(tokens[:end])
    guesser = guesser_of(tokens, first)
    assert (guesser.source, guesser.length) == (source, length)


@given(tokens=st.lists(st.integers(0, 3), min_size=2, max_size=14))
def test_in_a_short_text_it_is_the_longest_of_all(tokens: list[int]) -> None:
    place, length = longest_match(tokens)
    guesser = guesser_of(tokens, 1)
    assert (guesser.source, guesser.length) == (place, length)


@given(tokens=TEXTS, cuts=st.lists(st.integers(1, 60), max_size=5))
def test_reading_many_tokens_at_once_is_reading_them_one_by_one(tokens: list[int], cuts: list[int]) -> None:
    one_by_one = guesser_of(tokens, 1)
    at_once = Guesser()
    for end in sorted({1, *(cut for cut in cuts if cut < len(tokens)), len(tokens)}):
        at_once.read(tokens[:end])
    assert (at_once.source, at_once.length) == (one_by_one.source, one_by_one.length)
    assert at_once.guess(tokens, 9) == one_by_one.guess(tokens, 9)


def test_a_guess_is_what_followed_and_goes_round_where_the_text_ends() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 2, 3]
    assert guesser_of(tokens, 1).guess(tokens, 3) == [4, 5, 9]
    tokens = [9, 1, 2, 3, 1, 2, 3]
    assert guesser_of(tokens, 1).guess(tokens, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert guesser_of([1, 2, 3, 4], 1).guess([1, 2, 3, 4], 7) == []


def test_large_token_ids_are_told_apart() -> None:
    big = 2**31 - 1
    tokens = [1, big, 7, big, 1, 8, 1, big]
    assert guesser_of(tokens, 1).guess(tokens, 1) == [7]


def test_copied_text_becomes_sure_and_random_text_stays_unlikely() -> None:
    page = random.Random(0).choices(range(1000), k=200)
    copy = guesser_of([*page, *page[:100]], 200)
    assert copy.chances(4, 0.0)[3] > 0.8
    noise = guesser_of(random.Random(1).choices(range(6), k=2000), 2)
    assert noise.chances(1, 0.0)[0] < 0.3
    assert len(copy.chances(8, 0.99)) < 8
    assert noise.chances(8, 0.5) == []


def test_odds_follow_what_came_true_of_late_and_each_length_by_itself() -> None:
    odds = Odds()
    before = odds.chance(3)
    for _ in range(30):
        odds.record(3, is_right=True)
    assert before < 0.3 < 0.7 < odds.chance(3)
    assert odds.chance(18) == Odds().chance(18)
    for _ in range(30):
        odds.record(3, is_right=False)
    assert odds.chance(3) < before
    assert odds.chance(10_000) == odds.chance(19)

"""Drafts equal those of a plain search, and acceptance rates follow the right predictions."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.speculation import MAX_COMPARED, MAX_PLACES, AcceptanceRates, NgramProposer

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def longest_match(tokens: list[int]) -> tuple[int, int]:
    """(position, length) of the longest run at the end of the text that also occurs earlier; the latest of equal
    ones."""
    best = (0, 0)
    for place in range(2, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= 2 and length >= best[1]:
            best = (place, length)
    return best


def search(tokens: list[int]) -> tuple[int, int]:
    """Like longest_match, among the latest occurrences only and with a limit of the compared tokens."""
    pair = tokens[-2:]
    places = [place for place in range(2, len(tokens)) if tokens[place - 2 : place] == pair][-MAX_PLACES:]
    best = (0, 0)
    for place in reversed(places):
        length = 0
        while length < min(place, MAX_COMPARED) and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length > best[1]:
            best = (place, length)
    return best


def guesser_of(tokens: list[int], first: int) -> NgramProposer:
    """A proposer that has read a prompt of `first` tokens, then single tokens."""
    proposer = NgramProposer()
    for end in range(first, len(tokens) + 1):
        proposer.read(tokens[:end])
    return proposer


@given(tokens=TEXTS, first=st.integers(1, 60))
def test_the_match_equals_that_of_a_plain_search(tokens: list[int], first: int) -> None:
    first = min(first, len(tokens))
    source, length = search(tokens[:first]) if first >= 2 else (0, 0)
    for end in range(first + 1, len(tokens) + 1):
        if source and tokens[source] == tokens[end - 1]:
            source, length = source + 1, length + 1
        else:
            source, length = search(tokens[:end])
    proposer = guesser_of(tokens, first)
    assert (proposer.source, proposer.length) == (source, length)


@given(tokens=st.lists(st.integers(0, 3), min_size=2, max_size=14))
def test_the_match_in_a_short_text_is_the_longest(tokens: list[int]) -> None:
    place, length = longest_match(tokens)
    proposer = guesser_of(tokens, 1)
    assert (proposer.source, proposer.length) == (place, length)


@given(tokens=TEXTS, cuts=st.lists(st.integers(1, 60), max_size=5))
def test_tokens_may_be_read_together_or_singly(tokens: list[int], cuts: list[int]) -> None:
    one_by_one = guesser_of(tokens, 1)
    at_once = NgramProposer()
    for end in sorted({1, *(cut for cut in cuts if cut < len(tokens)), len(tokens)}):
        at_once.read(tokens[:end])
    assert (at_once.source, at_once.length) == (one_by_one.source, one_by_one.length)
    assert at_once.propose(tokens, 9) == one_by_one.propose(tokens, 9)


def test_drafts_repeat_where_the_text_ends() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 2, 3]
    assert guesser_of(tokens, 1).propose(tokens, 3) == [4, 5, 9]
    tokens = [9, 1, 2, 3, 1, 2, 3]
    assert guesser_of(tokens, 1).propose(tokens, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert guesser_of([1, 2, 3, 4], 1).propose([1, 2, 3, 4], 7) == []


def test_large_token_ids_differ() -> None:
    big = 2**31 - 1
    tokens = [1, big, 7, big, 1, 8, 1, big]
    assert guesser_of(tokens, 1).propose(tokens, 1) == [7]


def test_copied_text_is_likely_and_random_text_is_not() -> None:
    page = random.Random(0).choices(range(1000), k=200)
    copy = guesser_of([*page, *page[:100]], 200)
    assert copy.accept_probabilities(4, 0.0)[3] > 0.8
    noise = guesser_of(random.Random(1).choices(range(6), k=2000), 2)
    assert noise.accept_probabilities(1, 0.0)[0] < 0.3
    assert len(copy.accept_probabilities(8, 0.99)) < 8
    assert noise.accept_probabilities(8, 0.5) == []


def test_acceptance_rates_are_recent_and_per_length() -> None:
    rates = AcceptanceRates()
    before = rates.rate(3)
    for _ in range(30):
        rates.record(3, is_right=True)
    assert before < 0.3 < 0.7 < rates.rate(3)
    assert rates.rate(18) == AcceptanceRates().rate(18)
    for _ in range(30):
        rates.record(3, is_right=False)
    assert rates.rate(3) < before
    assert rates.rate(10_000) == rates.rate(19)

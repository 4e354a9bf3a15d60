"""Bad words become the token sequences in which a text can come to contain them."""

from __future__ import annotations

from pathlib import Path

import pdserve
from pdserve.text.tokenizer import HuggingFaceTokenizer, ToyTokenizer, bad_word_ids

MODEL = Path(pdserve.__file__).parent / "models" / "stdlib-5m"


def test_byte_tokens_need_no_second_sequence() -> None:
    assert bad_word_ids(["no", " no", "o!"], ToyTokenizer()) == [(110, 111), (111, 33)]
    assert bad_word_ids(["no", "o"], ToyTokenizer()) == [(111,)]  # a text without "o" has no "no"
    assert bad_word_ids(["\n"], ToyTokenizer()) == [(10,)]
    assert bad_word_ids([], ToyTokenizer()) == []


def test_a_word_is_banned_at_the_start_and_after_a_space() -> None:
    tokenizer = HuggingFaceTokenizer(MODEL)
    [bare, spaced] = bad_word_ids(["return"], tokenizer)
    assert tokenizer.decode(bare) == "return"
    assert tokenizer.decode(spaced) == " return"
    assert bad_word_ids([" return"], tokenizer) == [bare, spaced]

"""How much text one token can stand for, and that a tail has the last tokens of the whole text."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from pdserve.core.errors import InvalidRequest
from pdserve.text import text_bounds
from pdserve.text.text_bounds import COMPOSED_CHARS, TextBounds
from pdserve.text.tokenizer import HuggingFaceTokenizer, ToyTokenizer
from pdserve.tokenizer_json import LLAMA_3, QWEN_2
from tests.support.examples import examples
from tests.unit.text.conftest import CORPUS, KINDS, byte_level

BUNDLED = next((Path(__file__).parents[3] / "pdserve/models").glob("stdlib-*"))
# Text in which pieces join in every way that a pattern or a merge knows.
PIECES = (
    *("a", "the", "cat", " the", "'s", "'S", "'llama", "12", "1234567", "fib", "naïve", "你好", "が", "é", "🙂"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", ",", ", ", ".", "...", "?!", "; ", ":", "(n - 1)", " +", "'", '"'),
    *("<|end|>", "<s>", "</s>", "<tool café>", "e\u0301", "\u1100\u1161\u11a8", "_", "▁", "Ġ", "ſ", "ﬁ", "\u00a0"),
)


def patterned(pattern: str, *, is_composing: bool) -> Tokenizer:
    """As those of Llama 3 and of Qwen."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=not is_composing))
    if is_composing:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator([*CORPUS, "...\n\n?! (12) 345,   x\n  y"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    return tokenizer


MADE: dict[str, Callable[[], Tokenizer]] = {
    **{name: KINDS[name] for name in ("byte-level", "llama", "gemma")},
    "llama-3": lambda: patterned(LLAMA_3, is_composing=False),
    "qwen": lambda: patterned(QWEN_2, is_composing=True),
    "bundled": lambda: Tokenizer.from_file(str(BUNDLED / "tokenizer.json")),
}


@cache
def made(name: str) -> Tokenizer:
    return MADE[name]()


@cache
def bounds_of(name: str) -> TextBounds:
    return text_bounds.text_bounds(json.loads(made(name).to_str()))


@pytest.mark.parametrize("name", MADE)
def test_tokenizers_of_every_family_can_be_cut(name: str) -> None:
    assert bounds_of(name).max_token_chars is not None
    assert {" ", "\n"} & set(bounds_of(name).separators)


texts = st.lists(st.sampled_from(PIECES), min_size=40, max_size=250).map("".join)


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=examples(30), deadline=None)
@given(text=texts, num_tokens=st.integers(1, 12))
def test_a_tail_has_the_last_tokens_of_the_text(name: str, text: str, num_tokens: int) -> None:
    tokenizer, bounds = made(name), bounds_of(name)
    start = bounds.tail_start(text, num_tokens)
    assert 0 <= start < len(text)
    whole = tokenizer.encode(text).ids
    assert tokenizer.encode(text[start:]).ids[-num_tokens:] == whole[-num_tokens:]
    limit = bounds.max_chars(len(tokenizer.encode(text, add_special_tokens=False).ids))
    assert limit is not None
    assert len(text) <= limit


@pytest.mark.parametrize("name", MADE)
def test_a_long_text_is_cut_near_the_needed_length(name: str) -> None:
    text = "the cat sat, " * 20_000
    bounds = bounds_of(name)
    needed = bounds.max_chars(10)
    assert needed is not None
    assert needed <= len(text) - bounds.tail_start(text, 10) <= needed + 20


def test_a_text_without_a_separator_is_not_cut() -> None:
    assert bounds_of("bundled").tail_start("a" * 300_000, 10) == 0
    assert bounds_of("bundled").tail_start("a b" + "a" * 300_000, 10) == 0


def test_the_longest_composition_is_known() -> None:
    chars = (chr(number) for number in range(0x110000) if not 0xD800 <= number < 0xE000)
    assert max(len(unicodedata.normalize("NFD", char)) for char in chars) == COMPOSED_CHARS


def serialized(change: Callable[[Tokenizer], Any]) -> dict[str, Any]:
    tokenizer = byte_level()
    change(tokenizer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.add_tokens([AddedToken("<m>", lstrip=True)]),
        lambda one: one.add_tokens([AddedToken("<m>", rstrip=True)]),
        lambda one: setattr(one, "normalizer", normalizers.Strip()),
        lambda one: setattr(one, "normalizer", normalizers.Replace(Regex(r"\s+"), " ")),
        lambda one: setattr(one, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(change: Callable[[Tokenizer], Any]) -> None:
    assert text_bounds.text_bounds(serialized(change)) == TextBounds(max_token_chars=None, separators="")


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.add_tokens(["tool1"]),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\S+\s"), "isolated")),
        lambda one: setattr(one, "normalizer", normalizers.NFD()),
        lambda one: setattr(one.model, "dropout", 0.1),
    ],
)
def test_a_tokenizer_with_unknown_parts_is_not_cut(change: Callable[[Tokenizer], Any]) -> None:
    assert text_bounds.text_bounds(serialized(change)).separators == ""


def test_a_separator_inside_a_token_is_not_used() -> None:
    def add(one: Tokenizer) -> None:
        one.add_tokens(["<a b>", "<x.y>"])

    assert set(text_bounds.text_bounds(serialized(add)).separators) == set("\n,;:!?")


def test_encode_tail_is_the_end_of_encode() -> None:
    text = (BUNDLED / "README.md").read_text() * 3
    for tokenizer in (HuggingFaceTokenizer(BUNDLED), ToyTokenizer()):
        whole = tokenizer.encode(text)
        for count in (1, 7, 100, len(whole), len(whole) + 5):
            assert tokenizer.encode_tail(text, count) == whole[-count:]
    assert ToyTokenizer().encode_tail("né", 2) == list("né".encode())[-2:]


def test_a_long_text_that_cannot_be_cut_is_rejected() -> None:
    tokenizer = HuggingFaceTokenizer(BUNDLED)
    assert tokenizer.encode_tail("a" * 5_000, 3) == tokenizer.encode("a" * 5_000)[-3:]
    with pytest.raises(InvalidRequest, match="1000001 characters, without a place where they could be cut"):
        tokenizer.encode_tail("a" * 1_000_001, 3)
    assert tokenizer.encode_tail("a " * 1_000_000, 3) == tokenizer.encode("a " * 1_000)[-3:]

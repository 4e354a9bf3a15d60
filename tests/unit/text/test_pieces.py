"""That a text tokenized in parts has the tokens of the whole, and that kept ids are bounded and found by one salt."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from pdserve import tokenizer_json
from pdserve.text import pieces
from pdserve.text.child import _Texts, load_message
from pdserve.text.pieces import ENTRY_BYTES, KeptParts, PieceEncoder
from pdserve.text.text_bounds import text_bounds
from pdserve.text.tokenizer import HuggingFaceTokenizer
from pdserve.tokenizer_json import splits_before_spaces, tokens_around
from tests.support.examples import examples
from tests.unit.text.conftest import CORPUS, KINDS, byte_level
from tests.unit.text.test_text_bounds import BUNDLED, MADE, PIECES, patterned

# Characters that patterns, normalizers or Python call a space, a letter or neither, each differently.
SPACES = (*"\u00a0\u1680\u180e\u2003\u200b\u2028\u202f\u3000\x1c\x1f\x85\v\f", "\ufeff", "\u200d")
OTHERS = (
    *"Σςß\u0130ıǅªº²½Ⅷ٣۳\u0301\u0308\u093f\u0e33\u1100\ud7a3\U0001d7d8\U00020000\U0010ffff",
    "\x00",
    "\ufdfa",
    "🏳️\u200d🌈",
)
SPLITTING = sorted(
    one
    for one in tokenizer_json._PATTERNS
    if splits_before_spaces([{"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated"}])
)


def plain() -> Tokenizer:
    """Without its added token that has a space."""
    serialized = json.loads(byte_level().to_str())
    serialized["added_tokens"] = [one for one in serialized["added_tokens"] if " " not in one["content"]]
    found: Tokenizer = Tokenizer.from_str(json.dumps(serialized))
    return found


def metaspace() -> Tokenizer:
    """As newer ones of Llama 2: a text is one piece."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])
    tokenizer.train_from_iterator([*CORPUS, "the cat, a cat"], trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def with_prefix_space() -> Tokenizer:
    tokenizer = plain()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.add_special_tokens([AddedToken("<|end|>x")])
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    **{name: make for name, make in MADE.items() if name != "byte-level"},
    "plain": plain,
    "metaspace": metaspace,
    "prefix-space": with_prefix_space,
    **{
        f"pattern {number}": partial(patterned, one, is_composing=number % 2 == 0)
        for number, one in enumerate(SPLITTING)
    },
}


@cache
def made(name: str) -> Tokenizer:
    return FAMILIES[name]()


def encoder(tokenizer: Tokenizer) -> PieceEncoder:
    def encode_all(texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    serialized = json.loads(tokenizer.to_str())
    tokens = [one.replace("Ġ", " ").replace("▁", " ") for one in tokenizer.get_vocab()]
    return PieceEncoder(encode_all, tokens, text_bounds(serialized).word_end)


@cache
def encoder_of(name: str) -> PieceEncoder:
    return encoder(made(name))


def warm() -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(BUNDLED)
    tokenizer.warm_up()
    return tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_tokenizers_of_every_family_can_be_read_in_parts(name: str) -> None:
    word_end = text_bounds(json.loads(made(name).to_str())).word_end
    assert word_end
    assert (word_end == r"\S") == (name not in ("llama", "gemma", "metaspace"))


texts = st.lists(
    st.one_of(st.sampled_from((*PIECES, *SPACES, *OTHERS, " ", " ", " the")), st.text(max_size=3)), max_size=150
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=examples(60), deadline=None)
@given(pieces_of_text=texts, part_chars=st.sampled_from((1, 7, 40)), share=st.sampled_from((0.0, 0.4, 1.0)))
@example(pieces_of_text=["a", " ", " ", "the", "\n", " ", "cat", " "], part_chars=1, share=1.0)
def test_parts_have_the_tokens_of_the_whole(
    name: str, pieces_of_text: list[str], part_chars: int, share: float
) -> None:
    text, read = "".join(pieces_of_text), encoder_of(name)
    whole = made(name).encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PART_CHARS", part_chars)
        patch.setattr(pieces, "MAX_UNKNOWN_SHARE", share)
        assert read.encode(text, None) == whole
        for _ in range(2):  # the second one finds them
            assert read.encode(text, b"salt") == whole
        assert (
            read.encode(f"{text} the cat", b"salt")[: len(whole) - 1] == whole[:-1] or text[-1:].isspace() or not text
        )
    read.kept.check()


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.add_tokens([AddedToken("<m>", lstrip=True)]),
        lambda one: one.add_tokens([AddedToken("<m>", rstrip=True)]),
        lambda one: setattr(one.model, "dropout", 0.1),
        lambda one: setattr(one, "normalizer", normalizers.Strip()),
        lambda one: setattr(one, "normalizer", normalizers.Replace(Regex(r"\s+"), " ")),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\S+\s"), "isolated")),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda one: one.add_tokens(["<tool 1>"]),
    ],
)
def test_a_tokenizer_that_joins_words_is_not_read_in_parts(change: Callable[[Tokenizer], Any]) -> None:
    tokenizer = plain()
    change(tokenizer)
    assert text_bounds(json.loads(tokenizer.to_str())).word_end == ""


def test_a_token_that_a_normalizer_would_join_is_known() -> None:
    """Its own text has no letter before a space, but full-width forms that become them."""
    tokenizer = plain()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("＜ａ\u3000ｂ＞", normalized=True)])
    assert " " not in text_bounds(json.loads(tokenizer.to_str())).separators


@pytest.mark.parametrize("mark", ["ignore_merges", "end_of_word_suffix", "continuing_subword_prefix"])
def test_a_model_that_treats_the_end_of_a_piece_differently_is_read_whole(mark: str) -> None:
    tokenizer = json.loads(KINDS["llama"]().to_str())
    assert text_bounds(tokenizer).word_end
    tokenizer["model"][mark] = True if mark == "ignore_merges" else "#"
    assert text_bounds(tokenizer).word_end == ""


def test_the_tokens_around_a_text() -> None:
    def around(processor: Any) -> Any:
        tokenizer = byte_level()
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.post_processor = processor
        return tokens_around(json.loads(tokenizer.to_str()))

    begin, end = (made_ids := [KINDS["llama"]().token_to_id(one) for one in ("<s>", "</s>")])
    special = [("<s>", begin), ("</s>", end)]
    assert made_ids == [1, 2]
    assert around(None) == ([], [])
    assert around(processors.ByteLevel()) == ([], [])
    both = processors.TemplateProcessing(single="<s> $A </s> </s>", special_tokens=special)
    assert around(both) == ([begin], [end, end])
    assert around(processors.Sequence([processors.ByteLevel(), both])) == ([begin], [end, end])
    assert around(processors.TemplateProcessing(single="<s> $A $A", special_tokens=special)) is None
    assert around(processors.BertProcessing(("</s>", end), ("<s>", begin))) is None


def test_a_long_text_is_that_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = warm()
    prose = (Path(__file__).parents[3] / "docs/scheduling.md").read_text()
    code = Path(pieces.__file__).read_text()
    for text in (prose, code, prose.replace("\n", "\r\n"), "the cat sat " * 5_000, "x" * 20_000, "a  b " * 3_000):
        whole = tokenizer._backend.encode(text).ids
        assert tokenizer.encode(text) == whole
        assert tokenizer.encode(text, salt=b"") == whole
        assert tokenizer.encode(text, salt=b"") == whole
    assert tokenizer.kept is not None
    tokenizer.kept.check()


def test_the_next_turn_of_a_conversation_reads_only_its_end() -> None:
    tokenizer = warm()
    turn = " ".join(f"line {number} of the file has no other name," for number in range(2_000))
    tokenizer.encode(turn, salt=b"a")
    kept = tokenizer.kept
    assert kept is not None
    assert (kept.num_found_chars, kept.num_missed_chars) == (0, len(turn))
    longer = turn + "Then it slept. " * 100
    assert tokenizer.encode(longer, salt=b"a") == tokenizer._backend.encode(longer).ids
    assert kept.num_found_chars > len(turn) - 2 * pieces.PART_CHARS
    assert kept.num_found_chars + kept.num_missed_chars == len(turn) + len(longer)


def test_a_text_is_read_whole_while_the_table_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """encode() neither makes the table nor waits for the thread that does, because event loops call it."""
    is_making, may_end = threading.Event(), threading.Event()

    def make(*args: Any) -> PieceEncoder:
        is_making.set()
        assert may_end.wait(60.0)
        return PieceEncoder(*args)

    monkeypatch.setattr("pdserve.text.tokenizer.PieceEncoder", make)
    tokenizer, text = HuggingFaceTokenizer(BUNDLED), "the cat sat on the mat. " * 60
    whole = tokenizer._backend.encode(text).ids
    with ThreadPoolExecutor() as threads:
        try:
            making = threads.submit(tokenizer.warm_up)
            assert is_making.wait(60.0)
            assert threads.submit(tokenizer.encode, text, salt=b"").result(60.0) == whole
            assert tokenizer.kept is None
        finally:
            may_end.set()
        making.result(60.0)
    assert tokenizer.encode(text, salt=b"") == whole
    assert tokenizer.kept is not None
    assert tokenizer.kept.num_missed_chars == len(text)


def test_a_text_does_not_make_the_table() -> None:
    tokenizer = HuggingFaceTokenizer(BUNDLED)
    tokenizer.encode("the cat sat on the mat. " * 1_000, salt=b"")
    assert tokenizer.kept is None


def test_a_child_makes_the_table_before_its_first_text() -> None:
    texts = _Texts(load_message(None, folder=str(BUNDLED)))
    assert texts._tokenizer is not None
    assert texts._tokenizer.kept is not None


def test_another_salt_finds_nothing_and_keeps_its_own() -> None:
    tokenizer = warm()
    text = " ".join(f"the cat sat on mat {number}." for number in range(1_000))
    for salt in (b"", b"one", b"two", b"one,"):
        ids = tokenizer.encode(text, salt=salt)
        kept = tokenizer.kept
        assert kept is not None
        assert kept.num_found_chars == 0
    assert tokenizer.encode(text) == ids  # without a salt, nothing is looked for
    assert kept.num_found_chars == 0
    tokenizer.encode(text, salt=b"two")
    assert kept.num_found_chars == len(text)


def test_a_text_does_not_change_the_table_of_words() -> None:
    read = encoder(plain())
    before = dict(read._ids)
    read.encode("unheard-of words, said once " * 100, b"salt")
    assert read._ids == before


def test_kept_ids_are_bounded_in_bytes_and_the_oldest_are_dropped() -> None:
    kept = KeptParts(max_bytes=3 * (ENTRY_BYTES + 40))
    for number in range(3):
        kept.add(bytes([number]), [number] * 10)
    assert kept.find(bytes([0]), 1) == [0] * 10
    kept.add(bytes([3]), [3] * 10)
    kept.add(bytes([3]), [3] * 10)
    kept.check()
    assert [kept.find(bytes([number]), 1) is not None for number in range(4)] == [True, False, True, True]
    kept.add(b"long", [1] * 10_000)
    kept.check()
    assert kept.find(b"long", 1) is None
    assert kept.num_bytes == 0


def test_threads_share_the_kept_parts() -> None:
    tokenizer = warm()
    turns = ["the cat sat on the mat. " * count for count in (500, 700, 900)]
    whole = [tokenizer._backend.encode(turn).ids for turn in turns]
    wrong: list[str] = []

    def work() -> None:
        for turn, ids in [*zip(turns, whole, strict=True)] * 3:
            if tokenizer.encode(turn, salt=b"") != ids:
                wrong.append(turn)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert tokenizer.kept is not None
    tokenizer.kept.check()

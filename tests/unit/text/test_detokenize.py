from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ModelError
from pdserve.text import detokenize
from pdserve.text.tokenizer import HuggingFaceTokenizer, Tokenizer, ToyTokenizer, load_tokenizer

SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def streamed(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()]


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@SHARED_FOLDER
@given(data=st.data())
def test_streaming_equals_decoding_at_once(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assume(longest_byte_run(tokenizer, ids) <= detokenize.RUN_HELD_BYTES)
    assert "".join(streamed(tokenizer, ids, [])) == tokenizer.decode(ids)


@SHARED_FOLDER
@given(data=st.data())
def test_special_tokens_are_written_if_requested(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 3) | st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    assume(longest_byte_run(tokenizer, ids) <= detokenize.RUN_HELD_BYTES)
    detokenizer = tokenizer.detokenizer([], has_special_tokens=True)
    pieces = [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, has_special_tokens=True)


@SHARED_FOLDER
@given(text=st.text(max_size=40))
def test_no_piece_splits_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids, [])
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == whole
    if detokenize.REPLACEMENT not in whole:
        assert not any(detokenize.REPLACEMENT in piece for piece in pieces)


@SHARED_FOLDER
@given(data=st.data())
def test_text_after_a_prompt_is_the_added_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    prompt = tokenizer.encode("the cat")
    ids = tokenizer.encode(data.draw(st.text("abc \n", max_size=20)), has_special_tokens=False)
    assume(tokenizer.decode(prompt))
    assert tokenizer.decode(prompt) + "".join(streamed(tokenizer, ids, prompt)) == tokenizer.decode(prompt + ids)


def longest_byte_run(tokenizer: Tokenizer, ids: list[int]) -> int:
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    longest = run = 0
    for token_id in ids:
        token = tokenizer._token(token_id)
        if token is None:
            continue
        run = run + 1 if token.startswith("<0x") else 0
        longest = max(longest, run)
    return longest


@given(st.binary(max_size=60))
def test_toy_bytes_decode_like_the_whole(data: bytes) -> None:
    toy = ToyTokenizer()
    pieces = streamed(toy, list(data), [])
    assert "".join(pieces) == data.decode("utf-8", "replace") == toy.decode(list(data))


def test_an_emoji_is_sent_with_its_last_byte() -> None:
    assert streamed(ToyTokenizer(), list("a🙂b".encode()), []) == ["a", "", "", "", "🙂", "b", ""]


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    assert streamed(ToyTokenizer(), list("🙂".encode())[:2], []) == ["", "", detokenize.REPLACEMENT]


def long_run(text: str) -> tuple[detokenize.Detokenizer, list[int]]:
    rule = detokenize.TextRule(join=detokenize.Join.RUNS, has_byte_fallback=True)
    return detokenize.make_detokenizer(rule, lambda n: f"<0x{n:02X}>", is_continued=True), list(text.encode())


def test_a_long_run_of_byte_tokens_is_released() -> None:
    detokenizer, ids = long_run("สวัสดีชาวโลก")
    out = ""
    for count, token_id in enumerate(ids, 1):
        out += detokenizer.push([token_id])
        if count > detokenize.RUN_HELD_BYTES:
            assert len(out) == count // 3
    assert out + detokenizer.finish() == "สวัสดีชาวโลก"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece"},
        {"type": "CTC"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "a"}, "content": ""}],
        },
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""},
    ],
)
def test_an_unsupported_decoder_is_rejected_by_name(decoder: dict[str, object]) -> None:
    with pytest.raises(ModelError) as caught:
        detokenize.read_rule(decoder)
    assert caught.value.field == "tokenizer.json decoder"

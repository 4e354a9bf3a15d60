"""Bounds from a tokenizer.json: the maximum text length of one token, and positions where a text can be cut. Pure.

Both are used to reject or shorten a text before it is tokenized. If a tokenizer has an unknown part, there is no bound.

**Cutting.** A text can be cut between a letter and a separator if neither depends on what follows:
1. no token contains a letter directly before the separator, so no merge of BPE crosses the cut;
2. no match of a pre-tokenizer's pattern crosses it, so the pattern finds the same pieces after it;
3. the normalizers change no character because of its neighbours across the cut.
Then the tokens after the cut are those of the whole text.

**Cutting before a space.** Then the tokens before the cut are those of the whole text too, if also the last word of a
part is tokenized as it would be inside a text: a part ends with a pre-token, or the model does not treat the end of one
differently (`ignore_merges`, and marks at the ends of words). Where a pattern ends a piece before each space that
follows another character, the character need not be a letter.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.text.detokenize import BYTE_ALPHABET
from pdserve.tokenizer_json import (
    GPT_2,
    LLAMA_3,
    QWEN_2,
    added_tokens,
    is_byte_level,
    parts_of,
    splits_before_spaces,
    vocabulary,
)

SEPARATORS: Final = " \n,.;:!?"
# Letters and digits of every Unicode version that a regex engine may use.
LETTERS: Final = "A-Za-z0-9À-ÖØ-öø-ɏЀ-џぁ-ゖァ-ヺ一-龥가-힣"
WINDOW_CHARS: Final = 65_536  # searched for a cut at a time
# Characters that become one: the longest canonical decomposition has four.
COMPOSED_CHARS: Final = 4

_COMPOSING: Final = ("NFC", "NFKC")
_KEEPING: Final = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
_PRE_TOKENIZERS: Final = (
    "ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts", "FixedLength",
)  # fmt: skip
# Patterns of pre-tokenizers whose matches never contain a letter or digit directly before one of SEPARATORS.
_PATTERNS: Final = (GPT_2, LLAMA_3, QWEN_2)
_BYTE_TOKENS: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_STAND_INS: Final = {byte: char for char, byte in BYTE_ALPHABET.items()}
# UTF-8 has no others.
_TEXT_BYTES: Final = frozenset(
    char for char, byte in BYTE_ALPHABET.items() if byte not in (0xC0, 0xC1, *range(0xF5, 256))
)


@final
@dataclass(frozen=True, slots=True)
class TextBounds:
    max_token_chars: int | None  # maximum characters of one token; None if unlimited
    separators: str  # a text can be cut before each of them if a letter or digit precedes it
    word_end: str = ""  # a set of re: parts that begin with a space after one of these can be tokenized alone

    def max_chars(self, num_tokens: int) -> int | None:
        """Maximum characters of a text with at most `num_tokens` tokens; None if there is no bound."""
        return None if self.max_token_chars is None else num_tokens * self.max_token_chars

    def tail_start(self, text: str, num_tokens: int) -> int:
        """The position from which `text` must be tokenized so that its last `num_tokens` tokens are those of the
        whole."""
        needed = self.max_chars(num_tokens)
        if needed is None or not self.separators:
            return 0
        cut = re.compile(f"[{LETTERS}](?=[{re.escape(self.separators)}])")
        ends = len(text) - needed
        while ends > 0:
            begins = max(0, ends - WINDOW_CHARS)
            found = [match.start() for match in cut.finditer(text, begins, ends)]
            if found:
                # The letter belongs to the tail, whose cut is also after a letter.
                return found[-1]
            ends = begins
        return 0


def text_bounds(tokenizer: Mapping[str, Any]) -> TextBounds:
    """Of a tokenizer.json."""
    separators = _separators(tokenizer)
    return TextBounds(
        max_token_chars=_max_token_chars(tokenizer),
        separators=separators,
        word_end=_word_end(tokenizer, separators),
    )


def _max_token_chars(tokenizer: Mapping[str, Any]) -> int | None:
    if any(one.get("lstrip") or one.get("rstrip") for one in added_tokens(tokenizer)):
        return None  # such a token includes all adjacent spaces
    composed = 1
    for one in parts_of(tokenizer.get("normalizer"), "normalizers"):
        kind = one.get("type")
        if kind in _COMPOSING:
            composed *= COMPOSED_CHARS
        elif kind == "Replace":
            pattern, content = one.get("pattern", {}).get("String", ""), one.get("content", "")
            if not pattern or not content:
                return None
            composed *= -(-len(pattern) // len(content))
        elif kind not in _KEEPING:
            return None
    for one in parts_of(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if one.get("type") not in _PRE_TOKENIZERS or one.get("behavior") == "Removed":
            return None
    if not _knows_all_text(tokenizer):
        return None
    return composed * max(map(len, _tokens(tokenizer)), default=1)


def _knows_all_text(tokenizer: Mapping[str, Any]) -> bool:
    """Whether unknown text is neither dropped nor merged into one token."""
    model = tokenizer["model"]
    vocab = vocabulary(tokenizer)
    if model.get("byte_fallback") and vocab >= _BYTE_TOKENS:
        return True
    if model.get("type") != "BPE":
        return False
    if is_byte_level(tokenizer):
        return vocab >= _TEXT_BYTES
    return model.get("unk_token") is not None and not model.get("fuse_unk")


def _separators(tokenizer: Mapping[str, Any]) -> str:
    model = tokenizer["model"]
    added = added_tokens(tokenizer)
    if (
        model.get("type") != "BPE"
        or model.get("dropout")
        or any(one.get("lstrip") or one.get("rstrip") for one in added)
    ):
        return ""
    normalizers = parts_of(tokenizer.get("normalizer"), "normalizers")
    pre_tokenizers = parts_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if not all(map(_is_local, normalizers)) or not all(map(_is_synchronous, pre_tokenizers)):
        return ""
    contents = _contents(tokenizer)
    if any(re.search(f"[{LETTERS}]$", one) for one in contents):
        return ""  # after an added token, the text begins again with its own space
    is_bytes = is_byte_level(tokenizer)
    letters = r"[\w>]"  # > ends a byte in hexadecimal
    if is_bytes:
        high = (char for char, byte in BYTE_ALPHABET.items() if byte >= 0x80 or chr(byte).isalnum())
        letters = f"[{re.escape(''.join(high))}]"
    vocab = vocabulary(tokenizer)
    crossed = _followers(letters, vocab) | _followers(r"\w", contents)
    allowed = ""
    for separator in SEPARATORS:
        spelt = _spelling(separator, normalizers, pre_tokenizers, is_bytes)
        if spelt in vocab and spelt not in crossed and separator not in crossed:
            allowed += separator
    return allowed


def _contents(tokenizer: Mapping[str, Any]) -> list[str]:
    """The texts of the added tokens, also as the normalizers that change only characters may write them."""
    contents = [str(one.get("content", "")) for one in added_tokens(tokenizer)]
    composed = [unicodedata.normalize(form, one) for one in contents for form in ("NFC", "NFKC")]
    return list(dict.fromkeys((*contents, *composed, *(one.lower() for one in (*contents, *composed)))))


def _word_end(tokenizer: Mapping[str, Any], separators: str) -> str:
    """The characters before which, and the space after them, a text may be cut into parts."""
    model, added = tokenizer["model"], added_tokens(tokenizer)
    if (
        model.get("type") != "BPE"
        or model.get("dropout")
        or any(one.get("lstrip") or one.get("rstrip") for one in added)
    ):
        return ""
    normalizers = parts_of(tokenizer.get("normalizer"), "normalizers")
    if (
        all(one.get("type") == "NFC" for one in normalizers)
        and splits_before_spaces(parts_of(tokenizer.get("pre_tokenizer"), "pretokenizers"))
        and not any(one.get("single_word") for one in added)
        and not any(re.search(r"\S ", one) for one in _contents(tokenizer))
    ):
        return r"\S"
    ends_words = any(model.get(name) for name in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"))
    return f"[{LETTERS}]" if " " in separators and not ends_words else ""


def _followers(letters: str, tokens: Iterable[str]) -> set[str]:
    """Characters that directly follow a letter in some token."""
    pair = re.compile(f"(?={letters}(.))", re.DOTALL)
    return {match[1] for token in tokens for match in pair.finditer(token)}


def _is_local(normalizer: Mapping[str, Any]) -> bool:
    """Whether its results for a separator and for the letter before it are independent."""
    kind = normalizer.get("type")
    return kind in (*_COMPOSING, "Lowercase", "Prepend") or (
        kind == "Replace" and normalizer.get("pattern") == {"String": " "} and len(normalizer.get("content", "")) == 1
    )


def _is_synchronous(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether no match of its pattern crosses a cut."""
    kind = pre_tokenizer.get("type")
    if kind == "Split":
        pattern = pre_tokenizer.get("pattern", {})
        is_plain = pre_tokenizer.get("behavior") == "Isolated" and not pre_tokenizer.get("invert")
        is_known = is_plain and pattern.get("Regex") in _PATTERNS
        is_character = len(pattern.get("String", "")) == 1 and pre_tokenizer.get("behavior") != "Removed"
        return is_known or is_character
    return kind in ("ByteLevel", "Metaspace", "Digits")


def _spelling(
    separator: str,
    normalizers: Iterable[Mapping[str, Any]],
    pre_tokenizers: Iterable[Mapping[str, Any]],
    is_bytes: bool,
) -> str:
    """The text as written in the vocabulary."""
    for one in normalizers:
        if one.get("type") == "Replace" and separator == " ":
            separator = one["content"]
    for one in pre_tokenizers:
        if one.get("type") == "Metaspace" and separator == " ":
            separator = one.get("replacement", "▁")
    if is_bytes and len(encoded := separator.encode()) == 1:
        return _STAND_INS[encoded[0]]
    return separator


def _tokens(tokenizer: Mapping[str, Any]) -> Iterable[str]:
    return (*vocabulary(tokenizer), *(str(one.get("content", "")) for one in added_tokens(tokenizer)))

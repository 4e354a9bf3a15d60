"""Which tokenizers take a time in proportion to the text, by their tokenizer.json. Pure.

A pattern is known by its whole text, because no simple rule finds those that backtrack. A tokenizer with another one
works, but encodes only in a process with limits (pdserve/text/child.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

GPT_2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS_AND_SPACES: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
LLAMA_3: Final = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _MARKS_AND_SPACES
QWEN_2: Final = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _MARKS_AND_SPACES
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ASCII_WORDS: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""


def _cased(suffix: str = "", without: str = "") -> str:
    """Words whose capitals begin a new one."""
    upper, lower, before = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]", r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"


_LINES: Final = r"[^\n]+|[\n]+"
# What one match of these looks at, it or the next match takes. The first name is of a model that has the pattern.
_PATTERNS: Final = frozenset((
    GPT_2,
    LLAMA_3,  # GLM 4, Falcon 3, Granite
    QWEN_2,  # Qwen 3
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,  # Qwen 3.5
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+" + _MARKS_AND_SPACES,  # MiniCPM 5
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,  # Seed Coder
    # cl100k
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    # Ling and LLaDA
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    # Tekken: Mistral Nemo, Nemotron 3
    _cased() + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,
    # o200k: gpt-oss, Llama 4, MiniMax M2
    _cased(_ENGLISH + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,
    # Kimi K2
    r"[\p{Han}]+|" + _cased(_ENGLISH + "?", r"&&[^\p{Han}]") + r"|\p{N}{1,3}" + _MARKS_AND_SPACES,
    # DeepSeek V3, in steps
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    _ASCII_WORDS + r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    _ASCII_WORDS + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",  # Spark
    r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+",  # DeepSeek Coder, in steps
    "[0-9][0-9][0-9]",  # Falcon
    " ?[^(\\s|[.,!?…。，、।۔،])]+",  # Bloom
    r"(?:\r?\n)+(?!\r?\n)",  # Laguna
    " ", ".", r"\p{N}", r"\p{N}+", r"\d", r"\d+", r"\s+", r"\S+", r"\n", _LINES,
))  # fmt: skip
_LINEAR_NORMALIZERS: Final = (
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "ByteLevel", "Strip", "StripAccents", "Nmt", "BertNormalizer",
)  # fmt: skip
_LINEAR_PRE_TOKENIZERS: Final = (
    "ByteLevel", "Digits", "Punctuation", "Metaspace", "UnicodeScripts", "FixedLength", "Whitespace",
    "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit",
)  # fmt: skip
_MAX_REPLACES: Final = 4
_MAX_ADDED_CHARS: Final = 16  # that a normalizer writes
_MAX_PIECE_CHARS: Final = 512  # Unigram and WordPiece look so far ahead at every character
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SPACE_MARKS: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def is_linear(tokenizer: Mapping[str, Any]) -> bool:
    """Whether encoding surely takes time and memory in proportion to the text. Unknown patterns may backtrack, and a
    normalizer may write a long text for each character."""
    try:
        return _is_linear(tokenizer)
    except (AttributeError, KeyError, TypeError, ValueError):  # JSON that the library may not accept
        return False


def _is_linear(tokenizer: Mapping[str, Any]) -> bool:
    normalizers = parts_of(tokenizer.get("normalizer"), "normalizers")
    replaces = [one for one in normalizers if one.get("type") == "Replace"]
    if len(replaces) > _MAX_REPLACES or any(_growth(one) > 1 for one in replaces):
        return False
    if any(one.get("type") == "Prepend" and len(one.get("prepend", "")) > _MAX_ADDED_CHARS for one in normalizers):
        return False
    if any(one.get("type") not in (*_LINEAR_NORMALIZERS, "Replace", "Prepend") for one in normalizers):
        return False
    for one in parts_of(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        pattern = one.get("pattern")
        if one.get("type") == "Split" and isinstance(pattern, Mapping):
            if "String" not in pattern and not _is_known(pattern["Regex"]):
                return False
        elif one.get("type") not in _LINEAR_PRE_TOKENIZERS:
            return False
    if any(one.get("lstrip") for one in added_tokens(tokenizer)):
        return False  # for each such token, the library reads the whole text before it
    model = tokenizer["model"]
    if model.get("type") in ("BPE", "WordLevel"):
        return True
    words = int(model.get("max_input_chars_per_word") or 0)
    return words <= _MAX_PIECE_CHARS and max(map(len, vocabulary(tokenizer)), default=0) <= _MAX_PIECE_CHARS


def _is_known(pattern: str) -> bool:
    return _written(pattern) in _PATTERNS


def _written(pattern: str) -> str:
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


def splits_before_spaces(pre_tokenizers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a piece ends before each space that follows a character other than whitespace, whatever comes next.

    In every known pattern but one, a space is the first character of a match, or whitespace precedes it. A pattern that
    ends with the alternative for whitespace leaves no space without a match, so that a match begins there.
    """
    has_all_spaces = False
    for one in pre_tokenizers:
        kind = one.get("type")
        if kind == "Split":
            pattern = _written(one.get("pattern", {}).get("Regex", ""))
            is_plain = one.get("behavior") == "Isolated" and not one.get("invert")
            if not is_plain or pattern not in _PATTERNS or pattern == _LINES:
                return False
            has_all_spaces |= pattern.endswith(r"\s+")
        elif kind == "ByteLevel":
            has_all_spaces |= one.get("use_regex", True)
        elif kind != "Digits":
            return False
    return has_all_spaces


def _growth(replace: Mapping[str, Any]) -> float:
    """Characters for each one of the text; unlimited for a pattern that may be slow."""
    pattern, content = replace.get("pattern", {}).get("String", ""), replace.get("content", "")
    return len(content) / len(pattern) if pattern else float("inf")


def is_rust_error(error: BaseException) -> bool:
    """Whether it may come from a library in Rust: it raises plain exceptions for invalid input. A panic is none of
    them."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def with_known_parts(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json whose encoding of a text has the same bytes, though perhaps as other tokens. Only the model can
    still take a long time."""
    if is_byte_level(tokenizer):
        return without_patterns(tokenizer) | {"pre_tokenizer": _BYTE_LEVEL}
    has_marks = any("▁" in one for one in vocabulary(tokenizer))
    return without_patterns(tokenizer) | {"normalizer": _SPACE_MARKS if has_marks else None}


def without_patterns(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer.json for decoding only. Nothing in it reads a text."""
    added = [{**one, "lstrip": False, "rstrip": False} for one in added_tokens(tokenizer)]
    return {**tokenizer, "normalizer": None, "pre_tokenizer": None, "added_tokens": added}


def is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    parts = (
        *parts_of(tokenizer.get("normalizer"), "normalizers"),
        *parts_of(tokenizer.get("pre_tokenizer"), "pretokenizers"),
    )
    return any(one.get("type") == "ByteLevel" for one in parts)


def tokens_around(tokenizer: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """The ids that its post-processor puts before and after every text; None if that may depend on the text."""
    before: list[int] = []
    after: list[int] = []
    for one in parts_of(tokenizer.get("post_processor"), "processors"):
        if one.get("type") == "ByteLevel":  # changes offsets only
            continue
        pieces = one.get("single", ())
        if one.get("type") != "TemplateProcessing" or sum("Sequence" in piece for piece in pieces) != 1:
            return None
        at = next(at for at, piece in enumerate(pieces) if "Sequence" in piece)
        special = one.get("special_tokens", {})
        ids = [special[piece["SpecialToken"]["id"]]["ids"] if at != index else [] for index, piece in enumerate(pieces)]
        before = [*chain.from_iterable(ids[:at]), *before]
        after.extend(chain.from_iterable(ids[at:]))
    return before, after


def parts_of(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, or those of a sequence, in order."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [inner for one in part.get(name, ()) for inner in parts_of(one, name)]
    return [part]


def added_tokens(tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(tokenizer.get("added_tokens") or ())


def vocabulary(tokenizer: Mapping[str, Any]) -> frozenset[str]:
    vocab = tokenizer["model"].get("vocab", {})
    return frozenset(vocab if isinstance(vocab, Mapping) else (one[0] for one in vocab))


def text_vocabulary(raw: Mapping[str, Any]) -> dict[str, int]:
    """The ids of tokens by their text, as tokenizer.json writes it (a space is often "Ġ" or "▁"), without added tokens,
    such as special ones. Empty if the form is unknown."""
    model, added = raw.get("model"), raw.get("added_tokens")
    held = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(held, list):  # Unigram: pairs of a piece and its score
        held = {pair[0]: at for at, pair in enumerate(held) if isinstance(pair, list) and pair}
    if not isinstance(held, dict):
        return {}
    names = {one.get("content") for one in added if isinstance(one, dict)} if isinstance(added, list) else set()
    return {
        token: at
        for token, at in held.items()
        if isinstance(token, str) and type(at) is int and at >= 0 and token not in names
    }

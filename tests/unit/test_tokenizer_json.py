"""The normalizers and pre-tokenizers of well-known models take a time in proportion to the text.

Each is what a model's tokenizer.json has, letter for letter. The kernel limits the CPU time: a text takes a small part
of the limit, and a pattern that reads a run of characters again for each of them takes several times as much.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from pdserve.isolated.child import TOO_LONG, Limits, run
from pdserve.text.detokenize import BYTE_ALPHABET
from pdserve.tokenizer_json import LLAMA_3, QWEN_2, is_linear, with_known_parts

RUN_CHARS = 40_000
CPU_S = 2.0
# Runs after which an alternative of a pattern may fail.
RUNS = ("a", "A", "7", " ", "\r\n", " \n", "-", "\u0301", "一", "ʰ", "a ")
MORE_RUNS = (
    "aA", "\t", "\n", "'", "'s", "'S", " '", "\u0e33", "が", "한", "ǅ", "🙂", "\u00a0", "\x00", "▁", "_", " a",
    "a-", "/", "/\n", "a\u0301 ", "1,",
)  # fmt: skip


def regex(pattern: str, behavior: str = "Isolated", *, invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def byte_level(*, use_regex: bool = False) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def metaspace(scheme: str, *, split: bool) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
SPACE_SPLIT = {
    "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
}  # fmt: skip
DIGITS = {"type": "Digits", "individual_digits": True}
CJK = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
NFC = {"type": "NFC"}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, REPLACE]}
Family = tuple[dict[str, Any] | None, list[dict[str, Any]]]  # the normalizer and the pre-tokenizers
FAMILIES: dict[str, Family] = {
    "GPT-2": (None, [byte_level(use_regex=True)]),
    "GPT-NeoX, OLMo": (NFC, [byte_level(use_regex=True)]),
    "Llama 2, Mistral 7B, Phi-3": (PREPEND, []),
    "Mistral 7B v0.3": (None, [metaspace("first", split=False)]),
    "Llama 3, GLM-4, Falcon 3": (None, [regex(LLAMA_3), byte_level()]),
    "Granite 4": (None, [regex(LLAMA_3, "Removed", invert=True), byte_level()]),
    "Qwen 2 and 3": (NFC, [regex(QWEN_2), byte_level()]),
    "Qwen 3.5": (NFC, [regex(QWEN_35), byte_level()]),
    "DeepSeek V3, Hunyuan": (None, [regex(r"\p{N}{1,3}"), regex(CJK), regex(DEEPSEEK), byte_level()]),
    "Mistral Nemo (Tekken), Nemotron 3": (None, [regex(TEKKEN), byte_level()]),
    "Gemma 2 to 4": (REPLACE, [SPACE_SPLIT]),
    "Phi-4, cl100k": (None, [regex(CL100K), byte_level()]),
    "LLaDA": (None, [regex(CL100K.replace("{1,3}", "")), byte_level()]),
    "gpt-oss, Llama 4": (None, [regex(O200K), byte_level()]),
    "MiniMax M2": (None, [regex(O200K, "Removed", invert=True), byte_level()]),
    "Kimi K2": (None, [regex(KIMI), byte_level()]),
    "Falcon 7B": (
        None,
        [
            {"type": "Punctuation", "behavior": "Contiguous"},
            byte_level(use_regex=True),
            {"type": "Digits", "individual_digits": False},
            regex("[0-9][0-9][0-9]"),
        ],
    ),
    "SmolLM 2, StarCoder, Command R": (None, [DIGITS, byte_level(use_regex=True)]),
    "MiniCPM 5": (None, [regex(r"\p{N}{1,3}"), regex(LLAMA_3.replace("{1,3}", "+")), byte_level()]),
    "BLOOM": (None, [regex(" ?[^(\\s|[.,!?…。，、।۔،])]+"), byte_level()]),
    "DeepSeek Coder": (
        None,
        [
            regex("[\r\n]"),
            regex(r"\s?\p{L}+"),
            regex(r"\s?\p{P}+"),
            regex("[一-龥ࠀ-一가-\ud7ff]+"),
            DIGITS,
            byte_level(),
        ],
    ),
    "Laguna": (None, [regex(r"(?:\r?\n)+(?!\r?\n)", "MergedWithNext"), regex(QWEN_2), byte_level()]),
    "XLM-R": (None, [{"type": "WhitespaceSplit"}, metaspace("always", split=True)]),
}
# Each reads a run of characters again for each of them.
SLOW: dict[str, Family] = {
    "Tiny Aya": (None, [regex(r"\d{1,3}(?=(?:\d{3})*\b)"), regex(O200K), byte_level()]),
    "DeepSeek Coder V2": (None, [regex("[\r\n]"), regex(r"\s+$"), DIGITS, byte_level()]),
}


def tokenizer_of(family: Family) -> dict[str, Any]:
    normalizer, parts = family
    words = ("<unk>", "▁", *BYTE_ALPHABET)
    vocab = {word: number for number, word in enumerate(words)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"},
    }


def end_of(tokenizer: dict[str, Any], text: str) -> dict[str, Any]:
    """Of a process that encodes the text: its number of tokens, or why the process has ended."""
    serialized = json.dumps(tokenizer)

    def work() -> int:
        return len(Tokenizer.from_str(serialized).encode(text, add_special_tokens=False).ids)

    return run(work, Limits(CPU_S, 60.0, 2**30))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_well_known_tokenizer_encodes_long_runs_in_little_time(name: str) -> None:
    tokenizer = tokenizer_of(FAMILIES[name])
    assert is_linear(tokenizer)
    assert is_linear(json.loads(Tokenizer.from_str(json.dumps(tokenizer)).to_str()))  # as the library has read it
    ended = end_of(tokenizer, "b".join(one * (RUN_CHARS // len(one)) for one in RUNS) + "b")
    assert ended.get("value", 0) > RUN_CHARS, ended


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "b", "1", "-", "\n"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_well_known_tokenizer_encodes_every_long_run_in_little_time(name: str, end: str) -> None:
    tokenizer = tokenizer_of(FAMILIES[name])
    for one in (*RUNS, *MORE_RUNS):
        ended = end_of(tokenizer, one * (RUN_CHARS // len(one)) + end)
        assert "value" in ended, f"{one!r}: {ended}"


@pytest.mark.parametrize("name", SLOW)
def test_a_pattern_that_reads_a_run_again_is_not_known(name: str) -> None:
    tokenizer = tokenizer_of(SLOW[name])
    assert not is_linear(tokenizer)
    known = with_known_parts(tokenizer)
    assert is_linear(known)
    assert end_of(known, "a 12") == {"value": 4}


def test_the_limit_finds_a_pattern_that_reads_a_run_again() -> None:
    assert end_of(tokenizer_of(SLOW["Tiny Aya"]), "7" * RUN_CHARS + "b") == {"ended": TOO_LONG}

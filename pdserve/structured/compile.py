"""Compiles a grammar for a model's vocabulary with llguidance. Only this module uses that library's options.

Limits are llguidance's own counts of work, so that a grammar that one machine admits compiles on every other.
docs/decisions/0004-structured-output.md has the figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.bounded_file import MAX_TOKENIZER_BYTES, read_json_object
from pdserve.core.errors import InvalidRequest, ModelError, shortened
from pdserve.core.grammar import Grammar, GrammarKind, is_older_library
from pdserve.structured.supported import supported
from pdserve.tokenizer_json import added_tokens, is_linear, is_rust_error, vocabulary, with_known_parts

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_IS_OLDER: Final = is_older_library(version("llguidance"))  # in the environment of vLLM
NO_DOCUMENT: Final = "no document meets it"
NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# At most one space after a comma or a colon, and no other whitespace, in which a weak model could loop.
_JSON: Final[JsonCompileOptions] = {
    "item_separator": ",[ ]?",
    "key_separator": ":[ ]?",
    "whitespace_flexible": False,
    "lenient": False,  # an unsupported keyword is an error and not ignored
    "coerce_one_of": False,
    # Without \\uXXXX, so that a name of a property has one spelling, and a free name is never one that is listed.
    "json_allowed_escapes": 'nrbtf\\"',
}
_EMBEDDED: Final = re.compile(r"%json\s*(?=\{)")
_PATTERN_ERROR: Final = re.compile(
    r"regex parse error:\n(?P<margin> +)(?P<pattern>.*)\n(?P<indent> +)\^+\nerror: (?P<why>.*)"
)
_LARK_ERROR: Final = re.compile(r"(at )?(?P<line>\d+)\((?P<column>\d+)\): (?P<why>.*)")
_DECODER: Final = json.JSONDecoder()
_PER_GRAMMAR: Final = "x-guidance"  # a schema's own options, which could override those above


@final
class Compiler:
    """Thread-safe. Compiling releases the GIL."""

    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises ModelError if masks are impossible for the model: no end of sequence, or an unknown tokenizer."""
        ends = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
        if not ends:
            raise ModelError("eos_token_id", "none", "an end of sequence, which ends a structured answer")
        text, num_tokens = _tokenizer_text(model, vocab_size)
        try:
            self._tokenizer = LLTokenizer(json.dumps(text), n_vocab=max(vocab_size, num_tokens), eos_token=ends)
        except BaseException as error:
            if not is_rust_error(error):
                raise
            raise ModelError("tokenizer.json", _short(str(error)), "a tokenizer that llguidance reads") from error
        self._limits = LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )

    @property
    def num_words(self) -> int:
        """Words of 32 tokens in a mask."""
        return -(-self._tokenizer.vocab_size // 32)

    def compile(self, grammar: Grammar, *, for_older: bool = False) -> LLMatcher:
        """A matcher at the start of the document. Raises InvalidRequest with the reason. `for_older`: also if a worker
        with an older library would refuse the grammar."""
        try:
            source = _source(grammar, for_older=for_older)
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        except (ValueError, RecursionError) as error:
            raise refused(grammar, str(error)) from None
        if matcher.is_error():
            raise refused(grammar, matcher.get_error())
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise refused(grammar, "; ".join(warnings))
        return matcher


def refused(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(grammar.field, _short(_located(grammar, reason)), "a grammar that compiles and can be met")


def why_stuck(matcher: LLMatcher) -> str:
    """Why no token is allowed at the matcher's position."""
    reason = _short(matcher.get_error()) if matcher.is_error() else ""
    return NO_DOCUMENT if reason in ("", "NoExtension", "NoExtensionBias") else reason


def _source(grammar: Grammar, *, for_older: bool) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(schema_of(grammar, for_older=for_older), overrides=_JSON)
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            # A terminal (upper case) is one automaton; as rules, each string would cost an item at every step.
            strings = " | ".join(json.dumps(one, ensure_ascii=False) for one in grammar.choices())
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {strings}")
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(_with_json_options(grammar.text, for_older=for_older))


def _with_json_options(lark: str, *, for_older: bool) -> str:
    """Schemas within a Lark grammar obey the rules of a JSON_SCHEMA, unless they have options of their own. Raises
    ValueError or RecursionError with the reason."""
    found, end = "", 0
    for mark in _EMBEDDED.finditer(lark):
        if mark.start() < end:
            continue  # in the schema before
        try:
            schema, stop = _DECODER.raw_decode(lark, mark.end())
        except (ValueError, RecursionError):
            continue  # llguidance says why
        if _PER_GRAMMAR not in schema:
            schema = {**_supported(schema, for_older=for_older), _PER_GRAMMAR: _JSON}
        found += lark[end : mark.end()] + json.dumps(schema)
        end = stop
    return found + lark[end:]


def schema_of(grammar: Grammar, *, for_older: bool = False) -> dict[str, Any]:
    """Of a JSON_SCHEMA. Raises ValueError or RecursionError with the reason."""
    try:
        schema = json.loads(grammar.text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("Unsatisfiable schema: false allows no document")
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object, true or false")
    if _PER_GRAMMAR in schema:
        raise ValueError(f'Unimplemented keys: ["{_PER_GRAMMAR}"]')
    return _supported(schema, for_older=for_older)


def _supported(schema: dict[str, Any], *, for_older: bool) -> dict[str, Any]:
    return supported(schema, has_older_compiler=_IS_OLDER or for_older)


def _tokenizer_text(model: Path, vocab_size: int) -> tuple[dict[str, Any], int]:
    """tokenizer.json, without added tokens for which the model has no row, and its number of tokens.

    Tokens in tokenizer_config.json are special, as in the detokenizer. Only what llguidance needs is left: with
    `padding`, it would pad each text that a grammar forces, and it runs patterns in the worker's own process.
    """
    text = read_json_object(model / "tokenizer.json", MAX_TOKENIZER_BYTES)
    if text is None:
        raise ModelError("tokenizer.json", f"nothing in {model}", "the model's tokenizer")
    config = read_json_object(model / "tokenizer_config.json") or {}
    held = [config.get(name) for name in NAMED_TOKENS]
    named = {one.get("content") if isinstance(one, Mapping) else one for one in held}
    added = text.get("added_tokens")
    if isinstance(added, list):
        tokens = [token for token in added if isinstance(token, dict) and isinstance(token.get("id"), int)]
        text["added_tokens"] = [token for token in tokens if token["id"] < vocab_size]
        for token in text["added_tokens"]:
            token["special"] = bool(token.get("special")) or token.get("content") in named
    text |= {"padding": None, "truncation": None, "post_processor": None}
    try:
        if not is_linear(text):
            text = with_known_parts(text)
            if not is_linear(text):
                expected = "one that encodes texts in little time"
                raise ModelError("tokenizer.json", "a model with very long tokens", expected)
        # Not one more than the largest id, which may be any number: llguidance holds a row for each id.
        num_tokens = len(text["model"]["vocab"]) + len(
            {one["content"] for one in added_tokens(text)} - vocabulary(text)
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError("tokenizer.json", "fields of another type", "a tokenizer that llguidance reads") from None
    return text, num_tokens


def _located(grammar: Grammar, reason: str) -> str:
    """The compiler's message, which quotes the text and marks the place below it, in words."""
    if found := _PATTERN_ERROR.search(reason):
        where = f"{found['why']} at character {len(found['indent']) - len(found['margin']) + 1}"
        return where if grammar.kind is GrammarKind.REGEX else f"the pattern {found['pattern']!r}: {where}"
    found = _LARK_ERROR.match(reason)
    if found is None or grammar.kind is not GrammarKind.LARK:
        return reason
    # A schema in the text is compiled in another form, which moves what follows.
    where = "" if _EMBEDDED.search(grammar.text) else f"line {found['line']}, column {found['column']}: "
    return where + found["why"]


def _short(reason: str) -> str:
    """The message on one line, without the parser's state that follows it."""
    return shortened(" ".join(reason.split("<non-verbose/>")[0].split()))

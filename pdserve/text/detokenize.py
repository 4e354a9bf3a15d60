"""Converts token ids to text incrementally, at a constant cost per token. Pure: no I/O.

The output never contains incomplete characters, and its concatenation equals decoding all ids at once. The rules are
those of the tokenizer's own decoder (`read_rule`): byte-level BPE, sentencepiece with byte fallback, Metaspace, or
none. Other decoders are rejected.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, final

from pdserve.core.errors import ModelError

# A run of byte tokens is decoded as a whole, and becomes replacement characters if any of it is not UTF-8. So it is
# held back until it ends, up to this length; beyond it, complete characters are returned as they come.
RUN_HELD_BYTES: Final = 16
REPLACEMENT: Final = "\ufffd"


class Join(Enum):
    """How tokens become text."""

    BYTES = "bytes"  # each token is bytes; the whole is UTF-8 (byte-level BPE)
    RUNS = "runs"  # tokens are text, some are single bytes (sentencepiece with byte fallback)
    METASPACE = "metaspace"  # tokens are text; a first token loses its space
    SPACED = "spaced"  # tokens are words


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRule:
    """A tokenizer's decoder, read from its JSON."""

    join: Join
    replace: tuple[tuple[str, str], ...] = ()
    has_byte_fallback: bool = False
    strip: str = ""  # character that is removed from the start of the whole text,
    strip_count: int = 0  # at most so many times
    is_first_space_dropped: bool = False


class Detokenizer(Protocol):
    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        ...

    def finish(self) -> str:
        """The text that was held back, after the last token."""
        ...


Lookup = Callable[[int], "str | None"]  # the token of an id; None if it has no text (special, unknown)


def read_rule(decoder: Mapping[str, Any] | None) -> TextRule:
    """Raises ModelError on an unsupported decoder."""
    if decoder is None:
        return TextRule(join=Join.SPACED)
    kind = decoder["type"]
    if kind == "ByteLevel":
        return TextRule(join=Join.BYTES)
    if kind == "Metaspace":
        is_dropped = decoder.get("prepend_scheme", "always") != "never" and decoder.get("add_prefix_space", True)
        space = ((decoder.get("replacement", "▁"), " "),)
        return TextRule(join=Join.METASPACE, replace=space, is_first_space_dropped=bool(is_dropped))
    if kind == "Sequence":
        steps = decoder["decoders"]
        if len(steps) == 1:
            return read_rule(steps[0])
        return _read_sequence(steps)
    return _read_sequence([decoder])


def _read_sequence(steps: Sequence[Mapping[str, Any]]) -> TextRule:
    replace: list[tuple[str, str]] = []
    has_byte_fallback = is_fused = False
    strip, strip_count = "", 0
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not has_byte_fallback and not is_fused:
            replace.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not has_byte_fallback and not is_fused:
            has_byte_fallback = True
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and not strip_count and step.get("stop", 0) == 0:
            strip, strip_count = step["content"], step.get("start", 0)
        else:
            raise ModelError(
                "tokenizer.json decoder", kind, "ByteLevel, Metaspace, or Replace, ByteFallback, Fuse, Strip"
            )
    return TextRule(
        join=Join.RUNS,
        replace=tuple(replace),
        has_byte_fallback=has_byte_fallback,
        strip=strip,
        strip_count=strip_count,
    )


def make_detokenizer(rule: TextRule, lookup: Lookup, *, is_continued: bool) -> Detokenizer:
    """`is_continued`: there is text before the first token, so no token is at the beginning."""
    if rule.join is Join.BYTES:
        return ByteDetokenizer(lambda token_id: byte_level_bytes(lookup(token_id)))
    return TextDetokenizer(rule, lookup, is_continued=is_continued)


@final
class ByteDetokenizer:
    """Tokens are bytes. Invalid UTF-8 becomes replacement characters, as when decoding the whole."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = False  # a character may be incomplete

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join(map(self._piece, token_ids))
        if data.isascii() and not self._is_within:  # a third of the decoder's time
            return data.decode()
        text = self._decoder.decode(data)
        self._is_within = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


@final
class TextDetokenizer:
    """Tokens are text, and with byte fallback some are single bytes."""

    def __init__(self, rule: TextRule, lookup: Lookup, *, is_continued: bool) -> None:
        self._rule = rule
        self._lookup = lookup
        self._run = bytearray()
        self._stream: codecs.IncrementalDecoder | None = None  # of a run that has outgrown RUN_HELD_BYTES
        self._is_first = not is_continued
        self._strip_left = 0 if is_continued else rule.strip_count

    def push(self, token_ids: Iterable[int]) -> str:
        out: list[str] = []
        for token_id in token_ids:
            token = self._lookup(token_id)
            if token is None:
                continue
            byte = _fallback_byte(token) if self._rule.has_byte_fallback else None
            if byte is None:
                out.append(self._end_run())
                out.append(self._text(token))
            else:
                out.append(self._add_byte(byte))
            self._is_first = False
        return self._strip("".join(out))

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _text(self, token: str) -> str:
        join = self._rule.join
        if join is Join.SPACED:
            return token if self._is_first else " " + token
        drops = join is Join.METASPACE and self._is_first and self._rule.is_first_space_dropped
        for pattern, content in self._rule.replace:
            token = token.replace(pattern, "" if drops else content)
        return token

    def _add_byte(self, byte: int) -> str:
        if self._stream is not None:
            return self._stream.decode(bytes((byte,)))
        self._run.append(byte)
        if len(self._run) <= RUN_HELD_BYTES:
            return ""
        self._stream = codecs.getincrementaldecoder("utf-8")("replace")
        return self._stream.decode(bytes(self._run))

    def _end_run(self) -> str:
        if self._stream is not None:
            text = self._stream.decode(b"", True)
        elif not self._run:
            return ""
        else:
            try:
                text = self._run.decode()
            except UnicodeDecodeError:
                text = REPLACEMENT * len(self._run)
        self._run.clear()
        self._stream = None
        return text

    def _strip(self, text: str) -> str:
        while text and self._strip_left:
            if not text.startswith(self._rule.strip):
                self._strip_left = 0
                break
            text = text[len(self._rule.strip) :]
            self._strip_left -= 1
        return text


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET: Final = _byte_alphabet()  # character -> byte


def byte_level_bytes(token: str | None) -> bytes:
    """The bytes of a byte-level token; for an added token, its UTF-8."""
    if token is None:
        return b""
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def token_bytes(rule: TextRule, token: str) -> bytes:
    """What one token writes after other text. May end within a character."""
    if rule.join is Join.BYTES:
        return byte_level_bytes(token)
    byte = _fallback_byte(token) if rule.has_byte_fallback else None
    if byte is not None:
        return bytes((byte,))
    if rule.join is Join.SPACED:
        return f" {token}".encode()
    for pattern, content in rule.replace:
        token = token.replace(pattern, content)
    return token.encode()


def _fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None

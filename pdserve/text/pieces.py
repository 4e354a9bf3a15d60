"""Tokenizes a long text in parts, in less time than the whole and with the same tokens.

A text may be cut before a space, by the rule in text_bounds.py (`word_end`). Two shortcuts use this:

- **Words.** What is between two cuts has the same ids wherever it is. Most are words of one token, which a table from
  the vocabulary has; the tokenizer reads each other one once for a text. No text changes the table.
- **Parts.** The texts of a conversation begin with the same parts. The ids of a part are kept, and found by a keyed
  hash of its text. The key contains the salt of the request's KV blocks, so a caller finds only texts whose KV it may
  share. The space is shared: the texts of other salts may displace its own.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Final, final

MIN_CHARS: Final = 512  # a shorter text is tokenized whole
PART_CHARS: Final = 4096  # a part ends at the first cut after so many
MAX_KEPT_CHARS: Final = 4 * PART_CHARS  # a longer part, because it has no cut, is not kept
MAX_KEPT_BYTES: Final = 32 * 2**20
ENTRY_BYTES: Final = 200  # of a kept part, in addition to its ids
# With a larger share of words that must be tokenized, a part is tokenized whole: a word alone costs twice as much.
MAX_UNKNOWN_SHARE: Final = 0.25
_CONTEXT: Final = "a"  # takes the place of the text before a cut; its tokens are dropped


@final
class PieceEncoder:
    """Thread-safe."""

    def __init__(
        self, encode_all: Callable[[Sequence[str]], list[list[int]]], tokens: Iterable[str], word_end: str
    ) -> None:
        """`encode_all` tokenizes texts, without tokens around them. `tokens`: the text of each token after other text.
        `word_end` is that of the tokenizer's TextBounds."""
        self._encode_all = encode_all
        self._is_word_end = re.compile(word_end).fullmatch
        self._part_end = re.compile(f"{word_end}(?= )")
        self._cut = re.compile(f"(?<={word_end}) ")
        self._num_context = len(encode_all([_CONTEXT])[0])
        self._ids = self._table(tokens)
        self.kept = KeptParts()

    def encode(self, text: str, salt: bytes | None) -> list[int]:
        """The ids of the text. `salt`: that of its KV blocks; None: the ids of its parts are not kept."""
        ids: list[int] = []
        words: dict[str, Sequence[int]] = {}  # those of this text; another text's would tell its words by the time
        begin = 0
        while begin < len(text):
            found = self._part_end.search(text, begin + PART_CHARS)
            end = len(text) if found is None else found.end()
            part, is_first = text[begin:end], begin == 0
            if salt is None or len(part) > MAX_KEPT_CHARS:
                ids += self._encode(part, words, is_first=is_first)
            else:
                key = _key(part, salt, is_first)
                known = self.kept.find(key, len(part))
                if known is None:
                    known = self._encode(part, words, is_first=is_first)
                    self.kept.add(key, known)
                ids += known
            begin = end
        return ids

    def _encode(self, part: str, known: dict[str, Sequence[int]], *, is_first: bool) -> list[int]:
        """The ids of a part; if it is not the first, it begins with a space. Adds its words to `known`."""
        body = part if is_first else part[1:]
        words = body.split(" ")
        new = set(words).difference(known)
        unknown = new.difference(self._ids)
        if not all(self._is_word_end(word[-1:]) for word in unknown):  # the text is not cut at each space
            words = self._cut.split(body)
            new = set(words).difference(known)
            unknown = new.difference(self._ids)
        if len(unknown) > MAX_UNKNOWN_SHARE * len(words):
            return self._encode_all([part])[0] if is_first else self._after_cut([part])[0]
        known.update((word, self._ids[word]) for word in new.difference(unknown))
        known.update(zip(unknown, self._after_cut([f" {word}" for word in unknown]), strict=True))
        before = self._encode_all([words.pop(0)])[0] if is_first else ()  # a word without a space before it
        return [*before, *chain.from_iterable(map(known.__getitem__, words))]

    def _after_cut(self, texts: Sequence[str]) -> list[list[int]]:
        return [ids[self._num_context :] for ids in self._encode_all([_CONTEXT + one for one in texts])]

    def _table(self, tokens: Iterable[str]) -> dict[str, Sequence[int]]:
        """The ids of the words that are one token after a cut and its space."""
        words = [one[1:] for one in tokens if one[:1] == " " and " " not in one[1:] and self._is_word_end(one[1:][-1:])]
        found = zip(words, self._after_cut([f" {one}" for one in words]), strict=True)
        return {word: (ids[0],) for word, ids in found if len(ids) == 1}


@final
class KeptParts:
    """The ids of texts, by a hash; the least recently used are dropped. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self.num_bytes = 0
        self.num_found_chars = self.num_missed_chars = 0

    def find(self, key: bytes, num_chars: int) -> list[int] | None:
        with self._lock:
            held = self._ids.get(key)
            if held is None:
                self.num_missed_chars += num_chars
                return None
            self._ids.move_to_end(key)
            self.num_found_chars += num_chars
        return array("I", held).tolist()

    def add(self, key: bytes, ids: Sequence[int]) -> None:
        packed = array("I", ids).tobytes()
        with self._lock:
            if key in self._ids:  # another thread has tokenized the same part
                return
            self._ids[key] = packed
            self.num_bytes += len(packed) + ENTRY_BYTES
            while self.num_bytes > self._max_bytes:
                _, dropped = self._ids.popitem(last=False)
                self.num_bytes -= len(dropped) + ENTRY_BYTES

    def check(self) -> None:
        """Raises AssertionError unless the counted bytes are those held, within the limit."""
        held = sum(len(one) + ENTRY_BYTES for one in self._ids.values())
        assert held == self.num_bytes <= self._max_bytes, f"{self.num_bytes} bytes counted, {held} held"


def _key(part: str, salt: bytes, is_first: bool) -> bytes:
    # The length makes (salt, part) unambiguous. After a cut, a part may have other tokens than at the beginning.
    digest = blake2b(b"%d,%d," % (is_first, len(salt)) + salt, digest_size=32, person=b"pdserve.pieces")
    digest.update(part.encode("utf-8", "surrogatepass"))
    return digest.digest()

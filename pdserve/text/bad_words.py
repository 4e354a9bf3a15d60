"""Bad words as token sequences, for the engine to ban. Pure.

As in vLLM, a word is tokenised both at the beginning of a text and after a space, which may give different tokens. A
sequence that ends with another one of the list is redundant and left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.text.tokenizer import Tokenizer


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    found: dict[tuple[int, ...], None] = {}  # in order
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            found[tuple(tokenizer.encode(text, has_special_tokens=False))] = None
    return [one for one in found if not any(other != one and _ends_in(one, other) for other in found)]


def _ends_in(sequence: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return 0 < len(end) <= len(sequence) and sequence[len(sequence) - len(end) :] == end

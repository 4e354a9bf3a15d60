"""Logprobs in OpenAI's two forms, and vLLM's of prompts. Pure: the bytes of each token are an argument.

Long arrays are iterators, which are read once, while they are encoded: as objects, they take four times the memory of
their JSON.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from pdserve.client.results import TokenLogprob

BytesOf = Callable[[int], bytes]
LOWEST = -9999.0  # JSON has no -inf; as in vLLM


class Tokens(Protocol):
    def __call__(self, token_id: int) -> bytes:
        """What the token writes; a special token's name."""
        ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that is repeated before its answers."""

    text: str
    token_ids: tuple[int, ...] = ()  # empty if no logprobs are shown
    scored: tuple[TokenLogprob | None, ...] = ()  # one per token; known with the first piece


def token_ids(scored: Iterable[TokenLogprob | None]) -> set[int]:
    """All tokens whose bytes are needed."""
    return {
        token_id for one in scored if one is not None for token_id in (one.token_id, *(other for other, _ in one.top))
    }


def chat_logprobs(scored: Sequence[TokenLogprob], most: int, bytes_of: BytesOf) -> dict[str, Any]:
    return {"content": chat_content(scored, most, bytes_of), "refusal": None}


def chat_content(scored: Sequence[TokenLogprob], most: int, bytes_of: BytesOf) -> Iterator[dict[str, Any]]:
    return (
        {
            **_token(one.token_id, one.logprob, bytes_of),
            "top_logprobs": [_token(token_id, logprob, bytes_of) for token_id, logprob in one.top[:most]],
        }
        for one in scored
    )


def text_logprobs(
    ids: Sequence[int],
    scored: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    most: int,
    bytes_of: BytesOf,
) -> dict[str, Any]:
    """Of the tokens `ids`; the first token of a prompt has no logprob. `offsets` are positions in the text."""
    top = (None if one is None else _likeliest(one, most, bytes_of) for one in scored)
    return {
        "tokens": [_key(token_id, bytes_of) for token_id in ids],
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in scored],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }


@final
class TextOffsets:
    """Positions of the tokens of a text, in characters: the number of whole characters before each token."""

    def __init__(self, tokens: Tokens, begin: int, *, has_special_tokens: bool) -> None:
        """`begin`: the characters before the first token. Special tokens may have no text."""
        self._tokens, self._has_special_tokens = tokens, has_special_tokens
        self._num_chars = begin
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, ids: Iterable[int]) -> list[int]:
        found = []
        for token_id in ids:
            found.append(self._num_chars)
            if self._has_special_tokens or not self._tokens.is_special(token_id):
                self._num_chars += len(self._decoder.decode(self._tokens(token_id)))
        return found


def prompt_offsets(text: str, ids: Sequence[int], tokens: Tokens) -> list[int]:
    """Positions of a prompt's tokens in its text. A token that is not in the text, such as a BOS, takes no characters;
    a first token may lack the space that its tokenizer added. A tokenizer that changes texts gives only estimates."""
    rest, offsets, at = text.encode("utf-8", "surrogatepass"), [], 0
    starts = [0]  # of each byte: the number of whole characters before it
    for char in text:
        starts += [starts[-1]] * (len(char.encode("utf-8", "surrogatepass")) - 1) + [starts[-1] + 1]
    for token_id in ids:
        offsets.append(starts[at])
        raw = tokens(token_id)
        if not rest.startswith(raw, at) and at == 0:
            raw = raw.removeprefix(b" ")
        at += len(raw) if rest.startswith(raw, at) else 0
    if at == len(rest):
        return offsets
    return [min(offset, len(text)) for offset in TextOffsets(tokens, 0, has_special_tokens=False).take(ids)]


def prompt_logprobs(
    scored: Sequence[TokenLogprob | None], most: int, bytes_of: BytesOf
) -> Iterator[dict[str, Any] | None]:
    """As in vLLM: by token id, the prompt's own token first."""
    return (None if one is None else _prompt_token(one, most, bytes_of) for one in scored)


def _prompt_token(one: TokenLogprob, most: int, bytes_of: BytesOf) -> dict[str, Any]:
    ranks: dict[int, int | None] = {one.token_id: one.rank}
    ranks |= {token_id: rank for rank, (token_id, _) in enumerate(one.top, 1)}
    found = {one.token_id: one.logprob} | dict(one.top[:most])
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks[token_id],
            "decoded_token": _text(token_id, bytes_of),
        }
        for token_id, logprob in found.items()
    }


def _likeliest(one: TokenLogprob, most: int, bytes_of: BytesOf) -> dict[str, float]:
    """The `most` most likely tokens, and the token itself. Of tokens with equal text, it alone has the text as its key;
    the others have their ids."""
    found = dict(one.top[:most])
    found.setdefault(one.token_id, one.logprob)
    keys, own = {}, _key(one.token_id, bytes_of)
    for token_id, logprob in found.items():
        key = _key(token_id, bytes_of)
        is_taken = key in keys or (key == own and token_id != one.token_id)
        keys[f"token_id:{token_id}" if is_taken else key] = _finite(logprob)
    return keys


def _token(token_id: int, logprob: float, bytes_of: BytesOf) -> dict[str, Any]:
    raw = bytes_of(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _key(token_id: int, bytes_of: BytesOf) -> str:
    """The token's text; OpenAI's name of its bytes if they are not UTF-8, such as those of a part of a character."""
    raw = bytes_of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _text(token_id: int, bytes_of: BytesOf) -> str:
    return bytes_of(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)

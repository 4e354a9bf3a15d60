"""Logprobs in OpenAI's two forms, and vLLM's of prompts. Pure: the bytes of each token are an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pdserve.client.results import TokenLogprob

BytesOf = Callable[[int], bytes]
LOWEST = -9999.0  # JSON has no -inf; as in vLLM


def token_ids(scored: Iterable[TokenLogprob | None]) -> set[int]:
    """All tokens whose bytes are needed."""
    return {
        token_id for one in scored if one is not None for token_id in (one.token_id, *(other for other, _ in one.top))
    }


def chat_logprobs(scored: Sequence[TokenLogprob], most: int, bytes_of: BytesOf) -> dict[str, Any]:
    return {
        "content": [
            {
                **_token(one.token_id, one.logprob, bytes_of),
                "top_logprobs": [_token(token_id, logprob, bytes_of) for token_id, logprob in one.top[:most]],
            }
            for one in scored
        ],
        "refusal": None,
    }


def text_logprobs(scored: Sequence[TokenLogprob], most: int, offset: int, bytes_of: BytesOf) -> dict[str, Any]:
    """`offset` is the number of characters before the first token."""
    tokens = [_text(one.token_id, bytes_of) for one in scored]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(one.logprob) for one in scored],
        "top_logprobs": [
            {_text(token_id, bytes_of): _finite(logprob) for token_id, logprob in one.top[:most]} for one in scored
        ]
        if most
        else None,
        "text_offset": offsets,
    }


def prompt_logprobs(scored: Sequence[TokenLogprob | None], bytes_of: BytesOf) -> list[dict[str, Any] | None]:
    """As in vLLM: by token id, the prompt's own token first. `rank` is null for a token that is not among the top."""
    return [None if one is None else _prompt_token(one, bytes_of) for one in scored]


def _prompt_token(one: TokenLogprob, bytes_of: BytesOf) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(one.top, 1)}
    found = {one.token_id: one.logprob} | dict(one.top)
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": _text(token_id, bytes_of),
        }
        for token_id, logprob in found.items()
    }


def _token(token_id: int, logprob: float, bytes_of: BytesOf) -> dict[str, Any]:
    raw = bytes_of(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _text(token_id: int, bytes_of: BytesOf) -> str:
    return bytes_of(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)

"""Checks a router's messages before they are used. No I/O."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.durations import SHORTEST_SLO_S, check_duration
from pdserve.core.errors import InvalidRequest
from pdserve.core.hashing import chain_key
from pdserve.core.types import check_token_ids
from pdserve.v1 import worker_pb2
from pdserve.wire.sequence import SEQUENCE

MAX_REQUEST_ID_CHARS: Final = 256
MAX_SALT_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLimits:
    vocab_size: int
    max_context_tokens: int
    hash_seed: bytes


def key_of(router: int, request_id: str, attempt: int) -> AttemptKey:
    """Raises InvalidRequest if the name itself is invalid."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest("request_id", f"{len(request_id)} characters", f"1 to {MAX_REQUEST_ID_CHARS}")
    if attempt < 1:
        raise InvalidRequest("attempt", attempt, "at least 1")
    return AttemptKey(router, request_id, attempt)


def read_sequence(message: worker_pb2.Sequence, key: AttemptKey, limits: SequenceLimits, now_s: float) -> Attempt:
    """Raises InvalidRequest, naming the field and its limit."""
    num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
    if not message.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids", "none", "at least one token")
    if num_tokens > limits.max_context_tokens:
        raise InvalidRequest(
            "prompt_token_ids", f"{num_tokens} tokens with the output so far", f"at most {limits.max_context_tokens}"
        )
    if len(message.cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequest("cache_salt", f"{len(message.cache_salt)} bytes", f"at most {MAX_SALT_BYTES}")
    deadline_s = message.deadline_s if message.HasField("deadline_s") else None
    if deadline_s is not None:
        check_duration("deadline_s", deadline_s)
    check_duration("waited_s", message.waited_s)
    for name in ("ttft_s", "tpot_s", "itl_s"):
        if message.HasField(name):
            check_duration(name, getattr(message, name), low=SHORTEST_SLO_S)
    attempt = SEQUENCE.decode(
        message,
        key.peer,
        chain_key=_chain_key(message.cache_salt, limits.hash_seed),
        arrived_s=now_s,
        deadline_at_s=None if deadline_s is None else now_s + deadline_s,
        begun_at_s=now_s - message.waited_s,
    )
    _check_ids("prompt_token_ids", attempt.prompt_ids, limits.vocab_size)
    _check_ids("output_token_ids", attempt.output_ids, limits.vocab_size)
    check_token_ids(attempt.sampling, limits.vocab_size, "sampling.")
    if len(attempt.output_ids) >= attempt.sampling.max_tokens:
        raise InvalidRequest(
            "output_token_ids",
            f"{len(attempt.output_ids)} tokens",
            f"fewer than max_tokens {attempt.sampling.max_tokens}",
        )
    return attempt


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(field, max(token_ids), f"token ids below {vocab_size}")


_chain_key = functools.lru_cache(maxsize=1024)(chain_key)

"""Prompts without text: the trace's ids, not tokens, decide which KV blocks of two prompts are equal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pdserve.core.attempt import Attempt
from pdserve.core.kv.hashing import HASH_BYTES
from pdserve.core.types import Sampling, TokenOut
from simulator.model import TraceRequest

TOKEN = TokenOut(token_id=0)  # the token that every simulated engine samples


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Content hashes of one request's blocks, in the format of the live system.

    Blocks with ids in the trace are derived from the ids. The following blocks, the end of the prompt and the answer,
    are unique to the request.
    """

    number: int
    prompt: tuple[bytes, ...]  # full blocks with ids in the trace

    def extend(self, known: list[bytes], num_tokens: int, block_size: int) -> list[bytes]:
        full = num_tokens // block_size
        names = [*known, *self.prompt[len(known) : full]][:full]
        own = -self.number - 1
        return names + [_name(own, index) for index in range(len(names), full)]


def block_names(number: int, request: TraceRequest, block_tokens: int, block_size: int) -> BlockNames:
    """`block_tokens` is a multiple of `block_size`, or 0 if the trace has no ids."""
    if not request.block_ids or not block_tokens:
        return BlockNames(number, ())
    parts = block_tokens // block_size
    full = min(request.prompt_tokens // block_size, len(request.block_ids) * parts)
    ids = request.block_ids
    if parts == 1:
        return BlockNames(number, tuple([_name(one, 0) for one in ids[:full]]))
    return BlockNames(number, tuple([_name(ids[at // parts], at % parts) for at in range(full)]))


def _name(owner: int, index: int) -> bytes:
    return (owner % 2**64 << 64 | index).to_bytes(HASH_BYTES, "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticAttempt(Attempt):
    names: BlockNames

    def extend_hashes(self, known: list[bytes], token_ids: Sequence[int], block_size: int) -> list[bytes]:
        return self.names.extend(known, len(token_ids), block_size)


@lru_cache(maxsize=64)
def blank(num_tokens: int) -> tuple[int, ...]:
    """Dummy token ids."""
    return (TOKEN.token_id,) * num_tokens


@lru_cache(maxsize=4096)
def sampling_of(max_tokens: int) -> Sampling:
    """max_tokens for the worker, which ends the answer at the trace's length; routers get another value."""
    return Sampling(max_tokens=max_tokens, ignore_eos=True)

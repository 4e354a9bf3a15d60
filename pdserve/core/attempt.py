"""One placement of one request on a worker, and when its text ends. Pure: standard library only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, cast, final

from pdserve.core.kv.hashing import extend_hashes, tail_hash
from pdserve.core.kv.stamps import content_hash64
from pdserve.core.types import FinishReason, RequestAttributes, Sampling


class AttemptKey(NamedTuple):
    """Names an attempt on one stream between a router and a worker.

    `peer` names the other end of the stream: on a worker the number of the router's stream (not of the router's
    process), on a router the worker's id.
    """

    peer: int | str
    request_id: str
    attempt: int

    @property
    def router(self) -> int:
        """The peer, on a worker."""
        return cast("int", self.peer)

    @property
    def worker_id(self) -> str:
        """The peer, on a router."""
        return cast("str", self.peer)


class RefusalReason(Enum):
    """Why a worker declines an attempt. The worker then keeps no memory for the attempt."""

    INBOX_FULL = "inbox_full"
    NO_BLOCKS = "no_blocks"
    DRAINING = "draining"
    TOO_LARGE = "too_large"  # the sequence can never fit this worker
    DEADLINE = "deadline"
    NO_ADAPTER = "no_adapter"  # the worker has not loaded the sequence's adapter
    NO_KV = "no_kv"  # a decode worker was asked to send KV that it no longer has


class FailureKind(Enum):
    """Why a worker abandons an accepted attempt."""

    DEADLINE = "deadline"
    INTERNAL = "internal"
    INVALID = "invalid"  # the request itself is wrong
    TRANSFER = "transfer"  # the granted blocks were freed; a new grant may work


PULLS_TAKEN: Final = 4  # pulls at once by one worker
PULLS_GIVEN: Final = 2  # pulls at once from one worker, whose engine shares cores and memory with them


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """A worker that has the KV of a text's first tokens, as a router believes. Another worker may pull it."""

    worker_id: str
    incarnation: str
    endpoint: str  # HOST:PORT of its gRPC server
    num_tokens: int
    predicted_s: float  # until the KV has arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(RequestAttributes):
    """Everything that a worker needs to compute the request's tokens."""

    key: AttemptKey
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()  # output tokens that the client already has
    sampling: Sampling
    chain_key: bytes = b""  # key of the prefix cache's hash chain
    arrived_s: float = 0.0
    deadline_at_s: float | None = None  # on the clock of `now_s`
    ttft_s: float | None = None  # TTFT target
    #: When the request arrived at the router; when its first token was sampled if it has output.
    begun_at_s: float = 0.0
    tpot_s: float | None = None  # TPOT target
    itl_s: float | None = None  # as in Slo
    adapter: str = ""  # fingerprint of its LoRA adapter, which `chain_key` also depends on; empty: the model alone
    source: PrefixSource | None = None  # from which the worker that computes the text may pull KV

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, whose KV is needed before the next token can be sampled."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_top_of_prompt(self) -> int | None:
        """Number of most likely tokens to report for each prompt position; None if the prompt is not scored.

        The scores are sent before the first token.
        """
        return None if self.output_ids else self.sampling.prompt_logprobs

    def targets(self, first: int, end: int) -> tuple[int, ...]:
        """The tokens to score when positions `first` to `end` - 1 are computed."""
        return () if self.num_top_of_prompt is None else self.prompt_ids[first + 1 : end + 1]

    def extend_hashes(self, known: list[bytes], token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """`known`, followed by the hashes of the further full blocks of `token_ids`. Equal hashes mean equal KV."""
        return extend_hashes(known, token_ids, block_size, self.chain_key)

    def content_hashes(self, hashes: Sequence[bytes], token_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
        """The content hashes, as in stamps, of all blocks of `token_ids`, including a partly filled last one. `hashes`
        are the chain hashes of the full blocks."""
        full = tuple(map(content_hash64, hashes[: len(token_ids) // block_size]))
        tail = tail_hash(hashes, token_ids, block_size, self.chain_key)
        return full if tail is None else (*full, content_hash64(tail))

    def is_late(self, now_s: float) -> bool:
        return self.deadline_at_s is not None and now_s >= self.deadline_at_s


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def grant_error(num_tokens: int, *, cached_blocks: int, num_granted: int, granted_size: int) -> str:
    """Why a grant does not fit a text of `num_tokens`, of which the receiver has `cached_blocks`; empty if it fits."""
    total = blocks_for(num_tokens, granted_size)
    if cached_blocks + num_granted == total:
        return ""
    return f"grant: {cached_blocks} cached and {num_granted} granted blocks, expected {total} in total"


def shareable_blocks(num_tokens: int, block_size: int) -> int:
    """Number of leading blocks of a sequence that a prefix cache may supply: at least one token is always computed."""
    return max(0, num_tokens - 1) // block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRule:
    """Decides when a text ends, on the worker that samples its tokens. The router checks stop strings."""

    eos_token_ids: frozenset[int]
    max_context_tokens: int

    def is_end(self, sampling: Sampling, token_id: int) -> bool:
        """Whether the token ends a text that is long enough; with a grammar, a text of any length."""
        if token_id in self.eos_token_ids and (sampling.grammar is not None or not sampling.ignore_eos):
            return True
        return token_id in sampling.stop_token_ids

    def end_ids(self, sampling: Sampling) -> frozenset[int]:
        """Every token with which `finish` may end a text with this sampling."""
        stops = sampling.stop_token_ids
        return self.eos_token_ids.union(stops) if stops else self.eos_token_ids

    def ends_with_next(self, sampling: Sampling, num_output: int, num_tokens: int) -> bool:
        """Whether the next token is certainly the last one, after `num_output` output tokens and `num_tokens` in total.

        The KV of such a text is not needed for decoding.
        """
        return num_output + 1 >= sampling.max_tokens or num_tokens + 1 >= self.max_context_tokens

    def finish(self, sampling: Sampling, token_id: int, num_output: int, num_tokens: int) -> FinishReason | None:
        """The reason why the text ends with `token_id`, which is output token number `num_output`, and number
        `num_tokens` of all. None if it continues."""
        if sampling.grammar is not None and token_id in self.eos_token_ids:
            return FinishReason.STOP  # the grammar allows no further token, so min_tokens and ignore_eos do not apply
        if self.is_end(sampling, token_id) and num_output > sampling.min_tokens:
            return FinishReason.STOP
        if num_output >= sampling.max_tokens or num_tokens >= self.max_context_tokens:
            return FinishReason.LENGTH
        return None


@final
class AttemptLedger:
    """The newest attempt of each request, to distinguish late messages from new work.

    A request for which no memory is held is forgotten. Its router may then use the name again, from attempt 1 on.
    """

    def __init__(self, capacity: int = 8192) -> None:
        self._newest: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._capacity = capacity

    def newest(self, key: AttemptKey) -> AttemptKey | None:
        """The newest attempt seen of the same request."""
        attempt = self._newest.get((key.router, key.request_id))
        return None if attempt is None else key._replace(attempt=attempt)

    def begin(self, key: AttemptKey) -> bool:
        """Records a new attempt. False, without recording it, if it is not newer than the last one."""
        newest = self.newest(key)
        if newest is not None and key.attempt <= newest.attempt:
            return False
        self._newest[key.router, key.request_id] = key.attempt
        self._newest.move_to_end((key.router, key.request_id))
        if len(self._newest) > self._capacity:
            self._newest.popitem(last=False)
        return True

    def forget(self, key: AttemptKey) -> None:
        """Forgets the attempt, unless there is a newer one of the same request."""
        if self.newest(key) == key:
            del self._newest[key.router, key.request_id]

    def forget_router(self, router: int) -> None:
        for name in [name for name in self._newest if name[0] == router]:
            del self._newest[name]

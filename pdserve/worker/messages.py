"""Messages from routers, checked before they are used, and messages to them, built and kept until they are sent. No
I/O: the host sends them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, final

from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.adapters import MAX_FINGERPRINT_CHARS
from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.durations import SHORTEST_SLO_S, check_duration
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv.blocks import CacheChange
from pdserve.core.kv.hashing import chain_key
from pdserve.core.types import check_token_ids
from pdserve.telemetry.trace_context import trace_id_of
from pdserve.v1 import inference_pb2, worker_pb2
from pdserve.wire.convert import logprobs_to_proto
from pdserve.wire.protocol import ADAPTER_LOADED, ADAPTERS, SEQUENCE, encode_response

# --- checks of messages from routers --------------------------------------------------------------------------

MAX_REQUEST_ID_CHARS: Final = 256
MAX_SALT_BYTES: Final = 1024
MAX_ENDED_HASHES: Final = 128


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
    if len(message.adapter) > MAX_FINGERPRINT_CHARS:
        raise InvalidRequest("adapter", f"{len(message.adapter)} characters", f"at most {MAX_FINGERPRINT_CHARS}")
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


def read_block_hashes(message: worker_pb2.EndText) -> Sequence[bytes]:
    """Raises InvalidRequest."""
    if len(message.block_hashes) > MAX_ENDED_HASHES:
        raise InvalidRequest("block_hashes", len(message.block_hashes), f"at most {MAX_ENDED_HASHES}")
    return message.block_hashes


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(field, max(token_ids), f"token ids below {vocab_size}")


_chain_key = functools.lru_cache(maxsize=1024)(chain_key)


# --- messages that no codec covers ----------------------------------------------------------------------------
# They are defined in worker.proto.

MAX_SCORED: Final = 16_384  # logprobs in one message: some 200 kB


def prompt_scored(effect: fx.PromptScored) -> Iterator[worker_pb2.PromptScored]:
    """As many messages as keep each far below any limit on message size."""
    width = 1 + max(len(token.top) for token in effect.tokens)
    size = max(1, MAX_SCORED // width)
    for first in range(0, len(effect.tokens), size):
        scores = inference_pb2.PromptLogprobs(
            first_position=effect.first_position + first,
            tokens=[logprobs_to_proto(token) for token in effect.tokens[first : first + size]],
        )
        yield worker_pb2.PromptScored(request_id=effect.key.request_id, attempt=effect.key.attempt, scores=scores)


def plain_tokens(effect: fx.PlainTokens) -> Iterator[tuple[int, worker_pb2.PlainTokens]]:
    """One message for each router, by the number of its stream."""
    routers, request_ids, attempts = zip(*effect.keys, strict=True)
    columns: list[Sequence[Any]] = [request_ids, attempts, effect.output_indexes, effect.token_ids]
    for router in sorted(set(routers)):
        names, numbers, indexes, tokens = columns
        if routers.count(router) < len(routers):
            is_its = [one == router for one in routers]
            names, numbers, indexes, tokens = (list(compress(column, is_its)) for column in columns)
        plain = worker_pb2.PlainTokens(request_ids=names, attempts=numbers, output_indexes=indexes, token_ids=tokens)
        yield router, plain


def kv_events(change: CacheChange) -> worker_pb2.KvEvents:
    return worker_pb2.KvEvents(
        sequence=change.sequence,
        is_snapshot=change.is_snapshot,
        stored=change.stored,
        removed=change.removed,
        tiers=change.tiers,
    )


# --- outboxes of routers --------------------------------------------------------------------------------------
# Messages that wait to be sent. Runs on the engine thread only.


@final
class Outbox:
    """The order is kept for each router. A message to a router whose stream has ended is dropped."""

    def __init__(self) -> None:
        self._routers: dict[int, bool] = {}  # session -> whether it wants KV events
        self._pending: list[tuple[int, worker_pb2.AttachResponse]] = []

    def attach(self, session: int, *, wants_kv_events: bool) -> None:
        self._routers[session] = wants_kv_events

    def detach(self, session: int) -> None:
        self._routers.pop(session, None)

    def __contains__(self, session: int) -> bool:
        """Whether the router's stream is attached."""
        return session in self._routers

    def take(self) -> list[tuple[int, worker_pb2.AttachResponse]]:
        """(session, message) pairs since the last call, in order."""
        pending, self._pending = self._pending, []
        return pending

    def send(self, session: int, response: worker_pb2.AttachResponse) -> None:
        if session in self._routers:
            self._pending.append((session, response))

    def report(self, message: pr.AttemptMessage) -> None:
        """Sends a message about an attempt to the router of the attempt."""
        self.send(message.key.router, encode_response(message))

    def report_all(self, message: pr.Load | pr.BatchTimed) -> None:
        response = encode_response(message)
        for session in self._routers:
            self.send(session, response)

    def report_load(self, session: int, load: pr.Load) -> None:
        self.send(session, encode_response(load))

    def report_scores(self, effect: fx.PromptScored) -> None:
        for message in prompt_scored(effect):
            self.send(effect.key.router, worker_pb2.AttachResponse(prompt_scored=message))

    def report_links(self, links: Iterable[tuple[str, str, str]], session: int | None = None) -> None:
        """(decode worker, transport, reason) of each link, to one router or all."""
        reported = [worker_pb2.KvLink(decode_worker=one[0], transport=one[1], reason=one[2]) for one in links]
        response = worker_pb2.AttachResponse(kv_links=worker_pb2.KvLinks(links=reported))
        for one in self._routers if session is None else (session,):
            self.send(one, response)

    def report_adapters(self, adapters: pr.Adapters, session: int | None = None) -> None:
        """To one router or all."""
        response = worker_pb2.AttachResponse(adapters=ADAPTERS.encode(adapters))
        for one in self._routers if session is None else (session,):
            self.send(one, response)

    def report_adapter_loaded(self, session: int, loaded: pr.AdapterLoaded) -> None:
        self.send(session, worker_pb2.AttachResponse(adapter_loaded=ADAPTER_LOADED.encode(loaded)))

    def report_cache(self, change: CacheChange, session: int | None = None) -> None:
        """To one router, or all that want KV events."""
        response = worker_pb2.AttachResponse(kv_events=kv_events(change))
        wanting = [one for one, wants in self._routers.items() if wants]
        for one in wanting if session is None else (session,):
            self.send(one, response)


# --- fields of log records ------------------------------------------------------------------------------------
# What a log record about an attempt says: its request, its trace, and the attributes that the client has set.


@final
class AttemptFields:
    """Of the attempts on this worker. Used on the engine thread only."""

    def __init__(self) -> None:
        self._fields: dict[AttemptKey, Mapping[str, Any]] = {}

    def add(self, attempt: Attempt, traceparent: str) -> None:
        named = {"trace_id": trace_id_of(traceparent), **attempt.attributes()}
        self._fields[attempt.key] = {name: value for name, value in named.items() if value}

    def remove(self, key: AttemptKey) -> None:
        self._fields.pop(key, None)

    @property
    def keys(self) -> set[AttemptKey]:
        return set(self._fields)

    def of(self, key: AttemptKey) -> dict[str, Any]:
        """Without trace and attributes if the attempt has ended."""
        return {"request_id": key.request_id, "attempt": key.attempt, **self._fields.get(key, {})}

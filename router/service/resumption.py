"""The key of a call, and the checks of what the client of an interrupted call holds. No I/O.

The first message of a call has a key: a time, and a MAC over everything that the call's tokens depend on. If its
router dies, the client presents the key and its tokens to another router, which computes the MAC of the request
again. A request that differs is rejected. So is one that no router has admitted: a resumed call is never rejected for
its targets.
"""

from __future__ import annotations

import hmac
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.core.access.proof import ClusterSecret
from pdserve.core.attempt import EndRule
from pdserve.core.errors import InvalidRequest
from pdserve.core.types import FinishReason, Sampling
from pdserve.v1 import inference_pb2
from pdserve.wire import convert
from router.service.model import ModelFacts

TIME_BYTES: Final = 8
MAC_BYTES: Final = 16
CLOCK_SKEW_S: Final = 60.0  # between the clocks of two routers

_EXPECTED_KEY: Final = (
    "Started.resume_key of this call, not older than a call may last. Its prompt, options, model and seed must be the "
    "same, and so must be the model's weights and chat template; send the call again without resume"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedAnswer:
    """What the client of an interrupted call has of one answer."""

    token_ids: tuple[int, ...]
    num_chars: int
    logprob_sum: float
    has_finished: bool  # the client has its last message
    finish: FinishReason | None  # why the answer ends with the last token; None: it continues, or a stop string ends it


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What the tokens of a call depend on."""

    tenant: str
    model: ModelFacts
    adapter: str  # fingerprint
    prompt_ids: tuple[int, ...]
    sampling: Sampling  # with its seed
    num_answers: int


def make_key(secret: ClusterSecret, facts: CallFacts, now_s: float) -> bytes:
    """`now_s` is the time since the epoch."""
    at = int(now_s).to_bytes(TIME_BYTES, "little")
    return at + _mac(secret, facts, at)


def check_key(
    secret: ClusterSecret | None, calls: Sequence[CallFacts], key: bytes, now_s: float, longest_s: float
) -> CallFacts:
    """The one of `calls` for which `key` was made, at most `longest_s` ago. Raises InvalidRequest if it is none."""
    at, mac = key[:TIME_BYTES], key[TIME_BYTES:]
    age_s = now_s - int.from_bytes(at, "little")
    if secret is not None and -CLOCK_SKEW_S <= age_s <= longest_s + CLOCK_SKEW_S:
        for facts in calls:
            if hmac.compare_digest(mac, _mac(secret, facts, at)):
                return facts
    raise InvalidRequest("resume.key", f"{len(key)} bytes", _EXPECTED_KEY)


def _mac(secret: ClusterSecret, facts: CallFacts, at: bytes) -> bytes:
    fingerprint = facts.model.fingerprint
    return secret.mac(
        "resume",
        at,
        facts.tenant,
        fingerprint.model,
        fingerprint.engine,
        facts.adapter,
        str(facts.num_answers),
        convert.sampling_to_proto(facts.sampling).SerializeToString(deterministic=True),
        array("I", facts.prompt_ids).tobytes(),
    )[:MAC_BYTES]


def read_answers(message: inference_pb2.Resumption, facts: CallFacts) -> tuple[ResumedAnswer, ...]:
    """Raises InvalidRequest, naming the field and its limit."""
    num_answers, model = facts.num_answers, facts.model
    if len(message.answers) != num_answers:
        raise InvalidRequest("resume.answers", f"{len(message.answers)} answers", f"{num_answers}, one for each answer")
    if not any(one.token_ids for one in message.answers):
        raise InvalidRequest("resume.answers", "no token", "at least one; send the call again without resume")
    if all(one.has_finished for one in message.answers):
        raise InvalidRequest("resume.answers", "finished ones only", "one that is not complete; there is nothing to do")
    rule = EndRule(eos_token_ids=frozenset(model.eos_token_ids), max_context_tokens=model.max_context_tokens)
    return tuple([_read_answer(one, facts, rule) for one in message.answers])


def num_resumed_tokens(message: inference_pb2.Resumption) -> int:
    return sum(len(one.token_ids) for one in message.answers)


def _read_answer(message: inference_pb2.ResumedAnswer, facts: CallFacts, rule: EndRule) -> ResumedAnswer:
    token_ids, field = tuple(message.token_ids), "resume.answers.token_ids"
    sampling, vocab_size = facts.sampling, facts.model.vocab_size
    if len(token_ids) > sampling.max_tokens:
        raise InvalidRequest(field, f"{len(token_ids)} tokens", f"at most max_tokens, which is {sampling.max_tokens}")
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(field, max(token_ids), f"ids below {vocab_size}")
    if message.has_finished and not token_ids:
        raise InvalidRequest(field, "a finished answer without tokens", "all of its tokens")
    logprob_sum = message.cumulative_logprob
    is_missing = sampling.logprobs is not None and not message.HasField("cumulative_logprob")
    if is_missing or not math.isfinite(logprob_sum):
        given = "nothing" if is_missing else logprob_sum
        raise InvalidRequest("resume.answers.cumulative_logprob", given, "a finite number, because of logprobs")
    return ResumedAnswer(
        token_ids=token_ids,
        num_chars=message.num_chars,
        logprob_sum=logprob_sum,
        has_finished=message.has_finished,
        finish=_finish(token_ids, sampling, len(facts.prompt_ids), rule),
    )


def _finish(token_ids: Sequence[int], sampling: Sampling, num_prompt_tokens: int, rule: EndRule) -> FinishReason | None:
    """Why the answer ends with its last token; None if it continues. Raises InvalidRequest if it ends before."""
    for number, token_id in enumerate(token_ids, 1):
        finish = rule.finish(sampling, token_id, number, num_prompt_tokens + number)
        if finish is not None:
            if number < len(token_ids):
                raise ended_before(number, len(token_ids))
            return finish
    return None


def ended_before(number: int, count: int) -> InvalidRequest:
    return InvalidRequest(
        "resume.answers.token_ids", f"{count} tokens", f"{number}: the answer ends with token {number}, {count} came"
    )

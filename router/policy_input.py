"""Describes a waiting request for policies and for the order of the queue. Pure."""

from __future__ import annotations

import math
from typing import Any, Final

from router.fleet import Fleet
from router.lengths import OutputLengths
from router.policy.interface import PolicyInput
from router.policy.unloaded import unloaded_estimate
from router.queue import Entry
from router.request import Request
from router.view import WorkerView

NOTHING: Final[frozenset[Any]] = frozenset()
NEEDS_ESTIMATE: Final = frozenset({"least-slack", "ageing", "fairness", "rejection"})


def policy_input_of(request: Request, fleet: Fleet, lengths: OutputLengths, now_s: float) -> PolicyInput:
    facts = request.facts
    num_answered = len(request.output)
    expected_tokens = lengths.expected(facts.sampling.max_tokens, num_answered)
    return PolicyInput(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        max_new_tokens=facts.sampling.max_tokens - num_answered,
        expected_tokens=expected_tokens,
        slo=facts.slo,
        waited_s=now_s - (request.last_token_s if num_answered else request.arrived_s),
        is_resumed=num_answered > 0,
        answer_left_s=_answer_left_s(request, expected_tokens, now_s),
        deadline_left_s=request.deadline_left_s(now_s),
        priority=facts.priority,
        tenant=facts.tenant,
        bound_to=request.bound_to,
        cached_tokens=_cached_tokens(request, fleet),
        avoid_workers=_avoid_workers(request, fleet) if request.avoid_workers else NOTHING,
        avoid_pairs=_avoid_pairs(request, fleet) if request.avoid_pairs else NOTHING,
    )


def large_enough(request: Request, views: list[WorkerView], tokens: int, fits_all: int = 0) -> list[WorkerView]:
    """Those of `views` that hold `tokens` of the request; each of them holds `fits_all`."""
    if tokens <= fits_all and not request.too_large_for:
        return views
    if request.too_large_for:
        views = [view for view in views if (view.worker_id, view.incarnation) not in request.too_large_for]
    return [view for view in views if tokens <= view.max_tokens]


def entry_of(request: Request, fleet: Fleet, lengths: OutputLengths, rules: frozenset[str], now_s: float) -> Entry:
    """Sets its place in the queue and `request.unloaded`, according to the present workers."""
    facts = request.facts
    is_begun = bool(request.output)
    level = (0 if is_begun else 1, -facts.priority if "priority" in rules else 0)
    tenant = facts.tenant if "fairness" in rules else ""
    request.unloaded = None
    if rules & NEEDS_ESTIMATE:
        prefills, decodes = fleet.usable(now_s)
        if decodes:
            expected_tokens = lengths.expected(facts.sampling.max_tokens, len(request.output))
            cached_tokens = _cached_tokens(request, fleet)
            request.unloaded = unloaded_estimate(request.num_tokens, expected_tokens, cached_tokens, prefills, decodes)
    prefill_s = request.unloaded.ttft_s if request.unloaded is not None else 0.0
    if is_begun and "least-slack" in rules:
        # When its next token is due at the target TPOT: an answer that is ahead of it tolerates a longer gap.
        began_s = request.arrived_s if request.first_token_s is None else request.first_token_s
        due_s = began_s + len(request.output) * facts.slo.tpot_s
        return Entry(due_s, request.serial, request.request_id, level, tenant, prefill_s)
    if is_begun or "least-slack" not in rules:
        return Entry(request.serial, request.serial, request.request_id, level, tenant, prefill_s)
    due_s = request.arrived_s + facts.slo.ttft_s
    return Entry(
        key=due_s,
        serial=request.serial,
        request_id=request.request_id,
        level=level,
        tenant=tenant,
        prefill_s=prefill_s,
        late_at_s=due_s - prefill_s,
    )


def _answer_left_s(request: Request, expected_tokens: float, now_s: float) -> float:
    """How long the rest of the answer may take to meet the TPOT target for the whole; infinite before the first
    token."""
    if request.first_token_s is None:
        return math.inf
    return (len(request.output) + expected_tokens - 1.0) * request.facts.slo.tpot_s - (now_s - request.first_token_s)


def _avoid_workers(request: Request, fleet: Fleet) -> frozenset[str]:
    return frozenset([key[0] for key in request.avoid_workers if fleet.key(key[0]) == key])


def _avoid_pairs(request: Request, fleet: Fleet) -> frozenset[tuple[str, str]]:
    present = fleet.key
    return frozenset(
        [
            (prefill[0], decode[0])
            for prefill, decode in request.avoid_pairs
            if present(prefill[0]) == prefill and present(decode[0]) == decode
        ]
    )


def _cached_tokens(request: Request, fleet: Fleet) -> dict[str, int]:
    views = fleet.workers
    return {
        worker_id: blocks * views[worker_id].hello.block_size
        for worker_id, blocks in request.cached_blocks.items()
        if worker_id in views
    }

"""`goodput`: chooses the placement that meets the request's targets and costs other requests the least. Pure.

    remote  ttft(p, d) = queue(p) + prefill of the tokens that p lacks + time until d grants blocks
            tpot(d)    = one step with running and arriving requests, this one, and half of the new ones' answers,
                         + (part of the transfer that prefill does not hide + half a step to join) / answer
    local   ttft(d)    = prefill of earlier prompts on d and of this one, in chunks that running requests' targets allow
            tpot(d)    = the step as above; running requests also wait while the prompt is prefilled
    slack              = min of (target - prediction - band) / target over its TTFT, its TPOT, d's strictest TPOT

The policy takes the placement with the lowest cost among those that meet all targets. It takes the prefill worker with
the least delay plus work, because a second of work delays the next request by a second. It takes the emptiest decode
worker, or among similar ones the one with the cheapest transfer. If the best placement cannot start soon, or would make
other requests miss their targets, the request waits in the router. A request that cannot meet its target is served
late, on a worker where no other request misses its target because of it.

Each rule that can be switched off replaces one part by a simpler one in __init__.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final, final

from pdserve.core.cost.latency import LinkModel
from router.policy.availability import LONGEST_WAIT_S, clamped_wait_s, not_avoided
from router.policy.candidates import (
    OPTIONS_SHOWN,
    PATIENCE,
    WORTH_WAITING,
    PlacementOption,
    local_options,
    remote_options,
)
from router.policy.interface import (
    RULES,
    Candidate,
    Choice,
    Decision,
    Links,
    Obstacle,
    PolicyEntry,
    PolicyInput,
    ReadChoice,
)
from router.policy.ranking import NOTHING_CACHED, StepRule, rank_decodes, reported_step_s, tandem_step_s
from router.state.view import WorkerView

_COST: Final = attrgetter("cost")

NO_TRANSFER: Final = LinkModel(0.0, 1e18)


@final
class Goodput:
    def __init__(self, links: Links, rules_off: Sequence[str] = (), local_max_uncached_tokens: int = 16) -> None:
        self._short = local_max_uncached_tokens
        off = frozenset(rules_off)
        self._links: Links = (lambda p, d: NO_TRANSFER) if "transfer-price" in off else links
        self._cached: Callable[[PolicyInput], Mapping[str, int]] = _no_cache if "prefix-value" in off else _cache
        self._step_of: StepRule = reported_step_s if "tandem" in off else tandem_step_s
        self._has_choice = "path-choice" not in off

    def __call__(
        self, request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        able, cached = not_avoided(decodes, request), self._cached(request)
        receivers, local_workers = rank_decodes(request, cached, able, now_s, self._step_of)
        if not receivers:
            return _wait_for_room(request, "no decode worker has a free row and free blocks for the answer")
        options = []
        if prefills:
            options = remote_options(request, cached, not_avoided(prefills, request), receivers, now_s, self._links)
        if self._has_choice or not options:
            is_prefill_open = any(option.opens_in_s == 0.0 for option in options)
            short = self._short if is_prefill_open else math.inf
            options += local_options(request, cached, local_workers, now_s, short, self._links, is_only=not prefills)
        return _choose(request, options)


def _choose(request: PolicyInput, options: list[PlacementOption]) -> Decision:
    feasible = [option for option in options if option.slack >= 0.0]
    if feasible:
        open_ones = [option for option in feasible if option.opens_in_s == 0.0]
        if not open_ones:
            return _wait(feasible, "no worker that meets both targets can start it yet")
        chosen, best = min(open_ones, key=_COST), min(feasible, key=_COST)
        if best.cost + WORTH_WAITING < chosen.cost:
            return _wait([best], "waiting for a busy worker costs less")
        return _go(options, chosen, "the lowest cost of the placements that meet every target")
    harmless = [option for option in options if not option.harms]
    is_late = all(option.ttft_slack < 0.0 for option in options)
    if not harmless or not is_late:
        if request.waited_s < PATIENCE * request.slo.ttft_s and not (harmless and _is_hopeless_tpot(request, harmless)):
            return _wait_for_room(request, "no decode worker can take it without a missed target")
        harmless = harmless or options
    open_ones = [option for option in harmless if option.opens_in_s == 0.0]
    if not open_ones:
        return _wait(harmless, "no worker can start it yet")
    chosen, best = min(open_ones, key=_COST), min(harmless, key=_COST)
    if best.cost + WORTH_WAITING < chosen.cost:
        return _wait([best], "waiting for a busy worker costs less")
    return _go(options, chosen, "its targets cannot be met; it is served late, where it delays no other request")


def _is_hopeless_tpot(request: PolicyInput, options: list[PlacementOption]) -> bool:
    """Whether no decode worker could meet its TPOT target even without other requests."""
    return all(option.decode.load.alone_s >= request.slo.tpot_s for option in options)


def _go(options: list[PlacementOption], chosen: PlacementOption, reason: str) -> Decision:
    others = [option for option in options if option is not chosen][: OPTIONS_SHOWN - 1]
    shown = (_candidate(chosen), *map(_candidate, others))
    prefill = chosen.prefill
    return Decision(
        choice=Choice.LOCAL if prefill is None else Choice.REMOTE,
        prefill_worker="" if prefill is None else prefill.worker_id,
        decode_worker=chosen.decode.worker_id,
        reason=reason,
        candidates=shown,
        pull=chosen.pull if chosen.pull is not None and chosen.pull.is_pulled else None,
    )


def _wait(options: list[PlacementOption], reason: str) -> Decision:
    """The request waits. `options` are the placements that the policy would choose if they were available."""
    soonest_s = min(option.opens_in_s for option in options)
    return Decision(
        choice=Choice.WAIT,
        reason=reason,
        obstacle=Obstacle.PREFILL,
        retry_in_s=clamped_wait_s(soonest_s),
    )


def _wait_for_room(request: PolicyInput, reason: str) -> Decision:
    """The request waits for room. For a limited time, smaller requests may take that room."""
    is_urgent = request.waited_s >= PATIENCE * request.slo.ttft_s
    return Decision(
        choice=Choice.WAIT,
        reason=reason,
        obstacle=Obstacle.DECODE if is_urgent else Obstacle.ROOM,
        retry_in_s=LONGEST_WAIT_S,
    )


def _candidate(option: PlacementOption) -> Candidate:
    prefill_worker = "" if option.prefill is None else option.prefill.worker_id
    return Candidate(
        prefill_worker,
        option.decode.worker_id,
        option.ttft_s,
        option.tpot_s,
        option.slack,
        option.tpot_slack >= 0.0,
        option.cost,
        option.preference,
        option.pull,
        _read_choice(option),
    )


def _read_choice(option: PlacementOption) -> ReadChoice | None:
    reads = option.reads
    if reads is None or reads.copy_s + reads.read_s == 0.0:
        return None
    size = (option.prefill or option.decode).hello.block_size
    return ReadChoice(reads.num_read * size, reads.copy_s + reads.read_s, reads.computed_s)


def _cache(request: PolicyInput) -> Mapping[str, int]:
    return request.cached_tokens


def _no_cache(request: PolicyInput) -> Mapping[str, int]:
    return NOTHING_CACHED


POLICY: Final = PolicyEntry(
    make=lambda settings, links: Goodput(links, settings.rules_off, settings.local_max_uncached_tokens),
    rules=frozenset(RULES),
    obeys_rules_off=True,
)

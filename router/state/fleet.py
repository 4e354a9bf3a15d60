"""What the router knows of workers, links and lengths of answers, and the request that a policy sees. Pure."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, Final, final

from pdserve.core.cost.latency import LinkModel
from pdserve.core.errors import NONE_YET, NoWorkers
from pdserve.core.kv.tier_reads import TierReads
from pdserve.core.types import Role
from router.policy.availability import unloaded_estimate
from router.policy.interface import PolicyInput
from router.policy.pulls import pullable_tokens, source_of
from router.state.interface import RequestArrived, WorkerConnected
from router.state.queue import Entry
from router.state.request import Request
from router.state.view import WorkerView, WorkerViews

MAX_LINKS: Final = 16_384  # number of pairs; the least recently measured is dropped first


class Fleet:
    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.workers: dict[str, WorkerView] = {}
        self.has_known_decode = False
        self._usable: tuple[WorkerViews, WorkerViews] | None = None  # cached until something changes
        self._draining: list[WorkerView] | None = None  # cached as `_usable`
        # As of the last call of `usable`:
        self.fits_all = 0  # tokens of one sequence that every usable worker holds
        self.is_mixed = False  # whether usable workers have different weights
        self.can_pull = False  # whether a usable worker may pull KV from others
        self.shares: dict[str, float] = {}  # of new requests, by weights
        self.assigned: Counter[str] = Counter()  # new requests by weights, since the shares are as they are
        self._usable_until_s = 0.0  # when the first of them would exceed the silence limit
        self._links: OrderedDict[tuple[str, str], LinkModel] = OrderedDict()
        self._any_link = LinkModel()  # model of an unmeasured pair

    def connect(self, hello: WorkerConnected, now_s: float) -> WorkerView:
        self.changed()
        view = self.workers.get(hello.worker_id)
        if view is None:
            view = self.workers[hello.worker_id] = WorkerView(hello, now_s)
        else:
            view.came_back(hello, now_s)
        self.has_known_decode = self.has_known_decode or hello.role is Role.DECODE
        return view

    def forget(self, worker_id: str) -> None:
        self.changed()
        self.workers.pop(worker_id, None)

    def connected(self, worker_id: str) -> WorkerView | None:
        view = self.workers.get(worker_id)
        return view if view is not None and view.is_connected else None

    def is_usable(self, view: WorkerView, now_s: float) -> bool:
        """Whether the worker may receive new requests."""
        return view.is_connected and view.heard_s > now_s - self.silence_s and not view.is_draining

    def has_undrained_decode(self) -> bool:
        """Whether a decode worker is connected that no operator has drained."""
        return any(
            view.role is Role.DECODE and view.is_connected and not view.is_drained for view in self.workers.values()
        )

    def is_decode_drained(self) -> bool:
        """Whether operators have drained every known decode worker, so that waiting for one to reconnect is useless."""
        decodes = self.all_decode()
        return bool(decodes) and all(view.is_connected and view.is_drained for view in decodes)

    def all_decode(self) -> list[WorkerView]:
        """Also those that are not connected."""
        return [view for view in self.workers.values() if view.role is Role.DECODE]

    def why_none(self, views: Iterable[WorkerView], now_s: float) -> NoWorkers:
        """The error if none of `views`, decode workers, may receive a request: how many are in which state."""
        states = Counter(self._state(view, now_s) for view in views)
        counted = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
        return NoWorkers(Role.DECODE.value, states=counted or ("none is left" if self.has_known_decode else NONE_YET))

    def _state(self, view: WorkerView, now_s: float) -> str:
        """As `pdserve topology` names it."""
        if not view.is_connected:
            return "away"
        if view.is_draining:
            return "drained" if view.is_drained else "draining"
        return "connected" if self.is_usable(view, now_s) else "without a recent load report"

    def usable(self, now_s: float) -> tuple[WorkerViews, WorkerViews]:
        """The prefill workers and the decode workers that may receive new requests. The lists are cached, so callers
        must not change them."""
        kept = self._usable
        if kept is None or now_s >= self._usable_until_s:
            able = [view for view in self.workers.values() if self.is_usable(view, now_s)]
            prefills, decodes = ([view for view in able if view.role is role] for role in (Role.PREFILL, Role.DECODE))
            kept = self._usable = WorkerViews(prefills), WorkerViews(decodes)
            self.fits_all = min([view.max_tokens for view in able], default=0)
            self.is_mixed = len({view.hello.weights for view in able}) > 1
            self.can_pull = any(view.hello.pulls_kv for view in able)
            if (shares := shares_of(prefills, decodes)) != self.shares:
                self.shares = shares
                self.assigned.clear()
            self._usable_until_s = min([view.heard_s for view in able], default=now_s) + self.silence_s
        return kept

    def next_weights(self, now_s: float) -> str:
        """Those that the fewest new requests have got, by their share; empty without a decode worker."""
        self.usable(now_s)
        return min(self.shares, key=lambda one: ((self.assigned[one] + 1) / self.shares[one], one), default="")

    def draining(self, now_s: float) -> list[WorkerView]:
        """The connected decode workers that drain. The list is cached, so callers must not change it."""
        if self._draining is None:
            for view in self.workers.values():
                if not view.is_draining:
                    view.drains_since_s = math.inf
                elif view.drains_since_s == math.inf:
                    view.drains_since_s = now_s
            self._draining = [view for view in self.all_decode() if view.is_connected and view.is_draining]
        return self._draining

    def changed(self) -> None:
        """Drops the cached lists: a worker connected, disconnected, drains, or is no longer silent."""
        self._usable = self._draining = None

    def heard(self, view: WorkerView, now_s: float) -> None:
        if not view.heard_s > now_s - self.silence_s:
            self.changed()
        view.heard_s = now_s

    def check(self, now_s: float) -> None:
        kept = self._usable
        if kept is not None and now_s < self._usable_until_s:
            able = {view.worker_id for view in self.workers.values() if self.is_usable(view, now_s)}
            assert {view.worker_id for role in kept for view in role} == able, "the cached workers are out of date"
        if self._draining is not None:
            draining = {view.worker_id for view in self.all_decode() if view.is_connected and view.is_draining}
            assert {view.worker_id for view in self._draining} == draining, "the draining workers are out of date"

    def key(self, worker_id: str) -> tuple[str, str]:
        """Identifies a worker's current incarnation, so that a restarted worker starts without history."""
        view = self.workers.get(worker_id)
        return (worker_id, view.incarnation if view is not None else "")

    def link(self, sender: str, receiver: str) -> LinkModel:
        return self._links.get((sender, receiver), self._any_link)

    def measured(self, sender: str, receiver: str, num_bytes: int, busy_s: float, *, is_whole: bool = True) -> None:
        """Learns from a transfer of `num_bytes`. `busy_s` excludes the time in which the transfer waited for the
        prefill. One that was given up (not `is_whole`) only shows that the link is not faster."""

        def learn(model: LinkModel) -> bool:
            is_news = is_whole or busy_s > model.transfer_s(num_bytes)
            return is_news and model.observe(num_bytes, busy_s)

        pair, shared = (sender, receiver), self._any_link
        link = self._links.get(pair) or LinkModel(shared.latency_s, shared.bandwidth_bytes_s)
        learn(shared)
        if learn(link):  # without a sample, the pair stays like the others
            self._links[pair] = link
            self._links.move_to_end(pair)
            if len(self._links) > MAX_LINKS:
                self._links.popitem(last=False)

    @property
    def kv_tokens(self) -> int:
        """That the pools of all connected workers can hold."""
        return sum(view.hello.num_blocks * view.hello.block_size for view in self.workers.values() if view.is_connected)

    def excuse_silence(self, gap_s: float) -> None:
        """Does not count `gap_s`, in which the router itself was suspended, as silence of the workers."""
        self.changed()
        for view in self.workers.values():
            view.heard_s += gap_s


# --- expected lengths of answers ------------------------------------------------------------------------------
# They are unknown at arrival, so a running mean is used, or what the client expects of this answer.
#
# Requests are of one class if their `max_tokens` have the same number of binary digits, because requests with a limit
# of 16 tokens and of 4,096 differ. A new class starts with the mean over all classes.

FIRST_GUESS: Final = 256.0  # tokens; before any answer has ended
ALL: Final = -1
GAIN: Final = 0.02  # weight of each new answer: the mean follows about the last fifty

# What clients expect is multiplied by the ratio of the tokens that their tenant got to those that it expected, over its
# last answers whose expectations have the same number of binary digits. So true expectations of long answers do not
# make false ones of short answers credible. A tenant whose answers are longer than it says gains nothing: it is charged
# for about as many tokens as it gets, and its requests are placed as what they turn out to be.
MAX_TENANTS: Final = 1024  # whose ratios are kept, the most recently used
PRIOR_ANSWERS: Final = 2.0  # answers as long as their tenant expects that count before any was seen


@final
class OutputLengths:
    __slots__ = ("_hinted", "_means")

    def __init__(self) -> None:
        self._means: dict[int, tuple[int, float]] = {}  # class -> (answers seen, their mean); ALL: of every class
        #: tenant -> class of the hint -> answers with such a hint, their expected tokens, and their tokens
        self._hinted: OrderedDict[str, dict[int, tuple[float, float, float]]] = OrderedDict()

    def remaining(self, facts: RequestArrived, answered: int) -> float:
        """Expected remaining tokens, at least 1, of a request that has received `answered`. If there are more of them
        than the client expected, the mean counts."""
        hint = facts.expected_tokens
        if hint is not None:
            told = hint * self._ratio(facts.tenant, hint)
            if answered < told:
                return max(1.0, min(told, facts.sampling.max_tokens) - answered)
        return self.expected(facts.sampling.max_tokens, answered)

    def ended(self, facts: RequestArrived, tokens: int, *, is_whole: bool) -> None:
        """Learns from an answer that has ended after `tokens`. One that was cut (not `is_whole`) only shows whether it
        was longer than expected."""
        if is_whole:
            self.observe(facts.sampling.max_tokens, tokens)
        hint = facts.expected_tokens
        if hint is None or (tokens <= hint and not is_whole):
            return
        classes = self._hinted.setdefault(facts.tenant, {})
        self._hinted.move_to_end(facts.tenant)
        count, expected, received = classes.get(hint.bit_length(), (0.0, 0.0, 0.0))
        kept = 1.0 - GAIN
        classes[hint.bit_length()] = (kept * count + 1.0, kept * expected + hint, kept * received + tokens)
        if len(self._hinted) > MAX_TENANTS:
            self._hinted.popitem(last=False)

    def _ratio(self, tenant: str, hint: int) -> float:
        found = self._hinted.get(tenant, {}).get(hint.bit_length())
        if found is None:
            return 1.0
        count, expected, received = found
        prior = PRIOR_ANSWERS * expected / count
        return (prior + received) / (prior + expected)

    def expected(self, max_tokens: int, answered: int = 0) -> float:
        """Expected remaining tokens, at least 1, of a request that has received `answered` of its `max_tokens`."""
        means = self._means
        _, mean = means.get(max_tokens.bit_length()) or means.get(ALL) or (0, FIRST_GUESS)
        return max(1.0, min(mean, max_tokens) - answered)

    def observe(self, max_tokens: int, tokens: int) -> None:
        """Learns from an answer that has ended after `tokens`."""
        for key in (max_tokens.bit_length(), ALL):
            seen, mean = self._means.get(key, (0, 0.0))
            self._means[key] = (seen + 1, mean + max(GAIN, 1.0 / (seen + 1)) * (tokens - mean))


# --- a request for policies and the queue ---------------------------------------------------------------------

NOTHING: Final[frozenset[Any]] = frozenset()
NEEDS_ESTIMATE: Final = frozenset({"least-slack", "ageing", "fairness", "rejection"})


def policy_input_of(
    request: Request, fleet: Fleet, lengths: OutputLengths, now_s: float, expected_tokens: float | None = None
) -> PolicyInput:
    """`expected_tokens`: what remains of the answer; None: by `lengths`."""
    facts = request.facts
    num_answered = len(request.output)
    cached_tokens = _cached_tokens(request, fleet)
    given, given_read_s = cached_tokens, {}
    reads: dict[str, TierReads] = {}
    if request.cached_tiers:
        given = dict(cached_tokens)
        for worker_id in request.cached_tiers.keys() & given.keys():
            given[worker_id], given_read_s[worker_id] = request.given_by(fleet.workers[worker_id])
        reads = _reads(request, fleet, cached_tokens, now_s)
    source = None
    if fleet.can_pull and given:
        source = source_of(given, fleet.workers, lambda view: fleet.is_usable(view, now_s), now_s)
    if expected_tokens is None:
        expected_tokens = lengths.remaining(facts, num_answered)
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
        cached_tokens=cached_tokens,
        source=source,
        reads=reads,
        source_tokens=0 if source is None else pullable_tokens(given, source, request.num_tokens),
        source_read_s=0.0 if source is None else given_read_s.get(source.worker_id, 0.0),
        avoid_workers=_avoid_workers(request, fleet) if request.avoid_workers else NOTHING,
        avoid_pairs=_avoid_pairs(request, fleet) if request.avoid_pairs else NOTHING,
    )


def able(
    request: Request, views: list[WorkerView], tokens: int, fits_all: int = 0, *, needs_adapter: bool = True
) -> list[WorkerView]:
    """Those of `views` that have the request's adapter and weights and hold `tokens` of it; each of them holds
    `fits_all`."""
    if needs_adapter:
        views = with_adapter(request.facts.adapter, views)
    views = with_weights(request.needs_weights, views)
    if tokens <= fits_all and not request.too_large_for:
        return views
    if request.too_large_for:
        views = [view for view in views if (view.worker_id, view.incarnation) not in request.too_large_for]
    return [view for view in views if tokens <= view.max_tokens]


def with_adapter(fingerprint: str, views: list[WorkerView]) -> list[WorkerView]:
    return [view for view in views if fingerprint in view.adapters] if fingerprint else views


def with_weights(weights: str, views: list[WorkerView]) -> list[WorkerView]:
    """`weights` empty: any."""
    return [view for view in views if view.hello.weights == weights] if weights else views


def shares_of(prefills: Iterable[WorkerView], decodes: Iterable[WorkerView]) -> dict[str, float]:
    """How new requests are shared among weights: by the part of each pool that has them, the smaller one of the two.
    Weights without a share get requests only if the others have no room."""
    pools = [Counter(view.hello.weights for view in views) for views in (prefills, decodes)]
    if not pools[1]:
        return {}
    names = sorted(pools[0].keys() | pools[1].keys())
    least = {name: min(pool[name] / pool.total() for pool in pools if pool) for name in names}
    found = {name: share for name, share in least.items() if share}
    return found or {name: pools[1][name] / pools[1].total() for name in names if pools[1][name]}


def entry_of(request: Request, fleet: Fleet, lengths: OutputLengths, rules: frozenset[str], now_s: float) -> Entry:
    """Sets its place in the queue and `request.unloaded`, according to the present workers."""
    facts = request.facts
    # An answer that was resumed here is like a new one until its next token: what its client sends gives no precedence.
    is_begun = request.first_emitted_s is not None
    level = (0 if is_begun else 1, -facts.priority if "priority" in rules else 0)
    tenant = facts.tenant if "fairness" in rules else ""
    request.unloaded = None
    if rules & NEEDS_ESTIMATE:
        prefills, decodes = (with_adapter(facts.adapter, views) for views in fleet.usable(now_s))
        if fleet.is_mixed and (own := with_weights(request.weights, decodes)):
            prefills, decodes = with_weights(request.weights, prefills), own
        if decodes:
            expected_tokens = lengths.remaining(facts, len(request.output))
            cached_tokens = _cached_tokens(request, fleet)
            reads = _reads(request, fleet, cached_tokens, None) if request.cached_tiers else {}
            request.unloaded = unloaded_estimate(
                request.num_tokens, expected_tokens, cached_tokens, prefills, decodes, reads
            )
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


def _reads(request: Request, fleet: Fleet, cached_tokens: dict[str, int], now_s: float | None) -> dict[str, TierReads]:
    """The reads of the workers whose pools do not have all of their leading blocks. In `cached_tokens`, they have what
    they do not compute. `now_s` None: on workers without other requests."""
    found = {}
    for worker_id in request.cached_tiers.keys() & cached_tokens.keys():
        view = fleet.workers[worker_id]
        reads = request.reads_on(view, None if now_s is None else view.queue_s(now_s))
        assert reads is not None
        found[worker_id] = reads
        cached_tokens[worker_id] = reads.num_blocks * view.hello.block_size
        if not reads.num_blocks:
            del cached_tokens[worker_id]
    return found

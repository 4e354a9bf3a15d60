"""The candidate placements of a request with their costs: pairs of workers, and single decode workers. With the
constants of the goodput policy. Pure.

Each worker is ranked with a few multiplications; only the best of each role are compared in detail. Formulas:
docs/scheduling.md.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, NamedTuple, final

from pdserve.core.cost.latency import WIDEST_BAND, LinkModel
from pdserve.core.cost.overlap import chunked_exposed_s
from pdserve.core.cost.step_rule import TARGET_SHARE
from pdserve.core.kv.tier_reads import TierReads
from router.policy.availability import can_start, opens_in_s
from router.policy.interface import NO_READS, Links, PolicyInput, PullChoice
from router.policy.pulls import PULL_SHARE, WORK_WEIGHT, least_rest_s, pull_of
from router.state.load import DecodeLoad
from router.state.view import WorkerView, as_views

# --- constants of the goodput policy --------------------------------------------------------------------------
# They are the same for all traffic, models and machines.

# Share of a target that must be saved by waiting for a busy worker instead of starting elsewhere now, and by a local
# placement instead of a remote one. Predictions are not more accurate than that.
WORTH_WAITING: Final = 0.03

# Share of the TTFT target before the predicted end of a decode worker's prompt at which the next one is sent.
EARLY_SHARE: Final = 0.15

# How long a late request waits, in TTFT targets, for a placement that makes no other request miss its target. Then it
# takes any placement, so waiting is bounded.
PATIENCE: Final = 2.0

# How many of the cheapest workers of each role are compared in detail. The others are compared by their cached sums.
PREFILLS_PAIRED: Final = 3
DECODES_PAIRED: Final = 4
LOCALS_PRICED: Final = 3

TRANSFER_TIE_S: Final = 1e-3  # transfers that differ by less count as equally cheap
OPTIONS_SHOWN: Final = 6  # in explanations


# --- placements and their costs -------------------------------------------------------------------------------

_record: Final = tuple.__new__  # makes a NamedTuple from a tuple; half the time of its constructor

StepRule = Callable[[WorkerView, DecodeLoad, float, float], float]

_KEY: Final = itemgetter(0)

NOTHING_CACHED: Final[Mapping[str, int]] = {}


class Receiver(NamedTuple):
    """A decode worker with room. They are compared in the order of the fields."""

    excess: float  # of its step over the strictest TPOT target, as a share of the target; negative if that is met
    order: int  # among the workers
    step_s: float  # with this request
    view: WorkerView
    load: DecodeLoad


class LocalWorker(NamedTuple):
    """A decode worker with room that would prefill the prompt. They are compared in the order of the fields."""

    misses: bool  # a TPOT target
    cost: float
    excess: float  # this and the next as in Receiver
    order: int
    step_s: float
    view: WorkerView
    load: DecodeLoad


@final
@dataclass(slots=True)
class _Start:
    """A prefill worker, and when it would have computed the prompt."""

    cost_s: float  # of the delay for this request and the next one
    worker_id: str
    delay_s: float  # until the prompt is computed
    work_s: float  # of compute
    charged_s: float  # time that it costs later requests
    view: WorkerView
    read: float  # tokens to compute
    opens_s: float  # until it can start
    pull: PullChoice | None
    reads: TierReads | None  # of its tiers


@final
@dataclass(slots=True)
class _Landing:
    """What a receiver lacks of the prompt's KV."""

    receiver: Receiver
    worker_id: str
    misses: bool  # a TPOT target
    lacking: float  # tokens
    block_size: int
    block_bytes: float
    num_bytes: float  # of the lacking blocks
    landing_bytes: float  # of KV that is on its way there
    rest_s: float  # of its running step


class RankedDecodes(NamedTuple):
    """The best decode workers with room, in order."""

    receivers: list[Receiver]  # of KV from a prefill worker; at most DECODES_PAIRED
    locals: list[LocalWorker]  # workers for a local prefill; at most LOCALS_PRICED


@final
@dataclass(slots=True)
class PlacementOption:
    prefill: WorkerView | None  # None: local
    decode: WorkerView
    ttft_s: float  # from now
    tpot_s: float
    ttft_slack: float
    tpot_slack: float  # for the strictest TPOT target on the decode worker, including this request's
    harms: bool  # a running request would miss its target because of this placement
    # In shares of targets: TTFT of this request and the next one, TPOT on the decode worker. For a local placement also
    # the preference of local_options, so it can be negative.
    cost: float
    opens_in_s: float  # 0: the request can start now
    slack: float  # the smaller one of TTFT and TPOT slack
    preference: float  # the part of `cost` that is no time
    pull: PullChoice | None = None  # by the worker that computes the prompt
    reads: TierReads | None = None  # likewise, of its tiers


def tandem_step_s(view: WorkerView, load: DecodeLoad, tokens: float, growth: float) -> float:
    """A step after all arriving requests have arrived, when their answers and this one are half complete. Running
    requests are assumed to be in the middle of their answers, so the tokens that they add equal those that leave."""
    return load.joined_s + load.token_s * (tokens + growth * load.growing)


def reported_step_s(view: WorkerView, load: DecodeLoad, tokens: float, growth: float) -> float:
    """The next step, from the worker's own report."""
    base_s, row_s, token_s = view.cost.decode_coefficients
    return base_s + row_s * (view.report.running + 1) + token_s * (view.report.context_tokens + tokens)


def rank_decodes(
    request: PolicyInput,
    cached: Mapping[str, int],
    decodes: Sequence[WorkerView],
    now_s: float,
    step_of: StepRule,
) -> RankedDecodes:
    """The best decode workers among those with a free row, and blocks for the whole expected answer: the emptiest
    receivers, and the cheapest workers for a local prefill."""
    # all floats, because mixed arithmetic takes twice as long
    tokens, own_s = float(request.num_tokens), request.slo.tpot_s
    if request.is_resumed:
        own_s = request.answer_left_s / request.expected_tokens
    growth = 0.5 * request.expected_tokens
    room = tokens + request.expected_tokens
    per_second = 1.0 / request.slo.ttft_s
    per_read = (1.0 + WORK_WEIGHT) * per_second
    per_wait = 1.0 / (_steps(request) * request.slo.tpot_s)
    is_tandem = step_of is tandem_step_s
    half = tokens - 0.5 * tokens
    reads = request.reads if cached else NO_READS
    # plain tuples here, which are quicker to make; those that are left become records
    receivers: list[tuple[float, int, float, WorkerView, DecodeLoad]] = []
    local_workers: list[tuple[bool, float, float, int, float, WorkerView, DecodeLoad]] = []
    # workers that rank behind these are not among the best
    most_excess = last_cost = math.inf
    last_misses = True
    for order, view in enumerate(decodes):
        load = view.cached_load or view.load
        if load.free_tokens < room + growth * load.float_rows or view.closed_until_s > now_s:
            continue
        if is_tandem:  # inlined, because this runs for every worker and request
            step_s = load.joined_s + load.token_s * (tokens + growth * load.growing)
        else:
            step_s = step_of(view, load, tokens, growth)
        limit_s = load.tightest_s
        if own_s < limit_s and load.alone_s < own_s:
            limit_s = own_s
        excess = step_s * load.sure / limit_s - 1.0
        if excess < most_excess:
            insort(receivers, (excess, order, step_s, view, load))
            if len(receivers) > DECODES_PAIRED:
                receivers.pop()
                most_excess = receivers[-1][0]
        uncached, middle = tokens, half
        if view.worker_id in cached:
            uncached = max(1.0, tokens - cached[view.worker_id])
            middle = tokens - 0.5 * uncached
        read_s = uncached * (load.per_token_s + load.per_token_context_s * middle) * load.prefill_slowdown
        cost = read_s * (per_read + per_wait * load.decode_stall_share)
        if view.free_at_s > now_s:
            cost += (view.free_at_s - now_s) * per_second
        if reads and view.worker_id in reads:
            cost += request.read_wait_s(view.worker_id, view.queue_s(now_s)) * per_second
        misses = excess > 0.0
        if misses < last_misses or (misses == last_misses and cost <= last_cost):
            insort(local_workers, (misses, cost, excess, order, step_s, view, load))
            if len(local_workers) > LOCALS_PRICED:
                local_workers.pop()
                last_misses, last_cost = local_workers[-1][:2]
    return RankedDecodes(
        [_record(Receiver, one) for one in receivers], [_record(LocalWorker, one) for one in local_workers]
    )


def remote_options(
    request: PolicyInput,
    cached: Mapping[str, int],
    prefills: Sequence[WorkerView],
    receivers: Sequence[Receiver],
    now_s: float,
    links: Links,
) -> list[PlacementOption]:
    """Pairs of one of the cheapest prefill workers, available or not, and one of `receivers`; the best pair first."""
    tokens = float(request.num_tokens)
    starts = _earliest(request, tokens, cached, prefills, now_s, links)
    landings = [_landing(request, tokens, cached, one, now_s) for one in receivers]
    pairs = []
    avoid_pairs = request.avoid_pairs
    for start in starts:
        prefill_id, delay_s, read = start.worker_id, start.delay_s, start.read
        chunk, sent_blocks = start.view.hello.max_batch_tokens, start.view.totals.blocks
        for order, landing in enumerate(landings):
            if avoid_pairs and (prefill_id, landing.worker_id) in avoid_pairs:
                continue
            link = links(prefill_id, landing.worker_id)
            latency_s, per_byte_s = link.coefficients
            if landing.lacking <= read <= chunk:
                late_s = latency_s + per_byte_s * landing.num_bytes  # sent in one part
            else:
                late_s = _parts_late_s(link, start, landing, tokens)
            # Earlier transfers use the link first. They are hidden while prompts are computed.
            before_bytes = sent_blocks * landing.block_bytes
            if landing.landing_bytes > before_bytes:
                before_bytes = landing.landing_bytes
            queued_s = latency_s + per_byte_s * (before_bytes + landing.num_bytes) - delay_s
            if queued_s > late_s:
                late_s = queued_s
            key = landing.misses, round((start.cost_s + late_s) / TRANSFER_TIE_S), order, prefill_id
            pairs.append((key, late_s, start, landing))
    pairs.sort(key=_KEY)
    best = pairs[:DECODES_PAIRED]
    if not any(start.opens_s == 0.0 for _, _, start, _ in best):
        best += [pair for pair in pairs[DECODES_PAIRED:] if pair[2].opens_s == 0.0][:1]
    steps = _steps(request)
    return [_remote(request, steps, late_s, start, landing) for _, late_s, start, landing in best]


def _earliest(
    request: PolicyInput,
    tokens: float,
    cached: Mapping[str, int],
    prefills: Sequence[WorkerView],
    now_s: float,
    links: Links,
) -> list[_Start]:
    """The prefill workers with the least cost of delay."""
    reads = request.reads if cached else NO_READS
    starts: list[tuple[float, str, float, float, WorkerView]] = []  # plain tuples are quicker to make
    last_s = math.inf  # workers with a higher cost are not among the best
    most_s = math.inf
    if request.source is not None and len(prefills) > PREFILLS_PAIRED:  # any worker may pull what the source has
        most_s = least_rest_s(request, prefills[0])
    for view, work_s in zip(prefills, as_views(prefills).prefill_s(tokens, cached), strict=True):
        ranked_s = work_s if work_s < most_s else most_s
        delay_s = ranked_s + (view.free_at_s - now_s) if view.free_at_s > now_s else ranked_s
        if reads and view.worker_id in reads:
            delay_s += min(request.read_wait_s(view.worker_id, view.queue_s(now_s)), most_s)
        cost_s = delay_s + WORK_WEIGHT * ranked_s
        if cost_s <= last_s:
            insort(starts, (cost_s, view.worker_id, delay_s, work_s, view))
            if len(starts) > PREFILLS_PAIRED:
                starts.pop()
                last_s = starts[-1][0]
    found = []
    for _, worker_id, _, work_s, view in starts:
        held = min(float(cached[worker_id]), tokens - 1.0) if worker_id in cached else 0.0
        opens_s = 0.0 if can_start(view, request.num_tokens, now_s) else opens_in_s(view, now_s)
        queue_s = view.free_at_s - now_s if view.free_at_s > now_s else 0.0
        wait_s, read = 0.0, None
        if reads and (read := reads.get(worker_id)) is not None:
            work_s, wait_s = work_s + read.copy_s, read.wait_s(queue_s)
        delay_s, charged_s, choice = queue_s + wait_s + work_s, work_s, None
        cost_s = delay_s + WORK_WEIGHT * work_s
        source = request.source
        if (
            source is not None
            and (pull := pull_of(request, source, cached, view, work_s, queue_s, links, now_s)) is not None
        ):
            choice = pull.choice
            if choice.is_pulled:
                read = None
                held, work_s = float(choice.prefix_tokens), pull.rest_s
                charged_s = work_s + PULL_SHARE * choice.pull_s
                delay_s = work_s + (choice.pull_s if choice.pull_s > queue_s else queue_s)
                cost_s = delay_s + WORK_WEIGHT * charged_s
        computed = tokens - held
        found.append(_Start(cost_s, worker_id, delay_s, work_s, charged_s, view, computed, opens_s, choice, read))
    return found


def _landing(
    request: PolicyInput, tokens: float, cached: Mapping[str, int], receiver: Receiver, now_s: float
) -> _Landing:
    view = receiver.view
    size, block_bytes = view.hello.block_size, float(view.hello.block_bytes)
    lacking = max(1.0, tokens - (request.kept_on(view) if view.worker_id in cached else 0))
    return _Landing(
        receiver,
        view.worker_id,
        receiver.excess > 0.0,
        lacking,
        size,
        block_bytes,
        -(-lacking // size) * block_bytes,
        view.totals.landing_tokens // size * block_bytes,
        view.rest_of_step_s(now_s),
    )


def local_options(
    request: PolicyInput,
    cached: Mapping[str, int],
    local_workers: Sequence[LocalWorker],
    now_s: float,
    short: float,
    links: Links,
    *,
    is_only: bool,
) -> list[PlacementOption]:
    """The best local placements.

    Later requests need the decode workers' time. So a local placement of more than `short` uncached tokens must save
    WORTH_WAITING, and shorter prompts are preferably local. `short` is infinite if no prefill worker is free, and the
    cheaper placement is then chosen. With `is_only` there are no prefill workers. Otherwise a worker is suitable only
    if its steps leave time to prefill after all requests placed there have arrived.
    """
    steps = _steps(request)
    return [_cheaper_local(request, steps, cached, now_s, one, short, is_only, links) for one in local_workers]


def _parts_late_s(link: LinkModel, start: _Start, landing: _Landing, tokens: float) -> float:
    """How long after the first token the KV of a prompt arrives, if it is sent in parts as they are computed
    (pdserve/core/cost/overlap.py). The prefill worker computes the last `read` of the prompt's `tokens`, and the decode
    worker lacks the last `lacking`.
    """
    cost, chunk, read, lacking = start.view.cost, start.view.hello.max_batch_tokens, start.read, landing.lacking
    size, block_bytes = landing.block_size, landing.block_bytes
    last = read
    chunks_s = last_s = start.work_s  # from when the first part is ready; blocks in p's cache are ready at once
    if read > chunk:
        last = (read - 1.0) % chunk + 1.0
        last_s = cost.prefill_s(last, tokens - last)
        if lacking <= read:
            first = ((read - lacking) // chunk + 1.0) * chunk
            chunks_s = start.work_s - cost.prefill_s(first, tokens - read, chunk) if first < read else 0.0
    return chunked_exposed_s(
        link,
        num_bytes=landing.num_bytes,
        chunk_bytes=-(-chunk // size) * block_bytes,
        last_bytes=-(-last // size) * block_bytes,
        chunks_s=chunks_s,
        last_s=last_s,
    )


def _remote(
    request: PolicyInput,
    steps: float,
    late_s: float,
    start: _Start,
    landing: _Landing,
) -> PlacementOption:
    prefill, delay_s, rest_s = start.view, start.delay_s, landing.rest_s
    decode, load, step_s = landing.receiver.view, landing.receiver.load, landing.receiver.step_s
    ttft_s = delay_s + (rest_s + decode.grants.typical_s) + prefill.replies.typical_s
    # The KV arrives in the middle of a step, and the request joins the next one: half a step later on average.
    tpot_s = step_s + (late_s + 0.5 * step_s) / steps
    # The rest of a step is longer on fuller workers. It is not part of the cost, which should not prefer empty workers.
    cost = (ttft_s - rest_s + WORK_WEIGHT * start.charged_s) / request.slo.ttft_s + late_s / (
        steps * request.slo.tpot_s
    )
    option = _option(
        request, steps, prefill, decode, load, ttft_s, tpot_s, step_s, cost, start.opens_s, prefill.cost.prefill_error
    )
    option.pull, option.reads = start.pull, start.reads
    return option


def _cheaper_local(
    request: PolicyInput,
    steps: float,
    cached: Mapping[str, int],
    now_s: float,
    worker: LocalWorker,
    short: float,
    is_only: bool,
    links: Links,
) -> PlacementOption:
    """With a pull, if that costs less."""
    source, view, tokens = request.source, worker.view, request.num_tokens
    if source is None:
        return _local(request, steps, cached, now_s, worker, short, is_only)
    held, slowdown = min(cached.get(view.worker_id, 0), tokens - 1), worker.load.prefill_slowdown
    work_s = slowdown * view.prefill_s(tokens - held, held)
    if cached and (reads := request.reads.get(view.worker_id)) is not None:
        work_s += reads.copy_s
    pull = pull_of(request, source, cached, view, work_s, view.queue_s(now_s), links, now_s, slowdown)
    choice = None if pull is None else pull.choice
    is_pulled = choice is not None and choice.is_pulled
    option = _local(request, steps, cached, now_s, worker, short, is_only, choice if is_pulled else None)
    option.pull = choice
    return option


def _local(
    request: PolicyInput,
    steps: float,
    cached: Mapping[str, int],
    now_s: float,
    worker: LocalWorker,
    short: float,
    is_only: bool,
    pull: PullChoice | None = None,
) -> PlacementOption:
    step_s, decode, load = worker.step_s, worker.view, worker.load
    slo, held = request.slo, min(cached.get(decode.worker_id, 0), request.num_tokens - 1)
    pull_s = waits_s = copy_s = 0.0
    reads = request.reads.get(decode.worker_id) if cached and pull is None else None
    if pull is not None:
        held, waits_s = pull.prefix_tokens, pull.pull_s
        pull_s = waits_s
    elif reads is not None:
        waits_s, copy_s = reads.read_s, reads.copy_s
    uncached = request.num_tokens - held
    slack, stall_share = decode.slack(now_s), load.decode_stall_share
    is_late = request.waited_s >= slo.ttft_s
    queue_s = decode.queue_s(now_s) if is_late else decode.timely_queue_s(now_s)
    read_s = copy_s + decode.prefill_time_s(uncached, held, slack)
    ttft_s = max(queue_s, waits_s, decode.rest_of_step_s(now_s)) + read_s + decode.first_tokens.typical_s
    # Running requests wait while this prompt and those before it are prefilled, as far as that exceeds their slack.
    late_s = queue_s + read_s - slack.total_s
    waits_s = load.step_s + late_s * stall_share / steps if late_s > 0.0 else load.step_s
    residents_s = max(step_s, min(waits_s, load.reads_s))
    if not is_only:
        # Steps may take TARGET_SHARE of the target. If decode rows take all of that, prompts get only tiny chunks.
        left_s = slo.ttft_s - request.waited_s - queue_s
        alone_s = decode.prefill_s(uncached, held)
        left = 1.0 - alone_s / left_s if alone_s < left_s else 0.0
        residents_s = max(residents_s, step_s / (TARGET_SHARE * left)) if left > 0.0 else math.inf
    # The end of a prefill is known only roughly, so the next prompt is sent a little earlier. Until then it stays in
    # the router, where it can still be given up for shorter ones. But if the worker's prompt takes longer than the
    # target, a shorter one is sent at once, because the worker computes that first.
    early_s = min(load.batch_s, EARLY_SHARE * slo.ttft_s)
    goes_first = decode.totals.prefills <= 1 and queue_s > max(slo.ttft_s, read_s)
    opens_s = 0.0 if queue_s <= early_s or goes_first else queue_s - early_s
    cost = (ttft_s + WORK_WEIGHT * (read_s + PULL_SHARE * pull_s)) / slo.ttft_s + read_s * stall_share / (
        steps * slo.tpot_s
    )
    preference = 0.0 if short == math.inf else WORTH_WAITING if uncached > short else -WORTH_WAITING
    error = decode.cost.step_error
    option = _option(
        request, steps, None, decode, load, ttft_s, step_s, residents_s, cost + preference, opens_s, error, preference
    )
    option.reads = reads
    return option


def _steps(request: PolicyInput) -> float:
    """Number of tokens that count for TPOT: all but the first."""
    return request.expected_tokens - 1.0 if request.expected_tokens > 2.0 else 1.0


def _option(
    request: PolicyInput,
    steps: float,
    prefill: WorkerView | None,
    decode: WorkerView,
    load: DecodeLoad,
    ttft_s: float,
    tpot_s: float,
    residents_s: float,
    cost: float,
    opens_in_s: float,
    error: float,
    preference: float = 0.0,
) -> PlacementOption:
    slo, sure, tightest_s = request.slo, load.sure, load.tightest_s
    own = 1.0 - tpot_s * sure / slo.tpot_s
    # If no running request can meet its target, no delay matters. (inf / inf would be NaN.)
    theirs = 1.0 - residents_s * sure / tightest_s if tightest_s < math.inf else 1.0
    tpot_slack = own if own < theirs else theirs
    ttft_slack = (
        1.0 - (request.waited_s + ttft_s * (1.0 + (error if error < WIDEST_BAND else WIDEST_BAND))) / slo.ttft_s
    )
    if request.is_resumed:
        # Its TTFT is in the past. The gap in its answer counts as time per token.
        ttft_slack = own = (request.answer_left_s - ttft_s - steps * tpot_s * sure) / (steps * slo.tpot_s)
        tpot_slack = own if own < theirs else theirs
    slack = ttft_slack if ttft_slack < tpot_slack else tpot_slack
    harms = theirs < 0.0
    return PlacementOption(
        prefill, decode, ttft_s, tpot_s, ttft_slack, tpot_slack, harms, cost, opens_in_s, slack, preference
    )

"""The candidate placements of a request with their costs: pairs of workers, and single decode workers. With the
constants of the goodput policy. Pure.

Only the best workers of each role are compared here (ranking.py). Formulas: docs/scheduling.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, final

from pdserve.core.cost.latency import WIDEST_BAND, LinkModel
from pdserve.core.cost.overlap import chunked_exposed_s
from pdserve.core.cost.step_rule import TARGET_SHARE
from pdserve.core.kv.tier_reads import TierReads
from router.policy.availability import can_start, lead_of, opens_in_s
from router.policy.interface import NO_READS, Links, PolicyInput, PullChoice
from router.policy.pulls import PULL_SHARE, WORK_WEIGHT, pull_of
from router.policy.ranking import DECODES_PAIRED, LocalWorker, Receiver, rank_prefills, steps_of
from router.state.load import DecodeLoad
from router.state.view import WorkerView

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

TRANSFER_TIE_S: Final = 1e-3  # transfers that differ by less count as equally cheap
OPTIONS_SHOWN: Final = 6  # in explanations


# --- placements and their costs -------------------------------------------------------------------------------

_KEY: Final = itemgetter(0)


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
    steps = steps_of(request)
    return [_remote(request, steps, late_s, start, landing) for _, late_s, start, landing in best]


def _earliest(
    request: PolicyInput,
    tokens: float,
    cached: Mapping[str, int],
    prefills: Sequence[WorkerView],
    now_s: float,
    links: Links,
) -> list[_Start]:
    """The best prefill workers, and when each would have computed the prompt."""
    reads = request.reads if cached else NO_READS
    found = []
    for view, work_s in rank_prefills(request, tokens, cached, prefills, now_s):
        worker_id = view.worker_id
        held = min(float(cached[worker_id]), tokens - 1.0) if worker_id in cached else 0.0
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
        lead_s = lead_of(read, request.slo)
        is_open = can_start(view, request.num_tokens, now_s, lead_s)
        opens_s = 0.0 if is_open else opens_in_s(view, now_s, lead_s)
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
    steps = steps_of(request)
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
    prefill_s = copy_s + decode.prefill_time_s(uncached, held, slack)
    ttft_s = max(queue_s, waits_s, decode.rest_of_step_s(now_s)) + prefill_s + decode.first_tokens.typical_s
    # Running requests wait while this prompt and those before it are prefilled, as far as that exceeds their slack.
    late_s = queue_s + prefill_s - slack.total_s
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
    early_s = min(load.batch_s, EARLY_SHARE * slo.ttft_s) + lead_of(reads, slo)
    goes_first = decode.totals.prefills <= 1 and queue_s > max(slo.ttft_s, prefill_s)
    opens_s = 0.0 if queue_s <= early_s or goes_first else queue_s - early_s
    cost = (ttft_s + WORK_WEIGHT * (prefill_s + PULL_SHARE * pull_s)) / slo.ttft_s + prefill_s * stall_share / (
        steps * slo.tpot_s
    )
    preference = 0.0 if short == math.inf else WORTH_WAITING if uncached > short else -WORTH_WAITING
    error = decode.cost.step_error
    option = _option(
        request, steps, None, decode, load, ttft_s, step_s, residents_s, cost + preference, opens_s, error, preference
    )
    option.reads = reads
    return option


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

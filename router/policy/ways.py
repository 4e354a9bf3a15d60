"""The ways in which a request can be served, priced: each pair of workers, and each decode worker by itself. Pure.

Every worker is touched once, with the few multiplications that rank it; only the best of each role are priced in
detail. Formulas: docs/scheduling.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import itemgetter
from typing import Final, final

from pdserve.core.latency import LinkModel
from pdserve.core.overlap import chunked_exposed_s
from router.load import CHUNK_SHARE, DecodeLoad
from router.policy.interface import Ask, Links
from router.policy.rooms import can_start, opens_in_s
from router.policy.tuning import (
    DECODES_PAIRED,
    LOCALS_PRICED,
    PACK_SLACK,
    PREFILLS_PAIRED,
    TRANSFER_TIE_S,
    WIDEST_BAND,
    WORK_WEIGHT,
    WORTH_WAITING,
)
from router.view import WorkerView

# A decode worker with room: (rank as a landing place, its step with this request in it, rank as the only worker,
# view, load). Ranks begin with whether somebody's promise is broken; equal readers are ranked as landing places.
Rank = tuple[int, float]
Landing = tuple[Rank, float, tuple[int, float, Rank], WorkerView, DecodeLoad]
StepRule = Callable[[WorkerView, DecodeLoad, float, float], float]

_RANK: Final = itemgetter(0)
_LOCAL_RANK: Final = itemgetter(2)

NOTHING_CACHED: Final[Mapping[str, int]] = {}


@final
@dataclass(slots=True)
class Way:
    prefill: WorkerView | None  # None: local
    decode: WorkerView
    ttft_s: float  # from now
    tpot_s: float
    ttft_slack: float
    tpot_slack: float  # of the strictest promise on the decode worker, this request's included
    harms: bool  # a resident's promise is broken by it
    cost: float  # shares of promises that it takes: from its own TTFT and the next one's, from TPOTs on d
    opens_in_s: float  # 0: it can start now
    slack: float  # the lesser of both


def tandem_step_s(view: WorkerView, load: DecodeLoad, tokens: float, growth: float) -> float:
    """One step once all that is on its way has arrived, and this and they are half answered. Residents are taken to
    be in the middle of their answers: as many tokens as they will add leave with those that end."""
    return load.joined_s + load.token_s * (tokens + growth * (1 + load.arriving))


def reported_step_s(view: WorkerView, load: DecodeLoad, tokens: float, growth: float) -> float:
    """The next step as the worker itself sees it."""
    base_s, row_s, token_s = view.cost.decode_coefficients
    return base_s + row_s * (view.report.running + 1) + token_s * (view.report.context_tokens + tokens)


def find_landings(
    ask: Ask, cached: Mapping[str, int], decodes: Sequence[WorkerView], now_s: float, step_of: StepRule, fullest: float
) -> list[Landing]:
    """Decode workers with a row and blocks for the whole answer that is expected.
    `fullest`: 1 or -1, the order of their ranks."""
    tokens, own_s = ask.num_tokens, ask.slo.tpot_s
    growth = 0.5 * ask.expected_tokens
    room = tokens + ask.expected_tokens
    per_second = 1.0 / ask.slo.ttft_s
    per_read = (1.0 + WORK_WEIGHT) * per_second
    per_wait = 1.0 / _answer_s(ask)
    is_tandem = step_of is tandem_step_s
    half = tokens - 0.5 * tokens
    found: list[Landing] = []
    for view in decodes:
        load = view.kept_load or view.load
        rows = load.rows
        if load.free_tokens < room + growth * rows or not load.is_open or view.closed_until_s > now_s:
            continue
        if is_tandem:  # written out: every worker is asked for every request, and a call would cost more
            step_s = load.joined_s + load.token_s * (tokens + growth * (1 + load.arriving))
        else:
            step_s = step_of(view, load, tokens, growth)
        limit_s = load.tightest_s
        if load.alone_s < own_s < limit_s:
            limit_s = own_s
        spare = 1.0 - step_s * load.sure / limit_s
        if spare >= PACK_SLACK:
            rank = (0, fullest * spare)
        else:
            rank = (1 if spare >= 0.0 else 2, -spare)
        uncached, middle = tokens, half
        if view.worker_id in cached:
            uncached = max(1, tokens - cached[view.worker_id])
            middle = tokens - 0.5 * uncached
        read_s = uncached * (load.per_token_s + load.per_token_context_s * middle) * load.stretch
        cost = read_s * (per_read + per_wait * load.hold)
        if view.free_at_s > now_s:
            cost += (view.free_at_s - now_s) * per_second
        found.append((rank, step_s, (rank[0] >> 1, cost, rank), view, load))
    return found


def remote_ways(
    ask: Ask,
    cached: Mapping[str, int],
    prefills: Sequence[WorkerView],
    landings: Sequence[Landing],
    now_s: float,
    links: Links,
) -> list[Way]:
    """Pairs of the cheapest prefill workers, open or not, and the best of `landings`; the best pair first."""
    tokens, answer_s = ask.num_tokens, _answer_s(ask)
    starts = []  # (its delay and that of who comes next, worker id, delay, seconds of compute, cached tokens, view)
    for view in prefills:
        held = cached.get(view.worker_id, 0)
        if held >= tokens:
            held = tokens - 1
        work_s = view.cost.prefill_s(tokens - held, held, view.hello.max_batch_tokens)
        delay_s = work_s
        if view.free_at_s > now_s:
            delay_s += view.free_at_s - now_s
        starts.append((delay_s + WORK_WEIGHT * work_s, view.worker_id, delay_s, work_s, held, view))
    starts.sort()
    places = []
    for order, (rank, step_s, _, decode, load) in enumerate(nsmallest(DECODES_PAIRED, landings, key=_RANK)):
        uncached = max(1, tokens - cached.get(decode.worker_id, 0))
        places.append((order, rank, step_s, decode, load, uncached))
    pairs = []
    for cost_s, prefill_id, delay_s, work_s, held, prefill in starts[:PREFILLS_PAIRED]:
        for order, rank, step_s, decode, load, lacking in places:
            if ask.avoid_pairs and (prefill_id, decode.worker_id) in ask.avoid_pairs:
                continue
            link = links(prefill_id, decode.worker_id)
            late_s = _late_s(tokens, held, lacking, prefill, decode, link, work_s, delay_s)
            price_s = round((cost_s + late_s) / TRANSFER_TIE_S)
            pairs.append(((rank[0] >> 1, price_s, order, prefill_id), delay_s, late_s, prefill, decode, load, step_s))
    pairs.sort(key=_RANK)
    best = [_remote(ask, answer_s, now_s, *pair[1:]) for pair in pairs[:DECODES_PAIRED]]
    if pairs and not any(way.opens_in_s == 0.0 for way in best):
        best += [
            way
            for pair in pairs[DECODES_PAIRED:]
            if (way := _remote(ask, answer_s, now_s, *pair[1:])).opens_in_s == 0.0
        ][:1]
    return best


def local_ways(
    ask: Ask, cached: Mapping[str, int], landings: Sequence[Landing], now_s: float, short: float, *, is_only: bool
) -> list[Way]:
    """The decode workers that would do all of it soonest and cheapest.

    A decode worker's time belongs to all who will come to it, so for prompts of more than `short` uncached tokens it
    must save what would be worth waiting for; shorter ones are not worth sending away. Infinite where no prefill
    worker is free to read anything: then the cheaper way is taken. `is_only`: there is no prefill worker at all; else a
    worker is fit to read only if its steps leave the time for it, when all that is on its way there has arrived.
    """
    ranked = nsmallest(LOCALS_PRICED, landings, key=_LOCAL_RANK)
    return [_local(ask, cached, now_s, step_s, view, load, short, is_only) for _, step_s, _, view, load in ranked]


def _late_s(
    tokens: int,
    held: int,
    lacking: int,
    prefill: WorkerView,
    decode: WorkerView,
    link: LinkModel,
    work_s: float,
    delay_s: float,
) -> float:
    """How long after the first token the KV lands: of a prompt of `tokens`, of which the prefill worker has `held` and
    the decode worker lacks the last `lacking`.

    Its chunks leave as they are computed (core/overlap.py). What is sent before it takes turns with it on the link,
    and is hidden while prompts are computed.
    """
    size, block_bytes, chunk = decode.hello.block_size, decode.hello.block_bytes, prefill.hello.max_batch_tokens
    num_bytes = -(-lacking // size) * block_bytes
    read = tokens - held
    if lacking <= read <= chunk:
        late_s = link.transfer_s(num_bytes)  # one part
    else:
        cost, last = prefill.cost, (read - 1) % chunk + 1
        chunks_s = last_s = work_s  # from the first part's readiness; what p has cached is ready at once
        if read > chunk:
            last_s = cost.prefill_s(last, tokens - last)
            if lacking <= read:
                first = ((read - lacking) // chunk + 1) * chunk
                chunks_s = work_s - cost.prefill_s(first, held, chunk) if first < read else 0.0
        late_s = chunked_exposed_s(
            link,
            num_bytes=num_bytes,
            chunk_bytes=-(-chunk // size) * block_bytes,
            last_bytes=-(-last // size) * block_bytes,
            chunks_s=chunks_s,
            last_s=last_s,
        )
    before = prefill.totals.blocks * prefill.hello.block_bytes
    landing = decode.totals.landing_tokens // size * block_bytes
    queued_s = link.transfer_s((before if before > landing else landing) + num_bytes) - delay_s
    return queued_s if queued_s > late_s else late_s


def _remote(
    ask: Ask,
    answer_s: float,
    now_s: float,
    delay_s: float,
    late_s: float,
    prefill: WorkerView,
    decode: WorkerView,
    load: DecodeLoad,
    step_s: float,
) -> Way:
    rest_s = decode.rest_of_step_s
    ttft_s = delay_s + (rest_s + decode.grants.typical_s) + prefill.replies.typical_s
    # Its KV lands in the middle of a step, which it cannot join.
    tpot_s = step_s + (late_s + 0.5 * step_s) / _steps(ask)
    opens_s = 0.0 if can_start(prefill, ask.num_tokens, now_s) else opens_in_s(prefill, now_s)
    work_s = delay_s - (prefill.free_at_s - now_s if prefill.free_at_s > now_s else 0.0)
    # The rest of a step, longer where more is decoded, is no reason to spread what should be packed.
    cost = (ttft_s - rest_s + WORK_WEIGHT * work_s) / ask.slo.ttft_s + late_s / answer_s
    return _way(ask, prefill, decode, load, ttft_s, tpot_s, step_s, cost, opens_s, prefill.cost.prefill_error)


def _local(
    ask: Ask,
    cached: Mapping[str, int],
    now_s: float,
    step_s: float,
    decode: WorkerView,
    load: DecodeLoad,
    short: float,
    is_only: bool,
) -> Way:
    held = min(cached.get(decode.worker_id, 0), ask.num_tokens - 1)
    read_s = decode.reading_s(ask.num_tokens - held, held)
    queue_s = decode.queue_s(now_s)
    ttft_s = max(queue_s, decode.rest_of_step_s) + read_s + decode.first_tokens.typical_s
    # Residents wait while prompts are read: those of the queue, and this.
    waits_s = load.step_s + (queue_s + read_s) * load.hold / _steps(ask)
    residents_s = max(step_s, min(waits_s, load.reads_s))
    if not is_only:
        # Steps are filled up to CHUNK_SHARE of the promise; where decode rows come to do so, crumbs are read.
        left_s = ask.slo.ttft_s - ask.waited_s - queue_s
        alone_s = decode.prefill_s(ask.num_tokens - held, held)
        left = 1.0 - alone_s / left_s if alone_s < left_s else 0.0
        residents_s = max(residents_s, step_s / (CHUNK_SHARE * left)) if left > 0.0 else math.inf
    # When a prompt will have been read is known only roughly, so one may wait behind it: else steps read nothing.
    opens_s = 0.0 if queue_s <= load.batch_s or decode.totals.prefills <= 1 else queue_s - load.batch_s
    cost = (ttft_s + WORK_WEIGHT * read_s) / ask.slo.ttft_s + read_s * load.hold / _answer_s(ask)
    if short < math.inf:
        cost += WORTH_WAITING if ask.num_tokens - held > short else -WORTH_WAITING
    return _way(ask, None, decode, load, ttft_s, step_s, residents_s, cost, opens_s, decode.cost.step_error)


def _answer_s(ask: Ask) -> float:
    """What the whole answer may take by its promise: a delay within it is this share of the promise."""
    return _steps(ask) * ask.slo.tpot_s


def _steps(ask: Ask) -> float:
    """Tokens of the answer that take a time per token: all but the first."""
    return ask.expected_tokens - 1.0 if ask.expected_tokens > 2.0 else 1.0


def _way(
    ask: Ask,
    prefill: WorkerView | None,
    decode: WorkerView,
    load: DecodeLoad,
    ttft_s: float,
    tpot_s: float,
    residents_s: float,
    cost: float,
    opens_in_s: float,
    error: float,
) -> Way:
    slo, sure = ask.slo, load.sure
    own = 1.0 - tpot_s * sure / slo.tpot_s
    theirs = 1.0 - residents_s * sure / load.tightest_s
    tpot_slack = own if own < theirs else theirs
    ttft_slack = 1.0 - (ask.waited_s + ttft_s * (1.0 + (error if error < WIDEST_BAND else WIDEST_BAND))) / slo.ttft_s
    return Way(
        prefill,
        decode,
        ttft_s,
        tpot_s,
        ttft_slack,
        tpot_slack,
        theirs < 0.0,
        cost,
        opens_in_s,
        ttft_slack if ttft_slack < tpot_slack else tpot_slack,
    )

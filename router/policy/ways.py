"""The ways in which a request can be served, priced: each pair of workers, and each decode worker by itself. Pure.

Every worker is touched once, with the few multiplications that rank it; only the best of each role are priced in
detail. Formulas: docs/scheduling.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.latency import LinkModel
from router.load import DecodeLoad
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
# view, load). Ranks begin with whether somebody's promise is broken.
Landing = tuple[tuple[int, float], float, tuple[int, float], WorkerView, DecodeLoad]
StepRule = Callable[[WorkerView, DecodeLoad, float, float], float]

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

    @property
    def slack(self) -> float:
        return self.ttft_slack if self.ttft_slack < self.tpot_slack else self.tpot_slack


def tandem_step_s(view: WorkerView, load: DecodeLoad, tokens: float, growth: float) -> float:
    """One step once all that is on its way has arrived, and this and they are half answered. Residents are taken to
    be in the middle of their answers: as many tokens as they will add leave with those that end."""
    return load.step_s + load.row_s + load.token_s * (tokens + growth * (1 + load.arriving))


def reported_step_s(view: WorkerView, load: DecodeLoad, tokens: float, growth: float) -> float:
    """The next step as the worker itself sees it."""
    base_s, row_s, token_s = view.cost.decode_coefficients
    return base_s + row_s * (view.report.running + 1) + token_s * (view.report.context_tokens + tokens)


def find_landings(
    ask: Ask, cached: Mapping[str, int], decodes: Sequence[WorkerView], now_s: float, step_of: StepRule, fullest: float
) -> list[Landing]:
    """Decode workers with a row and blocks for the whole answer that is expected; `fullest`: 1 or -1, the order."""
    tokens, own_s = ask.num_tokens, ask.slo.tpot_s
    growth = 0.5 * ask.expected_tokens
    per_second = 1.0 / ask.slo.ttft_s
    per_read = (1.0 + WORK_WEIGHT) * per_second
    per_wait = 1.0 / _answer_s(ask)
    found: list[Landing] = []
    for view in decodes:
        load = view.load
        if not load.is_open or view.closed_until_s > now_s:
            continue
        if load.free_tokens < tokens + ask.expected_tokens + growth * load.rows:
            continue
        step_s = step_of(view, load, tokens, growth)
        limit_s = load.tightest_s
        if load.alone_s < own_s < limit_s:
            limit_s = own_s
        spare = 1.0 - step_s * (1.0 + load.band) / limit_s
        if spare >= PACK_SLACK:
            rank = (0, fullest * spare)
        else:
            rank = (1 if spare >= 0.0 else 2, -spare)
        uncached = tokens - cached.get(view.worker_id, 0)
        if uncached < 1:
            uncached = 1
        read_s = uncached * (load.per_token_s + load.per_token_context_s * (tokens - 0.5 * uncached)) * load.stretch
        queue_s = view.free_at_s - now_s
        cost = read_s * (per_read + per_wait * load.hold)
        if queue_s > 0.0:
            cost += queue_s * per_second
        found.append((rank, step_s, (rank[0] >> 1, cost), view, load))
    return found


def remote_ways(
    ask: Ask,
    cached: Mapping[str, int],
    prefills: Sequence[WorkerView],
    landings: Sequence[Landing],
    now_s: float,
    links: Links,
) -> list[Way]:
    """Pairs of the cheapest prefill workers, open or not, and the first of `landings`; the best pair first."""
    tokens = ask.num_tokens
    starts = []  # (its delay and that of who comes next, worker id, delay, seconds of compute, view)
    for view in prefills:
        held = cached.get(view.worker_id, 0)
        if held >= tokens:
            held = tokens - 1
        work_s = view.prefill_s(tokens - held, held)
        delay_s = view.queue_s(now_s) + work_s
        starts.append((delay_s + WORK_WEIGHT * work_s, view.worker_id, delay_s, view))
    starts.sort()
    pairs = []
    for cost_s, prefill_id, delay_s, prefill in starts[:PREFILLS_PAIRED]:
        for order, (rank, step_s, _, decode, load) in enumerate(landings[:DECODES_PAIRED]):
            if (prefill_id, decode.worker_id) in ask.avoid_pairs:
                continue
            late_s = _late_s(ask, cached, links(prefill_id, decode.worker_id), prefill, decode, delay_s)
            price_s = round((cost_s + late_s) / TRANSFER_TIE_S)
            pairs.append(((rank[0] >> 1, price_s, order, prefill_id), delay_s, late_s, prefill, decode, load, step_s))
    pairs.sort(key=_pair_order)
    best = [_remote(ask, now_s, *pair[1:]) for pair in pairs[:DECODES_PAIRED]]
    if pairs and not any(way.opens_in_s == 0.0 for way in best):
        best += [way for pair in pairs[DECODES_PAIRED:] if (way := _remote(ask, now_s, *pair[1:])).opens_in_s == 0.0][
            :1
        ]
    return best


def local_ways(
    ask: Ask, cached: Mapping[str, int], landings: Sequence[Landing], now_s: float, short: float
) -> list[Way]:
    """The decode workers that would do all of it soonest and cheapest.

    A decode worker's time belongs to all who will come to it, so for prompts of more than `short` uncached tokens it
    must save what would be worth waiting for; shorter ones are not worth sending away. Infinite where no prefill
    worker is free to read anything: then the cheaper way is taken.
    """
    ranked = sorted(landings, key=_local_order)[:LOCALS_PRICED]
    return [_local(ask, cached, now_s, step_s, view, load, short) for _, step_s, _, view, load in ranked]


def _late_s(
    ask: Ask, cached: Mapping[str, int], link: LinkModel, prefill: WorkerView, decode: WorkerView, delay_s: float
) -> float:
    """How long after the first token the KV lands: what is sent before it and itself take turns on the link, and are
    hidden while prompts are computed; the last chunk's KV never is."""
    hello = decode.hello
    block_bytes, size = hello.block_bytes, hello.block_size
    blocks = -(-(ask.num_tokens - min(cached.get(decode.worker_id, 0), ask.num_tokens - 1)) // size)
    last_blocks = min(blocks, -(-prefill.hello.max_batch_tokens // size))
    before = max(prefill.totals.blocks * prefill.hello.block_bytes, decode.totals.landing_tokens // size * block_bytes)
    unhidden_s = link.transfer_s(before + blocks * block_bytes) - delay_s
    return max(unhidden_s, link.transfer_s(last_blocks * block_bytes))


def _remote(
    ask: Ask,
    now_s: float,
    delay_s: float,
    late_s: float,
    prefill: WorkerView,
    decode: WorkerView,
    load: DecodeLoad,
    step_s: float,
) -> Way:
    ttft_s = delay_s + decode.grants_in_s + prefill.reply_s
    # Its KV lands in the middle of a step, which it cannot join.
    tpot_s = step_s + (late_s + 0.5 * step_s) / max(1.0, ask.expected_tokens - 1.0)
    opens_s = 0.0 if can_start(prefill, ask.num_tokens, now_s) else opens_in_s(prefill, now_s)
    work_s = delay_s - prefill.queue_s(now_s)
    # The rest of a step, longer where more is decoded, is no reason to spread what should be packed.
    cost = (ttft_s - decode.rest_of_step_s + WORK_WEIGHT * work_s) / ask.slo.ttft_s + late_s / _answer_s(ask)
    return _way(ask, prefill, decode, load, ttft_s, tpot_s, step_s, cost, opens_s, prefill.cost.prefill_error)


def _local(
    ask: Ask,
    cached: Mapping[str, int],
    now_s: float,
    step_s: float,
    decode: WorkerView,
    load: DecodeLoad,
    short: float,
) -> Way:
    held = min(cached.get(decode.worker_id, 0), ask.num_tokens - 1)
    read_s = decode.reading_s(ask.num_tokens - held, held)
    queue_s = decode.queue_s(now_s)
    ttft_s = max(queue_s, decode.rest_of_step_s) + read_s + max(0.0, decode.grant_wait_s)
    # Residents wait while prompts are read: those of the queue, and this.
    waits_s = load.step_s + (queue_s + read_s) * load.hold / max(1.0, ask.expected_tokens - 1.0)
    residents_s = max(step_s, min(waits_s, load.reads_s))
    # When a prompt will have been read is known only roughly, so one may wait behind it: else steps read nothing.
    opens_s = 0.0 if queue_s <= load.batch_s or decode.totals.prefills <= 1 else queue_s - load.batch_s
    cost = (ttft_s + WORK_WEIGHT * read_s) / ask.slo.ttft_s + read_s * load.hold / _answer_s(ask)
    if short < math.inf:
        cost += WORTH_WAITING if ask.num_tokens - held > short else -WORTH_WAITING
    return _way(ask, None, decode, load, ttft_s, step_s, residents_s, cost, opens_s, decode.cost.step_error)


def _answer_s(ask: Ask) -> float:
    """What the whole answer may take by its promise: a delay within it is this share of the promise."""
    return max(1.0, ask.expected_tokens - 1.0) * ask.slo.tpot_s


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
    slo, tightest_s, sure = ask.slo, load.tightest_s, 1.0 + load.band
    own = 1.0 - tpot_s * sure / slo.tpot_s
    theirs = 1.0 - residents_s * sure / tightest_s
    return Way(
        prefill=prefill,
        decode=decode,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        ttft_slack=1.0 - (ask.waited_s + ttft_s * (1.0 + min(error, WIDEST_BAND))) / slo.ttft_s,
        tpot_slack=own if own < theirs else theirs,
        harms=theirs < 0.0,
        cost=cost,
        opens_in_s=opens_in_s,
    )


def _local_order(landing: Landing) -> tuple[int, float]:
    return landing[2]


def _pair_order(pair: tuple[Any, ...]) -> tuple[int, int, int, str]:
    order: tuple[int, int, int, str] = pair[0]
    return order

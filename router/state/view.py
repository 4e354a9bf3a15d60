"""The router's view of one worker: its hello, its last report, and the placements since that report. Pure.

Only the worker decides about its capacity; the view predicts it. A report may be as old as a heartbeat. The router's
own reservations are exact, but exclude other routers. So the view combines both: estimate = reported + (reserved now -
reserved when the report came). load.py estimates the end of the current step and the latency of messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, final

from pdserve.core.cost.latency import CostModel, CostModels
from pdserve.core.durations import backoff_s, clamped_s
from pdserve.core.kv.tier_reads import MOST_ALONE, TierDepths, TierReads, TierSpeed, predict_given, predict_reads
from pdserve.core.protocol import BatchTimed, Load, TokensArrived
from pdserve.core.types import Role
from router.state.interface import WorkerConnected
from router.state.load import (
    NO_SLACK,
    DecodeLoad,
    MessageLatency,
    Reservation,
    Slack,
    StepClock,
    Totals,
    WorkerQueue,
    due_and_gap,
)

FIRST_PULL_S: Final = 0.02  # what a pull takes besides its bytes, before one was measured
FIRST_REST_S: Final = 2.0  # a worker pulls nothing from another one for this time after a failed pull; it doubles
LONGEST_REST_S: Final = 60.0
VAIN_SHARE: Final = 0.05  # of the time, at most, that a worker may spend on failed pulls from one source
MAX_RESTS: Final = 1024

# (decoding and arriving sequences; how many of them are arriving; tokens of all of them; available blocks)
LoadEstimate = tuple[int, int, int, int]


class WorkerView:
    """One worker. Mutated by RouterState alone; policies read it."""

    __slots__ = (
        "_at_report",
        "adapters",
        "cached_load",
        "closed_until_s",
        "computed_s",
        "cost",
        "drains_since_s",
        "first_tokens",
        "free_at_s",
        "freed_s",
        "grant_wait_s",
        "grants",
        "heard_s",
        "hello",
        "is_connected",
        "is_drain_requested",
        "last_step_s",
        "max_tokens",
        "prefilling",
        "pull_rests",
        "pulls",
        "pulls_closed_until_s",
        "queue",
        "replies",
        "report",
        "reservations",
        "step_clock",
        "totals",
        "tpot_targets_s",
        "worker_id",
    )

    def __init__(self, hello: WorkerConnected, now_s: float) -> None:
        self.worker_id = hello.worker_id
        self.hello = hello
        self.cost = CostModel(hello.cost)
        self.queue = WorkerQueue()  # requests that are bound to it and have no reservation yet
        self.is_drain_requested = False
        self.drains_since_s = math.inf  # infinite while it does not drain
        self.grant_wait_s = 0.0  # moving mean of Reserve -> Granted, beyond half a step
        # Latency of messages, without the worker's own time and the rest of its running step.
        self.grants = MessageLatency()  # Reserve -> Granted
        self.replies = MessageLatency()  # Prefill -> FirstToken
        self.first_tokens = MessageLatency()  # Reserve -> first token, for prompts that a decode worker prefills itself
        self.pulls = MessageLatency(FIRST_PULL_S)  # of pulls from it, without the time of their bytes
        self._start(now_s)

    def _start(self, now_s: float) -> None:
        hello = self.hello
        self.adapters = frozenset(hello.adapters)  # fingerprints
        self.max_tokens = min(hello.num_blocks * hello.block_size, hello.max_context_tokens)  # of one sequence
        self.is_connected = True
        self.heard_s = now_s
        self.report = Load(worker_id=hello.worker_id, steps=0, free_blocks=hello.num_blocks)
        self.reservations: dict[tuple[str, int], Reservation] = {}
        self.prefilling: dict[tuple[str, int], Reservation] = {}  # those with a prompt to compute
        self.totals = Totals()
        self._at_report = Totals()
        self.tpot_targets_s: Counter[float] = Counter()  # TPOT target -> rows reserved with it
        self.cached_load: DecodeLoad | None = None  # cached `load`
        self.free_at_s = now_s  # when its current prefills should be done
        self.closed_until_s = now_s  # gets no requests before this time, because it declined one
        self.pulls_closed_until_s = now_s  # nothing is pulled from it before this time, because it did not answer
        self.pull_rests: dict[str, tuple[float, int]] = {}  # source -> (until when, failed pulls one after the other)
        self.freed_s = now_s  # when an event may last have made room here
        self.computed_s = now_s  # when a prompt was last finished or abandoned here
        self.step_clock = StepClock()
        self.last_step_s = 0.0  # duration of the last reported batch

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def is_draining(self) -> bool:
        return self.is_drain_requested or self.report.is_draining

    @property
    def is_drained(self) -> bool:
        """Whether an operator drains the worker."""
        return self.is_drain_requested or self.report.is_drained

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.hello.block_size)

    # -- estimates -------------------------------------------------------------------------------------------------

    def estimated_load(self) -> LoadEstimate:
        """The worker's estimated current state, including other routers' requests."""
        report, totals, then = self.report, self.totals, self._at_report
        rows, arriving, context = totals.rows, totals.arriving, totals.tokens
        others = report.running + report.waiting - then.rows
        if others > 0:
            rows += others
        others = report.waiting - then.arriving
        if others > 0:
            arriving += others
        others = report.context_tokens - then.tokens
        if others > 0:
            context += others
        return rows, arriving, context, self.free_blocks

    @property
    def free_blocks(self) -> int:
        """Its estimated free blocks now."""
        report = self.report
        return report.free_blocks + report.evictable_blocks + self._at_report.blocks - self.totals.blocks

    @property
    def load(self) -> DecodeLoad:
        """A decode worker's load in seconds."""
        load = self.cached_load
        if load is None:
            load = self.cached_load = DecodeLoad(
                self.cost, self.hello, self.estimated_load(), self.tpot_targets_s, is_empty=not self.reservations
            )
        return load

    def prefill_time_s(self, uncached: int, cached: int, slack: Slack = NO_SLACK) -> float:
        """`prefill_s`; on a decode worker, the time within the steps of its running requests, which have `slack`."""
        if self.hello.role is Role.DECODE and self.totals.rows:
            return self.load.prefill_time_s(uncached, cached, slack)
        return self.prefill_s(uncached, cached)

    def prefill_share_s(self, uncached: int, cached: int, slack: Slack = NO_SLACK) -> float:
        """The delay for the next request. It is less than `prefill_time_s` on a decode worker, where both share a
        step."""
        if self.hello.role is Role.DECODE and self.totals.rows:
            return self.load.prefill_share_s(uncached, cached, slack)
        return self.prefill_s(uncached, cached)

    def slack(self, now_s: float) -> Slack:
        """The slack of a decode worker's running requests after the prompts that it already prefills. It is unknown,
        and assumed to be zero, if other routers have requests there."""
        totals = self.totals
        if not totals.rows:
            return NO_SLACK
        load = self.cached_load or self.load
        if load.rows > totals.rows:
            return NO_SLACK
        if load.due is None:
            load.due = due_and_gap(self.reservations.values(), load.alone_s, load.step_s)
        due_s, gap_s = load.due
        if gap_s == math.inf:
            return NO_SLACK
        total_s = due_s - (self.free_at_s if self.free_at_s > now_s else now_s)
        return Slack(total_s if total_s > 0.0 else 0.0, gap_s)

    @property
    def half_step_s(self) -> float:
        """The mean remaining time of a decode worker's running step."""
        if not self.totals.rows:
            return 0.0
        return 0.5 * (self.load.reads_s if self.totals.prefills else self.load.step_s)

    def rest_of_step_s(self, now_s: float) -> float:
        """How long a message that is sent now waits for the end of the decode worker's step."""
        totals = self.totals
        if not totals.rows:
            return 0.0
        load, at_s = self.cached_load or self.load, now_s + 0.5 * self.grants.typical_s
        if not totals.prefills:
            return self.step_clock.remaining_s(at_s, load.step_s)
        reads_s = load.reads_s
        if totals.prefills == totals.rows:  # without decode rows, chunks are not limited
            reads_s = self.prefill_s(min(totals.prefill_tokens, self.hello.max_batch_tokens), 0)
        # The last step of a prompt may be shorter.
        rest_s, prefill_s = self.step_clock.remaining_s(at_s, reads_s), self.free_at_s - now_s
        most_s = prefill_s if prefill_s > load.step_s else load.step_s
        return rest_s if rest_s < most_s else most_s

    def timed(self, event: BatchTimed) -> bool:
        """Learns from a finished batch. False: it was no valid sample. `load` is updated with the next report."""
        self.last_step_s = event.step_s
        return self.cost.observe_batch(event)

    def queue_s(self, now_s: float) -> float:
        """Predicted time until a prefill that is sent now starts."""
        wait_s = self.free_at_s - now_s
        return wait_s if wait_s > 0.0 else 0.0

    def timely_queue_s(self, now_s: float) -> float:
        """`queue_s` for a request that can be on time: without late prompts, which are computed later."""
        wait_s = self.free_at_s - now_s
        if wait_s > 0.0:
            wait_s -= sum(one.prefill_s for one in self.prefilling.values() if one.due_at_s < now_s)
        return wait_s if wait_s > 0.0 else 0.0

    @property
    def prefills_ahead(self) -> int:
        """Number of prompts to compute here before a new one: reserved, queued, and of other routers."""
        others = self.report.waiting - self._at_report.prefills
        return self.totals.prefills + len(self.queue) + max(others, 0)

    @property
    def prefill_tokens_ahead(self) -> int:
        """Prompt tokens to compute here before those of a new request: reserved, queued, and of other routers."""
        others = self.report.pending_prefill_tokens - self._at_report.prefill_tokens
        return self.totals.prefill_tokens + self.queue.uncached_tokens + max(others, 0)

    def prefill_s(self, uncached: int, cached: int) -> float:
        return self.cost.prefill_s(uncached, cached, self.hello.max_batch_tokens)

    def reads(self, num_blocks: int, split: TierDepths, turn_s: float | None) -> TierReads:
        """What the worker does with so many leading blocks of a prompt whose turn comes in `turn_s`; None: without
        other requests."""
        most, speeds = int(MOST_ALONE * self.hello.num_blocks), self._tier_speeds(is_unloaded=turn_s is None)
        return predict_reads(num_blocks, split, speeds, self._blocks_s, turn_s or 0.0, most)

    def given(self, num_blocks: int, split: TierDepths) -> tuple[int, float]:
        """How many of these blocks it gives to a worker that pulls them, and how long it reads before."""
        most = int(MOST_ALONE * self.hello.num_blocks)
        return predict_given(num_blocks, split, self._tier_speeds(), self._blocks_s, most)

    def _tier_speeds(self, *, is_unloaded: bool = False) -> Sequence[TierSpeed]:
        """As reported, with the reads that no report has; or without any queue."""
        tiers, more_s = self.report.tiers, self.totals.read_s
        if is_unloaded:
            return [replace(one, queue_s=0.0) for one in tiers]
        if not more_s:
            return tiers
        return [one if one.is_at_once else replace(one, queue_s=one.queue_s + more_s) for one in tiers]

    def _blocks_s(self, num_blocks: int, first: int) -> float:
        size = self.hello.block_size
        return self.prefill_s(num_blocks * size, first * size)

    @property
    def batch_s(self) -> float:
        """Time of one full prefill batch."""
        return self.cost.prefill_s(self.hello.max_batch_tokens)

    @property
    def tightest_tpot_s(self) -> float:
        """The strictest TPOT target among this router's requests here."""
        return min(self.tpot_targets_s) if self.tpot_targets_s else math.inf

    # -- reservations ------------------------------------------------------------------------------------------------

    def reserve(self, reservation: Reservation, now_s: float) -> None:
        key = (reservation.request_id, reservation.attempt)
        assert key not in self.reservations, key
        self.reservations[key] = reservation
        self.cached_load = None
        totals = self.totals
        totals.blocks += reservation.blocks
        totals.arriving += 1
        if reservation.tpot_s is not None:
            if not totals.rows:
                self.step_clock.ended(now_s)  # an idle worker begins a step at once
            totals.rows += 1
            totals.tokens += reservation.tokens
            self.tpot_targets_s[reservation.tpot_s] += 1
            if not reservation.prefill_tokens:
                totals.landing_tokens += reservation.tokens
                reservation.is_landing = True
        if reservation.prefill_tokens:
            totals.prefill_tokens += reservation.prefill_tokens
            totals.prefill_s += reservation.prefill_s
            totals.read_s += reservation.read_s
            totals.prefills += 1
            self.prefilling[key] = reservation
            self.free_at_s = max(self.free_at_s, now_s) + reservation.prefill_s

    def pulls_from(self, source: WorkerView, reservation: Reservation, tokens: int, read_s: float = 0.0) -> None:
        """The attempt begins to pull KV of `tokens` tokens, for which the source reads its tiers for `read_s`."""
        reservation.pull_tokens, reservation.pull_source = tokens, source.totals
        reservation.pull_read_s = read_s
        self.totals.pulls += 1
        self.totals.pulling_tokens += tokens
        source.totals.gives += 1
        source.totals.giving_tokens += tokens

    def pulled(self, reservation: Reservation) -> None:
        """The attempt pulls nothing any more."""
        source = reservation.pull_source
        if source is not None:
            self.totals.pulls -= 1
            self.totals.pulling_tokens -= reservation.pull_tokens
            source.gives -= 1
            source.giving_tokens -= reservation.pull_tokens
            reservation.pull_tokens, reservation.pull_source = 0, None

    def pull_ended(self, source_id: str, now_s: float, *, has_failed: bool, pull_s: float = 0.0) -> None:
        """After failed pulls from a source it pulls nothing from it for a while, and for longer if the last one took
        `pull_s`, for which its prompt may have waited in vain."""
        _, failures = self.pull_rests.pop(source_id, (0.0, 0))
        if has_failed:
            lost_s = clamped_s(pull_s / VAIN_SHARE, 0.0, LONGEST_REST_S)
            rest_s = max(backoff_s(FIRST_REST_S, LONGEST_REST_S, failures), lost_s)
            self.pull_rests[source_id] = now_s + rest_s, failures + 1
            if len(self.pull_rests) > MAX_RESTS:  # the oldest one, perhaps of a worker that has ended
                del self.pull_rests[next(iter(self.pull_rests))]

    def joined(self, reservation: Reservation, first_token_s: float) -> None:
        """The request decodes. Its client got the first token at `first_token_s`."""
        reservation.first_token_s = first_token_s
        if self.cached_load is not None:
            self.cached_load.due = None
        self.arrived(reservation)

    def arrived(self, reservation: Reservation) -> None:
        """The request has left the worker's inbox: it is being computed, or has ended."""
        if reservation.is_landing:
            reservation.is_landing = False
            self.totals.landing_tokens -= reservation.tokens
        if reservation.is_arriving:
            reservation.is_arriving = False
            self.totals.arriving -= 1
            self.cached_load = None

    def grew(self, reservation: Reservation, tokens: int) -> None:
        """A decode row has `tokens` more tokens."""
        if reservation.is_landing:
            self.totals.landing_tokens += tokens
        reservation.tokens += tokens
        blocks = self.blocks_for(reservation.tokens)
        fresh = blocks - reservation.blocks
        self.totals.blocks += fresh
        reservation.blocks = blocks
        if self.cached_load is not None:
            self.cached_load.grew(tokens, fresh)
        if reservation.tpot_s is not None:
            self.totals.tokens += tokens

    def computed(self, reservation: Reservation, now_s: float) -> None:
        """The prefill was finished or abandoned."""
        self.pulled(reservation)
        if reservation.prefill_tokens:
            totals = self.totals
            totals.prefill_tokens -= reservation.prefill_tokens
            totals.prefills -= 1
            totals.prefill_s = totals.prefill_s - reservation.prefill_s if totals.prefills else 0.0
            reservation.prefill_tokens, reservation.prefill_s = 0, 0.0
            self._does_not_read(reservation)
            del self.prefilling[reservation.request_id, reservation.attempt]
            self.free_at_s = now_s + max(totals.prefill_s, self._others_prefill_s)
            self.freed_s = self.computed_s = now_s

    def _does_not_read(self, reservation: Reservation) -> None:
        """The read for its prompt has ended, or the report has it in the queues of the tiers."""
        self.totals.read_s = max(0.0, self.totals.read_s - reservation.read_s)
        reservation.read_s = 0.0

    def left_batch(self, reservation: Reservation) -> None:
        """The request no longer has a row, but may still hold blocks."""
        self.cached_load = None
        if reservation.tpot_s is not None:
            self.totals.rows -= 1
            self.totals.tokens -= reservation.tokens
            self.tpot_targets_s[reservation.tpot_s] -= 1
            if not self.tpot_targets_s[reservation.tpot_s]:
                del self.tpot_targets_s[reservation.tpot_s]
            reservation.tpot_s = None

    def unreserve(self, reservation: Reservation, now_s: float) -> None:
        self.freed_s = now_s
        self.computed(reservation, now_s)
        self.left_batch(reservation)
        self.arrived(reservation)
        self.totals.blocks -= reservation.blocks
        self.cached_load = None
        del self.reservations[reservation.request_id, reservation.attempt]

    # -- reports of the worker ------------------------------------------------------------------------------------

    def reported(self, report: Load, now_s: float) -> None:
        self.report = report
        if report.is_drained:  # the report decides from now on, because another router may undo the drain
            self.is_drain_requested = False
        self.freed_s = now_s
        self.cached_load = None
        self._at_report = self.totals.copy()
        if self.totals.read_s:
            for one in self.prefilling.values():
                if one.is_sent:
                    self._does_not_read(one)
        # The worker is slower than predicted, or has other routers' work. Use the report's pending tokens.
        pending = report.pending_prefill_tokens
        if pending:
            self.free_at_s = max(self.free_at_s, now_s + self._pending_s(pending))
        else:  # what the router has reserved may still be on its way to the worker
            self.free_at_s = min(self.free_at_s, now_s + self.totals.prefill_s)

    @property
    def _others_prefill_s(self) -> float:
        return self._pending_s(self.report.pending_prefill_tokens - self._at_report.prefill_tokens)

    def _pending_s(self, tokens: int) -> float:
        """Time for reported prompt tokens whose division into prompts is unknown. They are assumed to cost as much per
        token as the reserved ones."""
        if tokens <= 0:
            return 0.0
        totals = self.totals
        if totals.prefill_tokens:
            return tokens * totals.prefill_s / totals.prefill_tokens
        return self.prefill_time_s(tokens, 0)

    def stepped(self, event: TokensArrived, now_s: float) -> None:
        """A step has ended. Only workers that report every step let the router predict when the next one ends."""
        rows = event.rows
        if 2 * len(rows) >= self.totals.rows - self.totals.arriving and all(len(row.tokens) == 1 for row in rows):
            self.step_clock.ended(now_s)

    def granted_after(self, wait_s: float, rest_of_step_s: float, half_step_s: float) -> None:
        """Learns from a grant. The last two arguments are the values when the worker was asked."""
        self.grant_wait_s += 0.1 * (wait_s - half_step_s - self.grant_wait_s)
        self.grants.observe(wait_s - rest_of_step_s)

    def lost(self) -> list[Reservation]:
        """The stream has ended, so the worker has no requests any more. Returns the lost reservations."""
        held = list(self.reservations.values())
        for reservation in held:
            self.pulled(reservation)
        self.is_connected = False
        self.reservations, self.totals, self._at_report = {}, Totals(), Totals()
        self.tpot_targets_s = Counter()
        self.cached_load = None
        return held

    def came_back(self, hello: WorkerConnected, now_s: float) -> None:
        """The worker has connected again. A new incarnation starts from its own prior cost; the same one keeps its
        learned cost."""
        if hello.incarnation != self.hello.incarnation:
            self.cost = CostModel(hello.cost)
            self.is_drain_requested = False
        self.hello = hello
        self._start(now_s)

    def check(self) -> None:
        reservations = self.reservations
        self.queue.check()
        assert self.is_connected or not reservations, f"{self.worker_id} is disconnected but has reservations"
        self.totals.check(reservations.values())
        targets_s = Counter(one.tpot_s for one in reservations.values() if one.tpot_s is not None)
        assert self.tpot_targets_s == targets_s, "tpot_targets_s"
        assert all(key == (one.request_id, one.attempt) for key, one in reservations.items()), (
            "a reservation has a wrong key"
        )


# --- views of several workers ---------------------------------------------------------------------------------


@final
class WorkerViews(list[WorkerView]):
    """Views with their cost models, to compare many workers. It must not be changed."""

    __slots__ = ("_orders", "costs")

    def __init__(self, views: Sequence[WorkerView]) -> None:
        super().__init__(views)
        self.costs = CostModels([view.cost for view in views], [view.hello.max_batch_tokens for view in views])
        self._orders = {view.worker_id: order for order, view in enumerate(views)}

    def prefill_s(self, tokens: float, cached_tokens: Mapping[str, int]) -> list[float]:
        """Seconds of each worker alone to prefill a prompt of `tokens`, of which it has some cached."""
        times, orders, most = self.costs.prefill_s(tokens), self._orders, tokens - 1.0
        for worker_id, count in cached_tokens.items():
            if worker_id in orders:
                order = orders[worker_id]
                view, held = self[order], most if count > most else float(count)
                times[order] = view.cost.prefill_s(tokens - held, held, view.hello.max_batch_tokens)
        return times


def as_views(views: Sequence[WorkerView]) -> WorkerViews:
    """`views` itself if it is the router's list of usable workers."""
    return views if isinstance(views, WorkerViews) else WorkerViews(views)

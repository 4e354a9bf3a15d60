"""The load of one worker: the memory and work of its attempts, the requests that wait for it alone, how long the steps
of a decode worker take with them, and how long messages take. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple, final

from pdserve.core.cost.latency import WIDEST_BAND, CostModel
from pdserve.core.cost.step_rule import (
    DUE_SHARE,
    LONGEST_GAP,
    TARGET_SHARE,
    StepLimit,
    chunk_tokens,
    held_share,
    step_limit,
)
from router.state.interface import WorkerConnected

# --- memory and work of attempts ------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Reservation:
    """The memory and work of one attempt of one request on one worker.

    It begins with the decision, so that the next decision takes it into account. It ends when the worker reports
    Released or Refused, or is lost. If the attempt was never sent to the worker (`is_sent`), the reservation ends with
    the attempt.
    """

    request_id: str
    attempt: int
    tokens: int  # tokens whose KV is, or will be, on this worker
    blocks: int
    prefill_tokens: int = 0  # still to be computed on this worker
    prefill_s: float = 0.0  # predicted time to compute them
    tpot_s: float | None = None  # TPOT target; None if the attempt has no row in a decode batch here
    itl_s: float | None = None  # ITL target, as in Slo
    prompt_tokens: int = 0  # the part of `tokens` that is prompt
    due_at_s: float = math.inf  # when its first token is due; infinite for an answer that was interrupted
    first_token_s: float | None = None  # when the client got the first token; None until the sequence decodes here
    is_sent: bool = False
    is_arriving: bool = True  # the worker has not begun to compute the request (decode: it is not in the batch yet)
    is_landing: bool = False  # the KV comes from a prefill worker and has not arrived yet
    is_cancelled: bool = False
    pull_tokens: int = 0  # whose KV is on its way from another worker, whose totals are `pull_source`
    pull_source: Totals | None = None
    pull_read_s: float = 0.0  # of these, in which the source reads its tiers
    read_s: float = 0.0  # of the worker's own tiers for the prompt, until a report can count it


@dataclass(slots=True)
class Totals:
    """Sums over a worker's reservations."""

    blocks: int = 0
    tokens: int = 0  # tokens of the reservations with a row
    rows: int = 0  # in the decode batch, now or later
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    prefills: int = 0
    arriving: int = 0
    landing_tokens: int = 0  # tokens of the reservations with `is_landing`
    pulls: int = 0  # by this worker
    pulling_tokens: int = 0
    gives: int = 0  # pulls from this worker by others
    giving_tokens: int = 0
    read_s: float = 0.0

    def copy(self) -> Totals:
        """Like copy.copy, which takes ten times as long. Every report of a worker needs a copy. Pulls and reads
        are left out, because they are not compared with a report."""
        return Totals(
            self.blocks,
            self.tokens,
            self.rows,
            self.prefill_tokens,
            self.prefill_s,
            self.prefills,
            self.arriving,
            self.landing_tokens,
        )

    def check(self, reservations: Collection[Reservation]) -> None:
        rows = [one for one in reservations if one.tpot_s is not None]
        assert self.blocks == sum(one.blocks for one in reservations), "blocks"
        assert self.rows == len(rows), "rows"
        assert self.tokens == sum(one.tokens for one in rows), "tokens"
        assert self.prefill_tokens == sum(one.prefill_tokens for one in reservations), "prefill tokens"
        assert self.prefills == sum(one.prefill_tokens > 0 for one in reservations), "prefills"
        assert abs(self.prefill_s - sum(one.prefill_s for one in reservations)) < 1e-6, "prefill seconds"
        assert self.arriving == sum(one.is_arriving for one in reservations), "arriving"
        assert self.landing_tokens == sum(one.tokens for one in reservations if one.is_landing), "landing tokens"
        assert self.pulling_tokens == sum(one.pull_tokens for one in reservations), "pulling tokens"
        assert abs(self.read_s - sum(one.read_s for one in reservations)) < 1e-6, "seconds of reads"
        assert self.pulls == sum(one.pull_source is not None for one in reservations), "pulls"
        assert (self.giving_tokens > 0) == (self.gives > 0), "giving tokens"


# --- queue of one prefill worker ------------------------------------------------------------------------------
# Requests that are bound to the worker, and wait until it can start them.
#
# The published baselines choose the prefill worker at arrival, so a request in a worker's queue counts as its load
# before it has a reservation there. The sums are updated when a request is bound. These requests are not in the
# router's common queue, so requests for a busy worker do not block others.

#: (0 if the client already has tokens, less priority, order of arrival)
Rank = tuple[int, int, int]


class Waiting(NamedTuple):
    rank: Rank
    uncached_tokens: int  # tokens that the worker must compute
    prefill_s: float  # predicted time for them


class WorkerQueue:
    """First come, first served within a priority class. Iteration has that order."""

    __slots__ = ("_order", "_waiting", "prefill_s", "uncached_tokens")

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}
        self._order: list[tuple[Rank, str]] = []  # sorted
        self.uncached_tokens = 0
        self.prefill_s = 0.0

    def join(self, request_id: str, uncached_tokens: int, prefill_s: float, rank: Rank) -> None:
        assert request_id not in self._waiting, request_id
        self._waiting[request_id] = Waiting(rank, uncached_tokens, prefill_s)
        insort(self._order, (rank, request_id))
        self.uncached_tokens += uncached_tokens
        self.prefill_s += prefill_s

    def leave(self, request_id: str) -> bool:
        """False: the request does not wait here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        del self._order[bisect_left(self._order, (waiting.rank, request_id))]
        self.uncached_tokens -= waiting.uncached_tokens
        # An empty queue has exact sums, so rounding errors do not accumulate.
        self.prefill_s = max(self.prefill_s - waiting.prefill_s, 0.0) if self._waiting else 0.0
        return True

    def first(self) -> tuple[Rank, str]:
        """The first request. The queue must not be empty."""
        return self._order[0]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return (request_id for _, request_id in self._order)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def check(self) -> None:
        """Checks the sums."""
        waiting = self._waiting
        assert self._order == sorted((one.rank, name) for name, one in waiting.items()), "the queue is not in order"
        assert self.uncached_tokens == sum(one.uncached_tokens for one in waiting.values()), "queued tokens"
        assert abs(self.prefill_s - sum(one.prefill_s for one in waiting.values())) < 1e-6, "queued seconds"


# --- load of a decode worker in seconds -----------------------------------------------------------------------
# Its steps, and the prompts that it prefills in them. Computed from a WorkerView when a decision needs it, and cached
# until the worker's state changes. A decision then needs only a dozen multiplications per worker.
#
#     step_s      one step with all running and all arriving requests (the tandem queue)
#     prefill     a step prefills as many prompt tokens as pdserve.core.cost.step_rule allows; such a token takes
#                 `prefill_slowdown` times as long as on an idle worker, and running requests wait for the share
#                 `decode_stall_share` of the prefill time

MID_PROMPT: Final = 4096  # assumed context in the cost of a prompt token, independent of prompts


class Slack(NamedTuple):
    """How much longer steps may take because running requests are ahead of their due times."""

    total_s: float  # beyond their TPOT targets, over all steps; at least 0
    longest_step_s: float  # the longest gap between two tokens


NO_SLACK: Final = Slack(0.0, 0.0)


def due_and_gap(reservations: Iterable[Reservation], alone_s: float, step_s: float) -> tuple[float, float]:
    """When the first running request needs its next token, and the longest gap between two tokens of each; infinite
    without requests that can meet their target. A step takes `alone_s` for one request, and `step_s` for all."""
    least_s = gap_s = math.inf
    for one in reservations:
        tpot_s, first_token_s, own_s = one.tpot_s, one.first_token_s, one.itl_s
        if first_token_s is None or tpot_s is None or tpot_s <= alone_s:
            continue
        due_s = first_token_s + (one.tokens - one.prompt_tokens) * DUE_SHARE * tpot_s
        if due_s < least_s:
            least_s = due_s
        if own_s is None:
            own_s = LONGEST_GAP * (tpot_s if tpot_s > step_s else step_s)
        if own_s < gap_s:
            gap_s = own_s
    return least_s, gap_s


TRUSTED_SAMPLES: Final = 16  # that a cost model must have before its errors are used


@final
class DecodeLoad:
    __slots__ = (
        "_cost",
        "_held_share",
        "_limit",
        "_most",
        "alone_s",
        "arriving",
        "band",
        "batch_s",
        "block_size",
        "blocks",
        "context",
        "decode_stall_share",
        "due",
        "float_rows",
        "free_tokens",
        "growing",
        "joined_s",
        "per_token_context_s",
        "per_token_s",
        "prefill_slowdown",
        "reads_s",
        "row_s",
        "rows",
        "step_s",
        "sure",
        "tightest_s",
        "token_s",
    )

    def __init__(
        self,
        cost: CostModel,
        hello: WorkerConnected,
        estimated_load: tuple[int, int, int, int],
        tpot_targets_s: Iterable[float],
        *,
        is_empty: bool,
    ) -> None:
        self.rows, self.arriving, self.context, self.blocks = rows, arriving, context, blocks = estimated_load
        base_s, row_s, token_s = cost.decode_coefficients
        _, per_token_s, per_token_context_s = cost.prefill_coefficients
        self.float_rows = float(rows)  # for arithmetic with floats, which takes half as long as mixed arithmetic
        self.row_s, self.token_s = row_s, token_s
        self.per_token_s, self.per_token_context_s = per_token_s, per_token_context_s
        rows_s = row_s * rows + token_s * context
        self.step_s = step_s = base_s + rows_s
        self.joined_s = step_s + row_s  # with one more row, without its context
        # A target that the worker could not meet even for a single short sequence is ignored.
        self.alone_s = alone_s = base_s + row_s
        tightest_s = math.inf
        for one in tpot_targets_s:
            if alone_s < one < tightest_s:
                tightest_s = one
        self.tightest_s = tightest_s
        # With a larger band, a machine with noisy step times would stay half empty.
        self.band = min(cost.decode_error, WIDEST_BAND) if cost.num_decode_samples >= TRUSTED_SAMPLES else 0.0
        self.sure = 1.0 + self.band
        self.growing = 1.0 + arriving  # with one more row
        self.block_size = hello.block_size
        # An empty worker counts as open whatever its report says, because the report may be old; the worker decides.
        self.free_tokens = math.inf if is_empty else float((blocks - rows) * hello.block_size)
        if not is_empty and (rows >= hello.max_batch or arriving >= hello.inbox_depth):
            self.free_tokens = -math.inf
        self._cost, self._most = cost, hello.max_batch_tokens
        most = hello.max_batch_tokens
        self.due: tuple[float, float] | None = None  # WorkerView.slack keeps what it depends on here
        self._limit = StepLimit(math.inf, most)
        token_at_mid_s = per_token_s + per_token_context_s * MID_PROMPT
        chunk = most
        if rows:
            self._held_share = held_share(context, rows, hello.num_blocks, hello.block_size)
            self._limit = self._step_limit(tightest_s if tightest_s < math.inf else None)
            chunk = self._chunk(MID_PROMPT)
        self.reads_s = reads_s = cost.step_s(rows, context, chunk, chunk * MID_PROMPT)
        self.prefill_slowdown = max(1.0, reads_s / (chunk * token_at_mid_s)) if token_at_mid_s > 0.0 else 1.0
        self.decode_stall_share = max(0.0, 1.0 - step_s / reads_s) if rows and reads_s > 0.0 else 0.0
        self.batch_s = reads_s * max(1.0, most / chunk)  # time to prefill the maximum of one step

    def prefill_time_s(self, uncached: float, cached: float, slack: Slack = NO_SLACK) -> float:
        """Seconds from the first to the last step that prefills the prompt."""
        if uncached <= 0.0:
            return 0.0
        chunk = self._chunk(cached)
        if chunk < uncached:
            chunk = self._chunk(cached + 0.5 * (uncached - chunk))
        steps = -(-uncached // chunk)
        if steps > 1.0 and slack.total_s > 0.0:
            steps = min(steps, math.ceil(self._steps_with(uncached, cached, slack)))
            chunk = math.ceil(uncached / steps)
        rows_s = self.row_s * self.rows + self.token_s * self.context
        return self._cost.prefill_s(uncached, cached, chunk) + rows_s * steps

    def prefill_share_s(self, uncached: float, cached: float, slack: Slack = NO_SLACK) -> float:
        """A prompt's share of the worker's prefill time. Its last step also contains tokens of the next prompt, so a
        queue of prompts takes the sum of their shares."""
        if uncached <= 0.0:
            return 0.0
        chunk = float(self._chunk(cached + 0.5 * uncached))
        if slack.total_s > 0.0 and chunk < uncached:
            chunk = max(chunk, uncached / self._steps_with(uncached, cached, slack))
        rows_s = self.row_s * self.rows + self.token_s * self.context
        return (self._cost.prefill_s(chunk, cached + 0.5 * (uncached - chunk)) + rows_s) * uncached / chunk

    def _steps_with(self, uncached: float, cached: float, slack: Slack) -> float:
        """The fewest steps, at least 1, that prefill the prompt beside requests with `slack`.

        k steps take k * (base + rows) + W, where W is the prompt's arithmetic. They may take the slack and k due times,
        and each of them no longer than the longest gap.
        """
        base_s, per_token_s, per_token_context_s = self._cost.prefill_coefficients
        fixed_s = base_s + self.row_s * self.rows + self.token_s * self.context
        work_s = uncached * (per_token_s + per_token_context_s * (cached + 0.5 * uncached))
        longest = self._step_limit(slack.longest_step_s)
        steps = max(1.0, uncached / self._most)
        if work_s > steps * (longest.step_s - fixed_s):
            steps = work_s / (longest.step_s - fixed_s) if longest.step_s > fixed_s else math.inf
        due_s = TARGET_SHARE * DUE_SHARE * self.tightest_s - fixed_s
        if work_s - slack.total_s > steps * due_s:
            steps = (work_s - slack.total_s) / due_s if due_s > 0.0 else math.inf
        return min(steps, uncached)

    def _step_limit(self, allowed_s: float | None) -> StepLimit:
        return step_limit(
            self._cost,
            decode_s=self.step_s,
            allowed_s=allowed_s,
            held_share=self._held_share,
            most=self._most,
        )

    def _chunk(self, cached: float) -> int:
        """Prompt tokens of one step after `cached` tokens of the prompt."""
        if not self.rows:
            return self._most
        return chunk_tokens(
            self._cost, self._limit, rows=self.rows, context_tokens=self.context, cached=cached, most=self._most
        )

    def grew(self, tokens: int, blocks: int) -> None:
        """Adds `tokens` in `blocks` new blocks to the running rows. Does not update the cost of prefill."""
        self.due = None
        self.context += tokens
        self.step_s += self.token_s * tokens
        self.joined_s = self.step_s + self.row_s
        self.blocks -= blocks
        self.free_tokens -= blocks * self.block_size


# --- end of the current step ----------------------------------------------------------------------------------
# Estimated from the end of the last reported step of a decode worker.
#
# A worker reads messages between steps, so a message waits for the end of the running step. Live workers report tokens
# after each step, and the ends of later steps are extrapolated from these reports. Times are by the router's clock: a
# step ends when its report arrives.

MAX_STEPS: Final = 2.0  # extrapolated steps; beyond that errors add up, and half a step is assumed


@final
class StepClock:
    __slots__ = ("_ended_s",)

    def __init__(self) -> None:
        self._ended_s = -math.inf

    def ended(self, now_s: float) -> None:
        """A step has ended, and the next one has begun."""
        self._ended_s = now_s

    def remaining_s(self, at_s: float, step_s: float) -> float:
        """Seconds from `at_s` to the end of the step that runs then, if each takes `step_s`."""
        since_s = at_s - self._ended_s
        return step_s - since_s % step_s if since_s < MAX_STEPS * step_s else 0.5 * step_s


# --- latency of messages --------------------------------------------------------------------------------------
# On every machine about one message in ten takes far longer than the others. Such outliers would dominate a mean.
# Predictions are made for single requests, and most requests are not outliers, so the median is used.

REMEMBERED: Final = 31


@final
class MessageLatency:
    """The median of the last messages; `typical_s` is cached, because it is read more often than it changes."""

    __slots__ = ("_seen", "typical_s")

    def __init__(self, first_s: float = 0.0) -> None:
        """`first_s` is assumed before the first message."""
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self.typical_s = first_s

    def observe(self, seconds: float) -> None:
        """Adds a latency. It is negative if the worker's preceding work was predicted too long."""
        self._seen.append(seconds)
        self.typical_s = max(median(self._seen), 0.0)

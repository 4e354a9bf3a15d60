"""The router's state of one request, and the timeline of its phases. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, final

from pdserve.core.attempt import PrefixSource, shareable_blocks
from pdserve.core.durations import clamped_s
from pdserve.core.kv.tier_reads import TierDepths, TierReads
from pdserve.core.protocol import Granted, TransferEnded
from pdserve.core.results import Phase, Phases, Slice, Timings, Usage
from pdserve.core.types import Path
from router.policy.interface import Obstacle, UnloadedEstimate
from router.state.conversations import Conversation
from router.state.interface import RequestArrived
from router.state.lifecycle import Move, Stage
from router.state.view import WorkerView

# --- timeline -------------------------------------------------------------------------------------------------
# It assigns each interval of a request's time to a phase of pdserve/core/results.py.
#
# An interval ends when the request's stage changes. Workers' reports assign parts of it to phases. The rest is assigned
# to MESSAGES if the worker has reported all of its own work, and otherwise to the phase of the stage. So the phases
# always add up to the whole time.
#
# A worker does not wait until the router has read its message: it may compute a whole prompt before the router reads
# the grant. A report that exceeds its interval then shortens the wait before it, which ended with that message.

MAX_SLICES: Final = 128  # further intervals are added to an earlier slice of the same phase

STANDS_FOR: Final[Mapping[Stage, Phase]] = {
    Stage.QUEUED: Phase.QUEUE,
    Stage.RESERVING: Phase.RESERVE,
    Stage.RESERVING_LOCAL: Phase.RESERVE,
    Stage.PREFILLING: Phase.PREFILL,
    Stage.LANDED: Phase.PREFILL,
    Stage.MOVING: Phase.TRANSFER_WAIT,
    Stage.DECODING: Phase.DECODE,
    Stage.LOCAL: Phase.PREFILL,  # until its first token; then DECODE
}
GOES_ON: Final = frozenset(
    {
        (Stage.PREFILLING, Move.COMMITTED),  # the last chunk is assumed to be still in computation
        (Stage.DECODING, Move.TOKENS),
        (Stage.LOCAL, Move.TOKENS),
    }
)
#: The worker works on after the message that ends the wait.
WORKS_ON: Final = frozenset({(Stage.RESERVING_LOCAL, Move.GRANTED), (Stage.MOVING, Move.COMMITTED)})


@final
class Timeline:
    __slots__ = ("_arrived_s", "_can_shorten", "_mark_s", "_parts", "_seconds", "_slices", "is_accounted")

    def __init__(self, arrived_s: float) -> None:
        self._arrived_s = self._mark_s = arrived_s
        self._seconds: dict[Phase, float] = {}
        self._slices: list[Slice] = []
        self._parts: list[tuple[Phase, float, str]] = []
        self._can_shorten = False  # the last slice, by reports on the open interval
        self.is_accounted = False  # the worker has reported all of its work in the open interval

    def report(self, phase: Phase, seconds: float, worker_id: str) -> None:
        """Assigns `seconds` of the open interval to this phase, as the worker reported."""
        if 0.0 < seconds < math.inf:
            self._parts.append((phase, seconds, worker_id))

    def close(self, rest: Phase, now_s: float, attempt: int, *, works_on: bool = False) -> None:
        """Ends the open interval. Reports that exceed it are clipped, because two clocks never agree exactly.
        `works_on`: the worker whose message ends the interval continues, so its later reports may shorten the rest."""
        if self._can_shorten:
            self._shorten(sum(seconds for _, seconds, _ in self._parts) - (now_s - self._mark_s))
        for phase, seconds, worker_id in self._parts:
            self._add(phase, min(self._mark_s + seconds, now_s), attempt, worker_id)
        self._parts.clear()
        self.is_accounted = False
        num_slices = len(self._slices)
        self._add(rest, now_s, attempt)
        self._can_shorten = works_on and len(self._slices) > num_slices

    def moved(self, stage: Stage, move: Move, now_s: float, attempt: int, last_token_s: float | None) -> None:
        """The request leaves `stage` by `move`. `last_token_s` is when the current attempt's last token came, or
        None."""
        if (stage, move) in GOES_ON or stage not in STANDS_FOR:
            return
        rest = STANDS_FOR[stage]
        if stage is Stage.LOCAL and last_token_s is not None:
            rest = Phase.DECODE
        is_lost = move in (Move.LOST, Move.MIGRATED) or (move is Move.DECLINED and stage is Stage.PREFILLING)
        if self.is_accounted:
            rest = Phase.MESSAGES
        elif is_lost and rest is Phase.DECODE and last_token_s is not None:
            self.close(rest, max(self._mark_s, min(last_token_s, now_s)), attempt)
            rest = Phase.LOST
        elif is_lost:
            rest = Phase.LOST
        self.close(rest, now_s, attempt, works_on=(stage, move) in WORKS_ON)

    def so_far(self, stage: Stage, last_token_s: float | None, now_s: float) -> tuple[Slice, ...]:
        """The slices if the open interval of a request in `stage` ended now. `last_token_s` is as for `moved`."""
        copy = Timeline(self._arrived_s)
        copy._mark_s, copy._parts, copy._slices = self._mark_s, list(self._parts), list(self._slices)
        copy._can_shorten = self._can_shorten
        is_decoding = stage is Stage.LOCAL and last_token_s is not None
        copy.close(Phase.DECODE if is_decoding else STANDS_FOR.get(stage, Phase.MESSAGES), now_s, 0)
        return copy.slices

    @property
    def phases(self) -> Phases:
        """The phases of all ended intervals."""
        return Phases.of(self._seconds)

    @property
    def slices(self) -> tuple[Slice, ...]:
        return tuple(self._slices)

    def _shorten(self, excess_s: float) -> None:
        """Takes this time, or as much as there is, from the last slice."""
        if excess_s <= 0.0:
            return
        wait = self._slices.pop()
        taken_s = min(excess_s, wait.seconds)
        if taken_s < wait.seconds:
            self._slices.append(replace(wait, seconds=wait.seconds - taken_s))
        self._seconds[wait.phase] = max(self._seconds.get(wait.phase, 0.0) - taken_s, 0.0)
        self._mark_s -= taken_s

    def _add(self, phase: Phase, until_s: float, attempt: int, worker_id: str = "") -> None:
        seconds = until_s - self._mark_s
        if seconds <= 0.0:
            return
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        slice_ = Slice(
            phase=phase,
            attempt=attempt,
            begin_s=self._mark_s - self._arrived_s,
            seconds=seconds,
            worker_id=worker_id,
        )
        self._mark_s = until_s
        if len(self._slices) >= MAX_SLICES:
            for index, one in enumerate(self._slices):
                if (one.phase, one.worker_id) == (phase, worker_id):
                    self._slices[index] = Slice(
                        phase=phase,
                        attempt=one.attempt,
                        begin_s=one.begin_s,
                        seconds=one.seconds + seconds,
                        worker_id=worker_id,
                    )
                    return
        self._slices.append(slice_)


# --- request --------------------------------------------------------------------------------------------------

_REPORTED_AS: Final[Mapping[str, str]] = {
    "busy_s": "transfer_busy_s",
    "exposed_s": "transfer_exposed_s",
    "num_bytes": "transfer_bytes",
    "saved_bytes": "transfer_saved_bytes",
}
_TIMINGS: Final = frozenset(one.name for one in fields(Timings))
_REPORTED: Final[Mapping[type, tuple[tuple[str, str], ...]]] = {
    kind: tuple(
        (one.name, timing) for one in fields(kind) if (timing := _REPORTED_AS.get(one.name, one.name)) in _TIMINGS
    )
    for kind in (Granted, TransferEnded)
}
WorkerKey = tuple[str, str]  # worker id and incarnation
LONGEST_AHEAD_S: Final = 3600.0  # workers reject a wait of more than a day
STORY_LENGTH: Final = 16  # moves kept for the message of an IllegalMove


@dataclass(slots=True, kw_only=True)
class Placement:
    """The workers of the present attempt. Never changed; not frozen, for the same reason as PolicyInput."""

    path: Path
    decode_worker: str
    prefill_worker: str = ""  # empty on the local path
    source: PrefixSource | None = None  # from which the worker that computes the prompt pulls KV

    @property
    def workers(self) -> tuple[str, ...]:
        return (self.prefill_worker, self.decode_worker) if self.prefill_worker else (self.decode_worker,)


@dataclass(slots=True, kw_only=True)
class Request:
    """Mutable; changed by the router's own modules only."""

    facts: RequestArrived
    arrived_s: float
    deadline_at_s: float | None
    serial: int  # order of arrival
    weights: str = ""  # those of its last attempt; before, those that it should get
    stage: Stage = Stage.QUEUED
    #: Its last moves, with the stage after each; None: the wrong worker sent the message.
    story: list[tuple[Move, Stage | None]] = field(default_factory=list)
    output: list[int] = field(default_factory=list)  # token ids that the client has
    conversation: Conversation | None = None
    reuse_within_s: float | None = None  # as workers are told
    #: Leading blocks that each worker may have: from the index, and from earlier attempts.
    cached_blocks: dict[str, int] = field(default_factory=dict)
    cached_tiers: dict[str, TierDepths] = field(default_factory=dict)  # of those whose pool lacks some of them

    # The current attempt.
    attempt: int = 0
    placement: Placement | None = None
    attempt_output: int = 0  # number of output tokens when the attempt was placed
    queued_s: float = 0.0  # while QUEUED: since when the request waits
    placed_s: float = 0.0
    granted_s: float = 0.0
    grant_s: float = 0.0  # time that the decode worker took for the grant, as it reported
    awaits_s: float = 0.0  # remaining time of the decode worker's step when the attempt was placed
    half_step_s: float = 0.0  # half of that step's duration
    not_before_s: float = 0.0  # end of the backoff
    unloaded: UnloadedEstimate | None = (
        None  # estimate for an unloaded cluster when it joined the queue; None: no worker
    )
    charged_s: float = 0.0  # GPU-seconds charged to its tenant
    asked_s: float = -math.inf  # when the policy last let the request wait; -inf: never
    ask_again_s: float = 0.0  # when to ask the policy again if no event makes room before
    waits_for: Obstacle = Obstacle.NONE
    bound_to: str = ""  # while QUEUED: the prefill worker for which the request waits

    # Failures so far.
    num_tried: int = 0  # attempts that were not declined
    lost_attempts: int = 0  # since the last progress, and only those that the request may have caused
    refusals: int = 0  # since the last accepted attempt
    migrations: int = 0  # how often it left a draining worker
    stays_until_s: float = -math.inf  # it does not leave a draining worker before this time
    deaths: int = 0  # crashes that the request may have caused
    num_crashes: int = 0  # of workers that had it, with progress or without
    avoid_workers: set[WorkerKey] = field(default_factory=set)
    avoid_pairs: set[tuple[WorkerKey, WorkerKey]] = field(default_factory=set)
    too_large_for: set[WorkerKey] = field(default_factory=set)

    #: Pairs (worker, attempt) that may hold memory or have a reservation; equal to the reservations of the workers.
    reservations: set[tuple[str, int]] = field(default_factory=set)

    # For Timings and Usage.
    last_path: Placement | None = None
    #: When its client got the first token. Of a resumed answer: when it would have, had all come at the TPOT target.
    first_token_s: float | None = None
    first_emitted_s: float | None = None  # when this router emitted the first token
    last_token_s: float = 0.0
    timeline: Timeline = field(init=False)
    reported: dict[str, Any] = field(default_factory=dict)  # fields of Timings, as workers reported them
    preemptions: int = 0
    cached_tokens: int | None = None

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.arrived_s)

    @property
    def request_id(self) -> str:
        return self.facts.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far; an attempt that is placed now needs the KV of all of them."""
        return self.facts.num_prompt_tokens + len(self.output)

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self.output)

    @property
    def num_emitted(self) -> int:
        """Output tokens without those that the client of a resumed answer already had."""
        return len(self.output) - len(self.facts.output_ids)

    @property
    def needs_weights(self) -> str:
        """The weights that all further tokens must be of; empty: any."""
        return self.weights if self.output or self.facts.keeps_weights else ""

    def resume(self, now_s: float) -> None:
        """The client has `facts.output_ids`. Its next token is due at `now_s` plus the TPOT target."""
        self.output.extend(self.facts.output_ids)
        ahead_s = clamped_s((len(self.output) - 1) * self.facts.slo.tpot_s, longest_s=LONGEST_AHEAD_S)
        self.first_token_s, self.last_token_s = now_s - ahead_s, now_s

    def holds(self, worker_id: str, num_blocks: int) -> None:
        """The worker has so many leading blocks in its pool."""
        self.cached_blocks[worker_id] = num_blocks
        self.cached_tiers.pop(worker_id, None)

    def forget_blocks(self, worker_id: str) -> None:
        """The worker is lost."""
        self.cached_blocks.pop(worker_id, None)
        self.cached_tiers.pop(worker_id, None)

    def reads_on(self, view: WorkerView, turn_s: float | None) -> TierReads | None:
        """What the worker does with the leading blocks that it has, if the request's turn comes in `turn_s`, or if the
        worker has no other requests. None: all of them are in its pool."""
        split = self.cached_tiers.get(view.worker_id)
        return None if split is None else view.reads(self._shareable_on(view), split, turn_s)

    def given_by(self, view: WorkerView) -> tuple[int, float]:
        """How many leading tokens the worker gives to another one, and how long it reads its tiers before."""
        split, size = self.cached_tiers.get(view.worker_id), view.hello.block_size
        if split is None:
            return self.cached_blocks.get(view.worker_id, 0) * size, 0.0
        num_blocks, read_s = view.given(self._shareable_on(view), split)
        return num_blocks * size, read_s

    def _shareable_on(self, view: WorkerView) -> int:
        """The leading blocks that the worker has, without the last token, which is computed."""
        return min(self.cached_blocks[view.worker_id], shareable_blocks(self.num_tokens, view.hello.block_size))

    def computed_on(self, view: WorkerView, reads: TierReads | None) -> tuple[int, float]:
        """Tokens that this worker must compute beside its `reads`, at least one, because logits are needed; and seconds
        of copies."""
        num_blocks = self.cached_blocks.get(view.worker_id, 0) if reads is None else reads.num_blocks
        uncached = max(self.num_tokens - num_blocks * view.hello.block_size, 1)
        return uncached, 0.0 if reads is None else reads.copy_s

    def waited_s(self, now_s: float) -> float:
        """Time since arrival, or since the first token if there is one."""
        return now_s - (self.arrived_s if self.first_token_s is None else self.first_token_s)

    def deadline_left_s(self, now_s: float) -> float | None:
        return None if self.deadline_at_s is None else max(self.deadline_at_s - now_s, 0.0)

    def usage(self, num_output_tokens: int) -> Usage:
        return Usage(
            prompt_tokens=self.facts.num_prompt_tokens,
            completion_tokens=num_output_tokens,
            cached_prompt_tokens=min(self.cached_tokens or 0, self.facts.num_prompt_tokens),
        )

    def ttft_s(self) -> float | None:
        return None if self.first_emitted_s is None else self.first_emitted_s - self.arrived_s

    def tpot_s(self) -> float:
        if self.first_emitted_s is None or self.num_emitted < 2:
            return 0.0
        return (self.last_token_s - self.first_emitted_s) / (self.num_emitted - 1)

    @property
    def attempt_token_s(self) -> float | None:
        """When the last token of the current attempt arrived; None before the first one."""
        return self.last_token_s if len(self.output) > self.attempt_output else None

    def add_reported(self, message: Granted | TransferEnded) -> None:
        """Adds a worker's durations and bytes to those of earlier attempts. _REPORTED_AS maps them to fields of Timings
        with another name."""
        for name, timing in _REPORTED[type(message)]:
            value = getattr(message, name)
            if value:
                self.reported[timing] = self.reported.get(timing, 0) + value

    def timings(self, now_s: float) -> Timings:
        """For an ended request, whose timeline is complete."""
        where = self.last_path
        return Timings(
            ttft_s=self.ttft_s() or 0.0,
            tpot_s=self.tpot_s(),
            total_s=now_s - self.arrived_s,
            phases=self.timeline.phases,
            path=where.path if where is not None else None,
            prefill_worker=where.prefill_worker if where is not None else "",
            decode_worker=where.decode_worker if where is not None else "",
            attempts=self.num_tried,
            preemptions=self.preemptions,
            migrations=self.migrations,
            **self.reported,  # type: ignore[arg-type]  # whole numbers and seconds
        )

    def remember(self, move: Move, after: Stage | None) -> None:
        self.story.append((move, after))
        if len(self.story) > STORY_LENGTH:
            del self.story[0]

    def story_text(self) -> tuple[str, ...]:
        """The last moves as text, oldest first."""
        return tuple(
            [
                f"{move.value} from the wrong side" if after is None else f"{move.value} -> {after.value}"
                for move, after in self.story
            ]
        )

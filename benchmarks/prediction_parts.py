"""Compares the router's prediction for each recorded answer with the result, part by part. Pure: opens nothing.

A new router handles the recorded events. If its rules have changed since and it decides otherwise, it is made to place
each request where the recorded router did, so that both know the same of each worker. Each first placement is priced as
the policy `goodput` does today. The result is taken from the recording, on the router's clock. Each message with tokens
from a decode worker is one of its steps, because live workers send one message per step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

from pdserve.core.errors import ConfigError
from pdserve.core.protocol import FirstToken, Granted, Prefill, Reserve, TokensArrived
from router.policy.candidates import local_options, rank_decodes, remote_options, tandem_step_s
from router.policy.interface import Choice, Decision, Obstacle, PolicyInput
from router.recording.replay import COMMAND_KINDS, EVENT_KINDS
from router.state.cluster_state import ClusterState
from router.state.commands import EmitTokens, EndCancelled, FailRequest, FinishRequest, WakeAt
from router.state.events import RequestArrived
from router.state.state import RouterState
from router.state.view import WorkerView
from simulator.traces.recorded import steps
from simulator.traces.trace_rows import NumberedLine

Senders = Mapping[tuple[str, int], str]  # (request id, attempt) -> its prefill worker

FLOOR: Final = "floor-"  # ids of requests that benchmarks.goodput repeats on the idle cluster; they are no load
FEWEST_MESSAGES: Final = 3  # with tokens, so that an answer has more than its first gap

_KINDS: Final = (*EVENT_KINDS.values(), *COMMAND_KINDS.values())
_COMPARED: Final = (Reserve, EmitTokens, FinishRequest, FailRequest, EndCancelled)
_LATER: Final = Decision(choice=Choice.WAIT, obstacle=Obstacle.PREFILL, retry_in_s=0.0)


class Parts(NamedTuple):
    """Parts of the time from placement to the first token of a remote request, in seconds."""

    grant_s: float  # message to the decode worker, rest of its running step, and its reply
    queue_s: float  # at the prefill worker
    prefill_s: float
    reply_s: float  # the rest: messages to the prefill worker and back


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedParts:
    """Predictions at placement, in seconds."""

    ttft_s: float  # from placement
    tpot_s: float
    first_gap_s: float  # from the first token to the second
    step_s: float  # of each decode step after that
    parts: Parts | None  # of a remote request


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """A whole answer to a request that was placed once. Seconds."""

    predicted: PredictedParts
    waited_s: float  # from arrival to placement
    ttft_s: float  # from arrival
    parts: Parts | None  # of a remote request
    tokens: int  # at least FEWEST_MESSAGES
    first_gap_s: float
    tpot_s: float
    rows_s: float  # of the steps after the second token, each priced with the rows that were in it
    mixed_s: float  # the same, with the time that was taken in place of the price where a prompt was read beside
    meets_prompt: bool  # a prompt was read beside it in some of those steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One recording."""

    answers: tuple[RecordedAnswer, ...]
    left_out: int  # requests that failed or ran at the end, were placed again, or answered in too few messages
    uses_recorded_placement: bool  # the router had to use the recorded placements
    otherwise: int  # steps to which it answers otherwise than the recorded one did even so, alarms apart


def account(lines: Sequence[NumberedLine], name: str, settle_s: float) -> Account:
    """The answers to requests that arrived at least `settle_s` after the first, in order of their ends.

    Raises TraceError at the first line that no router wrote, ConfigError where no such request has an answer.
    """
    found = _account(lines, name, settle_s, uses_recorded_placement=False)
    if found.otherwise:
        found = _account(lines, name, settle_s, uses_recorded_placement=True)
    if not found.answers:
        expected = (
            f"a whole answer of {FEWEST_MESSAGES} tokens, asked for {settle_s:g} s or more after its first request"
        )
        raise ConfigError("recording", name, expected)
    return found


def _account(lines: Sequence[NumberedLine], name: str, settle_s: float, *, uses_recorded_placement: bool) -> Account:
    _, sent = steps(lines, name, (Prefill,))
    senders = {(one.request_id, one.attempt): one.worker_id for _, found in sent for one in found}
    settings, rows = steps(lines, name, _KINDS)
    state = RouterState(settings)
    cluster = state._cluster
    guide = cluster.policy = _Guide(cluster, senders if uses_recorded_placement else None)
    seen = _Seen(cluster, guide)
    otherwise = 0
    for now_s, (event, *commands) in rows:
        seen.before(event, now_s)
        guide.reservations = {one.request_id: one for one in commands if isinstance(one, Reserve)}
        replayed = state.handle(event, now_s)
        otherwise += _but_alarms(replayed) != _but_alarms(commands)
        seen.after(event, commands, now_s)
    answers, left_out = seen.answers(settle_s)
    return Account(
        answers=tuple(answers), left_out=left_out, uses_recorded_placement=uses_recorded_placement, otherwise=otherwise
    )


def _but_alarms(commands: Sequence[object]) -> list[object]:
    return [one for one in commands if not isinstance(one, WakeAt)]


@final
class _Guide:
    """The router's policy, or one that repeats the recorded placements of a step. It keeps the predictions."""

    def __init__(self, cluster: ClusterState, senders: Senders | None) -> None:
        """`senders`: None: the policy decides."""
        self.reservations: Mapping[str, Reserve] = {}  # of this step, by request
        self.predicted: dict[str, PredictedParts] = {}
        self._policy, self._links, self._senders = cluster.policy, cluster.fleet.link, senders

    def __call__(
        self, request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        if self._senders is None:
            decision = self._policy(request, prefills, decodes, now_s)
        else:
            decision = self._recorded(request, prefills, decodes, self._senders)
        for decode in decodes:
            if decode.worker_id == decision.decode_worker:
                senders = [view for view in prefills if view.worker_id == decision.prefill_worker]
                predicted = self._price(request, senders, decode, now_s)
                if predicted is not None:
                    self.predicted[request.request_id] = predicted
        return decision

    def _recorded(
        self, request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], senders: Senders
    ) -> Decision:
        reservation = self.reservations.get(request.request_id)
        if reservation is None:
            return _LATER
        if reservation.is_local:
            choice, sender = Choice.LOCAL, ""
        else:  # a request without a grant reached no prefill worker and has no answer, so any will do
            choice = Choice.REMOTE
            sender = senders.get((request.request_id, reservation.attempt)) or (
                prefills[0].worker_id if prefills else ""
            )
        usable = {"", *(view.worker_id for view in (*prefills, *decodes))}
        if not {reservation.worker_id, sender} <= usable or (choice is Choice.REMOTE and not sender):
            return _LATER
        return Decision(choice=choice, prefill_worker=sender, decode_worker=reservation.worker_id)

    def _price(
        self, request: PolicyInput, senders: list[WorkerView], decode: WorkerView, now_s: float
    ) -> PredictedParts | None:
        """`senders`: the prefill worker, or none. None where the model sees no room for it."""
        cached = request.cached_tokens
        receivers, local_workers = rank_decodes(request, cached, [decode], now_s, tandem_step_s)
        if senders:
            options = remote_options(request, cached, senders, receivers, now_s, self._links)
        else:
            options = local_options(request, cached, local_workers, now_s, math.inf, is_only=False)
        if not options:
            return None
        option, step_s, parts = options[0], receivers[0][2], None
        for prefill in senders:
            held = request.cached_on(prefill)
            parts = Parts(
                grant_s=decode.rest_of_step_s(now_s) + decode.grants.typical_s,
                queue_s=prefill.queue_s(now_s),
                prefill_s=prefill.prefill_s(request.num_tokens - held, held),
                reply_s=prefill.replies.typical_s,
            )
        gaps = max(request.expected_tokens - 1.0, 1.0)
        first_gap_s = step_s + (option.tpot_s - step_s) * gaps
        return PredictedParts(
            ttft_s=option.ttft_s, tpot_s=option.tpot_s, first_gap_s=first_gap_s, step_s=step_s, parts=parts
        )


class _DecodeStep(NamedTuple):
    ended_s: float
    priced_s: float  # with the rows and the context that were in it
    reads: bool  # a prompt is read beside


@dataclass(slots=True, kw_only=True)
class _Run:
    """One request, as far as it has come."""

    arrived_s: float
    num_placed: int = 0
    decode_worker: str = ""
    placed_s: float = 0.0
    granted_s: float = math.nan
    first: FirstToken | None = None  # of a prefill worker
    predicted: PredictedParts | None = None
    emitted: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens)
    is_whole: bool = False


@final
class _Seen:
    """The true values, and the decode steps according to the model."""

    def __init__(self, cluster: ClusterState, guide: _Guide) -> None:
        self._cluster, self._guide = cluster, guide
        self._runs: dict[str, _Run] = {}
        self._ended: list[_Run] = []
        self._steps: defaultdict[str, list[_DecodeStep]] = defaultdict(list)  # by decode worker
        self._first_s: float | None = None

    def before(self, event: object, now_s: float) -> None:
        """The router does not know of `event` yet."""
        if isinstance(event, TokensArrived) and event.worker_id in self._cluster.fleet.workers:
            view = self._cluster.fleet.workers[event.worker_id]
            rows = [view.bookings.get((row.request_id, row.attempt)) for row in event.rows]
            priced_s = view.cost.decode_s(len(rows), sum(one.tokens for one in rows if one is not None))
            self._steps[event.worker_id].append(_DecodeStep(now_s, priced_s, view.totals.prefills > 0))

    def after(self, event: object, commands: Sequence[object], now_s: float) -> None:
        if isinstance(event, RequestArrived):
            self._first_s = now_s if self._first_s is None else self._first_s
            if not event.request_id.startswith(FLOOR):
                self._runs.setdefault(event.request_id, _Run(arrived_s=now_s - event.spent_s))
        elif isinstance(event, Granted | FirstToken) and event.request_id in self._runs:
            run = self._runs[event.request_id]
            if isinstance(event, Granted):
                run.granted_s = now_s
            else:
                run.first = event
        for command in commands:
            if not isinstance(command, _COMPARED) or command.request_id not in self._runs:
                continue
            run = self._runs[command.request_id]
            match command:
                case Reserve():
                    run.num_placed += 1
                    run.placed_s, run.decode_worker = now_s, command.worker_id
                    run.predicted = self._guide.predicted.pop(command.request_id, None)
                case EmitTokens():
                    run.emitted.append((now_s, len(command.tokens)))
                case _:
                    run.is_whole = isinstance(command, FinishRequest)
                    self._ended.append(self._runs.pop(command.request_id))

    def answers(self, settle_s: float) -> tuple[list[RecordedAnswer], int]:
        """In order of their ends, and how many other requests there were."""
        from_s = (self._first_s or 0.0) + settle_s
        settled = [run for run in self._ended if run.arrived_s >= from_s]
        others = sum(run.arrived_s >= from_s for run in self._runs.values())
        found = [_answer(run, self._steps[run.decode_worker]) for run in settled]
        answers = [one for one in found if one is not None]
        return answers, others + len(settled) - len(answers)


def _answer(run: _Run, decode_steps: Sequence[_DecodeStep]) -> RecordedAnswer | None:
    """None of one that failed, was placed again, was not priced, or is too short."""
    tokens, predicted = sum(count for _, count in run.emitted), run.predicted
    if not run.is_whole or run.num_placed != 1 or predicted is None or len(run.emitted) < FEWEST_MESSAGES:
        return None
    (first_s, _), (second_s, _), (last_s, _) = run.emitted[0], run.emitted[1], run.emitted[-1]
    parts = None
    if predicted.parts is not None:
        if run.first is None or math.isnan(run.granted_s):
            return None
        queue_s, prefill_s = run.first.queue_s, run.first.prefill_s
        parts = Parts(run.granted_s - run.placed_s, queue_s, prefill_s, first_s - run.granted_s - queue_s - prefill_s)
    rows_s = mixed_s = 0.0
    meets_prompt = False
    for index in range(_first_after(decode_steps, second_s), _first_after(decode_steps, last_s)):
        ended_s, priced_s, reads = decode_steps[index]
        rows_s += priced_s
        mixed_s += ended_s - decode_steps[index - 1].ended_s if reads else priced_s
        meets_prompt = meets_prompt or reads
    return RecordedAnswer(
        predicted=predicted,
        waited_s=run.placed_s - run.arrived_s,
        ttft_s=first_s - run.arrived_s,
        parts=parts,
        tokens=tokens,
        first_gap_s=second_s - first_s,
        tpot_s=(last_s - first_s) / (tokens - 1),
        rows_s=rows_s,
        mixed_s=mixed_s,
        meets_prompt=meets_prompt,
    )


def _first_after(decode_steps: Sequence[_DecodeStep], at_s: float) -> int:
    return bisect_right(decode_steps, at_s, key=lambda one: one.ended_s)

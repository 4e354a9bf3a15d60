"""Runs a RouterState: passes events to it, one at a time, and its commands to workers, clients and the clock.

Everything runs on one event loop. An event that occurs while commands are being executed (such as a stop string in
emitted tokens) waits until they are done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from pdserve.clock import steady
from pdserve.core.durations import clamped_s
from pdserve.core.protocol import Admit, Cancel, DrainWorker, EndText, Prefill, Reserve, UndrainWorker
from pdserve.core.results import Timings
from pdserve.core.types import Path
from pdserve.outage_log import PeerLog
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import encode_request
from router.service.answer import Answer
from router.service.measure import Measure, RequestFacts
from router.service.tenants import AnswerClaim, PendingReleases
from router.state.interface import (
    ClientLeft,
    Command,
    EmitTokens,
    EndCancelled,
    Event,
    FailRequest,
    FinishRequest,
    Outcome,
    RequestArrived,
    StopMatched,
    TimePassed,
    WakeAt,
)
from router.state.state import RouterState

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """A request whose client waits for its last message."""

    answer: Answer
    sequence: worker_pb2.Sequence
    facts: RequestFacts
    claim: AnswerClaim


@final
class Runtime:
    def __init__(
        self,
        state: RouterState,
        measure: Measure,
        *,
        send: Callable[[str, worker_pb2.AttachRequest], bool],
        on_step: Callable[[float, Event, list[Command]], None] | None = None,
        on_crash: Callable[[BaseException], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` passes a message to a worker's stream. It returns False if there is no stream; WorkerLost then
        follows."""
        self.state = state
        self._measure = measure
        self._send = send
        self._on_step = on_step
        self._on_crash = on_crash
        self._clock = steady(clock)
        self._lines = PeerLog(log)
        self._calls: dict[str, OpenCall] = {}
        self._releases = PendingReleases(state.knows)
        self._events: deque[tuple[Event, float | None]] = deque()
        self._is_handling = False
        self._now_s = 0.0  # of the event that is handled
        self._timer: asyncio.TimerHandle | None = None
        self._no_calls = asyncio.Event()
        self._no_calls.set()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def knows(self, request_id: str) -> bool:
        """Whether the id is still in use, by a client or by a worker that holds memory for it."""
        return request_id in self._calls or self.state.stage_of(request_id) is not None

    def begin(
        self,
        arrival: RequestArrived,
        answer: Answer,
        sequence: worker_pb2.Sequence,
        facts: RequestFacts,
        claim: AnswerClaim,
        now_s: float | None = None,
    ) -> None:
        """Starts a request. The answer receives its output until the last message, or until `leave`. The runtime ends
        and releases the claim. `now_s`: the time up to which `arrival.spent_s` counts."""
        assert not self.knows(arrival.request_id), arrival.request_id
        call = OpenCall(answer=answer, sequence=sequence, facts=facts, claim=claim)
        self._calls[arrival.request_id] = call
        self._no_calls.clear()
        self.submit(arrival, now_s)

    def leave(self, request_id: str, answer: Answer) -> None:
        """The client of `answer` has disconnected. Idempotent. Does nothing after the last message, because the id may
        then belong to another call."""
        call = self._calls.get(request_id)
        if call is not None and call.answer is answer:
            self.submit(ClientLeft(request_id=request_id))

    def scored(self, message: worker_pb2.PromptScored) -> None:
        """Passes prompt logprobs to the answer. They bypass the state, because a recording must not contain the
        prompt."""
        call = self._calls.get(message.request_id)
        if call is not None:
            call.answer.score(message.scores)

    def submit(self, event: Event, now_s: float | None = None) -> None:
        """`now_s`: the present, if the caller has just read the clock."""
        self._events.append((event, now_s))
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._handle(*self._events.popleft())
        except Exception as error:  # the state may be inconsistent, so this process must end
            log.critical("the router's state failed", exc_info=error)
            self._on_crash(error)
            raise
        finally:
            self._is_handling = False

    async def wait_until_idle(self) -> None:
        """Returns when no client waits for an answer."""
        await self._no_calls.wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, now_s: float | None) -> None:
        now_s = self._now_s = self._clock() if now_s is None else now_s
        commands = self.state.handle(event, now_s)
        if self._measure.metrics.is_on:
            self._measure.decided(self._clock() - now_s)
        if self._on_step is not None:
            self._on_step(now_s, event, commands)
        for command in commands:
            self._execute(command)
        self._releases.after(event, now_s)

    def _execute(self, command: Command) -> None:
        match command:
            case EmitTokens():
                self._emit(command)
            case Reserve() | Prefill():
                call = self._calls.get(command.request_id)
                if call is not None:
                    self._send(command.worker_id, encode_request(command, call.sequence))
                if isinstance(command, Reserve):
                    path = Path.LOCAL if command.is_local else Path.REMOTE
                    self._measure.placed(path.value, command.attempt)
            case Admit() | Cancel() | DrainWorker() | UndrainWorker() | EndText():
                self._send(command.worker_id, encode_request(command))
            case FinishRequest():
                call = self._end(command.request_id)
                if call is not None:
                    call.claim.end(is_free=False)
                    call.answer.finish(command)
                    self._measure.finished(call.facts, command)
                    self._log_end(command, call)
            case FailRequest():
                call = self._end(command.request_id)
                if call is not None:
                    is_ours = command.outcome in (Outcome.REJECTED, Outcome.FAILED)
                    call.claim.end(is_free=is_ours or _is_unplaced(command.timings))
                    call.answer.fail(command.to_error())
                    self._measure.failed(call.facts, command)
                    self._log_end(command, call)
            case EndCancelled():
                call = self._end(command.request_id)
                if call is not None:
                    call.claim.end(is_free=_is_unplaced(command.timings))
                    self._measure.cancelled(call.facts, command)
                    self._log_end(command, call)
            case WakeAt():
                self._wake_at(command.at_s)

    def _emit(self, command: EmitTokens) -> None:
        call = self._calls.get(command.request_id)
        if call is None:
            return
        self._measure.emitted(call.facts, len(command.tokens))
        call.claim.emitted(len(command.tokens))
        if command.weights:
            call.answer.computed_with(command.weights)
        matched = call.answer.take(command.tokens)
        if matched is not None:
            self._events.append((StopMatched(request_id=command.request_id, num_output_tokens=matched), None))

    def _end(self, request_id: str) -> OpenCall | None:
        call = self._calls.pop(request_id, None)
        if call is not None:
            call.answer.ended_s = self._now_s
            self._releases.ended(request_id, call.claim, self._now_s)
        if not self._calls:
            self._no_calls.set()
        return call

    def _wake_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = clamped_s(at_s - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring, at_s)

    def _ring(self, at_s: float) -> None:
        # The loop may call too early, or the wait was clipped. The state would then find nothing due, and would not
        # request another wake-up.
        if self._clock() < at_s:
            self._wake_at(at_s)
        else:
            self._timer = None
            self.submit(TimePassed())

    def _log_end(self, command: FinishRequest | FailRequest | EndCancelled, call: OpenCall) -> None:
        """One line for each request. Callers can cause failures, so those that are warnings too are limited."""
        if not isinstance(command, FailRequest) and not log.isEnabledFor(logging.INFO):
            return
        extra: dict[str, object] = {"request_id": command.request_id}
        if call.facts.span.trace_id:
            extra["trace_id"] = call.facts.span.trace_id
        extra["outcome"] = "cancelled" if isinstance(command, EndCancelled) else command.outcome.value
        if command.timings is not None:
            extra |= {"ttft_s": command.timings.ttft_s, "total_s": command.timings.total_s}
        if isinstance(command, FailRequest):
            extra |= {"kind": command.kind.value, "why": command.message}
            if self._lines.warning("request failed", command.kind.value, **extra):
                return
        log.info("request ended", extra=extra)


def _is_unplaced(timings: Timings | None) -> bool:
    """Whether no worker has accepted the request yet."""
    return timings is None or timings.attempts == 0

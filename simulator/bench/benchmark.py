"""Runs a whole benchmark: connects, warms up, and runs each level of load on each server in alternating turns."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, final

from pdserve.core.types import Slo
from simulator.bench.load import LoadLevel, LoadPlan, PromptMaker, check_planned
from simulator.bench.server import BenchAnswer, BenchOutcome, BenchServer, ServerReply
from simulator.bench.sessions import SessionAgenda, SessionPrompts, SessionTurn, planned_turns
from simulator.bench.statistics import BenchResult, BenchTurn, LevelResult
from simulator.model import TraceRequest

log = logging.getLogger(__name__)

# --- one turn of load -----------------------------------------------------------------------------------------
# An open loop, whose arrivals do not wait for answers, a closed loop of callers, or sessions, whose turns wait for the
# answers before them.
#
# An open loop prepares all requests before it begins, and measures how late it sends each. A sampler measures how late
# timers fire meanwhile, because a late event loop also reads answers late. Cancelling a turn ends its requests and
# returns what was measured.

_SAMPLE_S: Final = 0.02  # between samples of the event loop's delay
_MOST_SAMPLES: Final = 1_000_000
OnAnswer = Callable[[BenchAnswer], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    number: int
    request: TraceRequest
    body: Any
    task: int | None = None
    token_ids: Sequence[int] = ()  # of the prompt, in sessions
    reusable_tokens: int = 0


async def run_turn(
    server: BenchServer,
    level: LoadLevel,
    requests: Iterator[TraceRequest],
    prompts: PromptMaker,
    *,
    duration_s: float | None = None,
    on_answer: OnAnswer,
    sessions: Sessions | None = None,
) -> BenchTurn:
    """`duration_s` ends a closed loop and sessions: no request begins after it. `sessions`: requests follow each other.
    An interrupted turn is returned, not raised.

    Raises ConfigError if the requests are too many to prepare.
    """
    turn = _Turn(server, on_answer)
    numbered = enumerate(requests)
    prepared: list[_Prepared] = []
    planned_sessions = planned_turns(requests) if sessions is not None else []
    if level.is_open and sessions is None:
        planned = list(numbered)
        check_planned([one for _, one in planned])
        for number, one in planned:
            prepared.append(_prepare(server, prompts, number, one))
            if number % 64 == 0:
                await asyncio.sleep(0)  # lets a Ctrl-C through
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()  # collections would otherwise traverse all prepared requests during the turn
    sampler = asyncio.create_task(turn.sample_delays())
    is_interrupted = False
    turn.begin()
    try:
        if sessions is not None:
            made = SessionPrompts(prompts, sessions.block_tokens, planned_sessions)
            agenda = SessionAgenda(planned_sessions, level.concurrency)
            await turn.session_loop(agenda, made, sessions.name, duration_s)
        elif level.concurrency is None:
            await turn.open_loop(prepared)
        else:
            lazily = (_prepare(server, prompts, number, one) for number, one in numbered)
            await turn.closed_loop(lazily, level.concurrency, duration_s)
    except asyncio.CancelledError:
        is_interrupted = True
        await turn.end_requests()
    finally:
        sampler.cancel()
        if not was_frozen:  # or objects that a caller has frozen would be traversed again
            gc.unfreeze()
    return turn.result(is_interrupted=is_interrupted)


def _prepare(server: BenchServer, prompts: PromptMaker, number: int, one: TraceRequest) -> _Prepared:
    body = server.prepare(prompts.token_ids(number, one), one.output_tokens)
    return _Prepared(number=number, request=one, body=body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    block_tokens: int
    name: str  # before the number of each session, in its id


class _Turn:
    def __init__(self, server: BenchServer, on_answer: OnAnswer) -> None:
        self._server, self._on_answer = server, on_answer
        self._begin_s = 0.0
        self._answers: list[BenchAnswer] = []
        self._delays_s: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_end_missed = False

    def begin(self) -> None:
        self._begin_s = time.perf_counter()

    async def open_loop(self, prepared: Sequence[_Prepared]) -> None:
        first_s = prepared[0].request.arrival_s if prepared else 0.0
        for one in prepared:
            due_s = one.request.arrival_s - first_s
            if (wait_s := due_s - self._now_s()) > 0.0:
                await asyncio.sleep(wait_s)
            self._start(self._one(one, due_s))
            if wait_s <= 0.0:
                await asyncio.sleep(0)  # a late generator still sends and reads
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def closed_loop(self, requests: Iterator[_Prepared], callers: int, duration_s: float | None) -> None:
        async def call() -> None:
            while duration_s is None or self._now_s() < duration_s:
                one = next(requests, None)
                if one is None:
                    return
                await self._one(one, None)

        for _ in range(callers):
            self._start(call())
        while self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # a trace with an invalid row

    async def session_loop(
        self, agenda: SessionAgenda, prompts: SessionPrompts, name: str, duration_s: float | None
    ) -> None:
        """Prompts are built while their sessions pause, where they do."""
        ready: dict[int, _Prepared] = {}
        changed = asyncio.Event()  # a turn has ended

        def session_id(turn: SessionTurn) -> str:
            return f"{name}-{turn.task}"

        def prepare(turn: SessionTurn) -> _Prepared:
            token_ids, reusable = prompts.prompt(turn)
            body = self._server.prepare(token_ids, turn.request.output_tokens, session_id(turn))
            return _Prepared(
                number=turn.number,
                request=turn.request,
                body=body,
                task=turn.task,
                token_ids=token_ids,
                reusable_tokens=reusable,
            )

        async def send(turn: SessionTurn, due_s: float, prepared: _Prepared) -> None:
            reply = await self._one(prepared, due_s)
            prompts.answered(turn, prepared.token_ids, reply.token_ids)
            for one in agenda.ended(turn, self._now_s()):
                ready[one.number] = prepare(one)
            if turn.request.ends_session:
                await self._end_session(session_id(turn))

        failed: list[BaseException] = []

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                failed.append(error)
            changed.set()

        while self._tasks or agenda.next_s is not None:
            if failed:
                raise failed[0]
            due_s = agenda.next_s
            if due_s is not None and duration_s is not None and max(due_s, self._now_s()) >= duration_s:
                due_s = None  # it is not sent
                if not self._tasks:
                    return
            wait_s = None if due_s is None else due_s - self._now_s()
            if due_s is not None and wait_s is not None and wait_s <= 0.0:
                due_s, turn = agenda.pop()
                prepared = ready.pop(turn.number, None) or prepare(turn)
                self._start(send(turn, due_s, prepared)).add_done_callback(done)
                await asyncio.sleep(0)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await changed.wait()
            changed.clear()

    async def sample_delays(self) -> None:
        while len(self._delays_s) < _MOST_SAMPLES:
            before_s = time.perf_counter()
            await asyncio.sleep(_SAMPLE_S)
            self._delays_s.append(max(time.perf_counter() - before_s - _SAMPLE_S, 0.0))

    async def end_requests(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def result(self, *, is_interrupted: bool) -> BenchTurn:
        answers = sorted(self._answers, key=lambda one: one.number)
        lasted_s = max((one.ended_s for one in answers), default=0.0)
        return BenchTurn(
            answers=answers, lasted_s=lasted_s, loop_delays_s=self._delays_s, is_interrupted=is_interrupted
        )

    def _start(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_session(self, session_id: str) -> None:
        why = await self._server.end_session(session_id)
        if why and not self._is_end_missed:
            self._is_end_missed = True  # the others are like it
            log.warning("%s was not told that a session had ended: %s", self._server.name, why)

    async def _one(self, prepared: _Prepared, due_s: float | None) -> ServerReply:
        reply = ServerReply(chunk_s=[])
        sent_s = self._now_s()
        try:
            await self._server.send(prepared.body, reply)
        except asyncio.CancelledError:
            reply.outcome = BenchOutcome.INTERRUPTED
            self._add(prepared, reply, sent_s, due_s)
            raise
        self._add(prepared, reply, sent_s, due_s)
        return reply

    def _add(self, prepared: _Prepared, reply: ServerReply, sent_s: float, due_s: float | None) -> None:
        request = prepared.request
        answer = BenchAnswer(
            number=prepared.number,
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
            ended_s=self._now_s(),
            outcome=reply.outcome,
            prompt_tokens=request.prompt_tokens if reply.prompt_tokens is None else reply.prompt_tokens,
            output_tokens=len(reply.chunk_s) if reply.output_tokens is None else reply.output_tokens,
            cached_tokens=reply.cached_tokens or 0,
            chunk_s=tuple([at_s - self._begin_s for at_s in reply.chunk_s]),
            error=reply.error,
            detail=reply.detail,
            server_ttft_s=reply.server_ttft_s,
            server_tpot_s=reply.server_tpot_s,
            request_id=reply.request_id,
            prefill_worker=reply.prefill_worker,
            decode_worker=reply.decode_worker,
            task=prepared.task,
            reusable_tokens=prepared.reusable_tokens,
        )
        self._answers.append(answer)
        self._on_answer(answer)

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s


# --- whole benchmark ------------------------------------------------------------------------------------------

WARM_CALLERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    load: LoadPlan
    levels: Sequence[LoadLevel]
    turns: int = 1  # of each server at each level
    warm_requests: int = 0  # to each server, before its first turn
    seed: int = 0
    token_ids: tuple[int, int]
    slo_task_s: float | None = None  # deadline of a session
    reads_predictions: bool = False  # after each turn, of servers that predict


class BenchObserver:
    """Called as a benchmark progresses. This base class does nothing."""

    def turn_begins(self, server: str, level: LoadLevel, turn: int, turns: int) -> None: ...

    def answered(self, answer: BenchAnswer) -> None: ...

    def turn_ends(self) -> None: ...


@final
class Benchmark:
    def __init__(
        self, servers: Sequence[BenchServer], plan: BenchPlan, slo: Slo | None, observer: BenchObserver | None = None
    ) -> None:
        self._servers, self._plan, self._observer = servers, plan, observer or BenchObserver()
        self.result = BenchResult(
            servers=[], slo=slo, slo_task_s=plan.slo_task_s, has_shared_prefixes=plan.load.block_tokens > 0
        )
        self._turn: asyncio.Task[BenchTurn] | None = None

    def interrupt(self) -> None:
        """Ends the running turn; the benchmark then returns what was measured. To be called in its event loop."""
        self.result.is_interrupted = True
        if self._turn is not None:
            self._turn.cancel()

    async def run(self) -> BenchResult:
        """Raises PdserveError if a server cannot be reached or a trace is invalid."""
        try:
            for server in self._servers:
                model = await server.connect()
                self.result.servers.append((server.name, server.address, model))
            await self._warm_up()
            for level in self._plan.levels:
                await self._level(level)
        finally:
            for server in self._servers:
                await server.close()
        return self.result

    async def _warm_up(self) -> None:
        if not self._plan.warm_requests:
            return
        level = LoadLevel(concurrency=WARM_CALLERS)
        for server in self._servers:
            if self.result.is_interrupted:
                return
            requests = islice(self._plan.load.requests(level), self._plan.warm_requests)
            await self._one_turn(server, level, requests, "warm-up", is_counted=False)

    async def _level(self, level: LoadLevel) -> None:
        results = [
            LevelResult(level=level, server=one.name, slo=self.result.slo, slo_task_s=self.result.slo_task_s)
            for one in self._servers
        ]
        for number in range(self._plan.turns):
            for server, found in zip(self._servers, results, strict=True):
                if self.result.is_interrupted:
                    return
                self._observer.turn_begins(server.name, level, number, self._plan.turns)
                label = f"{level.label} turn {number}"
                turn = await self._one_turn(server, level, self._plan.load.requests(level), label, is_counted=True)
                self._observer.turn_ends()
                if self._plan.reads_predictions:
                    turn = replace(turn, answers=await server.with_predictions(turn.answers))
                if not found.turns:
                    self.result.levels.append(found)
                found.turns.append(turn)

    async def _one_turn(
        self,
        server: BenchServer,
        level: LoadLevel,
        requests: Iterator[TraceRequest],
        label: str,
        *,
        is_counted: bool,
    ) -> BenchTurn:
        load = self._plan.load
        prompts = PromptMaker(
            seed=self._plan.seed, turn=label, block_tokens=load.block_tokens, ids=self._plan.token_ids
        )
        on_answer: Callable[[BenchAnswer], None] = self._observer.answered if is_counted else _ignore
        sessions = None
        if load.has_sessions and is_counted:
            name = f"bench-{secrets.token_hex(4)}"  # others than those of earlier turns and benchmarks
            sessions = Sessions(block_tokens=load.block_tokens, name=name)
        self._turn = asyncio.create_task(
            run_turn(
                server,
                level,
                requests,
                prompts,
                duration_s=load.duration_s,
                on_answer=on_answer,
                sessions=sessions,
            )
        )
        try:
            return await self._turn
        except asyncio.CancelledError:
            if not self.result.is_interrupted:
                raise
            return BenchTurn(answers=(), lasted_s=0.0, is_interrupted=True)  # before its first request
        finally:
            self._turn = None


def _ignore(answer: BenchAnswer) -> None: ...

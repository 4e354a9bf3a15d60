"""Sessions of a benchmark: order, prompts, tasks. No test depends on how long something takes."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import ConfigError
from simulator.bench import sessions
from simulator.bench.benchmark import Benchmark, BenchPlan
from simulator.bench.load import DEFAULT_IDS, AgentLoad, LoadLevel, LoadPlan, PromptMaker
from simulator.bench.report import own_fields, render_bench
from simulator.bench.server import BenchOutcome, ServerReply
from simulator.bench.sessions import SessionAgenda, SessionPrompts, planned_turns
from simulator.bench.statistics import BenchResult, LevelResult, summarise_bench
from simulator.model import TraceRequest
from tests.unit.bench.given import ScriptedServer, answer, turn
from tests.unit.bench.test_command import bench
from tests.unit.gateway.conftest import Served

BLOCK = 10


def request(
    *ids: int, arrival_s: float = 0.0, more: int = 0, follows: int | None = None, **fields: Any
) -> TraceRequest:
    tokens = BLOCK * len(ids) - more
    return TraceRequest(
        arrival_s=arrival_s, prompt_tokens=tokens, output_tokens=3, block_ids=ids, follows=follows, **fields
    )


#: Two sessions with a common block; the first has a subagent with its whole context.
TURNS = planned_turns(
    [
        request(1, 2),
        request(1, 3, arrival_s=0.5),
        request(1, 2, 4, follows=0, pause_s=2.0),
        request(1, 2, 4, 5, follows=2, pause_s=1.0),
        request(1, 2, 4, 6, 7, follows=3, pause_s=4.0),
        request(1, 8, follows=1, pause_s=0.1),
    ]
)


def test_turns_know_their_task_and_conversation() -> None:
    assert [one.task for one in TURNS] == [0, 1, 0, 0, 0, 1]
    assert [one.extends for one in TURNS] == [None, None, 0, 2, 2, None]


def test_blocks_of_a_plan_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_PLANNED_IDS", 3)
    with pytest.raises(ConfigError, match="fewer --sessions"):
        planned_turns([request(1, 2), request(1, 3)])


def test_a_turn_is_due_its_pause_after_the_answer() -> None:
    agenda = SessionAgenda(TURNS)
    assert agenda.next_s == 0.0
    first, second = agenda.pop(), agenda.pop()
    assert [(first[0], first[1].number), (second[0], second[1].number)] == [(0.0, 0), (0.5, 1)]
    assert agenda.next_s is None
    assert [one.number for one in agenda.ended(first[1], 10.0)] == [2]
    assert [one.number for one in agenda.ended(second[1], 10.5)] == [5]
    assert agenda.pop()[0] == pytest.approx(10.6)
    due_s, third = agenda.pop()
    assert (due_s, third.number) == (12.0, 2)


def test_a_closed_loop_begins_a_session_when_one_is_over() -> None:
    agenda = SessionAgenda(TURNS, 1)
    order = []
    now_s = 0.0
    while agenda.next_s is not None:
        due_s, one = agenda.pop()
        now_s = max(now_s, due_s) + 1.0
        order.append(one.number)
        agenda.ended(one, now_s)
    assert order == [0, 2, 3, 4, 1, 5]


def test_a_prompt_repeats_the_conversation_and_the_answer() -> None:
    maker = PromptMaker(seed=1, turn="x", block_tokens=BLOCK)
    prompts = SessionPrompts(maker, BLOCK, TURNS)
    first, reusable = prompts.prompt(TURNS[0])
    assert (len(first), reusable) == (20, 0)
    prompts.answered(TURNS[0], first, [901, 902, 903])
    other, reusable = prompts.prompt(TURNS[1])
    assert (other[:10], reusable) == (first[:10], 10)
    second, reusable = prompts.prompt(TURNS[2])
    assert (second[:23], len(second), reusable) == ([*first, 901, 902, 903], 30, 23)
    prompts.answered(TURNS[2], second, [904])
    sub, reusable = prompts.prompt(TURNS[3])
    assert (sub[:31], reusable) == ([*second, 904], 31)
    prompts.answered(TURNS[3], sub, [905])
    last, reusable = prompts.prompt(TURNS[4])
    assert (last[:31], len(last), reusable) == ([*second, 904], 50, 31)
    assert not prompts._conversations  # nothing that no later prompt repeats is held


def test_a_long_answer_is_cut_where_the_prompt_ends() -> None:
    prompts = SessionPrompts(PromptMaker(seed=1, turn="x", block_tokens=BLOCK), BLOCK, TURNS)
    first, _ = prompts.prompt(TURNS[0])
    prompts.answered(TURNS[0], first, list(range(900, 950)))
    second, reusable = prompts.prompt(TURNS[2])
    assert (len(second), reusable) == (30, 30)


# --- the load -----------------------------------------------------------------------------------------------------


class Listed:
    name, block_tokens = "scripted", BLOCK

    def __init__(self, requests: list[TraceRequest]) -> None:
        self._requests = requests

    def __iter__(self) -> Any:
        return iter(self._requests)


async def run(level: LoadLevel, server: ScriptedServer, **fields: Any) -> BenchResult:
    load = LoadPlan(
        source=Listed([one.request for one in TURNS]),
        num_requests=None,
        duration_s=None,
        speed=1000.0,
        has_sessions=True,
        **fields,
    )
    plan = BenchPlan(load=load, levels=[level], token_ids=DEFAULT_IDS, slo_task_s=1000.0)
    return await Benchmark([server], plan, None).run()


@pytest.mark.parametrize("level", [LoadLevel(), LoadLevel(concurrency=1), LoadLevel(concurrency=9)])
async def test_turns_of_a_session_wait_for_each_other(level: LoadLevel) -> None:
    running: set[int] = set()

    async def script(number: int, reply: ServerReply) -> None:
        task = server.tasks[number]
        assert task not in running
        running.add(task)
        await asyncio.sleep(0)
        reply.chunk_s.append(time.perf_counter())
        reply.token_ids += [900, 901, 902]
        reply.cached_tokens = 10
        reply.complete()
        running.discard(task)

    class Server(ScriptedServer):
        def __init__(self) -> None:
            super().__init__(script)
            self.tasks: list[int] = []

        def prepare(self, token_ids: Any, max_tokens: int, session_id: str = "") -> Any:
            assert session_id.startswith("bench-")
            self.prompts.append((tuple(token_ids), max_tokens))
            return int(session_id.rpartition("-")[2])

        async def send(self, prepared: Any, reply: ServerReply) -> None:
            self.tasks.append(prepared)
            await super().send(prepared, reply)

    server = Server()
    found = await run(level, server)
    answers = found.levels[0].turns[0].answers
    assert [one.task for one in answers] == [0, 1, 0, 0, 0, 1]
    assert all(one.due_s >= before.ended_s for before, one in pairwise(answers[2:5]))
    assert sum(900 in prompt for prompt, _ in server.prompts) == 3
    tasks = found.levels[0].summary.tasks
    assert tasks is not None
    assert (tasks.tasks, tasks.completed, tasks.met) == (2, 2, 2)
    assert tasks.reusable_tokens == 10 + 23 + 33 + 33 + 10
    assert tasks.reused_tokens == 50


async def test_a_server_is_told_that_a_session_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    class Server(ScriptedServer):
        def __init__(self) -> None:
            super().__init__(script)
            self.ended: list[tuple[int, str]] = []

        async def end_session(self, session_id: str) -> str:
            self.ended.append((self._count, session_id.rpartition("-")[2]))
            return "it has no sessions"

    async def script(number: int, reply: ServerReply) -> None:
        reply.chunk_s.append(time.perf_counter())
        reply.complete()

    server, last = Server(), {4: True, 5: True}
    turns = [replace(one.request, session="s", ends_session=last.get(one.number, False)) for one in TURNS]
    load = LoadPlan(source=Listed(turns), num_requests=None, duration_s=None, speed=1000.0, has_sessions=True)
    plan = BenchPlan(load=load, levels=[LoadLevel(concurrency=1)], token_ids=DEFAULT_IDS)
    await Benchmark([server], plan, None).run()
    assert server.ended == [(4, "0"), (6, "1")]
    warned = [one.getMessage() for one in caplog.records if "had ended" in one.getMessage()]
    assert warned == ["scripted was not told that a session had ended: it has no sessions"]


async def test_an_error_ends_the_load() -> None:
    class Broken(ScriptedServer):
        def prepare(self, token_ids: Any, max_tokens: int, session_id: str = "") -> Any:
            if len(self.prompts) == 3:
                raise ValueError("boom")
            return super().prepare(token_ids, max_tokens, session_id)

    async def script(number: int, reply: ServerReply) -> None:
        reply.chunk_s.append(time.perf_counter())
        reply.complete()

    with pytest.raises(ValueError, match="boom"):
        await run(LoadLevel(), Broken(script))


def test_tasks_are_those_whose_turns_completed() -> None:
    late = [
        answer(0, chunks_s=[1.0], task=0),
        answer(2, sent_s=5.0, chunks_s=[2.0], task=0, reusable_tokens=8, cached_tokens=6),
    ]
    rejected = answer(1, outcome=BenchOutcome.REJECTED, task=1)
    early = answer(3, sent_s=2.0, chunks_s=[1.0], task=3, reusable_tokens=4, cached_tokens=9)
    found = summarise_bench([turn(*late, rejected, early)], None, 6.5)
    tasks = found.tasks
    assert tasks is not None
    assert (tasks.tasks, tasks.completed, tasks.met, tasks.attainment) == (3, 2, 1, 1 / 3)
    assert (tasks.task_s.median, tasks.served_s.median) == (4.0, 2.0)
    assert (tasks.reusable_tokens, tasks.reused_tokens) == (12, 10)
    fields = own_fields(found)
    assert (fields["task_attainment"], fields["total_reused_tokens"], fields["p50_task_s"]) == (1 / 3, 10, 4.0)
    level = LevelResult(level=LoadLevel(concurrency=2), server="one", turns=[turn(*late, rejected, early)])
    level.slo_task_s = 6.5
    text = render_bench(BenchResult(servers=[], slo=None, slo_task_s=6.5, levels=[level]))
    assert "WITHIN 6.5 s" in text
    assert "83.3%" in text
    assert summarise_bench([turn(answer(chunks_s=[1.0]))], None).tasks is None


def test_a_workload_has_as_many_sessions_as_asked() -> None:
    source = AgentLoad(num_sessions=3)
    planned = LoadPlan(source=source, num_requests=None, duration_s=None, length_scale=0.1, has_sessions=True)
    found = list(planned.requests(LoadLevel(concurrency=2)))
    assert sum(one.follows is None for one in found) == 3
    assert planned.num_planned == len(found)
    quick = list(planned.requests(LoadLevel(rate_rps=5.0)))
    assert [one.prompt_tokens for one in quick] == [one.prompt_tokens for one in found]
    assert quick[-1].arrival_s == pytest.approx(found[-1].arrival_s / 5.0)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_http", [False, True])
def test_agents_load_a_server(toy: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path, is_http: bool) -> None:
    rows = [
        {"session": name, "at_s": at_s, "input_tokens": tokens, "output_tokens": 4, "pause_s": 0.1, **fields}
        for at_s, name, tokens, fields in [
            (0.0, "a", 100, {"prefix": "tools", "prefix_tokens": 64}),
            (1.0, "b", 120, {"prefix": "tools", "prefix_tokens": 64}),
            (2.0, "a", 200, {}),
            (3.0, "a", 290, {"ends_session": True}),
        ]
    ]
    file = tmp_path / "sessions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = ("--url", toy.url) if is_http else ("--target", toy.router)
    flags = ("--replay", str(file), "--speed", "100", "--slo-task", "600", "--warmup", "0", "--json")
    status, out, _ = bench(capsys, *target, *flags)
    found = json.loads(out)
    assert status == 0
    assert (found["completed"], found["tasks"], found["tasks_completed"], found["task_attainment"]) == (4, 2, 2, 1.0)
    assert found["total_reusable_tokens"] == 64 + 104 + 204
    assert found["total_reused_tokens"] > 200
    seen = [one for one in toy.sdk.sessions().sessions if one.session_id.startswith("bench-")][:2]
    assert {one.turns: [row.is_over for row in one.conversations] for one in seen} == {3: [True], 1: [False]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workload", "agents", "--trace", "x"), "trace"),
        (("--workload", "agents", "--input-tokens", "5"), "input-tokens"),
        (("--workload", "agents", "--sessions", "0"), "sessions: got 0"),
        (("--sessions", "3"), "sessions: got 3"),
        (("--ended-sessions", "1"), "ended-sessions: got 1"),
        (("--workload", "agents", "--ended-sessions", "2"), "ended-sessions: got 2"),
        (("--slo-task", "3"), "slo-task: got 3"),
        (("--workload", "agents", "--slo-task", "-3"), "slo-task: got -3"),
        (("--workload", "agents", "--speed", "0"), "speed: got 0"),
        (("--speed", "2"), "speed"),
    ],
)
def test_wrong_flags_are_named(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = bench(capsys, "--target", "127.0.0.1:9", *flags)
    assert (status, out) == (1, "")
    assert message in err

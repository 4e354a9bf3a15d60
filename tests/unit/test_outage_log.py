"""Peers that fail often, or under ever new names, do not fill the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve import outage_log
from pdserve.outage_log import MAX_PEERS, LogLimits, OutageLog, PeerLog
from pdserve.prefix.redis_index import RedisIndex
from pdserve.prefix.registry import read_registration
from pdserve.telemetry.metrics import Metrics
from pdserve.telemetry.tracing import OpenSpan, Service, make_tracing
from pdserve.v1 import transfer_pb2, worker_pb2
from pdserve.worker.session import SessionOutbox, WorkerServicer
from router.service.measure import Measure
from router.service.runtime import Runtime
from router.service.worker_stream import WorkerStream
from router.service.workers import Workers
from router.state.interface import FailKind, FailRequest, Outcome, RouterSettings
from router.state.state import RouterState
from tests.support.cluster_secret import ROUTER

log = logging.getLogger(__name__)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr(outage_log, "time", type("Clock", (), {"monotonic": lambda: now_s[0]}))
    return now_s


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The messages since the last call."""
    caplog.set_level(logging.INFO)

    def take() -> list[str]:
        found = [one.getMessage() for one in caplog.records]
        caplog.clear()
        return found

    return take


def test_an_outage_is_logged_once_a_minute_with_a_count(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outages = OutageLog(log, "down", "up")
    for _ in range(100):
        outages.failed(redis="r", why="late")
        outages.recovered(redis="r")
    assert [one.message for one in caplog.records] == ["down", "up"]
    clock[0] += 60.0
    outages.failed(redis="r", why="late")
    assert (caplog.records[-1].message, caplog.records[-1].__dict__["times"]) == ("down", 100)


def test_a_recovery_has_the_level_of_the_logged_failure(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outages = OutageLog(log, "down", "up")
    outages.recovered("a")
    outages.failed("b")
    outages.recovered("b")
    clock[0] += 60.0
    outages.recovered("b")
    assert [(one.message, one.levelname) for one in caplog.records] == [
        ("up", "INFO"),
        ("down", "WARNING"),
        ("up", "WARNING"),
        ("up", "INFO"),
    ]


def test_late_answers_of_the_index_are_logged_once(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    index = RedisIndex("redis://127.0.0.1:1/0", "c")
    for _ in range(50):
        index._recover()
        index._trip("answers are late")
    assert sum("cannot be reached" in one.message for one in caplog.records) == 1


def test_each_peer_has_its_own_lines(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    peers = PeerLog(log)
    for _ in range(3):
        for name in "ab":
            peers.warning("bad", name, worker=name)
    assert peers.warning("other", "a")
    assert [one.message for one in caplog.records] == ["bad", "bad", "other"]
    clock[0] += 60.0
    assert peers.warning("bad", "b", worker="b")
    assert (caplog.records[-1].__dict__["worker"], caplog.records[-1].__dict__["times"]) == ("b", 3)


def test_new_names_share_a_limit() -> None:
    limits = LogLimits(60.0)
    counts = [limits.due(f"peer {number}", 0.0) for number in range(3 * MAX_PEERS)]
    assert sum(map(bool, counts)) == MAX_PEERS + 1
    assert limits.due("late", 60.0) == 1  # of the place of one whose time has passed
    assert limits.due("peer 1", 60.0) == 1
    assert len(limits._of) == MAX_PEERS


def test_many_peers_that_recover_are_bounded(clock: list[float], lines: Callable[[], list[str]]) -> None:
    outages = OutageLog(log, "down", "up")
    for number in range(2 * MAX_PEERS):
        outages.recovered(f"w{number}")
        outages.failed(f"w{number}")
    assert len(outages._logged) <= MAX_PEERS
    assert len(lines()) <= 2 * MAX_PEERS + 2


# -- a router and its workers ----------------------------------------------------------------------------------


def hello(worker_id: str, incarnation: int, **fields: Any) -> worker_pb2.WorkerHello:
    shape = transfer_pb2.KvShape(
        layout="block-major.v1", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, tp_degree=1
    )
    facts: dict[str, Any] = {
        "role": worker_pb2.ROLE_DECODE,
        "model": "toy",
        "version": "0.0.0",
        "max_context_tokens": 128,
        "inbox_depth": 4,
        "block_size": 16,
        "vocab_size": 256,
        "num_blocks": 8,
        "max_batch": 4,
        "max_batch_tokens": 64,
        "fingerprint": transfer_pb2.Fingerprint(protocol=1, model="toy", engine="toy", shape=shape),
    }
    return worker_pb2.WorkerHello(worker_id=worker_id, incarnation=str(incarnation), **{**facts, **fields})


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr("router.service.workers.is_compatible", lambda ours, theirs: True)
    return Workers(worker_pb2.RouterHello, lambda event: None, identity=ROUTER, model_name="toy")


def attach(workers: Workers, worker_id: str, number: int, **fields: Any) -> WorkerStream:
    session = WorkerStream(f"127.0.0.1:{fields.pop('port', 1)}", worker_pb2.RouterHello, workers, ROUTER)
    session.worker_id, session.incarnation = worker_id, str(number)
    workers.attached(session, hello(worker_id, number, **fields))
    return session


def test_a_flapping_worker_is_logged_once_a_minute(
    workers: Workers, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Ten times a second. It also has another version each time."""
    caplog.set_level(logging.INFO)
    for number in range(1199):
        workers.detached(attach(workers, "d0", number), "the worker ended the stream")
        clock[0] += 0.1
    found = [one.message for one in caplog.records]
    assert {one: found.count(one) for one in found} == {
        "a worker is attached": 4,  # the first one of a minute, and after each logged loss
        "a worker has another version or build": 2,
        "a worker is lost": 2,
    }
    lost = [one.__dict__ for one in caplog.records if one.message == "a worker is lost"]
    assert sum(one.get("times", 1) for one in lost) > 595
    assert lost[0]["why"] == "the worker ended the stream"


def test_a_worker_that_restarts_is_logged(workers: Workers, clock: list[float], lines: Callable[[], list[str]]) -> None:
    workers.detached(attach(workers, "d0", 1, version=""), "it was killed")
    assert "a worker is lost" in lines()
    clock[0] += 5.0
    session = attach(workers, "d0", 2, version="")
    assert "a worker is attached" in lines()
    clock[0] += 60.0
    workers.detached(session, "it was killed")
    attach(workers, "d0", 3)
    assert {"a worker is lost", "a worker is attached"} <= set(lines())


def test_workers_of_ever_new_names_are_bounded(
    workers: Workers, clock: list[float], lines: Callable[[], list[str]]
) -> None:
    for number in range(MAX_PEERS + 500):
        workers.detached(attach(workers, f"d{number}", 1), "gone")
    found = lines()
    assert max(found.count(one) for one in set(found)) <= MAX_PEERS + 1


def test_changing_complaints_are_logged_once_a_minute(
    workers: Workers, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(50):
        attach(workers, "d0", number, model=f"model {number}" + "x" * 10_000)
    [line] = [one.__dict__ for one in caplog.records]
    assert line["message"] == "a worker is rejected"
    assert len(line["why"]) < 1000
    clock[0] += 60.0
    for _ in range(50):
        attach(workers, "d0", 99, model="model 50")
    assert caplog.records[-1].__dict__["why"] == "it serves 'model 50', this router tokenizes for 'toy'"
    assert len(caplog.records) == 2


async def test_invalid_messages_of_a_worker_are_logged_once(
    workers: Workers, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20):
        session = attach(workers, "d0", number, version="")
        bad = worker_pb2.AttachResponse(tokens=worker_pb2.Tokens(plain=worker_pb2.PlainTokens(token_ids=[1])))
        workers.received(session, bad)
        workers.detached(session, "the router closed the stream")
    assert workers.num_invalid == 20
    assert [one.message for one in caplog.records].count("a worker sent an invalid message") == 1


async def test_registrations_that_come_and_go_are_logged_once(
    workers: Workers, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    attach(workers, "d0", 1, version="")
    for _ in range(20):
        workers.register({"d0": "127.0.0.1:1"})
        workers.register({})
    assert [one.message for one in caplog.records].count("an attached worker left the registry; it stays") == 1
    await workers.close()


async def test_failures_that_callers_cause_are_warnings_once_a_minute(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Each request keeps its line."""
    caplog.set_level(logging.INFO)
    measure = Measure(Metrics.off(), make_tracing(Service("router", "r"), ""))
    runtime = Runtime(RouterState(RouterSettings()), measure, send=lambda *message: True)
    call = SimpleNamespace(facts=SimpleNamespace(span=OpenSpan()))
    for number in range(20):
        for kind in (FailKind.OVERLOADED, FailKind.DEADLINE):
            failed = FailRequest(request_id=str(number), kind=kind, message="late", outcome=Outcome.REJECTED)
            runtime._log_end(failed, call)  # type: ignore[arg-type]
    assert [one.message for one in caplog.records] == ["request failed"] * 2 + ["request ended"] * 38
    assert {one.__dict__["kind"] for one in caplog.records} == {"overloaded", "deadline"}


# -- others ----------------------------------------------------------------------------------------------------


def test_unreadable_registrations_are_logged_once(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """A router reads all of them twice a second."""
    peers = PeerLog(log)
    for _ in range(20):
        for name in (b"d0", b"d1"):
            assert read_registration(name, b"1", json.dumps(["x" * 400]).encode(), peers) is None
    assert [one.message for one in caplog.records] == ["a registration cannot be read"] * 2


class _Call:
    """The stream of a router that reads nothing and leaves."""

    def __init__(self, servicer: WorkerServicer) -> None:
        self._servicer = servicer
        self._says = [worker_pb2.AttachRequest(hello=worker_pb2.RouterHello(router_id="r@x", router_incarnation="1"))]

    async def read(self) -> Any:
        return self._says.pop() if self._says else await asyncio.Event().wait()

    async def write(self, message: Any) -> None:
        self._servicer.close()


class _Program:
    def hello(self) -> worker_pb2.WorkerHello:
        return worker_pb2.WorkerHello()

    def attached(self, *args: object) -> None: ...
    def lost(self, *args: object) -> None: ...


async def test_a_flapping_router_is_logged_once_a_minute(
    clock: list[float], lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.worker.session.is_compatible", lambda ours, theirs: True)
    servicer = WorkerServicer(_Program(), lambda call: None, lambda: 0)  # type: ignore[arg-type]
    for _ in range(50):
        await servicer.Attach(None, _Call(servicer))
    assert lines() == ["router attached", "router gone", "router attached"]


async def test_routers_that_read_too_slowly_are_told_to_the_owner() -> None:
    told: list[int] = []
    outbox = SessionOutbox(limit=1, on_full=told.append)
    outbox.put([worker_pb2.AttachResponse()])
    for _ in range(3):
        outbox.put([worker_pb2.AttachResponse()])
    assert told == [1]

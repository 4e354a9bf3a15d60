"""Which workers a router is attached to, as its list and the registry change."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable

import pytest
from redis import Redis

from pdserve import Client
from pdserve.build import FULL_VERSION
from pdserve.config import RouterConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.installation import VERSION
from pdserve.core.kv.tier_reads import TierDepths
from pdserve.core.types import Role
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.prefix.index import PrefixIndex
from pdserve.v1 import worker_pb2
from router.service.program import make_router
from router.service.worker_stream import WorkerStream
from router.service.workers import Workers
from router.state.interface import Event, WorkerConnected, WorkerForgotten, WorkerLost
from tests.support.cluster_secret import ROUTER, TEXT
from tests.unit.router_io.conftest import until
from tests.unit.router_io.processes import Program, Start, spawn
from tests.unit.test_outage_log import hello


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.versions: list[str] = []

    def take(self, event: Event) -> None:
        if isinstance(event, WorkerConnected):
            self.versions.append(event.version)
        if isinstance(event, WorkerConnected | WorkerLost | WorkerForgotten):
            self.lines.append(f"{type(event).__name__} {event.worker_id}")


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., tuple[Workers, Log]]]:
    made: list[Workers] = []

    def make_workers(**settings: object) -> tuple[Workers, Log]:
        log = Log()
        hello = worker_pb2.RouterHello(router_id=f"test-{len(made)}", router_incarnation="1", wants_kv_events=True)
        settings = {"identity": ROUTER, "model_name": "toy", **settings}
        workers = Workers(lambda: hello, log.take, **settings)  # type: ignore[arg-type]
        made.append(workers)
        return workers, log

    yield make_workers
    for workers in made:
        await workers.close()


async def test_an_attached_worker_outlives_its_registration(
    make: Callable[..., tuple[Workers, Log]], decode: Program
) -> None:
    workers, log = make()
    workers.register({"d0": decode.address, "d1": "127.0.0.1:1"})
    await until(lambda: "d0" in workers.roles)
    workers.register({})  # as a Redis that is full, read-only, or evicts keys answers
    assert workers.num_unregistered == 1
    await asyncio.sleep(0)
    assert (workers.roles, log.lines) == ({"d0": Role.DECODE}, ["WorkerConnected d0", "WorkerForgotten d1"])
    workers.register({"d0": decode.address})
    assert workers.num_unregistered == 0


async def test_the_oldest_library_of_grammars_counts_while_its_worker_is_there(
    make: Callable[..., tuple[Workers, Log]],
) -> None:
    workers, _ = make()
    found = []
    for name, library in (("d0", "1.9.2"), ("d1", ""), ("d2", "1.7.6"), ("d3", "2.0.dev0"), ("d2", "1.9.0")):
        former = workers._attached.get(name)
        if former is not None:
            workers.detached(former, "it is updated")
        stream = WorkerStream("127.0.0.1:1", worker_pb2.RouterHello, workers, ROUTER)
        message = hello(name, len(found), version=FULL_VERSION, grammar_library=library)
        assert workers.attached(stream, message) is None
        stream.worker_id = name
        assert workers.model is not None
        found.append(workers.model.has_older_grammars)
    assert found == [False, False, True, True, False]


async def test_a_worker_tells_the_tiers_of_its_blocks(make: Callable[..., tuple[Workers, Log]]) -> None:
    index = PrefixIndex()
    workers, _ = make(index=index)
    stream = WorkerStream("127.0.0.1:1", worker_pb2.RouterHello, workers, ROUTER)
    stream.worker_id, stream.incarnation = "d0", "1"
    blocks = [bytes([number] * 16) for number in range(4)]

    def tell(sequence: int, tiers: bytes) -> None:
        events = worker_pb2.KvEvents(sequence=sequence, stored=blocks, tiers=tiers)
        workers._feed_index(stream, events)

    tell(1, b"")  # an older worker
    assert (index.lookup(blocks), index.lookup(blocks).tiers) == ({"d0": 4}, {})
    tell(2, bytes((0, 1, 1, 200)))  # a tier of a newer worker
    assert index.lookup(blocks).tiers == {"d0": TierDepths(1, 3)}
    for tiers in (b"\x01", bytes(5)):
        with pytest.raises(InvalidRequest):
            tell(3, tiers)
    assert index.lookup(blocks).tiers == {"d0": TierDepths(1, 3)}


async def test_an_unregistered_worker_is_forgotten_after_its_stream(
    make: Callable[..., tuple[Workers, Log]], start: Start
) -> None:
    decode = start("decode_worker", "--model=toy", "--worker-id=d0")
    workers, log = make(redial_s=0.5)
    workers.register({"d0": decode.address})
    await until(lambda: "d0" in workers.roles)
    workers.register({})
    decode.kill()
    await until(lambda: len(log.lines) == 3)
    assert log.lines == ["WorkerConnected d0", "WorkerLost d0", "WorkerForgotten d0"]
    assert workers.num_unregistered == 0


async def test_an_unregistered_worker_is_dialled_again(make: Callable[..., tuple[Workers, Log]], start: Start) -> None:
    decode = start("decode_worker", "--model=toy", "--worker-id=d0")
    workers, log = make(redial_s=300.0)
    workers.register({"d0": decode.address})
    await until(lambda: "d0" in workers.roles)
    workers.register({})
    decode.kill()
    await until(lambda: "d0" not in workers.roles)
    start("decode_worker", "--model=toy", "--worker-id=d0", f"--port={decode.address.rsplit(':', 1)[1]}")
    await until(lambda: "d0" in workers.roles)
    assert log.lines == ["WorkerConnected d0", "WorkerLost d0", "WorkerConnected d0"]


async def test_a_worker_that_moves_is_dialled_at_its_new_address(
    make: Callable[..., tuple[Workers, Log]], decode: Program, caplog: pytest.LogCaptureFixture
) -> None:
    workers, log = make()
    workers.register({"d0": decode.address})
    await until(lambda: "d0" in workers.roles)
    workers.register({"d0": "127.0.0.1:1"})
    await until(lambda: log.lines == ["WorkerConnected d0", "WorkerLost d0"])
    [lost] = [one for one in caplog.records if one.message == "a worker is lost"]
    assert lost.__dict__["why"] == "the router ended the stream"


async def test_a_listed_worker_stays_when_the_registry_forgets_it(
    make: Callable[..., tuple[Workers, Log]], decode: Program
) -> None:
    workers, log = make()
    workers.dial([decode.address])
    workers.register({"d0": decode.address})
    await until(lambda: "d0" in workers.roles)
    workers.register({})
    assert workers.roles == {"d0": Role.DECODE}
    assert log.lines == ["WorkerConnected d0"]


@pytest.mark.parametrize("is_registered", [False, True])
async def test_a_worker_that_is_listed_no_longer_is_forgotten(
    make: Callable[..., tuple[Workers, Log]], decode: Program, is_registered: bool
) -> None:
    workers, log = make()
    workers.dial_only([decode.address])
    if is_registered:
        workers.register({"d0": decode.address})
    await until(lambda: "d0" in workers.roles)
    workers.dial_only([])
    await until(lambda: log.lines == ["WorkerConnected d0", "WorkerForgotten d0", "WorkerLost d0"])
    assert workers.roles == {}
    workers.dial_only([decode.address])
    await until(lambda: "d0" in workers.roles)


async def test_a_worker_that_has_moved_stays_when_its_former_address_is_removed(
    make: Callable[..., tuple[Workers, Log]], decode: Program
) -> None:
    workers, log = make()
    workers.dial_only(["127.0.0.1:1", decode.address])
    await until(lambda: "d0" in workers.roles)
    workers.dial_only([decode.address])
    assert workers.roles == {"d0": Role.DECODE}
    assert log.lines == ["WorkerConnected d0"]


async def test_one_worker_under_two_names_is_attached_once(
    make: Callable[..., tuple[Workers, Log]], decode: Program, caplog: pytest.LogCaptureFixture
) -> None:
    workers, log = make()
    port = decode.address.rsplit(":", 1)[1]
    workers.dial([f"127.0.0.1:{port}"])
    await until(lambda: "d0" in workers.roles)
    workers.dial([f"localhost:{port}"])
    await until(lambda: "a worker is rejected" in caplog.text)
    [refusal] = [one for one in caplog.records if one.message == "a worker is rejected"]
    assert refusal.__dict__["why"] == f"it is attached already, as 127.0.0.1:{port}"
    assert log.lines == ["WorkerConnected d0"]


async def test_a_second_worker_of_one_id_is_rejected(
    make: Callable[..., tuple[Workers, Log]], decode: Program, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    workers, log = make()
    workers.dial([decode.address])
    await until(lambda: "d0" in workers.roles)
    second = start("decode_worker", "--model=toy", "--worker-id=d0")
    workers.dial([second.address])
    await until(lambda: "a worker is rejected" in caplog.text)
    assert f"its id is that of the worker at {decode.address}" in str(caplog.records[-1].__dict__["why"])
    assert log.lines == ["WorkerConnected d0"]
    workers.register({"d0": second.address})  # the registry knows where a worker is now
    await until(lambda: log.lines == ["WorkerConnected d0", "WorkerLost d0", "WorkerConnected d0"])


async def test_a_memory_index_is_fed_from_the_streams(make: Callable[..., tuple[Workers, Log]], start: Start) -> None:
    decode = start("decode_worker", "--model=toy", "--worker-id=cached")
    index = PrefixIndex()
    workers, _ = make(index=index)
    workers.dial([decode.address])
    await until(lambda: "cached" in workers.roles)
    router = make_router(RouterConfig(model="toy", port=0, workers=(decode.address,), cluster_secret=TEXT))

    def ask() -> None:
        with Client(router.start()) as client:  # its retries outlast a router that knows no worker yet
            client.generate("x" * 64, max_tokens=2)

    try:
        await asyncio.to_thread(ask)
        await until(lambda: index.num_blocks("cached") >= 4)
    finally:
        await asyncio.to_thread(router.stop)
    decode.kill()
    await until(lambda: index.num_blocks("cached") == 0)
    index.check()


def test_a_worker_does_not_start_under_the_id_of_another(start: Start) -> None:
    with EmbeddedRedis.start() as redis:
        env = {"PDSERVE_REDIS": redis.url}
        flags = ("--model=toy", "--worker-id=d0", "--lease-s=2")
        first = start("decode_worker", *flags, env=env)
        with Redis.from_url(redis.url) as client:
            deadline_s = time.monotonic() + 60.0
            while not client.keys("*:worker:d0"):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        second = spawn("decode_worker", *flags, stderr=subprocess.PIPE, env=env)
        _, said = second.communicate(timeout=60)
        assert second.returncode == 2
        assert f"worker_id: got d0, expected an id of its own: the worker at {first.address} has it" in said
        first.kill()
        start("decode_worker", *flags, env=env)  # its lease is no longer renewed


async def test_a_worker_of_another_release_is_rejected(
    make: Callable[..., tuple[Workers, Log]],
    decode: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("router.service.workers.FULL_VERSION", "9.9.9+a")
    workers, _ = make()
    workers.register({"d0": decode.address})
    await until(lambda: "a worker is rejected" in caplog.text)
    [refusal] = [one for one in caplog.records if one.message == "a worker is rejected"]
    assert refusal.__dict__["why"] == (
        f"its version is {FULL_VERSION!r}, this process's 9.9.9+a; only the patch number and build may differ"
    )


@pytest.mark.parametrize("own", [f"{VERSION}+another", VERSION.rpartition(".")[0] + ".999+unknown"])
async def test_a_worker_of_another_patch_or_build_is_served_with_a_warning(
    make: Callable[..., tuple[Workers, Log]],
    decode: Program,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    own: str,
) -> None:
    monkeypatch.setattr("router.service.workers.FULL_VERSION", own)
    workers, log = make()
    workers.register({"d0": decode.address})
    await until(lambda: "d0" in workers.roles)
    assert log.versions == [FULL_VERSION]
    assert "a worker has another version or build" in caplog.text

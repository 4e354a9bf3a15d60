"""A prefill and a decode host in this process on the toy engine, and a hand-written router that attaches to both."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from decode_worker import program as decode_program
from pdserve.config import WorkerConfig
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Engine
from pdserve.engine.load_engine import load_engine
from pdserve.v1 import worker_pb2
from pdserve.wire.convert import sampling_to_proto
from pdserve.worker.host import WorkerHost
from pdserve.worker.program import RoleProgram
from prefill_worker import program as prefill_program
from tests.support.cluster_secret import TEXT
from tests.support.cluster_secret import attach as proven_attach

DEADLINE_S = 60.0
Load = Callable[[WorkerConfig, Role], Engine]
BUILDS: dict[Role, Callable[..., RoleProgram]] = {
    Role.PREFILL: prefill_program.build,
    Role.DECODE: decode_program.build,
}


def config(role: Role, **changes: Any) -> WorkerConfig:
    base = WorkerConfig(
        model="toy-marked",
        worker_id=f"{role.value}-0",
        block_size=4,
        kv_blocks=64,
        max_context_tokens=256,
        max_batch=8,
        max_batch_tokens=32,
        inbox_depth=8,
        heartbeat_s=0.05,
        transport="tcp",
        kv_check="step",
        dtype="float32",  # auto may be bfloat16, depending on the processor.
        cluster_secret=TEXT,
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture
def worker_config() -> Callable[..., WorkerConfig]:
    return config


class Running:
    """A started host and the program inside it."""

    def __init__(self, role: Role, settings: WorkerConfig, load: Load = load_engine) -> None:
        self.fatal: list[str] = []
        self.programs: list[RoleProgram] = []

        def build(context: Any) -> RoleProgram:
            self.programs.append(BUILDS[context.role](context, load))
            return self.programs[-1]

        self.host = WorkerHost(
            settings,
            role,
            build,
            build,
            on_fatal=lambda: self.fatal.append("died"),
            on_stall=lambda: self.fatal.append("hung"),
        )
        self.address = self.host.start()

    @property
    def program(self) -> RoleProgram:
        return self.programs[-1]

    async def on_engine(self, call: Callable[[RoleProgram], Any]) -> Any:
        """Runs `call` on the engine thread, where the program may be inspected, and returns its result."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                result, error = call(self.program), None
            except BaseException as failure:
                result, error = None, failure
            loop.call_soon_threadsafe(done.set_exception if error else done.set_result, error or result)

        self.host._engine.post(run)
        return await asyncio.wait_for(done, DEADLINE_S)

    def until_no_block_is_used(self) -> None:
        """Waits until every block is free or in the prefix cache, after the routers have disconnected."""
        until_s = time.monotonic() + DEADLINE_S
        while not (self.fatal or self.host.wait(0)):
            used: Future[int] = Future()
            self.host._engine.post(lambda used=used: used.set_result(self.program.blocks.num_referenced))
            if used.result(DEADLINE_S) == 0:
                return
            assert time.monotonic() < until_s, f"{self.program.blocks.num_referenced} blocks are used for no request"
            time.sleep(0.005)

    async def until_fatal(self) -> None:
        """Waits for the fatal error with which the process would end."""
        until_s = time.monotonic() + DEADLINE_S
        while self.fatal != ["died"]:
            assert time.monotonic() < until_s, self.fatal
            await asyncio.sleep(0.005)

    async def until(self, holds: Callable[[RoleProgram], bool], what: str) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not await self.on_engine(holds):
            assert time.monotonic() < until_s, f"never saw: {what}"
            await asyncio.sleep(0.005)


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """start(role, **config changes); at the end no worker uses a block, its books balance, and it is stopped."""
    running: list[Running] = []

    def begin(role: Role, load: Load = load_engine, **changes: Any) -> Running:
        running.append(Running(role, config(role, **changes), load))
        return running[-1]

    yield begin
    try:
        for each in running:
            each.until_no_block_is_used()
    finally:
        for each in running:
            each.host.stop()
    for each in running:
        if each.fatal:
            continue
        each.program.check()
        held = each.program.scheduler.live()
        assert [key for key in held if key.router in each.program.outbox] == [], "attempts were left behind"


def _plain_rows(plain: worker_pb2.PlainTokens) -> list[worker_pb2.TokenRow]:
    columns = zip(plain.request_ids, plain.attempts, plain.output_indexes, plain.token_ids, strict=True)
    return [
        worker_pb2.TokenRow(
            request_id=name, attempt=attempt, output_index=index, tokens=[worker_pb2.Token(token_id=token_id)]
        )
        for name, attempt, index, token_id in columns
    ]


class Router:
    """Attach streams to workers, with the messages received on each."""

    def __init__(self, name: str = "router-0", incarnation: str = "1") -> None:
        self.name = name
        self.incarnation = incarnation
        self.streams: dict[Role, Any] = {}
        self.seen: list[tuple[Role, str, Any]] = []
        self.hellos: dict[Role, worker_pb2.WorkerHello] = {}
        self._arrived = asyncio.Condition()
        self._num_new = 0
        self._outboxes: dict[Role, asyncio.Queue[worker_pb2.AttachRequest]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._channels: list[Any] = []

    async def attach(self, role: Role, address: str, *, wants_kv_events: bool = False) -> None:
        channel = grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))
        self._channels.append(channel)
        stream = await proven_attach(channel, address)
        hello = worker_pb2.RouterHello(
            router_id=self.name, router_incarnation=self.incarnation, wants_kv_events=wants_kv_events
        )
        await stream.write(worker_pb2.AttachRequest(hello=hello))
        first = await asyncio.wait_for(stream.read(), DEADLINE_S)
        assert first.WhichOneof("message") == "hello"
        self.hellos[role] = first.hello
        self.streams[role] = stream
        self._outboxes[role] = asyncio.Queue()
        self._tasks.append(asyncio.create_task(self._read(role, stream)))
        self._tasks.append(asyncio.create_task(self._write(stream, self._outboxes[role])))

    async def _write(self, stream: Any, outbox: asyncio.Queue[worker_pb2.AttachRequest]) -> None:
        """One write at a time, and none that a test could cancel: that would cancel the stream."""
        while True:
            await stream.write(await outbox.get())

    async def _read(self, role: Role, stream: Any) -> None:
        try:
            while True:
                message = await stream.read()
                ended = message is grpc.aio.EOF  # type: ignore[attr-defined]
                kind = "ended" if ended else message.WhichOneof("message")
                async with self._arrived:
                    self._num_new += kind != "load"
                    self.seen.append((role, kind, None if ended else getattr(message, kind)))
                    self._arrived.notify_all()
                if ended:
                    return
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            async with self._arrived:
                self.seen.append((role, "ended", None))
                self._arrived.notify_all()

    async def send(self, role: Role, **message: Any) -> None:
        self._outboxes[role].put_nowait(worker_pb2.AttachRequest(**message))
        await asyncio.sleep(0)

    def all(self, kind: str, request_id: str | None = None, role: Role | None = None) -> list[Any]:
        return [
            message
            for by, each, message in self.seen
            if each == kind
            and (role is None or by is role)
            and (request_id is None or getattr(message, "request_id", None) == request_id)
        ]

    async def wait_for(self, what: Callable[[], Any]) -> Any:
        """Messages other than heartbeats must follow each other within DEADLINE_S."""
        async with self._arrived:
            while not what():
                num_seen = self._num_new
                async with asyncio.timeout(DEADLINE_S):
                    await self._arrived.wait_for(lambda: self._num_new > num_seen or what())  # noqa: B023
        return what()

    async def next(self, kind: str, request_id: str | None = None, role: Role | None = None) -> Any:
        return (await self.wait_for(lambda: self.all(kind, request_id, role)))[0]

    def rows(self, request_id: str, attempt: int = 1) -> list[worker_pb2.TokenRow]:
        """The received rows. Plain tokens are converted to rows."""
        return [
            row
            for message in self.all("tokens")
            for row in (*_plain_rows(message.plain), *message.rows)
            if row.request_id == request_id and row.attempt == attempt
        ]

    def text(self, request_id: str, attempt: int = 1) -> list[int]:
        return [token.token_id for row in self.rows(request_id, attempt) for token in row.tokens]

    async def finished(self, request_id: str, attempt: int = 1) -> list[int]:
        """The tokens of all rows up to the last one."""
        await self.wait_for(lambda: any(row.finish for row in self.rows(request_id, attempt)))
        rows = self.rows(request_id, attempt)
        index = rows[0].output_index
        for row in rows:
            assert row.output_index == index
            index += len(row.tokens)
        return self.text(request_id, attempt)

    async def released(self, request_id: str, role: Role, attempt: int = 1) -> None:
        await self.wait_for(lambda: [one for one in self.all("released", request_id, role) if one.attempt == attempt])

    async def remote(self, sequence: worker_pb2.Sequence) -> list[int]:
        """The whole remote path of one request: all its output tokens."""
        name = sequence.request_id
        await self.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
        granted = await self.next("granted", name)
        await self.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
        first = await self.next("first_token", name)
        if first.finish:
            cancel = worker_pb2.Cancel(request_id=name, attempt=sequence.attempt)
            await self.send(Role.DECODE, cancel=cancel)
            rest: list[int] = []
        else:
            admit = worker_pb2.Admit(request_id=name, attempt=sequence.attempt, first_token_id=first.token.token_id)
            await self.send(Role.DECODE, admit=admit)
            rest = await self.finished(name, sequence.attempt)
        await self.released(name, Role.PREFILL, sequence.attempt)
        await self.released(name, Role.DECODE, sequence.attempt)
        return [first.token.token_id, *rest]

    async def local(self, sequence: worker_pb2.Sequence) -> list[int]:
        await self.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
        tokens = await self.finished(sequence.request_id, sequence.attempt)
        await self.released(sequence.request_id, Role.DECODE, sequence.attempt)
        return tokens

    async def close(self) -> None:
        for stream in self.streams.values():
            stream.cancel()
        for channel in self._channels:
            await channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def attach() -> AsyncIterator[Callable[..., Any]]:
    """attach(p, d) gives a router that is attached to both; closed at the end."""
    routers: list[Router] = []

    async def begin(
        *workers: Running, name: str = "router-0", incarnation: str = "1", wants_kv_events: bool = False
    ) -> Router:
        router = Router(name, incarnation)
        routers.append(router)
        for worker in workers:
            await router.attach(worker.program.context.role, worker.address, wants_kv_events=wants_kv_events)
        return router

    yield begin
    for router in routers:
        await router.close()


@pytest.fixture
def ask() -> Callable[..., worker_pb2.Sequence]:
    """ask(request_id, prompt, max_tokens=..., ...): a Sequence as a router sends it; greedy unless told."""

    def make(
        request_id: str,
        prompt: list[int],
        *,
        attempt: int = 1,
        output: tuple[int, ...] = (),
        deadline_s: float | None = None,
        tpot_s: float | None = None,
        itl_s: float | None = None,
        **sampling: Any,
    ) -> worker_pb2.Sequence:
        settings = Sampling(**{"temperature": 0.0, "max_tokens": 8, **sampling})
        return worker_pb2.Sequence(
            request_id=request_id,
            attempt=attempt,
            prompt_token_ids=prompt,
            output_token_ids=output,
            sampling=sampling_to_proto(settings),
            deadline_s=deadline_s,
            tpot_s=tpot_s,
            itl_s=itl_s,
        )

    return make

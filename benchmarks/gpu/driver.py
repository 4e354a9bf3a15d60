"""A prefill and a decode worker process on one device, and a minimal router that drives them over gRPC.

The product's router needs Redis for its registry. Here this process sends requests directly over the workers' Attach
streams: reserve, prefill, admit, tokens.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import grpc

from pdserve.config import WorkerConfig
from pdserve.config_flags import to_flags
from pdserve.core.protocol import TokensArrived
from pdserve.core.types import Role, Sampling
from pdserve.engine.memory.plan import MemoryPlan
from pdserve.launch.report import memory_of
from pdserve.v1 import worker_pb2
from pdserve.wire.convert import sampling_to_proto
from pdserve.wire.protocol import decode_response
from tests.support.cluster_secret import ENVIRONMENT, attach

START_S: Final = 180.0  # captures graphs and compiles kernels
REQUEST_S: Final = 90.0
_MODULES: Final = {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker"}


@final
class WorkerProcess:
    def __init__(self, role: Role, config: WorkerConfig, environment: dict[str, str]) -> None:
        self.role = role
        command = [sys.executable, "-m", _MODULES[role], *to_flags(config)]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, **environment},
            stdin=subprocess.DEVNULL,
        )

    async def address(self) -> str:
        """Waits until the worker listens; HOST:PORT."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), START_S)
        found = re.search(r"listening on (\S+:\d+)", line)
        if found is None:
            raise RuntimeError(f"the {self.role.value} worker ended with {self._process.poll()}, see stderr")
        return found[1]

    async def memory(self) -> MemoryPlan:
        """How it has divided its memory; said once, after its address."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), REQUEST_S)
        plan = memory_of(line.rstrip())
        if plan is None:
            raise RuntimeError(f"the {self.role.value} worker does not say how it has divided its memory: {line!r}")
        return plan

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class ServedAnswer:
    """One request: times in seconds on this process's clock."""

    began_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.began_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, len(self.tokens) - 1)


@final
class RouterDriver:
    def __init__(self) -> None:
        self._streams: dict[Role, Any] = {}
        self._channels: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._outboxes: dict[Role, asyncio.Queue[Any]] = {}
        self._answers: dict[str, ServedAnswer] = {}
        self._events: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self.ended: list[str] = []  # streams and requests that ended badly

    async def attach(self, role: Role, address: str) -> None:
        channel = grpc.aio.insecure_channel(address)
        stream = await attach(channel, address)
        hello = worker_pb2.RouterHello(router_id="bench", router_incarnation="1")
        await stream.write(worker_pb2.AttachRequest(hello=hello))
        await asyncio.wait_for(stream.read(), REQUEST_S)
        self._streams[role], self._outboxes[role] = stream, asyncio.Queue()
        self._channels.append(channel)
        self._tasks += [asyncio.create_task(self._read(role, stream)), asyncio.create_task(self._write(role, stream))]

    async def ask(self, name: str, prompt: Sequence[int], num_tokens: int) -> ServedAnswer:
        """One greedy request over the remote path."""
        sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        sequence = worker_pb2.Sequence(
            request_id=name, attempt=1, prompt_token_ids=prompt, sampling=sampling_to_proto(sampling)
        )
        answer = self._answers[name] = ServedAnswer(time.perf_counter())
        self._say(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
        granted = await self._event("granted", name)
        self._say(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
        first = await self._event("first_token", name)
        answer.first_s = answer.last_s = time.perf_counter()
        answer.tokens.append(first.token.token_id)
        if not first.finish:
            admit = worker_pb2.Admit(request_id=name, attempt=1, first_token_id=first.token.token_id)
            self._say(Role.DECODE, admit=admit)
            await self._event("finished", name)
        return answer

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for stream in self._streams.values():
            stream.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    def _say(self, role: Role, **message: Any) -> None:
        self._outboxes[role].put_nowait(worker_pb2.AttachRequest(**message))

    async def _event(self, kind: str, name: str) -> Any:
        try:
            return await asyncio.wait_for(self._future(kind, name), REQUEST_S)
        except TimeoutError:
            raise RuntimeError(f"{name} has waited {REQUEST_S:.0f} s for {kind}; ended: {self.ended}") from None

    def _future(self, kind: str, name: str) -> asyncio.Future[Any]:
        return self._events.setdefault((kind, name), asyncio.get_running_loop().create_future())

    def _tell(self, kind: str, name: str, message: Any) -> None:
        future = self._future(kind, name)
        if not future.done():
            future.set_result(message)

    async def _write(self, role: Role, stream: Any) -> None:
        while True:
            await stream.write(await self._outboxes[role].get())

    async def _read(self, role: Role, stream: Any) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            kind = message.WhichOneof("message")
            body = getattr(message, kind)
            if kind in ("granted", "first_token"):
                self._tell(kind, body.request_id, body)
            elif kind == "tokens":
                arrived = decode_response(role.value, message)
                assert isinstance(arrived, TokensArrived)
                for row in arrived.rows:
                    answer = self._answers[row.key.request_id]
                    answer.tokens += [token.token_id for token in row.tokens]
                    answer.last_s = time.perf_counter()
                    if row.finish:
                        self._tell("finished", row.key.request_id, row)
            elif kind in ("refused", "failed"):
                self.ended.append(f"{role.value}: {kind} {body}"[:300])
        self.ended.append(f"{role.value}: the stream ended")

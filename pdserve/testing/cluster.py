"""A whole cluster in this process, for tests: one router and toy workers on loopback ports."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self, final

import decode_worker.program
import prefill_worker.program
from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig, with_gateway
from pdserve.core.errors import ConfigError, InternalError, NotFound
from pdserve.core.types import Role
from pdserve.engine import toy
from pdserve.launch.local import first_answer, tls_to
from pdserve.listening import ignore_poller_races
from pdserve.program import Host
from pdserve.text.tokenizer import load_tokenizer
from pdserve.worker.context import ProgramContext
from pdserve.worker.host import WorkerHost
from pdserve.worker.program import AnyProgram
from router.service.program import RouterHost

MAX_WORKERS: Final = 16  # of each role: a process has few cores, and each worker has three threads
START_S: Final = 30.0
_SETTINGS: Final = {"model": "toy", "host": "127.0.0.1", "port": 0}
_WORKER_SETTINGS: Final = {**_SETTINGS, "heartbeat_s": 0.05}
_BUILD: Final[dict[Role, Callable[[ProgramContext], AnyProgram]]] = {
    Role.PREFILL: prefill_worker.program.build,
    Role.DECODE: decode_worker.program.build,
}


@final
class Cluster:
    """Runs while its `with` block, or its `async with` block, runs.

    `address` is the target for clients. `router` and `worker` set fields of RouterConfig, and of each worker's
    WorkerConfig: `worker={"toy_step_s": 0.05}` makes steps slow, `router={"max_queue": 0}` rejects requests that would
    have to wait. The answers of the toy model are those of `toy_answer`. Another model is set on both sides:
    `router={"model": "FOLDER"}, worker={"model": "FOLDER"}`. `gateway` sets fields of GatewayConfig; with it, also if
    it is empty, the router's process serves OpenAI's HTTP API at `http_address`.
    """

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        router: Mapping[str, Any] | None = None,
        worker: Mapping[str, Any] | None = None,
        gateway: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ConfigError."""
        for name, count, least in (("prefill", prefill, 0), ("decode", decode, 1)):
            if not least <= count <= MAX_WORKERS:
                raise ConfigError(name, count, f"{least} to {MAX_WORKERS} workers")
        self._secret = secrets.token_hex(32)
        self._router = dict(router or {})
        if self._router.get("key_file"):  # the operator's token, to see the workers
            self._router.setdefault("token", secrets.token_hex(32))
        self._gateway = gateway
        self._workers = {
            f"{role.value}-{number}": (role, dict(worker or {}))
            for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
            for number in range(count)
        }
        self._hosts: dict[str, Host] = {}
        self._handler: Any = None  # of the caller's event loop
        self.address = self.http_address = ""

    @property
    def worker_ids(self) -> list[str]:
        """Names of the running workers."""
        return [name for name in self._hosts if name in self._workers]

    def stop_worker(self, worker_id: str) -> None:
        """Ends a worker at once, like a crash: its requests continue on others. Raises NotFound."""
        if worker_id not in self.worker_ids:
            raise NotFound("worker", worker_id)
        self._hosts.pop(worker_id).stop()

    def start(self) -> None:
        """Returns once a request has been answered. Raises ConfigError."""
        if self._hosts:
            raise InternalError("the cluster runs already")
        try:
            addresses = [self._start_worker(name) for name in self._workers]
            config = RouterConfig(
                **{**_SETTINGS, "workers": tuple(addresses), "cluster_secret": self._secret, **self._router}
            )
            if self._gateway is not None:
                config = with_gateway(config, GatewayConfig(router="", **{"port": 0, **self._gateway}))
            self._hosts["router"] = host = RouterHost(config, on_fatal=_ignore)
            self.address, self.http_address = host.start(), host.http_address
            with ThreadPoolExecutor(1) as thread:  # this thread may run an event loop
                thread.submit(asyncio.run, self._ready(config, len(addresses))).result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends all requests and workers. Idempotent."""
        for name in reversed(list(self._hosts)):  # the router first, so that no new work comes
            self._hosts.pop(name).stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._handler = loop.get_exception_handler()
        loop.set_exception_handler(ignore_poller_races)
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)
        asyncio.get_running_loop().set_exception_handler(self._handler)

    async def _ready(self, config: RouterConfig, num_workers: int) -> None:
        asyncio.get_running_loop().set_exception_handler(ignore_poller_races)
        await first_answer(
            self.address,
            token=config.token or None,
            workers=num_workers,
            timeout_s=START_S,
            tls=tls_to(config),
            insecure=config.insecure,
        )

    def _start_worker(self, name: str) -> str:
        role, settings = self._workers[name]
        config = WorkerConfig(**{**_WORKER_SETTINGS, "worker_id": name, "cluster_secret": self._secret, **settings})
        self._hosts[name] = host = WorkerHost(config, role, _BUILD[role], on_fatal=_ignore, on_stall=_ignore)
        return host.start()


def toy_answer(prompt: str, max_tokens: int, model: str = "toy") -> str:
    """The text that a toy model generates for `prompt` at temperature 0."""
    tokenizer = load_tokenizer(model)
    return tokenizer.decode(toy.answer(tokenizer.encode(prompt), max_tokens, model=model))


def _ignore() -> None:
    """A part has failed. Its requests fail or move; the test's process must not end."""

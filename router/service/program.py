"""A router in this process with its own thread and event loop, for scripts, tests and Ray actors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

from pdserve.config import OF_GATEWAY, RouterConfig, gateway_of
from pdserve.core.durations import clamped_s
from pdserve.core.errors import ConfigError, InternalError
from pdserve.listening import ignore_poller_races, needed_by, with_allowed_connections
from router.service.server import STOP_GRACE_S, RouterServer

if TYPE_CHECKING:
    from pdserve.gateway.server import GatewayServer

log = logging.getLogger(__name__)

FATAL_EXIT_CODE: Final = 71
FAREWELL_S: Final = 0.5
GATEWAY_STOP_S: Final = 3.0  # in which a gateway tells its clients that it ends


def end_process() -> None:
    time.sleep(FAREWELL_S)
    os._exit(FATAL_EXIT_CODE)


@final
class RouterHost:
    """start() once; then drain() or stop(); wait() returns when it has ended."""

    def __init__(self, config: RouterConfig, *, on_fatal: Callable[[], None] = end_process) -> None:
        """With the gateway of `gateway_of(config)`, if there is one. Raises ConfigError, as RouterServer and
        GatewayServer do. A fatal error calls `on_fatal`."""
        self._config, self._gateway_config = config, gateway_of(config)
        self._gateway: GatewayServer | None = None
        self._is_ending = False
        self._drain_s = config.drain_s
        self._on_fatal = on_fatal
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._has_ended = threading.Event()
        self._stop_lock = threading.Lock()
        with contextlib.ExitStack() as opened:
            self._server = RouterServer(config, on_crash=self._crashed)  # opens files and ports
            opened.callback(self._server.close)
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(ignore_poller_races)
            opened.pop_all()

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def http_address(self) -> str:
        """Empty without a gateway."""
        return "" if self._gateway is None else self._gateway.address

    @property
    def memory(self) -> str:
        return ""

    def start(self) -> str:
        """Returns HOST:PORT once it listens. Raises ConfigError and ModelError, as RouterServer does."""
        try:
            self._thread.start()
            return str(self._on_loop(self._start()))
        except BaseException:
            self.stop()
            raise

    def is_healthy(self) -> bool:
        return self._thread.is_alive() and self._server.is_healthy

    def drain(self) -> None:
        """Lets running requests finish, for at most drain_s, then stops. Returns immediately. Idempotent."""
        threading.Thread(target=self._drain, name="drain", daemon=True).start()

    def stop(self) -> None:
        """Ends every call and stream now. Idempotent."""
        with self._stop_lock:
            if self._has_ended.is_set():
                return
            self._finish(self._stop(), STOP_GRACE_S + GATEWAY_STOP_S + 5.0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once the router has ended."""
        return self._has_ended.wait(None if timeout_s is None else clamped_s(timeout_s))

    def reload(self, changes: Mapping[str, Any]) -> None:
        self._drain_s = changes.get("drain_s", self._drain_s)
        with contextlib.suppress(RuntimeError):  # the router has just ended
            self._loop.call_soon_threadsafe(self._reload, changes)

    # ------------------------------------------------------------------------------------------------------------

    async def _start(self) -> str:
        address = await self._server.start()
        if self._gateway_config is not None:
            # Imported here, because a router without it needs none of its packages.
            from pdserve.gateway.server import GatewayServer

            server, num_reserved = self._server, needed_by(self._config) - needed_by(self._gateway_config)
            gateway_config = with_allowed_connections(self._gateway_config, num_reserved)
            self._gateway = GatewayServer(
                gateway_config, server.transport, gate=server.gate, on_end=self._gateway_ended
            )
            try:
                await self._gateway.start()
            except ConfigError as error:
                raise ConfigError(OF_GATEWAY + error.field, error.seen, error.expected) from None
        return address

    async def _drain_both(self) -> None:
        self._is_ending = True
        await self._server.drain(self._gateway)

    async def _stop(self) -> None:
        self._is_ending = True
        try:
            if self._gateway is not None:
                await self._gateway.stop()
        finally:
            await self._server.stop()

    def _reload(self, changes: Mapping[str, Any]) -> None:
        of_gateway = {name.removeprefix(OF_GATEWAY): changes[name] for name in changes if name.startswith(OF_GATEWAY)}
        self._server.reload({name: changes[name] for name in changes if not name.startswith(OF_GATEWAY)})
        if self._gateway is not None:
            self._gateway.reload(of_gateway)

    def _gateway_ended(self) -> None:
        if not self._is_ending and self.http_address:
            log.critical("the HTTP server ended")
            self._crashed(InternalError("the HTTP server ended"))

    def _drain(self) -> None:
        if self._thread.is_alive() and not self._has_ended.is_set():
            try:
                self._on_loop(self._drain_both(), self._drain_s + STOP_GRACE_S + GATEWAY_STOP_S + 5.0)
            except Exception:  # any error ends the router
                log.exception("the router did not drain cleanly")
        self.stop()

    def _finish(self, closing: Any, timeout_s: float) -> None:
        if self._thread.is_alive():
            try:
                self._on_loop(closing, timeout_s)
            except Exception:  # the process or actor still ends
                log.exception("the router did not stop cleanly")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
        else:
            closing.close()
            self._loop.close()
            self._server.close()
        self._has_ended.set()

    def _crashed(self, error: BaseException) -> None:
        threading.Thread(target=self._on_fatal, name="fatal", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _on_loop(self, work: Any, timeout_s: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)


def make_router(config: RouterConfig) -> RouterHost:
    return RouterHost(config)

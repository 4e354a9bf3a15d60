"""One thread that makes blocking calls for an event loop, and may be left behind when a call never returns."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

Result = TypeVar("Result")


@final
class CallThread:
    """Calls run in order. The thread is a daemon: a call that hangs does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, function: Callable[..., Result], *args: Any, timeout_s: float | None = None) -> Result:
        """Raises TimeoutError after `timeout_s`; the call itself goes on, and those after it wait for it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def put(setter: Callable[[Any], None], value: Any) -> None:
            def settle() -> None:
                if not future.done():
                    setter(value)

            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)

        def run() -> None:
            try:
                result = function(*args)
            except Exception as error:  # whatever the call raises belongs to who awaits it
                put(future.set_exception, error)
            else:
                put(future.set_result, result)

        self._calls.put(run)
        return await asyncio.wait_for(future, timeout_s)

    def _run(self) -> None:
        while True:
            self._calls.get()()

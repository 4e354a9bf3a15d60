"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar, final

JOIN_S: Final = 5.0

T = TypeVar("T")


@final
class LoopThread:
    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def result_of(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it on the loop, and waits. Called on another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """Also if it was not started. Idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(JOIN_S)
        else:
            self.loop.close()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

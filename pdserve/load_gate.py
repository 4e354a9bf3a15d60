"""The gate of one process (pdserve/core/access/gate.py) on its event loop: measures the loop's delay and CPU time, and
counts the requests that enter.

A gateway in the router's process shares the router's gate. A request that has entered at the gateway enters the
router's service without being counted or checked again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, final

from pdserve.core.access.gate import DEFAULT_TTFT_S, Gate
from pdserve.core.errors import LoadShed
from pdserve.wire.local_channel import QUEUED_S

PERIOD_S: Final = 0.02  # of the timer
IDLE_S: Final = 1.0  # without a running request, after which the timer stops

ENTERED: ContextVar[EnteredRequest | None] = ContextVar("pdserve_entered", default=None)


@final
class EnteredRequest:
    """Notes how the cluster decided, once."""

    __slots__ = ("_has_waited", "_is_decided", "caller", "gate", "priority")

    def __init__(self, gate: LoadGate, caller: str, priority: int) -> None:
        self.gate, self.caller, self.priority = gate, caller, priority
        self._has_waited = self._is_decided = False

    def reached_router(self) -> None:
        """From the gateway of the router's process. The wait of its first call counts: further ones wait for each
        other, and work before the first, such as the tokenizer's, is no delay of the event loop."""
        if not self._has_waited:
            self._has_waited = True
            now_s = self.gate.clock()
            self.gate.core.waited(now_s - QUEUED_S.get(now_s))

    def accepted(self) -> None:
        if not self._is_decided:
            self._is_decided = True
            self.gate.core.accepted(self.caller, self.priority, self.gate.clock())

    def rejected(self, retry_after_s: float) -> None:
        if not self._is_decided:
            self._is_decided = True
            self.gate.core.rejected(self.caller, self.priority, retry_after_s, self.gate.clock())


@final
class LoadGate:
    """Belongs to one event loop."""

    def __init__(
        self,
        ttft_s: float = DEFAULT_TTFT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.thread_time,
    ) -> None:
        """`ttft_s`: the default TTFT target. `busy`: CPU time of the event loop's thread."""
        self.core = Gate(ttft_s)
        self.on_pace: Callable[[float], None] = lambda interval_s: None
        """Called with `core.pace.interval_s` when it changes."""
        self.clock = clock
        self._busy = busy
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._busy_s = self._active_s = 0.0

    def check(self, caller: str, priority: int | None = None) -> LoadShed | None:
        """The error of a request that must be rejected now. `priority` None: not known yet."""
        if self._outer() is not None:
            return None
        return self.core.check(caller, priority, self.clock())

    @contextmanager
    def enter(self, caller: str, priority: int) -> Iterator[EnteredRequest]:
        """Runs a request that `check` has let pass."""
        outer = self._outer()
        if outer is not None:
            outer.reached_router()
            yield outer
            return
        entered = EnteredRequest(self, caller, priority)
        self.core.enter(caller, priority, self.clock())
        self._watch()
        reset = ENTERED.set(entered)
        try:
            yield entered
        finally:
            ENTERED.reset(reset)
            self.core.leave(caller)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------------------------------------------------

    def _outer(self) -> EnteredRequest | None:
        """The request that this task serves, if it has entered at the gateway of this process."""
        entered = ENTERED.get()
        return entered if entered is not None and entered.gate is self else None

    def _watch(self) -> None:
        self._active_s = self.clock()
        if self._timer is None:
            self._busy_s = self._busy()
            self._set_timer(self._active_s)

    def _set_timer(self, now_s: float) -> None:
        self._due_s = now_s + PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)

    def _tick(self) -> None:
        now_s, busy_s, pace_s = self.clock(), self._busy(), self.core.pace.interval_s
        self.core.observe(max(now_s - self._due_s, 0.0), busy_s - self._busy_s, now_s)
        self._busy_s = busy_s
        if self.core.running:
            self._active_s = now_s
        if now_s - self._active_s > IDLE_S:
            self._timer = None
            self.core.pause()
        else:
            self._set_timer(now_s)
        if self.core.pace.interval_s != pace_s:
            self.on_pace(self.core.pace.interval_s)

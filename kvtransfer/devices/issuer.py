"""The thread that calls NCCL for a device, where a call may never return.

A call is not started if its caller has stopped waiting for it. If a call does not return in time, a new thread replaces
the stuck one, so that later calls continue. The stuck thread ends if its call ever returns.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, final

from pdserve.core.errors import TransferFailed

log = logging.getLogger(__name__)

CALL_S: Final = 10.0
_num_stuck = 0  # threads of this process that were replaced
_lock = threading.Lock()


def events() -> dict[str, int]:
    """For pdserve_kv_transfer_events_total, beside kvtransfer.protocol.transport."""
    return {"stuck_nccl_calls": _num_stuck}


def _count_stuck() -> None:
    global _num_stuck
    with _lock:
        _num_stuck += 1


@final
class IssuedCall:
    """A function that another thread runs, and what it returned."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_given_up = False

    def run(self) -> None:
        with self._lock:
            if self._is_given_up:
                return
        try:
            self._done.put((self._function(), None))
        except BaseException as error:  # handed to the caller
            self._done.put((None, error))

    def answer(self, timeout_s: float) -> Any:
        """The result of the function. Raises TransferFailed if the function raised or takes too long. If it has not
        started by then, it never will."""
        try:
            value, error = self._done.get(timeout=timeout_s)
        except queue.Empty:
            with self._lock:
                self._is_given_up = True
            raise TransferFailed(f"NCCL has not answered in {timeout_s:g} s") from None
        if error is not None:
            raise TransferFailed(f"NCCL failed: {status_of(error)}") from error
        return value


@final
class Issuer:
    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[IssuedCall] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards all below
        self._running: IssuedCall | None = None
        self.num_replaced = 0  # threads that were stuck
        self._begin()

    def call(self, function: Callable[[], Any], timeout_s: float = CALL_S) -> Any:
        """Runs `function` on the issuing thread. Raises TransferFailed if it raises or takes too long."""
        call = IssuedCall(function)
        self._calls.put(call)
        try:
            return call.answer(timeout_s)
        except TransferFailed:
            self._replace(call)
            raise

    def _begin(self) -> None:
        threading.Thread(target=self._run, args=(self.num_replaced,), name="nccl-issuer", daemon=True).start()

    def _replace(self, call: IssuedCall) -> None:
        with self._lock:
            if self._running is not call:  # it has ended, or is waiting behind another call
                return
            self.num_replaced += 1
            self._running = None
            _count_stuck()
            log.error("an NCCL call is stuck; its thread is replaced", extra={"replaced": self.num_replaced})
            self._begin()

    def _run(self, number: int) -> None:
        while True:
            call = self._calls.get()
            with self._lock:
                self._running = call
            call.run()
            with self._lock:
                if self.num_replaced != number:
                    return
                self._running = None


def answer_of(function: Callable[[], Any], begin: Callable[[Callable[[], None]], object], timeout_s: float) -> Any:
    """The result of `function`, on the thread on which `begin` runs it. Raises TransferFailed."""
    call = IssuedCall(function)
    begin(call.run)
    return call.answer(timeout_s)


def on_its_own_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="nccl-join", daemon=True).start()


def status_of(error: BaseException) -> str:
    """The NCCL status of an error. For a status that CuPy has no name for, CuPy raises KeyError with its number."""
    return f"status {error.args[0]}" if isinstance(error, KeyError) and error.args else str(error)

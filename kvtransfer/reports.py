"""Reports results to the owners of transfers, in the order of the table's decisions, without holding its lock."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

from kvtransfer.transport import Received, ReceiveOutcome, Sent
from pdserve.core.grant import TransferKey

log = logging.getLogger(__name__)

Result = TypeVar("Result", Received, Sent)


@final
class Reports(Generic[Result]):
    """`lock` guards the transfer table and this object."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._owners: dict[TransferKey, Callable[[Result], None]] = {}
        self._results: deque[Result] = deque()
        self._delivery = threading.Lock()  # held while ends are delivered, so that they stay in order

    def __len__(self) -> int:
        """Transfers that have an owner."""
        return len(self._owners)

    def own(self, key: TransferKey, owner: Callable[[Result], None]) -> None:
        """With the lock held."""
        self._owners[key] = owner

    def disown(self, key: TransferKey) -> None:
        """With the lock held."""
        self._owners.pop(key, None)

    def add(self, end: Result) -> None:
        """With the lock held."""
        self._results.append(end)

    def deliver(self) -> None:
        """Without the lock."""
        if not self._results:
            return
        with self._delivery:
            while True:
                with self._lock:
                    if not self._results:
                        return
                    end = self._results.popleft()
                    keeps = end.outcome is ReceiveOutcome.QUARANTINED
                    owner = self._owners[end.key] if keeps else self._owners.pop(end.key)
                try:
                    owner(end)
                except Exception:  # an error of one owner must not end the other owners' transfers
                    log.exception("on_end of a transfer raised", extra={"transfer_id": end.key.transfer_id})

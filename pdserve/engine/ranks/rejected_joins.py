"""Number of rejected calls to this process's rendezvous, including those before its engine was ready."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

_by_reason: Counter[str] = Counter()
_lock = threading.Lock()


def count_rejected_join(reason: str) -> None:
    with _lock:
        _by_reason[reason] += 1


def rejected_joins() -> Mapping[str, int]:
    """Counts since the process started, by reason, for pdserve_worker_rejected_rank_joins_total."""
    with _lock:
        return dict(_by_reason)

"""Tokens that a simulated decode worker has not reported to its routers yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import final

from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import TokenRow
from simulator.prompts import TOKEN


@dataclass(slots=True)
class _Tokens:
    """The tokens of one attempt."""

    output_index: int  # of the first
    count: int
    decode_s: float = 0.0
    decode_queue_s: float = 0.0
    preempted_s: float = 0.0
    preemptions: int = 0


@final
class UnreportedTokens:
    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._of: dict[AttemptKey, _Tokens] = {}

    def __len__(self) -> int:
        return len(self._of)

    @property
    def attempts(self) -> list[AttemptKey]:
        return list(self._of)

    def add(self, key: AttemptKey, output_index: int, count: int) -> None:
        """`output_index` is that of the first of these tokens."""
        held = self._of.get(key)
        if held is None:
            self._of[key] = _Tokens(output_index, count)
        else:
            held.count += count

    def add_account(self, row: TokenRow) -> None:
        """Adds the durations and the number of preemptions that the row reports."""
        if row.decode_s or row.decode_queue_s or row.preempted_s or row.preemptions:
            held = self._of[row.key]
            held.decode_s += row.decode_s
            held.decode_queue_s += row.decode_queue_s
            held.preempted_s += row.preempted_s
            held.preemptions += row.preemptions

    def discard(self, key: AttemptKey) -> None:
        self._of.pop(key, None)

    def take(self, rows: Iterable[TokenRow]) -> dict[int, list[TokenRow]]:
        """Removes the tokens of the attempts of `rows`. Returns for each router the rows with these tokens."""
        by_router: dict[int, list[TokenRow]] = {}
        for row in rows:
            key, held = row.key, self._of.pop(row.key)
            full = replace(
                row,
                key=key._replace(peer=self._worker_id),
                output_index=held.output_index,
                tokens=(TOKEN,) * held.count,
                decode_s=held.decode_s,
                decode_queue_s=held.decode_queue_s,
                preempted_s=held.preempted_s,
                preemptions=held.preemptions,
            )
            by_router.setdefault(key.router, []).append(full)
        return by_router

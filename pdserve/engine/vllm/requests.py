"""Which rows of a step continue rows of the last one, so that vLLM's runner, which keeps requests, computes them. Pure:
needs no vLLM.

The runner knows of a request its blocks and its adapter, and nothing else that decides a result: the engine writes the
tokens of every row, and their KV is in the blocks. So any request with the row's adapter whose blocks are the row's
first blocks may be continued, whichever text it began with. A row that continues none becomes a new request. Requests
that the next step does not continue are finished.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import final

from pdserve.engine.interface import Row


@dataclass(frozen=True, slots=True)
class Place:
    """A row as the runner sees it."""

    name: str  # of its request
    is_new: bool
    blocks: list[int]  # all blocks of a new request; those that a continued request lacks
    end: int  # positions of the text whose KV is known after the step


@dataclass(slots=True)
class _Request:
    name: str
    blocks: list[int]  # that the runner has
    adapter: str


@final
class Requests:
    """The requests of the last step. A row finds the request that wrote the position before the row."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._writer_of: dict[int, _Request] = {}  # by block that it wrote in the last step; no two rows write one
        self._names: set[str] = set()
        self._numbers = count()

    def place(self, rows: Sequence[Row]) -> tuple[list[Place], set[str]]:
        """The rows' requests, and the names of requests that ended. The runner must then compute these rows."""
        found = [self._continued(row) for row in rows]
        kept = {request.name for request in found if request is not None}
        ended = self._names - kept
        self._writer_of.clear()
        places, names = [], set()
        for row, request in zip(rows, found, strict=True):
            end = row.start + row.num_queries
            num_needed = -(-end // self._block_size)
            is_new = request is None or request.name in names  # rows of one text cannot continue it twice
            if request is None or is_new:
                request = _Request(f"row-{next(self._numbers)}", [], row.adapter)
            added = list(row.blocks[len(request.blocks) : num_needed])
            request.blocks += added
            places.append(Place(request.name, is_new, added, end))
            names.add(request.name)
            for block in row.blocks[row.start // self._block_size : num_needed]:
                self._writer_of[block] = request
        self._names = names
        return places, ended

    def forget(self) -> set[str]:
        """The names of all requests, which no row continues then: after a step that failed the runner may have any of
        them, or not."""
        names, self._names = self._names, set()
        self._writer_of.clear()
        return names

    def _continued(self, row: Row) -> _Request | None:
        if row.start == 0:
            return None
        request = self._writer_of.get(row.blocks[(row.start - 1) // self._block_size])
        if (
            request is None
            or request.adapter != row.adapter
            or list(row.blocks[: len(request.blocks)]) != request.blocks
        ):
            return None
        return request


def divided(
    rows: Sequence[Row],
    most_rows: int,
    most_tokens: int,
    most_adapters: int = 0,
    active: Callable[[], Container[str]] = frozenset,
) -> Iterator[Sequence[int]]:
    """Indices of rows that the runner can compute together. A row alone may have more tokens than allowed.

    With too many adapters, rows are ordered by them. Those whose weights are in a slot (`active`) come first, so that
    a step replaces as few as possible.
    """
    order: Sequence[int] = range(len(rows))
    adapters = dict.fromkeys(row.adapter for row in rows if row.adapter)
    if len(adapters) > most_adapters:
        known = active()
        places = {name: place for place, name in enumerate(sorted(adapters, key=lambda name: name not in known))}
        order = sorted(order, key=lambda index: places.get(rows[index].adapter, 0) // most_adapters)
    first = num_tokens = 0
    together: set[str] = set()
    for at, index in enumerate(order):
        row = rows[index]
        is_full = at - first == most_rows or num_tokens + row.num_queries > most_tokens
        if row.adapter and row.adapter not in together:
            is_full |= len(together) == most_adapters
            together.add(row.adapter)
        if at > first and is_full:
            yield order[first:at]
            first, num_tokens = at, 0
            together = {row.adapter} - {""}
        num_tokens += row.num_queries
    yield order[first:]

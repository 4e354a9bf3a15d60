"""The router's interface to a prefix index, and its implementation in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, final

from pdserve.prefix.index import PrefixIndex


class PrefixLookup(Protocol):
    @property
    def is_available(self) -> bool:
        """False while the index cannot be reached; an empty answer then has no meaning."""
        ...

    async def lookup(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """The number of leading blocks of the chain `hashes` that each worker has cached, by worker id.

        Never raises: an index that cannot answer in time returns nothing, and routing continues by load.
        """
        ...


@final
class MemoryLookup:
    """Answers from an index that this process feeds itself."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.is_available = True

    async def lookup(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        return self._index.lookup(hashes)

"""The KV connections between workers, as prefill workers report them. For operators and traces; no decision uses
them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

from pdserve.core.errors import InvalidRequest
from pdserve.v1 import worker_pb2

MAX_LINKS: Final = 4096
MAX_CHARS: Final = 1024  # in each text field


@final
class KvLinks:
    def __init__(self) -> None:
        self._of: dict[str, dict[str, worker_pb2.KvLink]] = {}  # prefill worker -> decode worker -> link

    def reported(self, prefill_worker: str, links: Iterable[worker_pb2.KvLink]) -> None:
        """Replaces the worker's links. Raises InvalidRequest."""
        kept = list(links)
        if len(kept) > MAX_LINKS:
            raise InvalidRequest("kv_links", f"{len(kept)} links", f"at most {MAX_LINKS}")
        for one in kept:
            if max(len(one.decode_worker), len(one.transport), len(one.reason)) > MAX_CHARS:
                raise InvalidRequest("kv_links", "a longer text", f"at most {MAX_CHARS} characters")
        self._of[prefill_worker] = {one.decode_worker: one for one in kept}

    def forget(self, worker_id: str) -> None:
        """Removes the connections of a lost worker."""
        self._of.pop(worker_id, None)
        for links in self._of.values():
            links.pop(worker_id, None)

    def of(self, prefill_worker: str) -> Sequence[worker_pb2.KvLink]:
        return list(self._of.get(prefill_worker, {}).values())

    def between(self, prefill_worker: str, decode_worker: str) -> worker_pb2.KvLink | None:
        return self._of.get(prefill_worker, {}).get(decode_worker)

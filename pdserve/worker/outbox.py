"""Messages that wait to be sent to routers. Runs on the engine thread only. No I/O: the host sends them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.blocks import CacheChange
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import encode_response
from pdserve.worker import messages


@final
class Outbox:
    """The order is kept for each router. A message to a router whose stream has ended is dropped."""

    def __init__(self) -> None:
        self._routers: dict[int, bool] = {}  # session -> whether it wants KV events
        self._pending: list[tuple[int, worker_pb2.AttachResponse]] = []

    def attach(self, session: int, *, wants_kv_events: bool) -> None:
        self._routers[session] = wants_kv_events

    def detach(self, session: int) -> None:
        self._routers.pop(session, None)

    def __contains__(self, session: int) -> bool:
        """Whether the router's stream is attached."""
        return session in self._routers

    def take(self) -> list[tuple[int, worker_pb2.AttachResponse]]:
        """(session, message) pairs since the last call, in order."""
        pending, self._pending = self._pending, []
        return pending

    def send(self, session: int, response: worker_pb2.AttachResponse) -> None:
        if session in self._routers:
            self._pending.append((session, response))

    def report(self, message: pr.AttemptMessage) -> None:
        """Sends a message about an attempt to the router of the attempt."""
        self.send(message.key.router, encode_response(message))

    def report_all(self, message: pr.Load | pr.BatchTimed) -> None:
        response = encode_response(message)
        for session in self._routers:
            self.send(session, response)

    def report_load(self, session: int, load: pr.Load) -> None:
        self.send(session, encode_response(load))

    def report_scores(self, effect: fx.PromptScored) -> None:
        for message in messages.prompt_scored(effect):
            self.send(effect.key.router, worker_pb2.AttachResponse(prompt_scored=message))

    def report_links(self, links: Iterable[tuple[str, str, str]], session: int | None = None) -> None:
        """(decode worker, transport, reason) of each link, to one router or all."""
        reported = [worker_pb2.KvLink(decode_worker=one[0], transport=one[1], reason=one[2]) for one in links]
        response = worker_pb2.AttachResponse(kv_links=worker_pb2.KvLinks(links=reported))
        for one in self._routers if session is None else (session,):
            self.send(one, response)

    def report_cache(self, change: CacheChange, session: int | None = None) -> None:
        """To one router, or all that want KV events."""
        response = worker_pb2.AttachResponse(kv_events=messages.kv_events(change))
        wanting = [one for one, wants in self._routers.items() if wants]
        for one in wanting if session is None else (session,):
            self.send(one, response)

"""The open connections of a server, and which of them is closed to make room for a new one."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, final

from pdserve.core.access.shares import closes_silent, first_to_close
from pdserve.gateway.api.errors import ErrorReply
from pdserve.listening import MAX_LINGERING
from pdserve.outage_log import LogLimit

log = logging.getLogger(__name__)


class OpenConnection(Protocol):
    def end_idle(self) -> None:
        """To make room, or because the server ends."""

    def drop(self) -> None:
        """Without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_connections: int
    max_header_bytes: int  # of a request line and its headers
    header_s: float  # time to receive these
    idle_s: float  # between two requests
    stall_s: float  # time that a client may read nothing


@final
@dataclass(slots=True)
class Connections:
    """All open connections of a server. Those without a request are closed first when there are too many.

    Of those that have sent something, the host with the most loses one. Those that sent nothing cost their clients the
    least, so they are closed in the least time, the oldest first whatever its host. For the same reason they give up
    their places among the lingering ones first.
    """

    limits: ConnectionLimits
    idle: dict[OpenConnection, str] = field(default_factory=dict)  # with their hosts; longest idle first
    silent: OrderedDict[OpenConnection, None] = field(default_factory=OrderedDict)  # have sent nothing; oldest first
    lingering: OrderedDict[OpenConnection, None] = field(default_factory=OrderedDict)  # oldest first
    rejected: OrderedDict[OpenConnection, None] = field(
        default_factory=OrderedDict
    )  # silent ones that linger; likewise
    num_open: int = 0  # without the lingering ones
    num_dropped: int = 0
    is_ending: bool = False  # idle ones are ended because the server leaves its port, not to make room
    # The answer to a request with this URL and these headers that is rejected without being served; None: it is served.
    shed: Callable[[bytes, Iterable[tuple[bytes, bytes]]], ErrorReply | None] = lambda url, headers: None
    failures: LogLimit = field(default_factory=LogLimit)  # of TLS handshakes

    def handshake_failed(self, why: str) -> None:
        """Limited, because any process that reaches the port can cause failures."""
        if count := self.failures.due(time.monotonic()):
            log.warning("TLS handshakes failed", extra={"connections": count, "why": why})

    def make_room(self) -> bool:
        """For the newest connection, which is counted but not yet listed. False if none can make room."""
        if self.num_open <= self.limits.max_connections:
            return True
        self.num_dropped += 1
        if closes_silent(len(self.silent), len(self.idle)):
            oldest, _ = self.silent.popitem(last=False)
            oldest.end_idle()
            return True
        closed = first_to_close(self.idle)
        if closed is None:
            return False
        del self.idle[closed]
        closed.end_idle()
        return True

    def linger(self, connection: OpenConnection) -> None:
        self.idle.pop(connection, None)
        self._linger_in(self.lingering, connection)

    def linger_silent(self, arrival: OpenConnection) -> None:
        """It has sent nothing, and is rejected."""
        self._linger_in(self.rejected, arrival)

    def _linger_in(self, place: OrderedDict[OpenConnection, None], connection: OpenConnection) -> None:
        self.num_open -= 1
        place[connection] = None
        if len(self.lingering) + len(self.rejected) > MAX_LINGERING:
            oldest, _ = (self.rejected or self.lingering).popitem(last=False)
            oldest.drop()

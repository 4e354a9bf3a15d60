"""gRPC options of a public port, which limit what a foreign client can keep open. No I/O.

connections   at most so many at a time; further ones are closed as they are accepted
half-open     a connection that has not sent its HTTP/2 preface within HANDSHAKE_S is closed
idle          a connection without a call is closed after a while; gRPC's clients open a new one with the next call
age           a connection is closed at some age, 10 % less or more, so that connections spread over routers again.
              Calls that run on it may finish within the grace; a client opens a new connection for the next call.
streams       calls of one connection at a time; further ones wait in the client
"""

from __future__ import annotations

from typing import Final

HANDSHAKE_S: Final = 10.0
MAX_STREAMS: Final = 4096
_MOST_MS: Final = 2**31 - 1  # gRPC reads a C int; the largest value means never


def port_options(*, max_connections: int, idle_s: float, shares_port: bool) -> list[tuple[str, int]]:
    """`shares_port`: the launcher keeps the port bound, and starts one server beside it. Otherwise a port in use is an
    error, because a second server would get half of the calls."""
    return [
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(HANDSHAKE_S)),
        ("grpc.max_connection_idle_ms", _ms(idle_s)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
    ]


def age_options(*, age_s: float, grace_s: float) -> list[tuple[str, int]]:
    """`grace_s`: the maximum duration of a call, so that no call is interrupted."""
    return [
        ("grpc.max_connection_age_ms", _ms(age_s)),
        ("grpc.max_connection_age_grace_ms", _ms(grace_s)),
    ]


def _ms(seconds: float) -> int:
    return min(int(seconds * 1000), _MOST_MS)

"""A Redis as an operator has it: on a TCP port, with a password."""

from __future__ import annotations

from typing import Final

from redis import Redis

from pdserve.launch.ports import free_ports
from pdserve.prefix.embedded import EmbeddedRedis

PASSWORD: Final = "of-the-operator"


def listen_on_tcp(server: EmbeddedRedis) -> str:
    """The URL at which `server`, which has listened on its socket alone, now listens too. It requires PASSWORD."""
    [port] = free_ports(1)
    with Redis.from_url(server.url) as client:
        for name, value in (("bind", "127.0.0.1"), ("requirepass", PASSWORD), ("port", port)):
            client.config_set(name, value)
    return f"redis://:{PASSWORD}@127.0.0.1:{port}/0"

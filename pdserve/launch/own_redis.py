"""Where the Redis listens that a cluster starts for itself."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pdserve.owned_folder import OwnedFolder
from pdserve.prefix.embedded import SOCKET, EmbeddedRedis, loopback_url, socket_url


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRedis:
    """On loopback with a password, or, for a cluster with TLS, on a socket file: the server itself has no TLS."""

    port: int = 0
    password: str = field(default="", repr=False)
    folder: OwnedFolder | None = None  # of the socket file

    @classmethod
    def on_port(cls, port: int) -> Self:
        return cls(port=port, password=secrets.token_hex(32))

    @classmethod
    def on_socket(cls) -> Self:
        return cls(folder=OwnedFolder.for_socket("redis", SOCKET))

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else self.folder.path / SOCKET

    @property
    def url(self) -> str:
        return loopback_url(self.port, self.password) if self.path is None else socket_url(self.path)

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}" if self.path is None else str(self.path)

    def start(self) -> EmbeddedRedis:
        """Returns when it answers. Raises ConfigError and Unavailable."""
        if self.path is not None:
            return EmbeddedRedis.start(path=self.path)
        return EmbeddedRedis.start(port=self.port, password=self.password)

"""The processes of a session that listen beyond loopback, from the kernel's tables. Linux only; empty elsewhere."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

_LISTEN: Final = "0A"
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")


class ListeningSocket(NamedTuple):
    process: str
    pid: int
    address: str
    port: int

    @property
    def is_on_loopback(self) -> bool:
        found = ipaddress.ip_address(self.address)
        mapped = getattr(found, "ipv4_mapped", None)
        return (mapped or found).is_loopback

    def __str__(self) -> str:
        return f"{self.process} (pid {self.pid}) on {self.address}:{self.port}"


def listeners(pids: Iterable[int]) -> list[ListeningSocket]:
    """All listening TCP sockets of these processes; none for ended processes and those of other users."""
    sockets = dict(_listening_sockets())
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = _SOCKET.fullmatch(os.readlink(descriptor))
                    if inode is not None and inode[1] in sockets:
                        found.add(ListeningSocket(name, pid, *sockets[inode[1]]))
    return sorted(found)


def listening_on(port: int) -> list[str]:
    """The addresses of this host at which any process listens on `port`."""
    return sorted({address for _, (address, found) in _listening_sockets() if found == port})


def session_of(leader_pid: int) -> list[int]:
    """The processes in the session that `leader_pid` leads."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid pgrp session; the name may contain any characters.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader_pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _listening_sockets() -> Iterator[tuple[str, tuple[str, int]]]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    yield fields[9], _endpoint(fields[1])


def _endpoint(text: str) -> tuple[str, int]:
    """The kernel prints an address as 32-bit words in the byte order of the machine."""
    words, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    return str(ipaddress.ip_address(packed)), int(port, 16)

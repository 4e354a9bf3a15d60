"""Identifies the host of this process for sharing memory.

Two processes get the same id if one can pass a file descriptor to the other over an abstract Unix socket: the same boot
of the same kernel, the same network namespace (it contains the abstract names), and the same user in the same user
namespace (each side checks the other's credentials). Mount and process namespaces do not matter, because a pool is an
anonymous memory file, which is passed as a descriptor.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


def can_share_memory() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")


def host_id() -> str:
    """Empty if this process cannot share memory."""
    if not can_share_memory():
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
    except OSError:
        return ""
    return "/".join([boot, *names, str(os.geteuid())])

"""Network namespaces joined by a bridge. Each is connected by a virtual cable that can be cut.

    root namespace: bridge 198.18.N.254
        |-- veth -- p0's namespace, 198.18.N.1
        |-- veth -- d0's ...

Needs root, iproute2, and a kernel with veth and bridge; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Final

LONGEST_CUT_S: Final = 3.0  # longer than any deadline of the storm


def why_not() -> str:
    """What this machine lacks for them; empty if nothing."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "network namespaces need Linux and iproute2's `ip`"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"pd{secrets.token_hex(3)}"
    tries = (
        ("netns", "add", name),
        ("link", "add", f"{name}b", "type", "bridge"),
        ("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name),
    )
    said = ""
    for words in tries:
        done = subprocess.run(("ip", *words), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = f"`ip {' '.join(words)}` says: {done.stderr.strip()}"
            break
    for words in (("link", "del", f"{name}v"), ("link", "del", f"{name}b"), ("netns", "del", name)):
        subprocess.run(("ip", *words), capture_output=True, check=False)
    return said


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, text=True)


def enter(name: str) -> None:
    """Moves this process into a network namespace that `ip netns add` made."""
    fd = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    finally:
        os.close(fd)


class Network:
    """Namespaces by name, each with one address that all others reach. Use as a context manager."""

    def __init__(self, names: Sequence[str]) -> None:
        tag = secrets.token_hex(2)
        self._prefix = f"198.18.{secrets.randbelow(250)}"
        self._bridge = f"pd{tag}br"
        self.namespaces = {name: f"pd{tag}{name}" for name in names}
        self.addresses = {name: f"{self._prefix}.{number}" for number, name in enumerate(names, start=1)}
        self._cables = {name: f"pd{tag}{name}v" for name in names}

    def __enter__(self) -> Network:
        try:
            # Without an address the bridge takes that of a port; cutting that port would disconnect all.
            ip("link", "add", self._bridge, "address", "02:00:00:00:00:fe", "type", "bridge")
            ip("addr", "add", f"{self._prefix}.254/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for name, namespace in self.namespaces.items():
                ip("netns", "add", namespace)
                ip("link", "add", self._cables[name], "type", "veth", "peer", "name", "eth0", "netns", namespace)
                ip("link", "set", self._cables[name], "master", self._bridge, "up")
                ip("-n", namespace, "link", "set", "lo", "up")
                ip("-n", namespace, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
                ip("-n", namespace, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def cut(self, name: str) -> None:
        """Cuts the cable: packets are lost in both directions without an error."""
        ip("link", "set", self._cables[name], "nomaster")

    def heal(self, name: str) -> None:
        ip("link", "set", self._cables[name], "master", self._bridge, "up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, namespace in self.namespaces.items():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("link", "del", self._cables[name])
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", namespace)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", self._bridge)


class Cables:
    """Cuts the cable of a random process now and then, and connects it again."""

    def __init__(self, network: Network, seed: int) -> None:
        self._network, self._draw = network, random.Random(seed)
        self._pulled = ""
        self._next_s = 0.0

    def pull(self, now_s: float) -> int:
        """Cuts or connects a cable if it is time; returns the number of cables that were cut."""
        if now_s < self._next_s:
            return 0
        if self._pulled:
            self.heal()
            self._next_s = now_s + self._draw.uniform(0.5, 2.0)
            return 0
        self._pulled = self._draw.choice(sorted(self._network.namespaces))
        self._network.cut(self._pulled)
        self._next_s = now_s + self._draw.uniform(0.1, LONGEST_CUT_S)
        return 1

    def heal(self) -> None:
        if self._pulled:
            self._network.heal(self._pulled)
            self._pulled = ""

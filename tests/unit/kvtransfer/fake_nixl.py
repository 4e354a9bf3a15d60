"""A stand-in for the NIXL library: reads between agents of this process, executed when their state is queried.

It keeps these properties of the real library: only the thread that created an agent may call it. A read may need
several queries, and may arrive in pieces. A failure is an exception or a state, and its data may still arrive later.
Releasing a handle ends nothing. Unregistered memory is rejected before anything is read.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import threading

_agents: dict[str, FakeNixl] = {}
Descs = list[tuple[int, int, int]]


class FakeHandle:
    def __init__(self, here: Descs, there: Descs) -> None:
        self.runs = [(to[0], from_[0], to[1]) for to, from_ in zip(here, there, strict=True)]
        self.state = "PROC"
        self.is_released = False

    def receive(self, most: int | None = None) -> None:
        for to, from_, size in self.runs[:most]:
            ctypes.memmove(to, from_, size)
        del self.runs[:most]


class World:
    """Settings of the tests for all agents."""

    def __init__(self) -> None:
        self.gate = threading.Event()  # While it is cleared, no read progresses.
        self.agents: list[FakeNixl] = []
        self.reset()

    def reset(self) -> None:
        self.gate.set()
        self.failing: str | None = None  # How reads end: "ERR", or the exception to raise.
        self.handles: list[FakeHandle] = []

    def make(self, name: str) -> FakeNixl:
        self.agents.append(FakeNixl(name, self))
        return self.agents[-1]


class FakeNixl:
    def __init__(self, name: str, world: World) -> None:
        self._name, self._world, self._thread = name, world, threading.get_ident()
        self.regions: dict[int, Descs] = {}
        self._numbers = itertools.count()
        self.remotes: set[str] = set()
        self.backends = {"UCX": 1}
        _agents[name] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str, backends: list[str]) -> int:
        self._check()
        assert (kind, backends) == ("DRAM", ["UCX"])
        number = next(self._numbers)
        self.regions[number] = [(address, size, 0) for address, size, _, _ in regions]
        return number

    def get_partial_agent_metadata(self, number: int, has_connection: bool, backends: list[str]) -> bytes:
        self._check()
        assert has_connection
        return json.dumps({"agent": self._name, "regions": self.regions[number]}).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._check()
        name = json.loads(metadata)["agent"]
        self.remotes.add(name)
        return str(name).encode()

    def remove_remote_agent(self, name: bytes) -> None:
        self._check()
        self.remotes.remove(name.decode())

    def get_xfer_descs(self, descs: Descs, kind: str) -> Descs:
        self._check()
        return descs

    def initialize_xfer(self, operation: str, here: Descs, there: Descs, remote: bytes) -> FakeHandle:
        self._check()
        assert operation == "READ"
        assert remote.decode() in self.remotes
        if not (self._covers(here) and _agents[remote.decode()]._covers(there)):
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return FakeHandle(here, there)

    def transfer(self, handle: FakeHandle) -> str:
        self._world.handles.append(handle)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: FakeHandle) -> str:
        self._check()
        assert not handle.is_released
        if not self._world.gate.is_set():
            return handle.state
        failing = self._world.failing
        if failing is None:
            handle.receive(most=4)
            handle.state = "PROC" if handle.runs else "DONE"
        elif failing == "ERR":
            handle.state = "ERR"
        else:
            raise RuntimeError(failing)
        return handle.state

    def release_xfer_handle(self, handle: FakeHandle) -> None:
        self._check()
        handle.is_released = True

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._check()
        return {}

    def _covers(self, descs: Descs) -> bool:
        regions = [region for regions in self.regions.values() for region in regions]
        return all(any(at >= a and at + n <= a + size for a, size, _ in regions) for at, n, _ in descs)

    def _check(self) -> None:
        assert threading.get_ident() == self._thread, "an agent is called by one thread"

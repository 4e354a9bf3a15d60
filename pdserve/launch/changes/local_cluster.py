"""The cluster whose workers are processes of this host: how one of them starts, changes its role and ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

from pdserve.core.errors import (
    PdserveError,
)
from pdserve.core.types import Role
from pdserve.launch.changes.cluster import ChangingCluster
from pdserve.launch.changes.plans import (
    add_worker,
    slot_for,
    with_role,
)
from pdserve.launch.changes.server import Say
from pdserve.launch.keys import Settings
from pdserve.launch.local import split
from pdserve.launch.ports import free_ports
from pdserve.launch.spec import (
    ClusterSpec,
    Process,
    ports,
    processes,
)
from pdserve.launch.supervisor import side_by_side, supervised
from pdserve.worker.role_change import change_role


@final
class LocalCluster(ChangingCluster):
    """The workers are processes of this host."""

    what_follows = "it is started again until it runs"

    def _first_start_s(self) -> float:
        return max(map(self._supervisor.start_s, self.spec.worker_ids))

    def _processes(self) -> list[Process]:
        workers = [self._process(one, self._overlays[one]) for one in self.spec.worker_ids]
        return [*workers, *self._routers()]

    def _routers(self) -> Sequence[Process]:
        return split(processes(self.spec), self.spec)[1]

    async def _start_workers(self, workers: Sequence[Process]) -> None:
        await side_by_side(self._supervisor.start(supervised(process)) for process in workers)

    def _names_of_workers(self) -> Sequence[str]:
        return self.spec.worker_ids

    def _with_worker(self, worker_id: str, role: Role, *, is_surge: bool) -> ClusterSpec:
        """Raises ConfigError without GPUs for it, or if one of its ports is in use."""
        before = self.spec
        listed = {port for _, _, port in ports(before, are_workers_here=True)}
        index, port = slot_for(before, role), 0
        if index == len(before.slots) or not before.slots[index].port:
            [port] = free_ports(1, {"127.0.0.1"}, avoid={*listed, *self._held.ports})
        held: list[int] = []
        try:
            spec = add_worker(before, worker_id, role, port, is_surge=is_surge)
            for name, host, number in ports(spec, are_workers_here=True):
                if number not in listed and number not in self._held.ports:
                    self._held.hold(name, host, number)
                    held.append(number)
        except (PdserveError, OSError):
            self._held.release({port, *held})
            raise
        return spec

    async def _start_worker(self, worker_id: str, overlay: Settings, say: Say, *, is_retried: bool = False) -> None:
        await self._supervisor.start(supervised(self._process(worker_id, overlay)), is_retried=is_retried)

    async def _take_role(self, worker_id: str, role: Role, say: Say) -> bool:
        """If the process ends in the meantime, it is started again in the new role."""
        before, began_s = self.spec, time.monotonic()
        former = self._process(worker_id, self._overlays[worker_id])
        self.spec = with_role(before, worker_id, role)
        process = self._process(worker_id, self._overlays[worker_id])
        self._has_taken_role(worker_id)
        why = await change_role(self._supervisor.address(worker_id), role, former.config, process.config)
        if why:
            self._restore_workers(before)
            say(worker_id, f"needs a new process for this role: {why}")
        else:
            # What SIGHUP has set may differ by role, and may have changed in the meantime.
            self._supervisor.reload([self._process(worker_id, self._overlays[worker_id])])
            say(worker_id, f"is a {role.value} worker after {time.monotonic() - began_s:.2f} s, in the same process")
        return not why

    def _has_taken_role(self, worker_id: str) -> None:
        self._supervisor.replace(supervised(self._process(worker_id, self._overlays[worker_id])))

    async def _end_worker(self, worker_id: str) -> None:
        await self._supervisor.end(worker_id)

    def _drain_s(self, worker_id: str) -> float:
        return self._supervisor.drain_s(worker_id)

    def _release_ports(self, before: ClusterSpec, after: ClusterSpec) -> None:
        left = {port for _, _, port in ports(after, are_workers_here=True)}
        self._held.release({port for _, _, port in ports(before, are_workers_here=True)} - left)

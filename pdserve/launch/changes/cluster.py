"""Changes of a cluster while it serves: the launcher starts, drains and ends workers when an operator asks a router for
it. `plans.py` decides which; a subclass starts and ends one worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pdserve.client.results import Worker
from pdserve.core.errors import (
    ChangeFailed,
    ConfigError,
    InvalidRequest,
    NotFound,
    PdserveError,
)
from pdserve.core.types import Role
from pdserve.launch.changes.plans import (
    RollCounts,
    RollStep,
    RollTarget,
    cheapest,
    check_serving,
    index_of,
    overlaid,
    plan_roll,
    plan_scale,
    read_settings,
    roll_target,
    stopped_text,
    vacate,
    why_failed,
    with_role,
    with_slots,
    workers_of,
)
from pdserve.launch.changes.routers import ATTACH_S, Routers
from pdserve.launch.changes.server import ChangeServer, Say
from pdserve.launch.changes.weights import check_weights, folder_of, with_revision
from pdserve.launch.detached.link import Attached, KeeperLink
from pdserve.launch.keys import Settings
from pdserve.launch.local import LaunchedCluster
from pdserve.launch.report import LauncherReport
from pdserve.launch.spec import (
    ClusterSpec,
    Process,
    check_reports,
    num_gpus,
    router_config,
    worker_process,
)

if TYPE_CHECKING:
    from pdserve.launch.changes.autoscale import Autoscaler
    from pdserve.launch.detached.saved import SavedCluster

FORGET_S: Final = 15.0  # until no router lists a worker that has ended
SETTLE_S: Final = 1.0  # in which a new worker serves before the next one is drained
LAUNCHER_SOCKET: Final = "launcher.sock"


class ChangingCluster(LaunchedCluster):
    """A cluster whose workers can change. A subclass says how one of them is started, ended and addressed."""

    def __init__(
        self,
        spec: ClusterSpec,
        report: LauncherReport,
        *,
        ray: str | None = None,
        saved: SavedCluster | None = None,
    ) -> None:
        """As of LaunchedCluster."""
        super().__init__(spec, report, ray=ray, saved=saved)
        socket = self._sockets.path / LAUNCHER_SOCKET
        if saved is None:
            if ray is not None:  # Ray assigns both
                self.spec = replace(self.spec, worker_ports=(), gpus=())
            self.spec = with_slots(replace(self.spec, launcher_socket=str(socket)))
        self._changing = ChangeServer(self, socket, router_config(self.spec, ()).token)
        self._address = ""
        # What roll-outs have set over `spec.settings`, which are those of the flags and the file, as last read.
        self._overlays = dict.fromkeys(self.spec.worker_ids, self.overlay)  # of each worker
        self._former: Settings | None = None  # overlay before the last roll-out with settings
        self._draining: tuple[str, ...] = ()  # by a change
        self._start_s = 0.0 if saved is None else saved.start_s  # of the first workers, for the controller
        if saved is not None:
            self.overlay, self._former, self._draining = saved.overlay, saved.former, saved.draining
            self._overlays = {one: saved.overlays.get(one, saved.overlay) for one in self.spec.worker_ids}
        self.autoscaler: Autoscaler | None = None
        self._scaling: asyncio.Task[None] | None = None

    async def start(self) -> str:
        await self._changing.start()
        self._address = await super().start()
        self._begin_changes()
        return self._address

    async def adopt(self, link: KeeperLink, attached: Attached) -> str:
        self._address = await super().adopt(link, attached)
        await self._changing.start()
        await self._finish_former_change()
        self._begin_changes()
        return self._address

    async def _finish_former_change(self) -> None:
        """The former launcher may have been killed in the middle of one: what a router says then counts. A roll-out
        ends where it is, as if it had stopped."""
        async with Routers(self.spec, self._address) as routers:
            for worker in workers_of(await routers.frames()):
                slot = next((one for one in self.spec.slots if one.worker_id == worker.worker_id), None)
                if slot is not None and not slot.is_vacant and worker.is_connected and worker.role is not slot.role:
                    self.spec = with_role(self.spec, worker.worker_id, worker.role)
                    self._has_taken_role(worker.worker_id)
            for worker_id in self._draining:
                self.say(worker_id, "serves again: the former launcher has drained it, and has ended")
                with contextlib.suppress(NotFound):  # it is being started again
                    await routers.undrain(worker_id)
            self._draining = ()
            for slot in self.spec.slots:
                if slot.is_surge and not slot.is_vacant:
                    await self._end_surge(slot.worker_id, routers, self.say)
            if self._former is None and any(one != self.overlay for one in self._overlays.values()):
                self._former = self.overlay  # for `roll --undo`
            self._told()

    def _begin_changes(self) -> None:
        self._changing.is_ready = True
        if self.spec.is_automatic:
            self.autoscaler = self._make_autoscaler()
            self._scaling = asyncio.create_task(self.autoscaler.run(), name="autoscale")

    def _make_autoscaler(self) -> Autoscaler:
        from pdserve.launch.changes.autoscale import (  # imports the router
            Autoscaler,
            ask_routers,
            first_settings,
            record_of,
        )

        self._start_s = self._start_s or self._first_start_s()
        settings = first_settings(self.spec, self._start_s)
        return Autoscaler(
            self,
            self._changing,
            settings,
            lambda: ask_routers(self.spec, self._address),
            record=record_of(self.spec, settings),
            on_size=self._metrics.wanted,
        )

    async def stop(self, *, is_graceful: bool) -> None:
        await self._end_changes()
        await super().stop(is_graceful=is_graceful)

    async def leave(self) -> None:
        await self._end_changes()
        await super().leave()

    async def _end_changes(self) -> None:
        if self._scaling is not None and self.autoscaler is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
            self.autoscaler.close()
        await self._changing.close()

    @property
    def running_change(self) -> str:
        return self._changing.running

    def saved(self) -> SavedCluster:
        return replace(
            super().saved(),
            overlay=self.overlay,
            overlays=dict(self._overlays),
            former=self._former,
            draining=self._draining,
            start_s=self._start_s,
        )

    # -- changes -------------------------------------------------------------------------------------------------

    async def scale(self, prefill: int | None, decode: int | None, say: Say) -> None:
        """Raises PdserveError; workers that were already added or ended then stay so."""
        async with Routers(self.spec, self._address) as routers:
            plan = plan_scale(self.spec.slots, workers_of(await routers.frames()), prefill, decode)
            try:
                for worker_id, role in plan.add:
                    self._take_slot(worker_id, role, self.overlay)
            except (PdserveError, OSError):
                for worker_id, _ in plan.add:
                    if worker_id in self._overlays:
                        self._forget(worker_id, keeps_ports=False)
                raise
            starts = [self._start_added(worker_id, routers, say) for worker_id, _ in plan.add]
            for one in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(one, BaseException):
                    raise one
            for worker_id in plan.remove:
                await self._check_serving(worker_id, routers)
                await self._end(worker_id, routers, say)
        self._say_numbers(say)

    async def set_role(self, worker_id: str, role: Role, say: Say) -> None:
        slot = self.spec.slots[index_of(self.spec, worker_id)]
        if slot.role is role:
            raise InvalidRequest("role", role.value, f"another role: {worker_id} has this one")
        with_role(self.spec, worker_id, role)  # raises before a router is called
        async with Routers(self.spec, self._address) as routers:
            await self._set_role(worker_id, role, routers, say)

    async def change_roles(self, role: Role, count: int, say: Say) -> None:
        """Gives this role to workers of the other one whose end costs least."""
        async with Routers(self.spec, self._address) as routers:
            seen = workers_of(await routers.frames())
            for worker_id in cheapest(self.spec.slots, {one.worker_id: one for one in seen}, role.other)[:count]:
                await self._set_role(worker_id, role, routers, say)

    async def _set_role(self, worker_id: str, role: Role, routers: Routers, say: Say) -> None:
        with_role(self.spec, worker_id, role)  # raises before the worker is drained
        await self._check_serving(worker_id, routers)
        await self._replace(worker_id, routers, say, self._overlays[worker_id], role)
        self._say_numbers(say)

    async def roll(
        self, worker_ids: Sequence[str], surge: int, settings: str, model: str, *, is_undo: bool, say: Say
    ) -> None:
        """Raises ChangeFailed if it has stopped before its end."""
        wanted: Settings | None = read_settings(settings, self.overlay) if settings else None
        spec, folder = self.spec, ""
        if model:
            folder = await asyncio.to_thread(folder_of, model)
            spec, wanted = with_revision(spec, self.overlay if wanted is None else wanted, folder)
        target = roll_target(self._overlays, wanted, worker_ids, self._former, is_undo=is_undo)
        if model and all(one == wanted for one in self._overlays.values()):
            raise ConfigError(
                "model", model, "another folder: all workers serve this one; `pdserve roll` restarts them"
            )
        self.spec = replace(self.spec, revisions=spec.revisions)
        workers = self._check_roll(target.worker_ids or self.spec.worker_ids, target.overlay)
        if model:
            await asyncio.to_thread(check_weights, self.spec, folder, workers)
            say("", f"the new workers load {folder}")
        async with Routers(self.spec, self._address) as routers:
            frames = await routers.frames()
            live, by_turns = workers_of(frames), target.what == "weights"
            steps = plan_roll(self.spec.slots, live, target.worker_ids, surge, is_undo=is_undo, by_turns=by_turns)
            try:
                await self._follow(steps, routers, target, RollCounts(frames, len(steps)), say)
            finally:
                if target.overlay is not None and not is_undo:
                    self._former = self.overlay if target.overlay in self._overlays.values() else None
                    self.on_change()
        if target.overlay is not None:
            self.overlay = target.overlay
            if is_undo:
                self._former = None
            self.on_change()
        kind = f" with the {target.what} from before" if is_undo else f" with the new {target.what}"
        say("", f"all workers that were to be replaced run again{kind if target.what else ''}")

    def _check_roll(self, worker_ids: Sequence[str], target: Settings | None) -> list[Process]:
        """The new workers. Checks what `up` does at its start, so that a wrong value is an error before a worker is
        drained. Raises ConfigError and NotFound."""
        workers = []
        for one in worker_ids:
            index, overlay = index_of(self.spec, one), self._overlays[one] if target is None else target
            num_now = len(self.spec.slots[index].gpus)
            wanted = num_gpus(replace(self.spec, settings=overlaid(self.spec.settings, overlay)), index)
            if wanted != num_now:
                expected = f"{num_now} for {one}, as now: `pdserve up` divides the GPUs at its start"
                raise ConfigError("worker.device", f"{wanted} GPUs", expected)
            workers.append(self._process(one, overlay))
        check_reports([*workers, *self._routers()])
        return workers

    async def _follow(
        self,
        steps: Sequence[RollStep],
        routers: Routers,
        target: RollTarget,
        counts: RollCounts,
        say: Say,
    ) -> None:
        done: list[str] = []
        surges: list[str] = []  # the additional workers that run
        try:
            for step in steps:
                overlay = self._overlays.get(step.worker_id, self.overlay) if target.overlay is None else target.overlay
                match step.kind:
                    case "add":
                        self._take_slot(step.worker_id, step.role, overlay, is_surge=True)
                        surges.append(step.worker_id)
                        await self._start_added(step.worker_id, routers, say)
                    case "replace":
                        await self._check_serving(step.worker_id, routers)
                        await self._replace(step.worker_id, routers, say, overlay)
                        done.append(step.worker_id)
                    case "end":
                        surges.remove(step.worker_id)  # if an operator has drained the others, it stays
                        await self._check_serving(step.worker_id, routers)
                        await self._end(step.worker_id, routers, say)
                await asyncio.sleep(SETTLE_S)
                counts.observe(await routers.frames())
                if counts.why_to_stop:
                    raise ChangeFailed(counts.why_to_stop)
        except (PdserveError, OSError) as error:
            for surge in surges:
                if surge in self._overlays:
                    await self._end_surge(surge, routers, say)
            left = [one.worker_id for one in steps if one.kind == "replace" and one.worker_id not in done]
            raise ChangeFailed(stopped_text(why_failed(error), done, left, target.what)) from None

    async def _end_surge(self, worker_id: str, routers: Routers, say: Say) -> None:
        """After a roll-out that has stopped. The worker stays if no other decode worker serves."""
        try:
            await self._check_serving(worker_id, routers)
            await self._end(worker_id, routers, say)
        except ConfigError as error:
            say(worker_id, f"stays: {error.message}")
        except PdserveError:  # no router answers
            await self._end_worker(worker_id)
            self._forget(worker_id)

    # -- one worker ----------------------------------------------------------------------------------------------

    def _take_slot(self, worker_id: str, role: Role, overlay: Settings, *, is_surge: bool = False) -> None:
        """A place for a new worker. Raises ConfigError if there is none, and OSError."""
        before = self.spec
        self.spec = self._with_worker(worker_id, role, is_surge=is_surge)
        try:
            if self._certificates is not None:
                self._certificates.add(worker_id)
        except (PdserveError, OSError):
            self._release_ports(self.spec, before)
            self.spec = before
            raise
        self._overlays[worker_id] = overlay
        self.on_change()

    def _process(self, worker_id: str, overlay: Settings) -> Process:
        spec = replace(self.spec, settings=overlaid(self.spec.settings, overlay))
        return worker_process(spec, index_of(spec, worker_id))

    async def _start_added(self, worker_id: str, routers: Routers, say: Say) -> None:
        """Returns when each router is connected to it. If it cannot start, its slot is free again, without ports: they
        may be the reason."""
        say(worker_id, "starting")
        try:
            await self._start_worker(worker_id, self._overlays[worker_id], say)
            self._told()
            await self._attached(worker_id, "", routers)
        except Exception as error:  # also of the system, such as no memory for a process
            say(worker_id, f"is not ready: {why_failed(error)}")
            await self._end_worker(worker_id)
            self._forget(worker_id, keeps_ports=False)
            raise
        say(worker_id, "ready")

    async def _end(self, worker_id: str, routers: Routers, say: Say) -> None:
        await self._drain(worker_id, routers, say)
        await self._end_worker(worker_id)
        self._forget(worker_id)
        await routers.wait_for_all(worker_id, lambda one: one is None, FORGET_S)
        say(worker_id, "ended")

    async def _replace(
        self, worker_id: str, routers: Routers, say: Say, overlay: Settings, role: Role | None = None
    ) -> None:
        """With the same name and ports. If the new process does not become ready, one as before takes its place. The
        supervisor goes on starting that one if it fails too."""
        before, former = self.spec, self._overlays[worker_id]
        seen = await routers.worker(worker_id)
        await self._drain(worker_id, routers, say)
        incarnation = "" if seen is None else seen.incarnation
        try:
            if role is None or not await self._take_role(worker_id, role, say):
                await self._end_worker(worker_id)
                say(worker_id, "starting" if role is None else f"starting as a {role.value} worker")
                if role is not None:
                    self.spec = with_role(self.spec, worker_id, role)
                self._overlays[worker_id] = overlay
                await self._start_worker(worker_id, overlay, say)
            await self._attached(worker_id, incarnation, routers)
        except Exception as error:  # as above
            say(worker_id, f"is not ready: {why_failed(error)}; starting it as before")
            await self._end_worker(worker_id)
            self._restore_workers(before)
            self._overlays[worker_id] = former
            try:
                await self._start_worker(worker_id, former, say, is_retried=True)
                await self._attached(worker_id, incarnation, routers)
            except Exception as again:
                say(worker_id, f"is not ready as before either: {why_failed(again)}; {self.what_follows}")
            raise
        finally:
            self._draining = ()
            self._told()
        say(worker_id, "ready")

    def _restore_workers(self, before: ClusterSpec) -> None:
        """But not the settings, which SIGHUP may have changed in the meantime."""
        self.spec = replace(self.spec, slots=before.slots, prefill=before.prefill, decode=before.decode)

    async def _drain(self, worker_id: str, routers: Routers, say: Say) -> None:
        """Until the worker has no requests, for its drain_s at most. Those that are left continue on others."""
        limit_s, began_s = self._drain_s(worker_id), time.monotonic()
        self._draining = (worker_id,)
        self.on_change()
        try:
            await routers.drain(worker_id)
        except NotFound:  # it is being started again, and has none
            return
        say(worker_id, f"draining, for at most {limit_s:g} s")
        try:
            is_empty = await routers.wait_for_all(worker_id, _is_empty, limit_s)
        except PdserveError:  # the change ends here, and the worker has not ended
            with contextlib.suppress(PdserveError):
                await routers.undrain(worker_id)
            self._draining = ()
            raise
        spent_s = time.monotonic() - began_s
        say(worker_id, f"drained after {spent_s:.1f} s" if is_empty else "still has requests, which others continue")

    async def _attached(self, worker_id: str, former: str, routers: Routers) -> None:
        """Raises ChangeFailed unless each router connects to an incarnation that is not `former`."""

        def is_attached(one: Worker | None) -> bool:
            return one is not None and one.is_connected and one.incarnation != former

        if not await routers.wait_for_all(worker_id, is_attached, ATTACH_S):
            lines = f"see the log of the router for the reason; nothing connected within {ATTACH_S:.0f} s"
            raise ChangeFailed(f"{worker_id} listens, but a router does not accept it: {lines}")

    async def _check_serving(self, worker_id: str, routers: Routers) -> None:
        """Raises ConfigError if a router would have no decode worker without this one."""
        for frame in await routers.frames():
            check_serving(frame.workers, worker_id)

    # -- where the workers run -------------------------------------------------------------------------------------

    what_follows: str  # if a worker cannot start with its former settings either

    @abstractmethod
    def _first_start_s(self) -> float:
        """How long the slowest of the first workers took."""

    @abstractmethod
    def _routers(self) -> Sequence[Process]: ...

    @abstractmethod
    def _with_worker(self, worker_id: str, role: Role, *, is_surge: bool) -> ClusterSpec:
        """The spec with a worker that has not started yet. Raises ConfigError if there is no place for it."""

    @abstractmethod
    async def _start_worker(self, worker_id: str, overlay: Settings, say: Say, *, is_retried: bool = False) -> None:
        """Returns when the worker listens. If it raises, `_end_worker` follows, unless it `is_retried`."""

    async def _take_role(self, worker_id: str, role: Role, say: Say) -> bool:
        """Whether the running process has taken the role. False: it needs a new process."""
        return False

    def _has_taken_role(self, worker_id: str) -> None:
        """It has the role of its slot now, in the same process, and starts again in that role."""

    @abstractmethod
    async def _end_worker(self, worker_id: str) -> None:
        """Drains a worker, for its own time limit at most, and ends it for good: its name may be used again."""

    @abstractmethod
    def _drain_s(self, worker_id: str) -> float: ...

    def _release_ports(self, before: ClusterSpec, after: ClusterSpec) -> None:
        """Those of this host that only `before` has."""

    # ------------------------------------------------------------------------------------------------------------

    def _forget(self, worker_id: str, *, keeps_ports: bool = True) -> None:
        before = self.spec
        self.spec = vacate(before, worker_id, keeps_port=keeps_ports)
        if not keeps_ports:
            self._release_ports(before, self.spec)
        self._overlays.pop(worker_id, None)
        self._draining = ()
        self._told()

    def _say_numbers(self, say: Say) -> None:
        say("", f"the cluster has {self.spec.prefill} prefill and {self.spec.decode} decode workers")

    def _told(self) -> None:
        """Tells the routers and Prometheus of the workers that there are."""
        self._supervisor.reload(self._routers())
        self._metrics.changed(self.spec)
        self.on_change()


def _is_empty(one: Worker | None) -> bool:
    return one is None or not one.is_connected or (one.is_draining and one.running == one.waiting == 0)


# --- processes of this host -----------------------------------------------------------------------------------

"""`up --autoscale` and `--roles auto`: asks the routers what has arrived, lets the controller of router/scaling decide,
and has its changes made as an operator's are. The decisions are kept for `pdserve explain --scaling`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, final

from pdserve.client.connect import CONNECT_S
from pdserve.client.connect import target as target_of
from pdserve.client.results import (
    MOST_DECISIONS,
    SCALING,
    Scaling,
    ScalingAlternative,
    ScalingDecision,
    ScalingDemand,
    ScalingOutcome,
)
from pdserve.config import bounds_of
from pdserve.core.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.core.setting import Range
from pdserve.core.types import Role
from pdserve.launch.changes.plans import why_failed
from pdserve.launch.changes.server import Say
from pdserve.launch.local import targets_of_routers
from pdserve.launch.spec import ClusterSpec, router_config, scaling_recording
from pdserve.v1 import cluster_pb2
from router.recording.recording import ScalingRecord
from router.scaling.controller import FIRST_PAUSE_S, Controller
from router.scaling.interface import (
    LONGEST_CHANGE_S,
    Change,
    ChangeKind,
    Decision,
    Demand,
    Interval,
    Observed,
    ScalingSettings,
)
from router.scaling.observing import DemandHistory, RouterDemand, measured, observe, under_way, why_unsettled
from router.service.demand import EVERY_S, ask_addresses, ask_demand

log = logging.getLogger(__name__)

NAME: Final = "autoscale"  # in the lines of `up`
FIRST_DRAIN_S: Final = 5.0  # assumed until a worker has drained
SHOWN: Final = 20
LIMITS: Final = Range(0, MOST_DECISIONS)

Ask = Callable[[], Awaitable[Mapping[str, RouterDemand]]]


class Workers(Protocol):
    """The launcher's cluster."""

    @property
    def spec(self) -> ClusterSpec: ...

    async def scale(self, prefill: int | None, decode: int | None, say: Say) -> None: ...

    async def change_roles(self, role: Role, count: int, say: Say) -> None: ...

    def say(self, name: str, text: str) -> None: ...


class Changes(Protocol):
    """Makes one change at a time, of whomever."""

    @property
    def running(self) -> str:
        """What the change is; empty while there is none."""
        ...

    def begin(self, what: str, change: Callable[[], Coroutine[Any, Any, None]]) -> object:
        """Raises Unavailable while another change runs."""
        ...


def first_settings(spec: ClusterSpec, start_s: float) -> ScalingSettings:
    """`start_s`: how long the first workers took."""
    start_s = min(max(start_s, 0.0), LONGEST_CHANGE_S)
    return with_bounds(
        ScalingSettings(
            may_change_roles=spec.roles == "auto", start_s=start_s, change_role_s=start_s, drain_s=FIRST_DRAIN_S
        ),
        spec,
    )


def with_bounds(settings: ScalingSettings, spec: ClusterSpec) -> ScalingSettings:
    """Without bounds the number of workers is the operator's, who may change it."""
    total = spec.prefill + spec.decode
    low, high = bounds_of("autoscale", spec.autoscale) if spec.autoscale else (total, total)
    return replace(settings, min_workers=low, max_workers=high)


def record_of(spec: ClusterSpec, settings: ScalingSettings) -> ScalingRecord | None:
    """Beside the routers' recordings, if there are any."""
    config = router_config(spec, ())
    if not (file := spec.settings.get("router", {}).get("record")):
        return None
    path = str(scaling_recording(Path(str(file))))
    return ScalingRecord(path, settings, config.record_mib * 2**20)


# --- routers --------------------------------------------------------------------------------------------------


async def ask_routers(spec: ClusterSpec, address: str) -> dict[str, RouterDemand]:
    """What each router has seen since its start. Raises Unavailable, with their names, unless all of this launcher's
    answer. Of those that others have started (`scaling_routers`), those that answer count."""
    config = router_config(spec, ())
    token, targets = config.token or None, {}
    for name, (where, tls) in zip(spec.router_names, targets_of_routers(spec, address), strict=True):
        targets[name] = target_of(where, tls=tls, token=token, connect_timeout_s=CONNECT_S, insecure=config.insecure)
    answers, failures = await ask_demand(targets)
    if failures:
        raise Unavailable(f"{', '.join(failures)} did not answer ({next(iter(failures.values())).message})")
    if config.scaling_routers:
        own = {one.incarnation for one in answers.values()}
        found = await ask_addresses(config)
        answers |= {name: one for name, one in found.items() if one.incarnation not in own}
    return answers


# --- decisions ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Entry:
    """A decision, and what is known of its change by now."""

    decision: Decision
    observed: Observed
    failure: str = ""
    outcome: ScalingOutcome | None = None


@final
class Autoscaler:
    """`run` until it is cancelled. Belongs to one event loop."""

    def __init__(
        self,
        workers: Workers,
        changes: Changes,
        settings: ScalingSettings,
        ask: Ask,
        *,
        record: ScalingRecord | None = None,
        on_size: Callable[[Mapping[Role, int]], None] = lambda numbers: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_size` is called with the wanted numbers of workers after each decision."""
        self._workers, self._changes, self._settings, self._ask = workers, changes, settings, ask
        self._record, self._on_size, self._clock = record, on_size, clock
        self._controller = Controller(settings)
        self._history = DemandHistory()
        self._under_way: Change | None = None
        self._failed: Change | None = None  # which the controller has not seen yet
        self._trouble = ""
        self._kept: deque[Entry] = deque(maxlen=MOST_DECISIONS)  # those with a change
        self._last: Entry | None = None

    async def run(self) -> None:
        low, high = self._settings.min_workers, self._settings.max_workers
        bounds = f"{low} to {high} workers" if low < high else f"{low} workers"
        roles = "changes their roles" if self._settings.may_change_roles else "adds and ends decode workers"
        self._workers.say(NAME, f"keeps {bounds} and {roles}; `pdserve explain --scaling` shows its decisions")
        while True:
            await self.step()
            await asyncio.sleep(EVERY_S)

    async def step(self) -> None:
        """One decision, unless the routers do not answer. A mistake in it is told, and does not end the cluster."""
        try:
            answers = await self._ask()
            await self._decide(answers, self._clock())
        except PdserveError as error:
            self._troubled(error.message)
        except Exception as error:
            if self._trouble != (text := why_failed(error)):
                log.exception("no decision about the number of workers")
            self._troubled(text)
        else:
            self._troubled("")

    def close(self) -> None:
        if self._record is not None:
            self._record.close()

    def _troubled(self, why: str) -> None:
        if why != self._trouble:
            self._workers.say(NAME, f"cannot decide: {why}" if why else "decides again")
            self._trouble = why

    async def _decide(self, answers: Mapping[str, RouterDemand], now_s: float) -> None:
        interval = self._history.interval(answers, now_s)
        if interval is None:
            return
        observed = self._observed(interval, list(answers.values()))
        # With many workers it takes a tenth of a second or more, in which the launcher has other work.
        try:
            decision = await asyncio.to_thread(self._controller.decide, observed, now_s)
        except Exception:
            self._controller = Controller(self._settings)  # it has seen an interval that no recording has
            self._failed = self._failed or observed.failed
            if self._record is not None:
                self._workers.say(NAME, "the recording of the decisions ends")
                self._record.close()
                self._record = None
            raise
        if self._record is not None:
            self._record.step(now_s, observed, decision)
        self._note(decision, observed)
        self._on_size({Role.PREFILL: decision.wanted.prefill, Role.DECODE: decision.wanted.decode})
        for change in decision.changes:
            self._begin(change)

    def _observed(self, interval: Interval, answers: list[RouterDemand]) -> Observed:
        starting, draining = under_way(self._under_way)
        busy = ""
        if self._under_way is None:
            busy = self._why_busy(answers)
        self._settings = with_bounds(self._settings, self._workers.spec)
        failed, self._failed = self._failed, None
        return observe(
            interval,
            answers,
            starting=starting,
            draining=draining,
            busy_because=busy,
            failed=failed,
            settings=self._settings,
        )

    def _why_busy(self, answers: list[RouterDemand]) -> str:
        if running := self._changes.running:
            return f"change by an operator ({running})"
        return why_unsettled(answers, frozenset(self._workers.spec.worker_ids))

    def _note(self, decision: Decision, observed: Observed) -> None:
        outcome = decision.outcome
        for one in self._kept:
            if outcome is not None and one.decision.at_s == outcome.decided_s:
                one.outcome = ScalingOutcome(**{name: getattr(outcome, name) for name in ScalingOutcome.__slots__})
                self._workers.say(NAME, f"{outcome.change}: {one.outcome.text}")
        self._last = entry = Entry(decision, observed)
        if decision.changes:
            self._kept.append(entry)
            self._workers.say(NAME, change_text(decision, observed))

    # -- changes -------------------------------------------------------------------------------------------------

    def _begin(self, change: Change) -> None:
        entry = self._kept[-1]
        self._under_way = change
        try:
            self._changes.begin(f"{NAME}: {change}", lambda: self._carry_out(change, entry))
        except PdserveError as error:
            self._under_way = None
            entry.failure = error.message

    async def _carry_out(self, change: Change, entry: Entry) -> None:
        began_s = self._clock()
        try:
            await self._make(change)
        except Exception as error:
            entry.failure, self._failed = why_failed(error), change
            self._workers.say(NAME, f"{change} failed; such a change waits for {FIRST_PAUSE_S:g} s or more")
            raise
        else:
            self._settings = measured(self._settings, change, self._clock() - began_s)
        finally:
            self._under_way = None

    async def _make(self, change: Change) -> None:
        spec, say = self._workers.spec, self._say_step
        if change.kind is ChangeKind.CHANGE_ROLE:
            await self._workers.change_roles(change.role, change.count, say)
            return
        more = -change.count if change.kind is ChangeKind.STOP else change.count
        if change.role is Role.PREFILL:
            await self._workers.scale(spec.prefill + more, None, say)
        else:
            await self._workers.scale(None, spec.decode + more, say)

    def _say_step(self, worker_id: str, text: str) -> None:
        self._workers.say(worker_id or NAME, text)

    # -- explanation ---------------------------------------------------------------------------------------------

    def explain(self, limit: int) -> cluster_pb2.GetScalingResponse:
        """Raises InvalidRequest."""
        if limit not in LIMITS:
            raise InvalidRequest("limit", limit, str(LIMITS))
        entries = list(self._kept)
        if self._last is not None and self._last not in entries:
            entries.append(self._last)
        now_s = self._clock()
        found = Scaling(
            min_workers=self._settings.min_workers,
            max_workers=self._settings.max_workers,
            may_change_roles=self._settings.may_change_roles,
            every_s=EVERY_S,
            trouble=self._trouble,
            decisions=tuple(explained(one, now_s) for one in entries[-(limit or SHOWN) :]),
        )
        return SCALING.encode(found)


def change_text(decision: Decision, observed: Observed) -> str:
    """The line of `up`."""
    [change] = decision.changes
    shares = {one.change: one.attainment for one in decision.alternatives}
    text = f"{change}, from {decision.size} to {decision.wanted} (prefill:decode): {decision.reason}"
    text += f"; {observed.interval.requests / observed.interval.width_s:.1f} requests/s"
    if "keep" in shares and str(change) in shares:
        text += f", predicted to meet both targets: {shares[str(change)]:.0%} instead of {shares['keep']:.0%}"
    return text


def explained(one: Entry, now_s: float) -> ScalingDecision:
    decision, observed = one.decision, one.observed
    interval = observed.interval
    now, later = decision.demand or (None, None)
    return ScalingDecision(
        age_s=now_s - decision.at_s,
        change=str(decision.changes[0]) if decision.changes else "",
        reason=decision.reason,
        prefill=decision.size.prefill,
        decode=decision.size.decode,
        seen_rate_rps=interval.requests / interval.width_s,
        queued=observed.queued,
        running=observed.running,
        met=interval.met,
        missed=interval.missed,
        now=_demand(now),
        later=_demand(later),
        alternatives=tuple(
            ScalingAlternative(
                change=each.change,
                prefill=each.size.prefill,
                decode=each.size.decode,
                attainment=each.attainment,
                cost_s=each.cost_s,
                change_cost_s=each.change_cost_s,
                refused=each.refused,
            )
            for each in decision.alternatives
        ),
        outcome=one.outcome,
        failure=one.failure,
        capacity_share=decision.capacity_share,
    )


def _demand(one: Demand | None) -> ScalingDemand | None:
    if one is None:
        return None
    return ScalingDemand(**{name: getattr(one, name) for name in ScalingDemand.__slots__})

"""Decides how the workers of a running cluster change: which ones end, in which order they are replaced, and when a
roll-out stops. Pure: `cluster.py` carries it out.

A changed cluster has slots. A worker that ends leaves its slot vacant, and the next one takes it, with its port, its
metrics port and its GPUs.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, variance
from typing import Any, Final, Literal, final

from pdserve.core.errors import ConfigError, InvalidRequest, NotFound, PdserveError
from pdserve.core.live import LiveFrame, LiveTotals, LiveWorker
from pdserve.core.types import Role
from pdserve.launch.keys import Kind, Settings, Value, check_settings, fields_of
from pdserve.launch.spec import NUM_WORKERS, ClusterSpec, WorkerSlot, gpus_of, num_gpus, worker_config

# --- which workers --------------------------------------------------------------------------------------------


def loss(worker: LiveWorker) -> tuple[Any, ...]:
    """Orders workers by what their end costs. A worker without requests loses only its prefix cache. Otherwise the
    tokens count that move to others, or are computed again. Of equal workers, the last by name ends first."""
    serves = worker.is_connected and not worker.is_drained
    tokens = worker.context_tokens + worker.pending_prefill_tokens
    requests = max(worker.running + worker.waiting, worker.booked)
    return (serves, worker.is_connected, requests > 0, tokens, requests, worker.cached_blocks, *_last_first(worker))


def _last_first(worker: LiveWorker) -> tuple[int, int]:
    number = worker.worker_id.lstrip("pd")
    return (-len(number), -int(number)) if number.isdecimal() else (0, 0)


def workers_of(frames: Iterable[LiveFrame]) -> list[LiveWorker]:
    """As the routers see them together, each of which sent its own frame."""
    found: dict[str, LiveWorker] = {}
    booked: Counter[str] = Counter()
    for one in (worker for frame in frames for worker in frame.workers):
        booked[one.worker_id] += one.booked
        if one.worker_id not in found or (one.is_connected and not found[one.worker_id].is_connected):
            found[one.worker_id] = one
    return [replace(one, booked=booked[name]) for name, one in found.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    add: tuple[tuple[str, Role], ...]
    remove: tuple[str, ...]


def plan_scale(
    slots: Sequence[WorkerSlot], live: Iterable[LiveWorker], prefill: int | None, decode: int | None
) -> ScalePlan:
    """None: as many as there are. `live`: the workers as routers see them, which may lack some. Raises
    InvalidRequest."""
    if prefill is None and decode is None:
        raise InvalidRequest("prefill and decode", "neither", "the wanted number of workers of one role, or of both")
    loads = {one.worker_id: one for one in live}
    taken = {one.worker_id for one in slots if not one.is_vacant}
    add: list[tuple[str, Role]] = []
    remove: list[str] = []
    for role, wanted in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        if wanted is None:
            continue
        if wanted not in (allowed := NUM_WORKERS[role.value]):
            raise InvalidRequest(role.value, wanted, str(allowed))
        own = cheapest(slots, loads, role)
        for _ in range(wanted - len(own)):
            worker_id = free_id(role, taken)
            taken.add(worker_id)
            add.append((worker_id, role))
        remove += own[: max(len(own) - wanted, 0)]
    return ScalePlan(add=tuple(add), remove=tuple(remove))


def cheapest(slots: Sequence[WorkerSlot], loads: Mapping[str, LiveWorker], role: Role) -> list[str]:
    """The workers of a role, in the order in which they end."""
    own = [one.worker_id for one in slots if one.role is role and not one.is_vacant]
    unknown = [one for one in own if one not in loads]  # to the router: it serves nothing
    known = sorted((loads[one] for one in own if one in loads), key=loss)
    return [*reversed(unknown), *(one.worker_id for one in known)]


def free_id(role: Role, taken: Collection[str]) -> str:
    """The first free name of that role."""
    return next(name for number in range(len(taken) + 1) if (name := f"{role.value[0]}{number}") not in taken)


def check_serving(live: Iterable[LiveWorker], worker_id: str) -> None:
    """Raises ConfigError if no decode worker would serve while this one is away: requests would fail."""
    serving = [one for one in live if one.role is Role.DECODE and one.is_connected and not one.is_drained]
    if [one.worker_id for one in serving] == [worker_id]:
        raise ConfigError(
            worker_id, "the only decode worker that serves", "another one beside it: without one, requests fail"
        )


# --- roll-outs ------------------------------------------------------------------------------------------------

StepKind = Literal["add", "replace", "end"]
SURGES: Final = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollStep:
    """`add` starts an additional worker of this role, `replace` one of the others, and `end` ends the additional one
    again. It is also the first to try new settings, before a worker is drained."""

    kind: StepKind
    role: Role
    worker_id: str


def plan_roll(
    slots: Sequence[WorkerSlot],
    live: Iterable[LiveWorker],
    worker_ids: Sequence[str],
    surge: int,
    *,
    is_undo: bool = False,
    by_turns: bool = False,
) -> list[RollStep]:
    """`worker_ids` empty: all. Prefill workers come first, those of each role in the order of what they hold. An undo
    begins with the decode workers: they were replaced last, before requests failed. With `by_turns`, which is for other
    weights, the roles take turns: a worker has no use without one of the other role and the same weights. Raises
    InvalidRequest and NotFound."""
    if surge not in SURGES:
        raise InvalidRequest("surge", surge, "0 or 1")
    running = {one.worker_id: one.role for one in slots if not one.is_vacant}
    for worker_id in worker_ids:
        if worker_id not in running:
            raise NotFound("worker", worker_id)
    chosen, loads = set(worker_ids or running), {one.worker_id: one for one in live}
    parts: list[list[RollStep]] = []
    for role in (Role.DECODE, Role.PREFILL) if is_undo else (Role.PREFILL, Role.DECODE):
        own = [one for one, its_role in running.items() if its_role is role and one in chosen]
        own.sort(key=lambda one: (one in loads, loss(loads[one]) if one in loads else ()))
        replacing = [RollStep(kind="replace", role=role, worker_id=one) for one in own]
        if replacing and surge:
            surge_id = free_id(role, running)
            add, end = (RollStep(kind=kind, role=role, worker_id=surge_id) for kind in ("add", "end"))  # type: ignore[arg-type]
            replacing = [add, *replacing, end]
        parts.append(replacing)
    if not by_turns:
        return [step for part in parts for step in part]
    placed: list[tuple[float, RollStep]] = []  # by the part of the role that is done
    for part in parts:
        first = int(bool(surge))
        count = len(part) - 2 * first
        ends = {"add": 0.0, "end": 1.0}
        placed += [(ends.get(step.kind, (at - first + 0.5) / max(count, 1)), step) for at, step in enumerate(part)]
    return [step for _, step in sorted(placed, key=lambda one: one[0])]


def revision_of(overlay: Settings) -> str:
    """The name of its weights; empty: those of the cluster's start."""
    return str(overlay.get("worker", {}).get("revision", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class RollTarget:
    overlay: Settings | None  # None: each worker keeps its own
    worker_ids: tuple[str, ...]  # empty: all
    what: str  # what is new, for operators: settings or weights; empty: nothing


def roll_target(
    overlays: Mapping[str, Settings],
    target: Settings | None,
    worker_ids: Sequence[str],
    former: Settings | None,
    *,
    is_undo: bool,
) -> RollTarget:
    """`overlays`: of each worker now. `target`: the new one, or None. `former`: the one before the last roll-out, if
    that can be undone. Raises ConfigError and InvalidRequest."""
    if is_undo:
        if target is not None or worker_ids:
            expected = "nothing beside it: it concerns the last roll-out"
            raise InvalidRequest("undo", "settings, a model or workers", expected)
        if former is None:
            expected = "a last one that has replaced workers with new settings or weights, and was not undone yet"
            raise ConfigError("undo", "no roll-out", expected)
        target, worker_ids = former, [name for name, one in overlays.items() if one != former]
        if not worker_ids:
            raise ConfigError("undo", "no worker", "workers with other settings than before the last roll-out")
    elif target is not None and worker_ids:
        raise InvalidRequest("workers", "some of them", "all: a cluster has one model and one set of settings")
    new = {} if target is None else target
    what = "" if target is None else "settings"
    if what and any(revision_of(one) != revision_of(new) for one in overlays.values()):
        what = "weights"
    return RollTarget(overlay=target, worker_ids=tuple(worker_ids), what=what)


MIN_REQUESTS: Final = 100  # in each of two windows whose misses are compared
MIN_BURST: Final = 4.0  # requests that count as one independent request, because they miss their targets together
BATCH: Final = 32
MARGIN: Final = 0.05  # by which the share of missed targets may grow
FALSE_STOP: Final = 0.001  # probability that a roll-out stops for misses although their share is as before
_MISSED: Final = ("late", "rejected", "expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """Requests that met both of their targets, and those that did not. Cancelled and failed ones do not count."""

    met: int = 0
    missed: int = 0

    @property
    def total(self) -> int:
        return self.met + self.missed

    def __sub__(self, other: Attainment) -> Attainment:
        return Attainment(met=self.met - other.met, missed=self.missed - other.missed)

    def bounds(self, z: float, burst: float) -> tuple[float, float, float]:
        """The share of missed targets, and the bounds of its score interval at `z` standard deviations (Wilson 1927).
        There must be requests, of which `burst` count as one."""
        share, spread = self.missed / self.total, z * z * burst / self.total
        centre = (share + spread / 2) / (1 + spread)
        half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
        return share, centre - half, centre + half


def burst_of(have_missed: Sequence[bool]) -> float:
    """How many requests, in the order of their ends, count as one independent request: the variance of the means of
    batches, as a multiple of that of independent requests. At least MIN_BURST."""
    if len(have_missed) < 2 * BATCH or not 0 < (share := fmean(have_missed)) < 1:
        return MIN_BURST
    means = [fmean(have_missed[at : at + BATCH]) for at in range(0, len(have_missed) - BATCH + 1, BATCH)]
    return max(BATCH * variance(means) / (share * (1 - share)), MIN_BURST)


def misses_more(before: Attainment, since: Attainment, burst: float, chance: float) -> bool:
    """Whether the share of missed targets has grown by more than MARGIN: the one-sided lower bound of the difference of
    two shares exceeds it (Newcombe 1998, method 10). `chance`: of the bound being wrong. `burst` as in `burst_of`."""
    if min(before.total, since.total) < MIN_REQUESTS:
        return False
    z = -NormalDist().inv_cdf(chance)
    (then, _, most_then), (now, least_now, _) = before.bounds(z, burst), since.bounds(z, burst)
    return now - then - math.hypot(now - least_now, most_then - then) > MARGIN


@final
class RollCounts:
    """Counts what came of requests since the first frames of a roll-out, and before them.

    A router's totals count since the start of its process. So they are kept for each process, by its incarnation: one
    that is not among the first has started since then, and one that has ended keeps its last totals.
    """

    def __init__(self, frames: Sequence[LiveFrame], num_steps: int) -> None:
        """`frames`: one of each router, with the requests that ended last. `observe` follows after each step."""
        self._first = {one.incarnation: one.totals for one in frames}
        self._last = dict(self._first)
        judged = ("served", *_MISSED)
        ends = [one.outcome in _MISSED for frame in frames for one in frame.requests if one.outcome in judged]
        self._before, self._burst = Attainment(met=ends.count(False), missed=ends.count(True)), burst_of(ends)
        self._chance = FALSE_STOP / max(num_steps * (num_steps + 1) // 2, 1)  # for each window that is judged
        self._since = [Attainment()]  # at the beginning, and after each step

    def observe(self, frames: Iterable[LiveFrame]) -> None:
        self._last.update((one.incarnation, one.totals) for one in frames)
        self._since.append(Attainment(met=self._num("served"), missed=sum(map(self._num, _MISSED))))

    @property
    def why_to_stop(self) -> str:
        """Empty: the roll-out goes on."""
        if failed := self._num("failed"):
            requests = "1 request" if failed == 1 else f"{failed} requests"
            return f"{requests} failed since it began"
        *begins, now = self._since
        for window in (now - begin for begin in begins):  # the later ones have fewer requests on former workers
            if misses_more(self._before, window, self._burst, self._chance):
                shares = f"{window.missed} of the last {window.total} requests missed their targets"
                return f"{shares}, and {self._before.missed} of {self._before.total} before it began"
        return ""

    def _num(self, outcome: str) -> int:
        """Of requests that ended so since the beginning."""
        none = LiveTotals()
        return sum(
            getattr(totals, outcome) - getattr(self._first.get(incarnation, none), outcome)
            for incarnation, totals in self._last.items()
        )


def why_failed(error: Exception) -> str:
    """An error that is not ours may have no text, such as a TimeoutError."""
    if isinstance(error, PdserveError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def stopped_text(why: str, done: Sequence[str], left: Sequence[str], what: str) -> str:
    """What an operator is told of a roll-out that has stopped. `what` is new: settings, or weights; empty: nothing."""
    state = f"replaced: {', '.join(done) or 'none'}; not replaced: {', '.join(left) or 'none'}"
    if not what:
        return f"the roll-out stopped: {why} ({state})"
    if not done:
        return f"the roll-out stopped: {why} ({state}), so all workers keep their {what}"
    return f"the roll-out stopped: {why} ({state}); `pdserve roll --undo` returns to the {what} from before"


# --- settings of a roll-out -----------------------------------------------------------------------------------
# A caller with the operator's token may not choose a program, a file or an address of the launcher's host.

_TABLES: Final[tuple[Kind, ...]] = ("worker", "prefill_worker", "decode_worker")
FIXED: Final = frozenset(
    {
        "advertise",
        "engine",
        "engine_python",
        "insecure",
        "local_ranks",
        "lora",
        "lora_folders",
        "metrics_port",
        "profile",
        "rendezvous",
        "revision",
        "tensor_parallel",  # GPUs are divided at the start
        "tls_ca",
        "tls_cert",
        "tls_key",
        "tls_peer_name",
    }
)
MAX_SETTINGS_CHARS: Final = 2**16


def overlaid(settings: Settings, overlay: Settings) -> dict[Kind, dict[str, Value]]:
    return {kind: {**settings.get(kind, {}), **overlay.get(kind, {})} for kind in {**settings, **overlay}}


def read_settings(text: str, overlay: Settings) -> dict[Kind, dict[str, Value]]:
    """`overlay` with the values of a TOML text. Raises ConfigError and InvalidRequest."""
    if len(text) > MAX_SETTINGS_CHARS:
        raise InvalidRequest("settings", f"{len(text)} characters", f"at most {MAX_SETTINGS_CHARS}")
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("settings", "no TOML", f"TOML ({error})") from None
    found = overlaid(overlay, {})
    for name, values in given.items():
        if name not in _TABLES or not isinstance(values, dict):
            raise ConfigError(name, "a value", f"only the tables {', '.join(_TABLES)}: a roll-out replaces workers")
        kind = name
        fields = fields_of(kind)
        lists = {one for one in values if one in fields and fields[one].default == ()}
        table = {
            one: tuple(value) if one in lists and isinstance(value, list) else value for one, value in values.items()
        }
        check_settings(kind, table)
        if fixed := sorted(FIXED & table.keys()):
            raise ConfigError(
                f"{kind}.{fixed[0]}", "a value", "none here: it can change at a start of `pdserve up` only"
            )
        found.setdefault(kind, {}).update(table)
    return found


# --- slots ----------------------------------------------------------------------------------------------------


def with_slots(spec: ClusterSpec) -> ClusterSpec:
    """The same cluster, with a slot for each worker."""
    if spec.slots:
        return spec
    configs = [worker_config(spec, index) for index in spec.running]
    slots = [
        WorkerSlot(worker_id=config.worker_id, role=role, port=config.port, gpus=gpus_of(spec, index))
        for index, (role, config) in enumerate(configs)
    ]
    return replace(spec, slots=tuple(slots), first_slots=len(slots))


def index_of(spec: ClusterSpec, worker_id: str) -> int:
    """Raises NotFound."""
    for index, slot in enumerate(spec.slots):
        if slot.worker_id == worker_id and not slot.is_vacant:
            return index
    raise NotFound("worker", worker_id)


def slot_for(spec: ClusterSpec, role: Role) -> int:
    """The index of the vacant slot that a new worker of that role takes, if possible one with as many GPUs as it needs;
    the number of slots if none is vacant."""
    vacant = [index for index, slot in enumerate(spec.slots) if slot.is_vacant]
    for index in vacant:
        slot = spec.slots[index]
        if num_gpus(_put(spec, index, replace(slot, role=role)), index) == len(slot.gpus):
            return index
    return vacant[0] if vacant else len(spec.slots)


def add_worker(spec: ClusterSpec, worker_id: str, role: Role, port: int, *, is_surge: bool = False) -> ClusterSpec:
    """With a worker in `slot_for`, on `port` if that slot has none. It takes GPUs of other vacant slots if its own slot
    has another number of them. Raises ConfigError without GPUs for it."""
    index = slot_for(spec, role)
    slot = spec.slots[index] if index < len(spec.slots) else WorkerSlot(worker_id=worker_id, role=role, port=0)
    slot = replace(slot, worker_id=worker_id, role=role, port=slot.port or port, is_vacant=False, is_surge=is_surge)
    wider = _put(spec, index, slot)
    if (wanted := num_gpus(wider, index)) == len(slot.gpus):
        return wider
    slots = [one for at, one in enumerate(spec.slots) if at != index]
    used = {gpu for one in slots if not one.is_vacant for gpu in one.gpus}
    kept = {gpu for one in slots for gpu in one.gpus}  # also by vacant slots, so these come last
    free = sorted((gpu for gpu in spec.gpus if gpu not in used), key=kept.__contains__)
    if len(free) < wanted:
        expected = f"{wanted} GPUs of this host that no worker has, and {len(free)} are free; end a worker first"
        raise ConfigError(role.value, worker_id, expected)
    taken = tuple(free[:wanted])
    for at, one in enumerate(spec.slots):
        if one.is_vacant and at != index and not set(taken).isdisjoint(one.gpus):
            wider = _put(wider, at, replace(one, gpus=tuple(gpu for gpu in one.gpus if gpu not in taken)))
    return _put(wider, index, replace(slot, gpus=taken))


def vacate(spec: ClusterSpec, worker_id: str, *, keeps_port: bool = True) -> ClusterSpec:
    index = index_of(spec, worker_id)
    slot = spec.slots[index]
    return _put(spec, index, replace(slot, is_vacant=True, is_surge=False, port=slot.port if keeps_port else 0))


def with_role(spec: ClusterSpec, worker_id: str, role: Role) -> ClusterSpec:
    """Raises ConfigError if the worker would need another number of GPUs."""
    index = index_of(spec, worker_id)
    changed = _put(spec, index, replace(spec.slots[index], role=role))
    if (wanted := num_gpus(changed, index)) != len(spec.slots[index].gpus):
        raise ConfigError(worker_id, f"{len(spec.slots[index].gpus)} GPUs", f"{wanted}, as a {role.value} worker has")
    return changed


def _put(spec: ClusterSpec, index: int, slot: WorkerSlot) -> ClusterSpec:
    slots = (*spec.slots[:index], slot, *spec.slots[index + 1 :])
    counts = {role: sum(one.role is role and not one.is_vacant and not one.is_surge for one in slots) for role in Role}
    for role, count in counts.items():
        if count not in NUM_WORKERS[role.value]:
            raise ConfigError(role.value, count, str(NUM_WORKERS[role.value]))
    return replace(spec, slots=slots, prefill=counts[Role.PREFILL], decode=counts[Role.DECODE])

"""The LoRA adapters of the cluster: what each name means, and loading and unloading on all workers.

Only workers store it, and each reports all that it knows, so routers need no other store. If reports differ, the entry
with the larger version counts. A worker that lacks it, for instance after a restart, gets it from each router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from typing import Final, final

from pdserve.config import MAX_ADAPTERS
from pdserve.core.adapters import (
    MAX_FINGERPRINT_CHARS,
    MAX_FOLDER_CHARS,
    MAX_NAME_CHARS,
    MAX_UNLOADED,
    check_adapter_name,
)
from pdserve.core.errors import ConfigError, InvalidRequest, NoWorkers, Overloaded, Unavailable, UnknownModel, shortened
from pdserve.core.protocol import AdapterCommand, AdapterLoaded, Adapters, DropLoad, LoadAdapter, NamedAdapter
from pdserve.outage_log import PeerLog
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import ADAPTER_LOADED, ADAPTERS, encode_request

log = logging.getLogger(__name__)

LOAD_S: Final = 120.0  # to read an adapter, behind those that wait before it
NAME_S: Final = 10.0  # more than a step takes
MAX_CALLS: Final = 8  # of operators that load or unload, together with the one that is served
MAX_ENTRIES: Final = MAX_ADAPTERS + 2 * MAX_UNLOADED
MAX_REASONS: Final = 4  # workers whose reasons one error has

Key = tuple[str, str, int]  # worker id, name and version of a load


def read_report(message: worker_pb2.Adapters) -> Adapters:
    """Raises InvalidRequest if a worker reports more, or longer texts, than workers may have."""
    for field, count in (("named", len(message.named)), ("loaded", len(message.loaded))):
        if count > MAX_ENTRIES:
            raise InvalidRequest(f"adapters.{field}", f"{count} adapters", f"at most {MAX_ENTRIES}")
    names = max((len(one.name) for one in message.named), default=0)
    folders = max((len(one.folder) for one in message.named), default=0)
    fingerprints = max(map(len, (*message.loaded, *(one.fingerprint for one in message.named))), default=0)
    if names > MAX_NAME_CHARS or folders > MAX_FOLDER_CHARS or fingerprints > MAX_FINGERPRINT_CHARS:
        raise InvalidRequest("adapters", "a longer text", f"names of at most {MAX_NAME_CHARS} characters")
    return ADAPTERS.decode(message)


@final
class ClusterAdapters:
    """Lives on one event loop."""

    def __init__(
        self,
        send: Callable[[str, worker_pb2.AttachRequest], bool],
        model_names: Callable[[], Collection[str]],
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """`send` passes a message to a worker's stream; False: there is none. `model_names` are no names of
        adapters."""
        self._send, self._model_names, self._now_us = send, model_names, now_us
        self._reports: dict[str, Adapters | None] = {}  # of attached workers; None: its engine computes no adapters
        #: What each name means. Of the last worker that was lost, until another one reports.
        self._entries: Mapping[str, NamedAdapter] = {}
        self._unloaded: dict[str, NamedAdapter] = {}  # by this router
        self._asked: dict[Key, asyncio.Future[AdapterLoaded]] = {}
        self._loading: set[str] = set()  # workers whose stream has lasted since the present load began
        #: By worker, the largest precedence of each name that it had or was given, so that none is given twice.
        self._given: dict[str, dict[str, tuple[int, str]]] = {}
        self._spreading: dict[str, NamedAdapter] = {}  # by worker, what it loads to catch up with the others
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._num_calls = 0
        self._lines = PeerLog(log)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that requests may choose."""
        taken = self._model_names()
        return tuple(sorted(name for name, one in self._entries.items() if one.fingerprint and name not in taken))

    def find(self, name: str) -> NamedAdapter | None:
        found = self._entries.get(name)
        return found if found is not None and found.fingerprint else None

    # -- reports of workers ---------------------------------------------------------------------------------------

    def reported(self, worker_id: str, report: Adapters | None) -> None:
        self._reports[worker_id] = report
        self._update()
        known = self._given.get(worker_id, {})
        for one in () if report is None else report.named:
            known[one.name] = max(known.get(one.name, _NONE), one.precedence)
        self._given[worker_id] = {name: known[name] for name in known.keys() & self._entries.keys()}
        self._catch_up()

    def loaded(self, worker_id: str, message: worker_pb2.AdapterLoaded) -> None:
        """Raises InvalidRequest."""
        if max(len(message.name), len(message.fingerprint)) > MAX_NAME_CHARS or len(message.error) > MAX_FOLDER_CHARS:
            raise InvalidRequest("adapter_loaded", "a longer text", f"names of at most {MAX_NAME_CHARS} characters")
        result = ADAPTER_LOADED.decode(message)
        asked = self._asked.pop((worker_id, result.name, result.version), None)
        if asked is not None:
            if not asked.done():
                asked.set_result(result)
            return
        wanted = self._spreading.get(worker_id)
        if wanted is not None and (wanted.name, wanted.version) == (result.name, result.version):
            del self._spreading[worker_id]
            self._spread(worker_id, wanted, result)
            self._catch_up()

    def lost(self, worker_id: str) -> None:
        self._reports.pop(worker_id, None)
        self._given.pop(worker_id, None)
        self._spreading.pop(worker_id, None)
        self._loading.discard(worker_id)
        for key in [key for key in self._asked if key[0] == worker_id]:
            asked = self._asked.pop(key)
            if not asked.done():  # it gets the adapter when it is back
                asked.set_exception(Unavailable(f"worker {worker_id} has disconnected"))
        if any(report is not None for report in self._reports.values()):
            self._update()
        self._notify()

    # -- commands of operators ------------------------------------------------------------------------------------

    async def load(self, name: str, folder: str) -> str:
        """Returns the fingerprint, when all workers serve it. Raises InvalidRequest with each worker's reason, and
        nothing has changed then; Overloaded; NoWorkers and Unavailable."""
        self._check_name(name)
        if not 1 <= len(folder) <= MAX_FOLDER_CHARS or not folder.isprintable():
            allowed = f"1 to {MAX_FOLDER_CHARS} printable characters"
            raise InvalidRequest("folder", f"{len(folder)} characters", allowed)
        async with self._one_at_a_time():
            workers = sorted(self._reports)
            if not workers:
                raise NoWorkers("decode")
            if unable := [one for one in workers if self._reports[one] is None]:
                why = f"worker {unable[0]} computes no LoRA adapters"
                raise InvalidRequest("folder", folder, f"workers whose engine computes LoRA adapters; {why}")
            command = LoadAdapter(name=name, folder=folder, version=self._next_version(name))
            try:
                fingerprint, present = await self._load_on(workers, command)
            except BaseException:  # also if the caller has left
                self._tell(workers, DropLoad(name=name, version=command.version))
                raise
            named = NamedAdapter(name=name, fingerprint=fingerprint, version=command.version, folder=folder)
            await self._name(present, named)
            log.info("an adapter was loaded", extra={"adapter": name, "fingerprint": fingerprint})
            return fingerprint

    async def unload(self, name: str) -> None:
        """New requests cannot choose it from now on. Raises UnknownModel, and Unavailable if a worker does not
        answer."""
        async with self._one_at_a_time():
            if self.find(name) is None:
                raise UnknownModel(name, self.names)
            named = NamedAdapter(name=name, version=self._next_version(name))
            self._unloaded[name] = named
            if len(self._unloaded) > MAX_UNLOADED:
                del self._unloaded[next(iter(self._unloaded))]
            self._update()
            log.info("an adapter was unloaded", extra={"adapter": name})
            await self._name([one for one, report in self._reports.items() if report is not None], named)

    # -------------------------------------------------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        try:
            check_adapter_name(name, "name")
        except ConfigError as error:
            raise InvalidRequest(error.field, error.seen, error.expected) from None
        if name in self._model_names():
            raise InvalidRequest("name", name, "no name of the model")

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        """For one operator at a time. Raises Overloaded if too many wait."""
        if self._num_calls >= MAX_CALLS:
            raise Overloaded(f"{MAX_CALLS} adapters are being loaded or unloaded", 1.0)
        self._num_calls += 1
        try:
            async with self._turn:
                yield
        finally:
            self._num_calls -= 1

    def _next_version(self, name: str) -> int:
        """Larger than every known one, also if the clock of another router is ahead."""
        known = self._entries.get(name)
        return max(self._now_us(), 1 + (0 if known is None else known.version))

    async def _load_on(self, workers: Collection[str], command: LoadAdapter) -> tuple[str, list[str]]:
        """The fingerprint, and the workers that have loaded it. Raises InvalidRequest and Unavailable."""
        loop = asyncio.get_running_loop()
        self._loading = set(workers)
        keys: dict[str, Key] = {one: (one, command.name, command.version) for one in workers}
        for worker_id, key in keys.items():
            asked = self._asked[key] = loop.create_future()
            asked.add_done_callback(_note_error)
            if not self._send(worker_id, encode_request(command)):
                asked.set_exception(Unavailable(f"worker {worker_id} is not connected"))
        futures = {one: self._asked[key] for one, key in keys.items()}
        try:
            await asyncio.wait(futures.values(), timeout=LOAD_S)
        finally:
            for key in keys.values():
                self._asked.pop(key, None)
        if silent := [one for one, asked in futures.items() if not asked.done()]:
            raise Unavailable(f"worker {silent[0]} has not loaded the adapter within {LOAD_S:g} s; nothing has changed")
        # A worker that came back meanwhile has dropped what it had loaded, and catches up later.
        present = self._loading
        results = {one: asked.result() for one, asked in futures.items() if one in present and not asked.exception()}
        if not results:
            raise Unavailable("all workers have disconnected")
        reasons = {one: result.error for one, result in results.items() if result.error or not result.fingerprint}
        found = {result.fingerprint for result in results.values()}
        if not reasons and len(found) > 1:
            reasons = {one: f"it read {result.fingerprint}" for one, result in results.items()}
        if reasons:
            listed = [
                f"{one}: {shortened(why or 'no fingerprint')}" for one, why in list(reasons.items())[:MAX_REASONS]
            ]
            more = f"; and {len(reasons) - MAX_REASONS} more workers" if len(reasons) > MAX_REASONS else ""
            expected = "one adapter that all workers can load; nothing has changed. "
            raise InvalidRequest("folder", command.folder, f"{expected}{'; '.join(listed)}{more}")
        return found.pop(), list(results)

    async def _name(self, workers: Iterable[str], named: NamedAdapter) -> None:
        """Returns when all workers report the entry or have disconnected. Raises Unavailable."""
        wanted = set(workers)
        for worker_id in wanted & self._given.keys():
            self._given[worker_id][named.name] = named.precedence
        self._tell(wanted, named)
        try:
            async with asyncio.timeout(NAME_S):
                while waiting := {one for one in wanted & self._reports.keys() if not self._has(one, named)}:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(f"worker {min(waiting)} has not answered within {NAME_S:g} s; it follows later") from None

    def _has(self, worker_id: str, named: NamedAdapter) -> bool:
        report = self._reports[worker_id]
        return report is None or any(
            one.name == named.name and one.precedence >= named.precedence for one in report.named
        )

    def _tell(self, workers: Iterable[str], command: AdapterCommand) -> None:
        for worker_id in workers:
            self._send(worker_id, encode_request(command))

    def _update(self) -> None:
        entries = dict(self._unloaded)
        for report in self._reports.values():
            for one in () if report is None else report.named:
                known = entries.get(one.name)
                if known is None or one.precedence > known.precedence:
                    entries[one.name] = one
        self._entries = entries
        self._notify()

    def _notify(self) -> None:
        self._changed.set()

    # -- workers that lack an entry -------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Gives each worker the entries that others have, one load at a time."""
        for worker_id, report in self._reports.items():
            if report is None:
                continue
            given = self._given[worker_id]
            for name, one in self._entries.items():
                if one.precedence <= given.get(name, _NONE):
                    continue
                if not one.fingerprint:
                    given[name] = one.precedence
                    self._tell((worker_id,), one)
                elif worker_id not in self._spreading:
                    given[name] = one.precedence
                    self._spreading[worker_id] = one
                    self._tell((worker_id,), LoadAdapter(name=name, folder=one.folder, version=one.version))

    def _spread(self, worker_id: str, wanted: NamedAdapter, result: AdapterLoaded) -> None:
        if result.fingerprint == wanted.fingerprint:
            self._tell((worker_id,), wanted)
            return
        self._tell((worker_id,), DropLoad(name=wanted.name, version=wanted.version))
        why = result.error or f"its folder has other weights, of fingerprint {result.fingerprint}"
        self._lines.warning(
            "a worker does not serve an adapter that others serve",
            worker_id,
            worker_id=worker_id,
            adapter=wanted.name,
            why=shortened(why),
        )


_NONE: Final = (-1, "")


def _note_error(asked: asyncio.Future[AdapterLoaded]) -> None:
    """Marks an error as read, if its caller has left."""
    if not asked.cancelled():
        asked.exception()

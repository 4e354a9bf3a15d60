"""The LoRA adapters of one worker: which names requests may choose, which fingerprints the engine has, and loading.

A router loads an adapter in two parts, so that it changes all workers or none: LoadAdapter reads it and loads it into
the engine, NamedAdapter gives it the name. A name that gets other weights, or is unloaded, keeps its former fingerprint
here until the last sequence with it has ended.

Files are read and checked on a thread. All else runs on the engine thread, and changes of the engine between two steps.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, final

from pdserve.config import WorkerConfig
from pdserve.core import protocol as pr
from pdserve.core.adapters import (
    MAX_FOLDER_CHARS,
    MAX_UNLOADED,
    Adapter,
    AdapterLimits,
    check_adapter_name,
    split_adapter,
)
from pdserve.core.attempt import AttemptKey
from pdserve.core.errors import ConfigError, InvalidRequest, ModelError, PdserveError
from pdserve.engine.adapters import read_adapter
from pdserve.engine.interface import AdapterEngine, Engine

log = logging.getLogger(__name__)

MAX_LOADS: Final = 8  # that wait, beside the one that is read
# For requests that routers had accepted before a name got other weights, and have not placed yet.
KEEP_S: Final = 10.0

LoadKey = tuple[str, int]  # name and version


@dataclass(frozen=True, slots=True)
class _Load:
    session: int  # of the router that asked
    command: pr.LoadAdapter

    @property
    def key(self) -> LoadKey:
        return self.command.name, self.command.version


@final
class WorkerAdapters:
    def __init__(self, engine: Engine, config: WorkerConfig, now: Callable[[], float]) -> None:
        """`bind` must follow before the first command."""
        self._engine = engine if isinstance(engine, AdapterEngine) else None
        self._config, self._now = config, now
        self._post: Callable[[Callable[[], None]], None] = lambda call: None
        self._on_change: Callable[[], None] = lambda: None
        self._answer: Callable[[int, pr.AdapterLoaded], None] = lambda session, loaded: None
        self._named: dict[str, pr.NamedAdapter] = {}
        self._uses_of: dict[str, int] = {}  # fingerprint in the engine -> its sequences
        self._staged: dict[_Load, str] = {}  # in the engine, and its router has not named it yet
        self._uses: dict[AttemptKey, str] = {}
        self._waiting: deque[_Load] = deque()
        self._reading: _Load | None = None
        self._has_read: list[tuple[_Load, Adapter]] = []  # to load into the engine
        #: Fingerprints without a name or a load, and when each may be freed if no sequence uses it.
        self._retired: dict[str, float] = {}
        #: Replaced as a whole, so that other threads may read it. None: the engine computes no adapters.
        self.report: pr.Adapters | None = None if self._engine is None else pr.Adapters()

    def load_configured(self) -> None:
        """Loads the adapters of the settings; before the first request. Raises ConfigError."""
        for text in self._config.lora:
            name, folder = split_adapter(text)
            if self._engine is None:
                raise ConfigError("lora", text, "an engine that computes LoRA adapters")
            adapter = self._read(name, folder)
            self._hold(adapter)
            self._named[name] = pr.NamedAdapter(name=name, fingerprint=adapter.fingerprint, folder=str(folder))
        self._changed()

    def bind(
        self,
        post: Callable[[Callable[[], None]], None],
        on_change: Callable[[], None],
        answer: Callable[[int, pr.AdapterLoaded], None],
    ) -> None:
        """For a new program of the engine. No sequence has an adapter, and no router's load is left. `on_change` is
        called after each change of `report`, and `answer` with the number of the router's stream."""
        self._post, self._on_change, self._answer = post, on_change, answer

    # -- sequences ------------------------------------------------------------------------------------------------

    def begin(self, key: AttemptKey, fingerprint: str) -> bool:
        """Keeps the adapter until `end`. False: it is not loaded."""
        if fingerprint not in self._uses_of:
            return False
        self._uses_of[fingerprint] += 1
        self._uses[key] = fingerprint
        return True

    def end(self, key: AttemptKey) -> None:
        """Idempotent; does nothing for a sequence without an adapter."""
        fingerprint = self._uses.pop(key, None)
        if fingerprint is not None:
            self._uses_of[fingerprint] -= 1

    # -- commands of routers --------------------------------------------------------------------------------------

    def handle(self, session: int, command: pr.AdapterCommand) -> None:
        """Raises InvalidRequest."""
        match command:
            case pr.LoadAdapter():
                self._ask(_Load(session, command))
            case pr.DropLoad():
                key = command.name, command.version
                self._drop(lambda load: load.session == session and load.key == key)
            case pr.NamedAdapter():
                self._set(session, command)

    def lost(self, session: int) -> None:
        """The router's stream ended: its loads are dropped."""
        self._drop(lambda load: load.session == session)

    @property
    def waits(self) -> bool:
        """Whether the engine must change, so that no step may be launched ahead."""
        return bool(self._has_read) or bool(self._free_now(self._now()))

    def change_engine(self) -> None:
        """Loads what was read, and frees what is no longer needed. Between two steps; no step may be in flight."""
        if self._engine is None:
            return
        has_read, self._has_read = self._has_read, []
        for load, adapter in has_read:
            try:
                self._check_names(load.command.name)
                self._hold(adapter)
            except Exception as error:  # an adapter may not end the process; the engine has not changed
                log.warning("an adapter was not loaded", extra={"adapter": load.key[0], "why": _why(error)})
                self._fail(load, _why(error))
                continue
            self._staged[load] = adapter.fingerprint
            self._retired.pop(adapter.fingerprint, None)
            self._changed()
            self._answer(load.session, _answer_of(load, fingerprint=adapter.fingerprint))
        self._free(self._now())
        self._read_next()

    def check(self) -> None:
        """Raises AssertionError unless the tables agree; for tests."""
        assert Counter(self._uses.values()) == {name: uses for name, uses in self._uses_of.items() if uses}
        wanted = self._wanted()
        assert wanted.isdisjoint(self._retired), "an adapter with a name may be freed"
        assert wanted | self._retired.keys() == self._uses_of.keys(), (
            "a name has no adapter, or an adapter is forgotten"
        )

    # -- loading --------------------------------------------------------------------------------------------------

    def _ask(self, load: _Load) -> None:
        try:
            check_adapter_name(load.command.name, "lora_name")
            if self._engine is None:
                raise ConfigError("lora_name", load.command.name, "an engine that computes LoRA adapters")
            if len(self._waiting) >= MAX_LOADS:
                raise ConfigError("lora_name", load.command.name, f"at most {MAX_LOADS} adapters that wait to be read")
        except PdserveError as error:
            self._fail(load, error.message)
            return
        self._waiting.append(load)
        self._read_next()

    def _read_next(self) -> None:
        """One after the other, also with the loads into the engine, so that the bytes of one are held at a time."""
        if self._reading is None and not self._has_read and self._waiting:
            load = self._reading = self._waiting.popleft()
            threading.Thread(target=self._read_on_thread, args=(load,), name="adapter", daemon=True).start()

    def _read_on_thread(self, load: _Load) -> None:
        adapter: Adapter | None = None
        why = ""
        try:
            folder = permitted_folder(load.command.folder, self._config.lora_folders, self._configured(load.key[0]))
            adapter = self._read(load.command.name, folder)
        except Exception as error:  # of a file that someone wrote: the router gets the reason, and the worker goes on
            why = _why(error)
            log.warning("an adapter was not read", extra={"adapter": load.key[0], "why": why})
        self._post(partial(self._was_read, load, adapter, why))

    def _read(self, name: str, folder: Path) -> Adapter:
        """On any thread. Raises ConfigError."""
        return read_adapter(name, folder, AdapterLimits(self._config.max_lora_rank, self._config.max_lora_bytes))

    def _configured(self, name: str) -> str:
        """The name's folder in the settings, which is permitted for that name; empty: none."""
        folders = dict(map(split_adapter, self._config.lora))
        return str(folders[name]) if name in folders else ""

    def _was_read(self, load: _Load, adapter: Adapter | None, why: str) -> None:
        is_wanted, self._reading = self._reading is load, None
        if is_wanted and adapter is not None:
            self._has_read.append((load, adapter))
        elif is_wanted:  # else it was dropped while it was read
            self._fail(load, why)
        self._read_next()

    def _fail(self, load: _Load, why: str) -> None:
        self._answer(load.session, _answer_of(load, error=why))

    def _drop(self, is_dropped: Callable[[_Load], bool]) -> None:
        """Drops loads in every stage. Another router's load of the same name and version goes on."""
        self._waiting = deque(one for one in self._waiting if not is_dropped(one))
        self._has_read = [one for one in self._has_read if not is_dropped(one[0])]
        if self._reading is not None and is_dropped(self._reading):
            self._reading = _Load(-1, self._reading.command)  # the thread goes on, so the next load waits for it
        self._unstage(is_dropped)
        self._read_next()

    def _unstage(self, is_ended: Callable[[_Load], bool]) -> None:
        for load in [load for load in self._staged if is_ended(load)]:
            self._retire(self._staged.pop(load), 0.0)

    # -- names ----------------------------------------------------------------------------------------------------

    def _set(self, session: int, named: pr.NamedAdapter) -> None:
        """Raises InvalidRequest."""
        try:
            check_adapter_name(named.name, "set_adapter.name")
        except ConfigError as error:
            raise InvalidRequest(error.field, error.seen, error.expected) from None
        if len(named.folder) > MAX_FOLDER_CHARS:
            raise InvalidRequest("set_adapter.folder", f"{len(named.folder)} characters", f"at most {MAX_FOLDER_CHARS}")
        former = self._named.get(named.name)
        is_newer = former is None or named.precedence > former.precedence
        if is_newer and (not named.fingerprint or named.fingerprint in self._uses_of):
            self._named[named.name] = named
            self._retired.pop(named.fingerprint, None)
            if former is not None:
                self._retire(former.fingerprint, KEEP_S if named.fingerprint else 0.0)
            unloaded = sorted((one for one in self._named.values() if not one.fingerprint), key=_version)
            for one in unloaded[:-MAX_UNLOADED]:
                del self._named[one.name]
            message = "an adapter is served" if named.fingerprint else "an adapter is no longer served"
            log.info(message, extra={"adapter": named.name, "fingerprint": named.fingerprint})
        key = named.name, named.version
        self._unstage(lambda load: load.session == session and load.key == key)
        self._changed()  # also if nothing has changed: the router waits for it

    # -- engine ---------------------------------------------------------------------------------------------------

    def _check_names(self, name: str) -> None:
        """Raises ModelError if it would be one name too many. Many names of one adapter take no room in the engine, but
        make every report longer, and routers reject workers with too many."""
        names = {one.name for one in self._named.values() if one.fingerprint}
        names |= {load.command.name for load in self._staged}
        most = self._config.max_lora_adapters
        if name not in names and len(names) >= most:
            raise ModelError("lora_name", f"{name} beside {len(names)} others", f"at most max_lora_adapters, {most}")

    def _hold(self, adapter: Adapter) -> None:
        """Raises ModelError if the adapter does not fit the model or the limits."""
        assert self._engine is not None
        if adapter.fingerprint in self._uses_of:
            return
        try:
            self._engine.load_adapter(adapter)
        except ModelError:
            if not self._free(math.inf):
                raise
            self._engine.load_adapter(adapter)  # there may be room now
        self._uses_of[adapter.fingerprint] = 0

    def _wanted(self) -> set[str]:
        named = {one.fingerprint for one in self._named.values()} - {""}
        return named | set(self._staged.values())

    def _retire(self, fingerprint: str, keep_s: float) -> None:
        """Nothing names the adapter any more, or at least one name less."""
        if fingerprint in self._uses_of and fingerprint not in self._wanted():
            self._retired[fingerprint] = self._now() + keep_s

    def _free_now(self, now_s: float) -> list[str]:
        return [one for one, at_s in self._retired.items() if at_s <= now_s and not self._uses_of[one]]

    def _free(self, now_s: float) -> bool:
        """Whether an adapter was freed."""
        assert self._engine is not None
        for fingerprint in (freed := self._free_now(now_s)):
            del self._uses_of[fingerprint], self._retired[fingerprint]
            self._engine.unload_adapter(fingerprint)
        if freed:
            self._changed()
        return bool(freed)

    def _changed(self) -> None:
        if self._engine is not None:
            self.report = pr.Adapters(named=tuple(self._named.values()), loaded=tuple(self._uses_of))
            self._on_change()


def permitted_folder(given: str, folders: Sequence[str], configured: str = "") -> Path:
    """The resolved folder, if it is one of `folders` or lies below one, or if it is `configured`.

    Raises InvalidRequest. A folder that does not exist gets the same error, so callers do not learn what exists.
    """
    below = (
        f"below one of worker.lora_folders ({', '.join(folders)})" if folders else "none: worker.lora_folders is empty"
    )
    error = InvalidRequest("lora_path", given, f"an existing folder on every worker, {below}")
    path = Path(given)
    if not given.isprintable() or not path.is_absolute() or ".." in path.parts:
        raise error
    try:
        found = path.resolve(strict=True)
        if configured and found == Path(configured).resolve(strict=True):
            return found
        roots = [Path(one).resolve() for one in folders]
        is_below = any(found.is_relative_to(root) for root in roots)
        is_folder = found.is_dir()
    except (OSError, RuntimeError, ValueError):  # for a loop of links, Python 3.12 and older raise RuntimeError
        raise error from None
    if not (is_below and is_folder):
        raise error
    return found


MAX_WHY_CHARS: Final = 1024


def _answer_of(load: _Load, *, fingerprint: str = "", error: str = "") -> pr.AdapterLoaded:
    name, version = load.key
    return pr.AdapterLoaded(name=name, version=version, fingerprint=fingerprint, error=error[:MAX_WHY_CHARS])


def _why(error: Exception) -> str:
    return error.message if isinstance(error, PdserveError) else f"{type(error).__name__}: {error}"


def _version(named: pr.NamedAdapter) -> int:
    return named.version

"""The workers that the router knows, and the measured links between them. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

from pdserve.core.errors import NONE_YET, NoWorkers
from pdserve.core.latency import LinkModel
from pdserve.core.types import Role
from router.events import WorkerConnected
from router.view import WorkerView

MAX_LINKS: Final = 16_384  # number of pairs; the least recently measured is dropped first


class Fleet:
    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.workers: dict[str, WorkerView] = {}
        self.has_known_decode = False
        self._usable: tuple[list[WorkerView], list[WorkerView]] | None = None  # cached until something changes
        self.fits_all = 0  # tokens of one sequence that every usable worker holds, as of the last call of `usable`
        self._usable_until_s = 0.0  # when the first of them would exceed the silence limit
        self._links: OrderedDict[tuple[str, str], LinkModel] = OrderedDict()
        self._any_link = LinkModel()  # model of an unmeasured pair

    def connect(self, hello: WorkerConnected, now_s: float) -> WorkerView:
        self.changed()
        view = self.workers.get(hello.worker_id)
        if view is None:
            view = self.workers[hello.worker_id] = WorkerView(hello, now_s)
        else:
            view.came_back(hello, now_s)
        self.has_known_decode = self.has_known_decode or hello.role is Role.DECODE
        return view

    def forget(self, worker_id: str) -> None:
        self.changed()
        self.workers.pop(worker_id, None)

    def connected(self, worker_id: str) -> WorkerView | None:
        view = self.workers.get(worker_id)
        return view if view is not None and view.is_connected else None

    def is_usable(self, view: WorkerView, now_s: float) -> bool:
        """Whether the worker may receive new requests."""
        return view.is_connected and view.heard_s > now_s - self.silence_s and not view.is_draining

    def has_undrained_decode(self) -> bool:
        """Whether a decode worker is connected that no operator has drained."""
        return any(
            view.role is Role.DECODE and view.is_connected and not view.is_drained for view in self.workers.values()
        )

    def is_decode_drained(self) -> bool:
        """Whether operators have drained every known decode worker, so that waiting for one to reconnect is useless."""
        decodes = self.all_decode()
        return bool(decodes) and all(view.is_connected and view.is_drained for view in decodes)

    def all_decode(self) -> list[WorkerView]:
        """Also those that are not connected."""
        return [view for view in self.workers.values() if view.role is Role.DECODE]

    def why_none(self, views: Iterable[WorkerView], now_s: float) -> NoWorkers:
        """The error if none of `views`, decode workers, may receive a request: how many are in which state."""
        states = Counter(self._state(view, now_s) for view in views)
        counted = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
        return NoWorkers(Role.DECODE.value, states=counted or ("none is left" if self.has_known_decode else NONE_YET))

    def _state(self, view: WorkerView, now_s: float) -> str:
        """As `pdserve topology` names it."""
        if not view.is_connected:
            return "away"
        if view.is_draining:
            return "drained" if view.is_drained else "draining"
        return "connected" if self.is_usable(view, now_s) else "without a recent load report"

    def usable(self, now_s: float) -> tuple[list[WorkerView], list[WorkerView]]:
        """The prefill workers and the decode workers that may receive new requests. The lists are cached, so callers
        must not change them."""
        kept = self._usable
        if kept is None or now_s >= self._usable_until_s:
            able = [view for view in self.workers.values() if self.is_usable(view, now_s)]
            prefills = [view for view in able if view.role is Role.PREFILL]
            kept = self._usable = prefills, [view for view in able if view.role is Role.DECODE]
            self.fits_all = min([view.max_tokens for view in able], default=0)
            self._usable_until_s = min([view.heard_s for view in able], default=now_s) + self.silence_s
        return kept

    def changed(self) -> None:
        """Drops the cached lists: a worker connected, disconnected, drains, or is no longer silent."""
        self._usable = None

    def heard(self, view: WorkerView, now_s: float) -> None:
        if not view.heard_s > now_s - self.silence_s:
            self.changed()
        view.heard_s = now_s

    def check(self, now_s: float) -> None:
        kept = self._usable
        if kept is not None and now_s < self._usable_until_s:
            able = {view.worker_id for view in self.workers.values() if self.is_usable(view, now_s)}
            assert {view.worker_id for role in kept for view in role} == able, "the cached workers are out of date"

    def key(self, worker_id: str) -> tuple[str, str]:
        """Identifies a worker's current incarnation, so that a restarted worker starts without history."""
        view = self.workers.get(worker_id)
        return (worker_id, view.incarnation if view is not None else "")

    def link(self, prefill_worker: str, decode_worker: str) -> LinkModel:
        return self._links.get((prefill_worker, decode_worker), self._any_link)

    def measured(self, prefill_worker: str, decode_worker: str, num_bytes: int, busy_s: float) -> None:
        """Learns from a transfer of `num_bytes`. `busy_s` excludes the time in which the transfer waited for the
        prefill."""
        pair = (prefill_worker, decode_worker)
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = LinkModel(self._any_link.latency_s, self._any_link.bandwidth_bytes_s)
            if len(self._links) > MAX_LINKS:
                self._links.popitem(last=False)
        link.observe(num_bytes, busy_s)
        self._any_link.observe(num_bytes, busy_s)
        self._links.move_to_end(pair)

    def excuse_silence(self, gap_s: float) -> None:
        """Does not count `gap_s`, in which the router itself was suspended, as silence of the workers."""
        self.changed()
        for view in self.workers.values():
            view.heard_s += gap_s

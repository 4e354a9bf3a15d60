"""How far the start, or the drain, of a cluster is: its processes, and the phase that each is in. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from pdserve.core.progress import PhaseProgress, Progress

MAX_SHOWN = 4  # processes in one line


@final
class ClusterProgress:
    """Times are of one clock. `names`: the steps in order, such as the processes that must start."""

    def __init__(self, what: str, names: Sequence[str], began_s: float, limit_s: float | None = None) -> None:
        """`limit_s`: after which it ends anyway."""
        self.what, self.began_s, self._limit_s = what, began_s, limit_s
        self._open = dict.fromkeys(names, False)  # whether it has begun, for what has not ended
        self._total = len(self._open)
        self._phases: dict[str, Progress] = {}  # by process; the current one
        self._texts: dict[str, PhaseProgress] = {}
        self._causes: dict[str, str] = {}  # why a step waits

    def begins(self, name: str) -> None:
        if name in self._open:
            self._open[name] = True

    def phase(self, name: str, one: PhaseProgress, now_s: float) -> None:
        known = self._texts.get(name)
        if known is None or known.phase != one.phase:
            self._phases[name] = Progress(one.total, now_s - one.seconds)
        self._phases[name].update(one.done, now_s)
        self._texts[name] = one

    def waits(self, name: str, cause: str) -> None:
        self._causes[name] = cause

    def ends(self, name: str) -> None:
        self._causes.pop(name, None)
        self._open.pop(name, None)
        self._phases.pop(name, None)
        self._texts.pop(name, None)

    @property
    def is_over(self) -> bool:
        return not self._open

    @property
    def share(self) -> float:
        """A step counts when it has ended."""
        return 1.0 - len(self._open) / self._total if self._total else 1.0

    def time_text(self, now_s: float) -> str:
        spent_s = now_s - self.began_s
        if self._limit_s is not None:
            return f"at most {max(self._limit_s - spent_s, 0.0):.0f} s left"
        return f"{spent_s:.0f} s so far"

    def detail(self, now_s: float) -> str:
        """What runs now, with the rest of a phase where it can be estimated."""
        running = [name for name, has_begun in self._open.items() if has_begun]
        shown = [self._one(name, now_s) for name in running[:MAX_SHOWN]]
        more = [f"{len(running) - MAX_SHOWN} more"] if len(running) > MAX_SHOWN else []
        return "; ".join([f"{self._total - len(self._open)} of {self._total}", *shown, *more])

    def _one(self, name: str, now_s: float) -> str:
        one = self._texts.get(name)
        if one is None or one.is_over:
            return f"{name}: {self._causes[name]}" if name in self._causes else name
        remaining_s = self._phases[name].remaining_s(now_s)
        rest = "" if remaining_s is None else f", {remaining_s:.0f} s left"
        return " ".join(filter(None, (name, one.phase, one.detail))) + rest

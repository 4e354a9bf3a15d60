"""Statistics of one worker over the whole run, including its successors, and samples over time. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

from pdserve.core.effects import StepAccount
from simulator.model import Sample, WorkerRow, WorkerShape

# --- samples over time ----------------------------------------------------------------------------------------
# The cluster's state and the workers' steps, in bounded memory: a run that is twice as long is sampled half as often.

FIRST_INTERVAL_S: Final = 0.1
MOST_SAMPLES: Final = 2048
FIRST_WIDTH_S: Final = 0.05
MOST: Final = 256
PREFILL, MIXED, DECODE = 0, 1, 2  # kinds of steps


@final
class Samples:
    """The state of the cluster at equal intervals."""

    def __init__(self) -> None:
        self.interval_s = FIRST_INTERVAL_S
        self.kept: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self.kept.append(sample)
        if len(self.kept) >= MOST_SAMPLES:
            del self.kept[1::2]
            self.interval_s *= 2.0


@final
class StepShares:
    """What a worker's time went to, in equal intervals."""

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self._busy_s: tuple[list[float], ...] = ([], [], [])  # by kind and interval

    def add(self, begin_s: float, end_s: float, *, prefills: bool, decodes: bool) -> None:
        """A step, or several equal ones in a row, that end no earlier than those before."""
        while end_s > self.width_s * MOST:
            self._widen()
        first, last = int(begin_s / self.width_s), min(int(end_s / self.width_s), MOST - 1)
        for each in self._busy_s:
            each.extend([0.0] * (last + 1 - len(each)))
        busy_s = self._busy_s[MIXED if prefills and decodes else PREFILL if prefills else DECODE]
        for number in range(first, last + 1):
            overlap_s = min(end_s, (number + 1) * self.width_s) - max(begin_s, number * self.width_s)
            if overlap_s > 0.0:
                busy_s[number] += overlap_s

    @property
    def shares(self) -> list[list[float]]:
        """By kind and interval, 0 to 1."""
        return [[min(busy_s / self.width_s, 1.0) for busy_s in each] for each in self._busy_s]

    def _widen(self) -> None:
        self.width_s *= 2.0
        for each in self._busy_s:
            each[:] = [sum(each[number : number + 2]) for number in range(0, len(each), 2)]


# --- statistics of a worker -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    shape: WorkerShape
    row: WorkerRow = field(init=False)
    decode_steps: int = 0
    shares: StepShares = field(default_factory=StepShares)
    _noted_s: float = 0.0

    def __post_init__(self) -> None:
        self.row = WorkerRow(worker_id=self.shape.worker_id, role=self.shape.role)

    def kv_held(self, now_s: float, held_tokens: int, stranded_tokens: int) -> None:
        """Adds the memory held since the last call; called before it changes."""
        since_s = now_s - self._noted_s
        if since_s > 0.0:
            self.row.kv_token_s += held_tokens * since_s
            self.row.stranded_token_s += stranded_tokens * since_s
            self._noted_s = now_s

    def computed(self, account: StepAccount, steps: int, busy_s: float, ended_s: float) -> None:
        """`steps` equal steps that took `busy_s` together."""
        row = self.row
        self.shares.add(ended_s - busy_s, ended_s, prefills=account.prefill_tokens > 0, decodes=account.decode_rows > 0)
        row.busy_s += busy_s
        row.steps += steps
        row.prefill_tokens += account.prefill_tokens
        row.decode_tokens += account.decode_rows * steps
        if account.decode_rows:
            self.decode_steps += steps

    def finish(self) -> WorkerRow:
        self.row.mean_rows = self.row.decode_tokens / self.decode_steps if self.decode_steps else 0.0
        self.row.shares_width_s, self.row.shares = self.shares.width_s, self.shares.shares
        return self.row

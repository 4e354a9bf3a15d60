"""Statistics of one worker over the whole run, including its successors. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.core.effects import StepAccount
from simulator.model import WorkerRow, WorkerShape
from simulator.over_time import StepShares


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

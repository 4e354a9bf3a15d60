"""The phases of a request: every moment between its arrival and its end belongs to exactly one. Pure.

router/timeline.py divides the time of a request into intervals, by the router's clock. A worker reports how long its
own work took, by its own clock, and that part of the interval is assigned to the worker's phase. The rest of the
interval is MESSAGES. Clocks of two processes are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Final, Literal


class Phase(Enum):
    __hash__ = object.__hash__  # the router looks phases up on every event, and Enum computes its hash in Python

    PREPARE = "prepare"
    PREFIX_LOOKUP = "prefix_lookup"
    QUEUE = "queue"
    RESERVE = "reserve"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    TRANSFER_WAIT = "transfer_wait"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    PREEMPTED = "preempted"
    MESSAGES = "messages"
    LOST = "lost"


MEASURED_BY: Final[Mapping[Phase, Literal["router", "worker"]]] = {
    Phase.PREPARE: "router",
    Phase.PREFIX_LOOKUP: "router",
    Phase.QUEUE: "router",
    Phase.RESERVE: "router",
    Phase.PREFILL_QUEUE: "worker",
    Phase.PREFILL: "worker",
    Phase.TRANSFER_WAIT: "router",
    Phase.DECODE_QUEUE: "worker",
    Phase.DECODE: "worker",
    Phase.PREEMPTED: "worker",
    Phase.MESSAGES: "router",
    Phase.LOST: "router",
}
MEANING: Final[Mapping[Phase, str]] = {
    Phase.PREPARE: "validate and tokenize the prompt, compile its grammar, hash its blocks",
    Phase.PREFIX_LOOKUP: "look up which workers hold the prompt's leading blocks",
    Phase.QUEUE: "wait in the router for a placement, including backoff",
    Phase.RESERVE: "wait for the decode worker to reserve KV blocks",
    Phase.PREFILL_QUEUE: "wait on the worker that computes the prompt",
    Phase.PREFILL: "compute the prompt, from the first chunk to the first token",
    Phase.TRANSFER_WAIT: "wait from the first token to committed KV: the part of the transfer after the prefill",
    Phase.DECODE_QUEUE: "wait on the decode worker for the first decode step",
    Phase.DECODE: "run decode steps, up to the last token",
    Phase.PREEMPTED: "wait after an eviction for lack of KV blocks, up to the next token",
    Phase.MESSAGES: "messages between router and workers, and other time that no worker reports",
    Phase.LOST: "time in failed attempts after their last token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of each phase, over all attempts. They add up to the time from arrival to the end."""

    prepare_s: float = 0.0
    prefix_lookup_s: float = 0.0
    queue_s: float = 0.0
    reserve_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_wait_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    messages_s: float = 0.0
    lost_s: float = 0.0

    @classmethod
    def of(cls, seconds: Mapping[Phase, float]) -> Phases:
        return cls(**{f"{phase.value}_s": took_s for phase, took_s in seconds.items()})

    def shown(self) -> list[tuple[str, float]]:
        """Name and seconds of every phase that took time, in the order in which a request passes through them."""
        seconds = [(phase.value.replace("_", " "), float(getattr(self, f"{phase.value}_s"))) for phase in Phase]
        return [(name, took_s) for name, took_s in seconds if took_s > 0.0]

    @property
    def total_s(self) -> float:
        return sum(float(getattr(self, field.name)) for field in fields(self))


NO_PHASES: Final = Phases()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One interval of one phase. `begin_s` counts from the request's arrival."""

    phase: Phase
    attempt: int  # 0: before the first attempt
    begin_s: float
    seconds: float
    worker_id: str = ""  # that measured it; empty: the router

"""Frames of the live feed without a cluster: a small queueing model, the same for the same seed. Pure.

Each request is planned when it arrives, with all its phases. A frame shows the plans up to its time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

Frame = dict[str, Any]

START_S = 1000.0  # the router's clock does not begin at zero
NUM_BLOCKS = 1200
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 24_576
DECIDED_AFTER_S = 0.002  # from arrival to the decision; then the request waits for the prefill worker
PREFILL_TOKENS_PER_S = 9000.0
LINK_BYTES_PER_S = 4e8


@dataclass(frozen=True, kw_only=True)
class Load:
    """What arrives and what happens. Times are seconds after the start."""

    seed: int = 0
    rate_rps: float | Callable[[float], float] = 6.0  # 0: nothing arrives
    prefill: int = 2
    decode: int = 3
    output_tokens: tuple[int, int] = (30, 180)
    slo_ttft_s: float | None = 0.6
    slo_tpot_s: float | None = 0.05
    lost: dict[str, float] = field(default_factory=dict)  # worker: when it leaves
    drained: dict[str, float] = field(default_factory=dict)  # worker: when it begins to drain
    name: Callable[[int], str] | None = None  # request id by number
    tenants: tuple[str, ...] = ("search", "chat", "batch")
    admits: bool = True  # rejects what would be late


@dataclass(kw_only=True)
class _Plan:
    request_id: str
    tenant: str
    arrived_s: float
    prompt: int
    cached: int
    max_tokens: int
    prefill_worker: str = ""
    decode_worker: str = ""
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    phases: list[tuple[str, float, float]] = field(default_factory=list)  # begin after the arrival
    ttft_s: float | None = None
    tpot_s: float | None = None
    ended_s: float = 0.0
    outcome: str = "served"
    why: str = ""
    retry_after_s: float | None = None
    attempt: int = 1
    transfer_s: float | None = None

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.max_tokens) // BLOCK_TOKENS)


@final
class FrameSource:
    """`frame(at_s)` must be called with times that do not decrease."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._random = random.Random(load.seed)
        self._prefill = [f"p{number}" for number in range(load.prefill)]
        self._decode = [f"d{number}" for number in range(load.decode)]
        self._free_s = dict.fromkeys(self._prefill, START_S)
        self._running: list[_Plan] = []
        self._next_s = START_S + 0.05 if load.rate_rps else math.inf
        self._number = 0
        self._totals = dict.fromkeys(
            (
                "arrived",
                "served",
                "late",
                "rejected",
                "cancelled",
                "expired",
                "failed",
                "output_tokens",
                "transfer_bytes",
            ),
            0,
        )
        self._counted: dict[str, int] = {}
        self._steps: dict[str, int] = {}
        self.explanations: dict[str, dict[str, Any]] = {}

    def frame(self, at_s: float) -> Frame:
        self._arrive(at_s)
        self._lose(at_s)
        ended = [plan for plan in self._running if plan.ended_s <= at_s]
        self._running = [plan for plan in self._running if plan.ended_s > at_s]
        for plan in [*self._running, *ended]:
            self._count(plan, at_s)
        live = self._running[:256]
        return {
            "at_s": round(at_s, 6),
            "queued": sum(_phase(plan, at_s) == "queue" for plan in self._running),
            "running": len(self._running),
            "omitted": len(self._running) - len(live),
            "totals": dict(self._totals),
            "workers": [self._worker(name, at_s) for name in (*self._prefill, *self._decode)],
            "requests": [_request(plan, at_s, self._load) for plan in [*live, *ended]],
        }

    def _arrive(self, at_s: float) -> None:
        while self._next_s <= at_s:
            self._plan(self._next_s)
            rate = self._load.rate_rps
            rps = rate(self._next_s - START_S) if callable(rate) else rate
            self._next_s += self._random.expovariate(rps)

    def _plan(self, now_s: float) -> None:
        self._number += 1
        self._totals["arrived"] += 1
        load, draw = self._load, self._random
        name = load.name(self._number) if load.name else f"{draw.getrandbits(128):032x}"
        prompt = int(min(6000, 64 + draw.expovariate(1 / 900)))
        plan = _Plan(
            request_id=name,
            tenant=draw.choice(load.tenants),
            arrived_s=now_s,
            prompt=prompt,
            cached=int(prompt * draw.choice((0, 0, 0.5, 0.9))) // BLOCK_TOKENS * BLOCK_TOKENS,
            max_tokens=draw.randint(*load.output_tokens),
        )
        self._place(plan, now_s, begin_s=0.0)
        self._running.append(plan)

    def _place(self, plan: _Plan, now_s: float, *, begin_s: float) -> None:
        """Plans the phases from `begin_s` after the arrival on."""
        load = self._load
        candidates = [
            self._candidate(plan, p, d, now_s)
            for p in (*self._usable(self._prefill), "")
            for d in self._usable(self._decode)
        ]
        chosen = min(candidates, key=lambda one: (not one["is_feasible"], one["cost"]))
        # A request that was already admitted is placed again whatever its prediction.
        chosen["is_chosen"] = chosen["is_feasible"] or not load.admits or plan.attempt > 1
        self._explain(plan, candidates, chosen)
        if not chosen["is_chosen"]:
            best = min(one["predicted_ttft_s"] for one in candidates)
            plan.outcome, plan.retry_after_s = "rejected", round(best, 1) + 0.5
            plan.why = f"best predicted TTFT {best:.3f} s, target {load.slo_ttft_s:.3f} s"
            plan.phases.append(("queue", begin_s, 0.015))
            plan.ended_s = now_s + 0.015
            return
        p, d = chosen["prefill_worker"], chosen["decode_worker"]
        plan.prefill_worker, plan.decode_worker = p, d
        plan.predicted_ttft_s, plan.predicted_tpot_s = chosen["predicted_ttft_s"], chosen["predicted_tpot_s"]
        noise = self._random.uniform(0.85, 1.3)
        uncached = plan.prompt - plan.cached
        free_s = self._free_s[p] if p else now_s
        queue_s = max(0.0, free_s - now_s)
        prefill_s = (0.02 + uncached / PREFILL_TOKENS_PER_S) * noise * (1 if p else 1.6)
        transfer_s = 0.004 + uncached * BYTES_PER_TOKEN / LINK_BYTES_PER_S if p else 0.0
        plan.transfer_s = transfer_s if p else None
        tpot_s = chosen["predicted_tpot_s"] * self._random.uniform(0.9, 1.15)
        steps: list[tuple[str, float]] = [
            ("queue", DECIDED_AFTER_S),
            ("reserve", 0.004),
            ("prefill_queue", queue_s + 0.006),
            ("prefill", prefill_s),
        ]
        if p:
            steps.append(("transfer_wait", transfer_s))
            self._free_s[p] = max(free_s, now_s) + prefill_s
        steps += [("decode_queue", tpot_s / 3), ("decode", tpot_s * plan.max_tokens)]
        at_s = begin_s
        for name, length_s in steps:
            plan.phases.append((name, at_s, length_s))
            at_s += length_s
            if name == "prefill" and plan.ttft_s is None:
                plan.ttft_s = at_s
        plan.tpot_s = tpot_s
        plan.ended_s = plan.arrived_s + at_s
        is_late = (load.slo_ttft_s is not None and (plan.ttft_s or 0) > load.slo_ttft_s) or (
            load.slo_tpot_s is not None and tpot_s > load.slo_tpot_s
        )
        plan.outcome = "late" if is_late else "served"
        if self._random.random() < 0.01:
            plan.outcome, plan.ended_s = "cancelled", plan.arrived_s + at_s * 0.7

    def _usable(self, names: list[str]) -> list[str]:
        free = [name for name in names if name not in self._draining]
        return free or names

    _draining: frozenset[str] = frozenset()

    def _candidate(self, plan: _Plan, p: str, d: str, now_s: float) -> dict[str, Any]:
        uncached = plan.prompt - plan.cached
        batch = sum(other.decode_worker == d and other.ended_s > now_s for other in self._running)
        waited_s = now_s - plan.arrived_s
        queue_s = max(0.0, self._free_s[p] - now_s) if p else 0.02 * batch
        ttft_s = waited_s + queue_s + 0.03 + uncached / PREFILL_TOKENS_PER_S * (1 if p else 1.6)
        tpot_s = 0.016 + 0.0007 * batch + (0.012 if not p else 0)
        load = self._load
        meets_ttft = load.slo_ttft_s is None or ttft_s <= load.slo_ttft_s
        meets_tpot = load.slo_tpot_s is None or tpot_s <= load.slo_tpot_s
        return {
            "prefill_worker": p,
            "decode_worker": d,
            "predicted_ttft_s": ttft_s,
            "predicted_tpot_s": tpot_s,
            "slack": None if load.slo_ttft_s is None else 1 - ttft_s / load.slo_ttft_s,
            "is_feasible": meets_ttft and meets_tpot,
            "is_chosen": False,
            "cost": (ttft_s + 4 * tpot_s) / (load.slo_ttft_s or 1.0),
        }

    def _explain(self, plan: _Plan, candidates: list[dict[str, Any]], chosen: dict[str, Any]) -> None:
        load, is_chosen = self._load, chosen["is_chosen"]
        decision = ("remote" if chosen["prefill_worker"] else "local") if is_chosen else "reject"
        first = sorted(candidates, key=lambda one: not one["is_chosen"])[:8]
        self.explanations[plan.request_id] = {
            "request_id": plan.request_id,
            "decision": decision,
            "reason": ("the lowest cost of the placements that meet" if is_chosen else "no placement meets")
            + " every target",
            "waited_s": DECIDED_AFTER_S,
            "slo_ttft_s": load.slo_ttft_s,
            "slo_tpot_s": load.slo_tpot_s,
            "candidates": first,
            "ended_because": "",
        }

    def _lose(self, at_s: float) -> None:
        load = self._load
        for name, after_s in load.lost.items():
            if at_s - START_S < after_s or name not in (*self._prefill, *self._decode):
                continue
            for names in (self._prefill, self._decode):
                if name in names:
                    names.remove(name)
            for plan in self._running:
                if name in (plan.prefill_worker, plan.decode_worker) and plan.ended_s > at_s:
                    since_s = at_s - plan.arrived_s
                    plan.phases = [
                        (phase, begin, min(length, since_s - begin))
                        for phase, begin, length in plan.phases
                        if begin < since_s
                    ]
                    plan.phases.append(("lost", since_s, 0.08))
                    plan.attempt += 1
                    if plan.ttft_s is not None and plan.ttft_s > since_s:
                        plan.ttft_s = None
                    self._place(plan, at_s, begin_s=since_s + 0.08)
        self._draining = frozenset(name for name, after_s in load.drained.items() if at_s - START_S >= after_s)

    def _count(self, plan: _Plan, at_s: float) -> None:
        tokens = _tokens(plan, at_s)
        self._totals["output_tokens"] += tokens - self._counted.get(plan.request_id, 0)
        before = self._counted.get(plan.request_id)
        self._counted[plan.request_id] = tokens
        if before is None and plan.prefill_worker:
            self._totals["transfer_bytes"] += (plan.prompt - plan.cached) * BYTES_PER_TOKEN
        if plan.ended_s <= at_s:
            self._totals[plan.outcome] += 1
            del self._counted[plan.request_id]

    def _worker(self, name: str, at_s: float) -> Frame:
        is_prefill = name.startswith("p")
        mine = [plan for plan in self._running if name in (plan.prefill_worker, plan.decode_worker)]
        places = {"p": ("prefill",), "d": ("decode",) if not is_prefill else ()}[name[0]]
        running = [plan for plan in mine if _phase(plan, at_s) in places]
        waiting = [
            plan for plan in mine if _phase(plan, at_s) in (("prefill_queue",) if is_prefill else ("decode_queue",))
        ]
        used = min(NUM_BLOCKS, sum(plan.blocks for plan in running))
        cached = min(NUM_BLOCKS - used, 150 + (self._number * 7 + len(name) * 31) % 200)
        self._steps[name] = self._steps.get(name, 0) + 8
        is_draining = name in self._draining
        return {
            "worker_id": name,
            "role": "prefill" if is_prefill else "decode",
            "endpoint": f"127.0.0.1:{40000 + int(name[1:]) + (100 if is_prefill else 200)}",
            "is_connected": True,
            "is_draining": is_draining,
            "is_drained": is_draining and not mine,
            "running": len(running),
            "waiting": len(waiting),
            "booked": len(mine),
            "num_blocks": NUM_BLOCKS,
            "free_blocks": NUM_BLOCKS - used - cached,
            "cached_blocks": cached,
            "context_tokens": sum(plan.prompt for plan in running),
            "pending_prefill_tokens": sum(plan.prompt for plan in waiting) if is_prefill else 0,
            "steps": self._steps[name],
            "step_s": (0.045 if is_prefill else 0.016 + 0.0007 * len(running)) if mine else 0.0,
            "silent_s": 0.03,
            "preemptions": 0,
        }


def _phase(plan: _Plan, at_s: float) -> str:
    name = "queue"
    for phase, begin_s, _ in plan.phases:
        if plan.arrived_s + begin_s > at_s:
            break
        name = phase
    return name


def _tokens(plan: _Plan, at_s: float) -> int:
    if plan.ttft_s is None or plan.tpot_s is None or at_s < plan.arrived_s + plan.ttft_s:
        return 0
    until_s = min(at_s, plan.ended_s)
    return min(plan.max_tokens, 1 + int((until_s - plan.arrived_s - plan.ttft_s) / plan.tpot_s))


_STAGES = {
    "queue": "queued",
    "reserve": "reserving",
    "prefill_queue": "prefilling",
    "prefill": "prefilling",
    "transfer_wait": "landed",
}


def _request(plan: _Plan, at_s: float, load: Load) -> Frame:
    has_ended = plan.ended_s <= at_s
    since_s = min(at_s, plan.ended_s) - plan.arrived_s
    tokens = _tokens(plan, at_s)
    is_placed = _phase(plan, at_s) != "queue"
    phase = _phase(plan, at_s)
    is_sent = bool(plan.prefill_worker) and any(
        name == "transfer_wait" and begin <= since_s for name, begin, _ in plan.phases
    )
    return {
        "request_id": plan.request_id,
        "stage": "ended" if has_ended else _STAGES.get(phase, "decoding"),
        "tenant": plan.tenant,
        "priority": 0,
        "prompt_tokens": plan.prompt,
        "cached_tokens": plan.cached,
        "output_tokens": tokens,
        "max_tokens": plan.max_tokens,
        "prefill_worker": plan.prefill_worker if is_placed else "",
        "decode_worker": plan.decode_worker if is_placed else "",
        "attempt": plan.attempt if is_placed else 0,
        "preemptions": 0,
        "arrived_s": round(plan.arrived_s, 6),
        "ended_s": round(plan.ended_s, 6) if has_ended else None,
        "outcome": plan.outcome if has_ended else "",
        "why": plan.why if has_ended else "",
        "retry_after_s": plan.retry_after_s if has_ended else None,
        "ttft_s": plan.ttft_s if tokens else None,
        "tpot_s": plan.tpot_s if tokens > 1 else None,
        "slo_ttft_s": load.slo_ttft_s,
        "slo_tpot_s": load.slo_tpot_s,
        "predicted_ttft_s": plan.predicted_ttft_s,
        "predicted_tpot_s": plan.predicted_tpot_s,
        "transfer_bytes": (plan.prompt - plan.cached) * BYTES_PER_TOKEN if is_sent else 0,
        "transfer_s": plan.transfer_s if is_sent else None,
        "phases": [
            [name, round(begin, 6), round(min(length, since_s - begin), 6)]
            for name, begin, length in plan.phases
            if begin <= since_s
        ],
    }


def recorded(load: Load, duration_s: float = 60.0, period_s: float = 0.25) -> tuple[list[Frame], FrameSource]:
    """The frames of some seconds, and their source, which has the explanations."""
    source = FrameSource(load)
    return [source.frame(START_S + number * period_s) for number in range(int(duration_s / period_s) + 1)], source

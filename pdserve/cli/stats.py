"""Lines that are printed after an answer: its timings, and a warning if it was truncated. Pure."""

from __future__ import annotations

from collections.abc import Container

from pdserve.cli.sampling import SHAPES
from pdserve.client.results import Completion
from pdserve.core.phases import Phases


def stats_line(done: Completion) -> str:
    usage, times = done.usage, done.timings
    rate = f"{1 / times.tpot_s:.1f} tokens/s" if times.tpot_s > 0 else "one token"
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    where = " → ".join(worker for worker in (times.prefill_worker, times.decode_worker) if worker)
    parts = [
        f"{usage.prompt_tokens} prompt tokens{cached}",
        f"{usage.completion_tokens} new",
        f"first after {milliseconds(times.ttft_s)}",
        rate,
        f"{times.path or 'unplaced'} {where}".strip(),
        f"ended by {done.finish_reason}",
    ]
    if times.attempts > 1:
        parts.append(f"{times.attempts} attempts")
    parts.append(f"id {done.request_id}")
    return " · ".join(parts)


def versions_line(router: str, own: str) -> str:
    """The versions of the router and, if it is another one, of this command."""
    return f"router: version {router or 'unknown'}" + ("" if router == own else f", this command: version {own}")


def phases_line(phases: Phases) -> str:
    """The total time, and the phases that add up to it."""
    spent = [f"{name} {milliseconds(took_s)}" for name, took_s in phases.shown()]
    return f"{milliseconds(phases.total_s)} = {' + '.join(spent) or 'nothing'}"


def truncation_warnings(finish_reasons: Container[str], options: Container[str]) -> list[str]:
    """A warning if `max_tokens` truncated a structured answer, which then does not match its schema or grammar.

    `finish_reasons` are those of all answers; `options` are the names of the sampling options that were given.
    """
    if "length" not in finish_reasons:
        return []
    return [f"max_tokens ended the answer before its {name} was complete" for name in SHAPES if name in options]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"

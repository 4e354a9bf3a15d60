"""A completion's times in one line for a person. Pure."""

from __future__ import annotations

from pdserve.client.results import Completion


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
    return " · ".join(parts)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"

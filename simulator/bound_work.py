"""The least work of each request of a trace, and when it can be done. Pure.

A step of a worker (pdserve.core.latency) with `rows` decode rows and `u` prompt tokens takes

    max(D, B + a * u) + r * rows + c * context + q * attention      D: reading the weights

for at most T prompt tokens. So each prompt token takes at least a + B / T, and at least D / T, of a prefill worker. On
a decode worker, arithmetic can be hidden behind the reading of the weights. For any `hidden` from 0 to 1,

    max(D, B + a * u) >= hidden * D + (1 - hidden) * (B + a * u)

Prompt: only the tokens of blocks that no earlier request of the trace contains. Some request computes each of them
between the arrival and the latest time of the first token. The attention of the positions from b to e is
(e^2 - b^2) / 2. A decode worker may compute the last token of a prompt as a decode row, so the last token of each block
is not counted.

Answer: of n tokens, n - 1 take a decode row each; the first one is sampled with the prompt. The rows attend to N,
N + 1, .. tokens. The rows of a step also share `hidden` * D (simulator.bound_decode).

An answer that is preempted, or that continues after a worker has died, samples one token with its recomputed prompt
instead of a decode row. Deaths are limited by the router's `max_attempts`; with faults, that many rows are not
counted. A preemption is assumed to save no work: its recomputed tokens take as long as a row.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.latency import CostModel
from simulator.bound_capacity import least_slowness
from simulator.model import SimConfig, TraceRequest, WorkerShape

ROUNDING: Final = 1e-9  # relative
ROUNDING_S: Final = 1e-6  # the clock of a run is the sum of many steps


@dataclass(frozen=True, slots=True)
class PromptWork:
    """`tokens` of its `length` must be computed; `last` of them may be decode rows."""

    length: int
    tokens: int
    attention: float
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The least cost of each kind of work on any worker of one role, in seconds at slowness 1."""

    base: float
    per_token: float
    per_token_context: float
    weights: float
    per_row: float
    per_context_token: float
    max_tokens: int  # of one step
    max_rows: int
    kv_tokens: int
    max_context: int  # the largest of any worker
    least_context: int  # the smallest
    slowness: float  # the least

    def prompt_s(self, prompt: PromptWork) -> float:
        """The least work between the begin and the end of its computation, one step after the other."""
        steps = -(-max(1, prompt.tokens) // self.max_tokens)
        tokens = max(0, prompt.tokens - prompt.last)
        chunks = -(-tokens // self.max_tokens)
        compute = chunks * self.base + self.per_token * tokens
        return max(steps * self.weights, compute) + self._attention(prompt)

    def prompt_work(self, prompt: PromptWork, hidden: float = 0.0, *, can_decode: bool = True) -> float:
        """The least work of its tokens, in the largest steps."""
        token = self.per_token + self.base / self.max_tokens
        if not can_decode:
            token = max(token, self.weights / self.max_tokens)
        return (1.0 - hidden) * token * max(0, prompt.tokens - prompt.last) + self._attention(prompt)

    def _attention(self, prompt: PromptWork) -> float:
        return self.per_token_context * max(0.0, prompt.attention - prompt.last * prompt.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request that an idle cluster would serve in time. Times are those of its workers."""

    release_s: float
    first_due_s: float
    last_due_s: float
    prompt: PromptWork
    rows: int  # of its decode steps
    context: float  # the sum over its rows
    decode_s: float  # the most time between its first and its last token; 0 for one token
    tpot_s: float
    held: float  # its share of the KV memory, in tokens; the sum over its rows


def costs(config: SimConfig, shapes: Sequence[WorkerShape]) -> Costs:
    """Each cost is the lowest of any of these workers."""
    models = [CostModel(shape.cost) for shape in shapes]
    prefill = [model.prefill_coefficients for model in models]
    decode = [model.decode_coefficients for model in models]
    kv_tokens = [shape.kv_capacity_tokens // config.block_size * config.block_size for shape in shapes]
    context = [min(held, shape.max_context_tokens) for held, shape in zip(kv_tokens, shapes, strict=True)]
    return Costs(
        base=min(one[0] for one in prefill),
        per_token=min(one[1] for one in prefill),
        per_token_context=min(one[2] for one in prefill),
        weights=min(one[0] for one in decode),
        per_row=min(one[1] for one in decode),
        per_context_token=min(one[2] for one in decode),
        max_tokens=max(shape.max_batch_tokens for shape in shapes),
        max_rows=max(shape.max_batch for shape in shapes),
        kv_tokens=max(kv_tokens),
        max_context=max(context),
        least_context=min(context),
        slowness=min(least_slowness(config, shape) for shape in shapes),
    )


def least_work(
    trace: Iterable[TraceRequest], block_tokens: int, config: SimConfig, prefill: Costs | None, decode: Costs
) -> list[Work]:
    """Of the requests that an idle cluster could serve in time. `prefill`: None without prefill workers."""
    found: list[Work] = []
    requests: list[TraceRequest] = []
    seen: dict[int, int] = {}
    for request in trace:
        prompt = _prompt(request, block_tokens, config.block_size, seen)
        work = _work(request, prompt, config, [decode] if prefill is None else [prefill, decode], decode)
        if work is not None:
            found.append(work)
            requests.append(request)
    return _with_memory(found, requests, block_tokens, config.block_size)


def _prompt(request: TraceRequest, block_tokens: int, block_size: int, seen: dict[int, int]) -> PromptWork:
    """`seen`: of each id, the number of its full blocks that earlier prompts contain; updated."""
    tokens, attention, last, end = 0, 0.0, 1, 0
    for begin, name, count in _ids(request, block_tokens, block_size):
        known = min(seen.get(name, 0), count)
        fresh, end = begin + known * block_size, begin + count * block_size
        tokens += end - fresh
        attention += (end * end - fresh * fresh) / 2
        last += count - known
        seen[name] = max(count, seen.get(name, 0))
    length = request.prompt_tokens
    tokens += length - end
    attention += (length * length - end * end) / 2
    return PromptWork(length, tokens, attention, last)


def _ids(request: TraceRequest, block_tokens: int, block_size: int) -> Iterable[tuple[int, int, int]]:
    """(first position, id, full blocks) of each id of the prompt."""
    if not block_tokens:
        return
    for index, name in enumerate(request.block_ids):
        begin = index * block_tokens
        count = (min(request.prompt_tokens, begin + block_tokens) - begin) // block_size
        if count <= 0:
            return
        yield begin, name, count


def _work(
    request: TraceRequest, prompt: PromptWork, config: SimConfig, roles: Sequence[Costs], decode: Costs
) -> Work | None:
    slo = request.slo or config.slo
    if prompt.length > max(one.kv_tokens for one in roles):
        return None
    fewest = min(request.output_tokens, min(one.least_context for one in roles) - prompt.length)
    rows = max(0, fewest - 1 - (config.router.max_attempts if config.faults else 0))
    most = max(1, min(request.output_tokens, decode.max_context - prompt.length))
    decode_s = (most - 1) * slo.tpot_s
    messages_s = 2.0 * config.message_s
    ends_s = min(
        slo.ttft_s + decode_s,
        math.inf if request.cancel_after_s is None else request.cancel_after_s,
        math.inf if config.deadline_s is None else config.deadline_s,
    )
    slack_s = ROUNDING_S + ROUNDING * (request.arrival_s + ends_s)
    first_s, last_s = min(slo.ttft_s, ends_s) - messages_s + slack_s, ends_s - messages_s + slack_s
    context = rows * prompt.length + rows * (rows - 1) / 2
    prompt_s = min(one.slowness * one.prompt_s(prompt) for one in roles)
    rows_s = decode.slowness * (rows * (decode.weights + decode.per_row) + decode.per_context_token * context)
    if prompt_s > first_s or rows_s > decode_s + slack_s or prompt_s + rows_s > last_s:
        return None
    release_s = request.arrival_s + config.message_s
    return Work(
        release_s=release_s,
        first_due_s=release_s + first_s,
        last_due_s=release_s + last_s,
        prompt=prompt,
        rows=rows,
        context=context,
        decode_s=decode_s + slack_s,
        tpot_s=slo.tpot_s,
        held=0.0,
    )


def _with_memory(
    works: Sequence[Work], requests: Sequence[TraceRequest], block_tokens: int, block_size: int
) -> list[Work]:
    """Requests that hold a block at the same time share its memory. Each counts for 1 / k of it if it may be in the
    cluster at the same time as k - 1 others with that block: at any time, the shares of those that hold it are at
    most 1."""
    sharers: dict[int, list[int]] = defaultdict(list)
    parts = [list(_ids(request, block_tokens, block_size)) for request in requests]
    for index, ids in enumerate(parts):
        for _, name, _ in ids:
            sharers[name].append(index)
    alone = [float(request.prompt_tokens) for request in requests]
    for name, group in sharers.items():
        if len(group) == 1:
            continue
        begins = [works[index].release_s for index in group]  # in order, as the trace
        ends = sorted(works[index].last_due_s for index in group)
        for index in group:
            one = works[index]
            together = bisect_right(begins, one.last_due_s) - bisect_left(ends, one.release_s)
            if together > 1:
                count = next(count for _, held, count in parts[index] if held == name)
                alone[index] -= count * block_size * (1.0 - 1.0 / together)
    return [
        replace(one, held=one.rows * tokens + one.rows * (one.rows + 1) / 2)
        for one, tokens in zip(works, alone, strict=True)
    ]

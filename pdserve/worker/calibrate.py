"""Measures a loaded engine at start: one real token, then a few small steps for the cost model's prior."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pdserve.config import WorkerConfig
from pdserve.core.attempt import blocks_for
from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.errors import InternalError
from pdserve.core.kv.cache import KvCache
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.profiles import load_profile
from pdserve.progress import PhaseReport

BUDGET_S: Final = 0.6
WARM_UP_S: Final = 1.0  # longest predicted time of the warm-up step
UNKNOWN: Final = CostPrior(
    prefill_base_s=0.0,
    prefill_per_token_s=0.0,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.0,
    decode_per_row_s=0.0,
    decode_per_context_token_s=0.0,
)


@dataclass(frozen=True, slots=True)
class StepSample:
    """Seconds that a step took, and the factors of its coefficients in the closed form."""

    factors: tuple[float, ...]
    seconds: float


def calibrate(engine: Engine, role: Role, config: WorkerConfig) -> CostPrior:
    """Of a new engine. Raises InternalError if it does not work."""
    report = PhaseReport(config.worker_id, "calibration", "parts")
    report(0, 3)
    draw_one_token(engine)
    report(1, 3)
    cost = expected_cost(engine, role, config)
    report(2, 3)
    warm_up(engine, cost, max_batch_tokens=config.max_batch_tokens)
    report(3, 3)
    return cost


def calibrate_again(engine: Engine, role: Role, config: WorkerConfig, cost: CostPrior, kv: KvCache) -> CostPrior:
    """Of a worker that takes the role `role`, with `cost` in the other one: a prefill worker has not measured decode
    steps.

    The steps write into free blocks. If fewer than `max_batch` are free, others are evicted from the prefix cache.
    """
    if role is Role.PREFILL or config.profile or cost.decode_base_s or cost.decode_per_row_s:
        return cost
    spec, pool = engine.spec, kv.blocks
    limit = min(spec.max_context_tokens, spec.num_blocks * spec.block_size)
    wanted = max(config.max_batch, min(pool.num_free, config.max_batch + blocks_for(limit // 2, spec.block_size)))
    blocks = kv.extend(min(wanted, pool.num_available)) or []
    try:
        return _with_decode_steps(cost, engine, config.max_batch, blocks, BUDGET_S / 2)
    finally:
        kv.release(blocks)


def draw_one_token(engine: Engine) -> None:
    """Raises InternalError unless the engine samples a token of its vocabulary. Uses block 0."""
    sampled = engine.step([_reading(engine, count=1, start=0)])[0].sampled
    if len(sampled) != 1 or not 0 <= sampled[0].token_id < engine.spec.vocab_size:
        raise InternalError(f"the engine's first step drew {sampled}, expected one of {engine.spec.vocab_size} tokens")


def expected_cost(engine: Engine, role: Role, config: WorkerConfig) -> CostPrior:
    """From the configured profile; measured if there is none."""
    if config.profile:
        return load_profile(config.profile).cost
    return measure_cost(engine, role, max_batch=config.max_batch, max_batch_tokens=config.max_batch_tokens)


def warm_up(engine: Engine, cost: CostPrior, *, max_batch_tokens: int) -> None:
    """One step of `max_batch_tokens`, or of as many tokens as take WARM_UP_S by `cost`.

    A CPU engine allocates its scratch memory when a step of a size first runs, which makes that step up to half as long
    again. A GPU engine has allocated it before. Overwrites the pool.
    """
    spec = engine.spec
    count = min(max_batch_tokens, spec.max_context_tokens, spec.num_blocks * spec.block_size)
    if not engine.pool.is_on_host or count < 1:
        return
    model = CostModel(cost)
    while count > 1 and model.prefill_s(count, 0, count) > WARM_UP_S:
        count //= 2
    engine.step([_reading(engine, count=count, start=0)])


def measure_cost(
    engine: Engine, role: Role, *, max_batch: int, max_batch_tokens: int, budget_s: float = BUDGET_S
) -> CostPrior:
    """Coefficients from steps of several sizes; zeros if the budget or the pool allows no measurement.

    Overwrites the pool, so it comes before the first request.
    """
    share_s = budget_s if role is Role.PREFILL else budget_s / 2
    base, per_token, per_context = _fit(_time(engine, _prefill_steps(engine, max_batch_tokens), share_s))
    cost = replace(UNKNOWN, prefill_base_s=base, prefill_per_token_s=per_token, prefill_per_token_context_s=per_context)
    if role is Role.PREFILL:
        return cost
    return _with_decode_steps(cost, engine, max_batch, range(engine.spec.num_blocks), share_s)


def _with_decode_steps(
    cost: CostPrior, engine: Engine, max_batch: int, blocks: Sequence[int], budget_s: float
) -> CostPrior:
    base, per_row, per_context = _fit(_time(engine, _decode_steps(engine, max_batch, blocks), budget_s))
    return replace(cost, decode_base_s=base, decode_per_row_s=per_row, decode_per_context_token_s=per_context)


def _prefill_steps(engine: Engine, max_batch_tokens: int) -> Iterator[tuple[list[Row], tuple[float, ...]]]:
    limit = min(engine.spec.max_context_tokens, engine.spec.num_blocks * engine.spec.block_size)
    most = min(max_batch_tokens, limit)
    for count, cached in (
        (1, 0),
        (most // 8, 0),
        (most // 2, 0),
        (most // 8, limit // 2),
        (most, 0),
        (most // 4, most),
    ):
        if count >= 1 and count + cached <= limit:
            yield [_reading(engine, count=count, start=cached)], (1.0, count, count * (cached + count / 2))


def _decode_steps(
    engine: Engine, max_batch: int, blocks: Sequence[int]
) -> Iterator[tuple[list[Row], tuple[float, ...]]]:
    spec = engine.spec
    limit = min(spec.max_context_tokens, len(blocks) * spec.block_size)
    most = min(max_batch, len(blocks))
    for batch, context in (
        (1, 8),
        (most // 2, 8),
        (1, limit // 2),
        (most, 8),
        (most // 4, limit // 4),
        (most, limit // 8),
    ):
        shared = blocks_for(max(1, context), spec.block_size) - 1
        if batch >= 1 and context >= 1 and shared + batch <= len(blocks):
            prefix = blocks[:shared]
            rows = [
                replace(_reading(engine, count=1, start=context - 1), blocks=[*prefix, blocks[shared + row]])
                for row in range(batch)
            ]
            yield rows, (1.0, batch, batch * context)


def _reading(engine: Engine, *, count: int, start: int) -> Row:
    """`count` tokens after `start` positions of arbitrary pool contents."""
    spec = engine.spec
    return Row(
        tokens=[1 % spec.vocab_size] * count,
        start=start,
        blocks=list(range(blocks_for(start + count, spec.block_size))),
        sample=Sampling(temperature=0.0),
        history=[1 % spec.vocab_size] * (start + count),
        prompt_len=start + count,
    )


def _time(engine: Engine, steps: Iterator[tuple[list[Row], tuple[float, ...]]], budget_s: float) -> list[StepSample]:
    """The best of two runs of each step: the first one of a size may compile or allocate. On a GPU the first run
    imports, compiles and loads kernels for seconds, so a size that was started runs twice, whatever the budget."""
    samples: list[StepSample] = []
    until_s = time.monotonic() + budget_s
    for rows, factors in steps:
        best_s = float("inf")
        for _ in range(2):
            started_s = time.monotonic()
            engine.step(rows)
            ended_s = time.monotonic()
            best_s = min(best_s, ended_s - started_s)
            if ended_s > until_s and engine.pool.is_on_host:
                break
        samples.append(StepSample(factors, best_s))
        if ended_s > until_s:
            break
    return samples


def _fit(samples: Sequence[StepSample]) -> tuple[float, float, float]:
    """Non-negative least squares of relative errors over (1, x, y); coefficients that the samples do not determine stay
    0."""
    active = list(range(min(3, len(samples))))
    while active:
        found = _least_squares(samples, active)
        if found is not None and min(found) >= 0.0:
            coefficients = [0.0, 0.0, 0.0]
            for index, value in zip(active, found, strict=True):
                coefficients[index] = value
            return coefficients[0], coefficients[1], coefficients[2]
        # A negative coefficient is noise: its term is too small to measure.
        worst = active[-1] if found is None else active[found.index(min(found))]
        active.remove(worst)
    return 0.0, 0.0, 0.0


def _least_squares(samples: Sequence[StepSample], active: Sequence[int]) -> list[float] | None:
    """None if there is no unique solution."""
    weighted = [[sample.factors[index] / sample.seconds for index in active] for sample in samples if sample.seconds]
    matrix = np.array(weighted).reshape(-1, len(active))
    scale = np.abs(matrix).max(axis=0, initial=0.0)
    if not scale.all():
        return None
    found, _, rank, _ = np.linalg.lstsq(matrix / scale, np.ones(len(matrix)), rcond=1e-6)
    return [float(one) for one in found / scale] if rank == len(active) else None

"""An engine with random weights, driven as by a decode worker: each step is launched before the last one is read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.setting import Setting
from pdserve.config import WorkerConfig
from pdserve.core.types import Sampling
from pdserve.engine.gpu.engine import GraphEngine
from pdserve.engine.gpu.graphs import EagerReplays, Replays, StaticDecode, make_replays
from pdserve.engine.interface import PENDING, Flight, Row
from pdserve.engine.load.build_engine import open_torch_engine
from pdserve.engine.load.load_plan import weight_bytes
from pdserve.engine.model.config import read_config

GREEDY = Sampling(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
_WARM_STEPS = 2


@final
class TimedReplays:
    """Marks the begin and the end of each replay on the device."""

    def __init__(self, inner: Replays, clock: Clock) -> None:
        self.buckets = inner.buckets
        self.marks: list[tuple[Any, Any]] = []
        self._inner, self._clock = inner, clock

    def replay(self, bucket: int) -> None:
        begin = self._clock.mark()
        self._inner.replay(bucket)
        self.marks.append((begin, self._clock.mark()))


@dataclass
class OpenedEngine:
    engine: GraphEngine
    replays: TimedReplays
    clock: Clock
    load_s: float
    capture_s: float

    def tables(self, num_rows: int, num_tokens: int) -> list[list[int]]:
        """Blocks of each row. If the pool is too small, distant rows share blocks, so that no cache holds them."""
        per_row, size = -(-num_tokens // self.engine.spec.block_size), self.engine.spec.num_blocks
        return [[(row * per_row + at) % size for at in range(per_row)] for row in range(num_rows)]

    def shared_kv(self, num_rows: int, num_tokens: int) -> float:
        """Share of the rows' blocks that also belong to another row."""
        return max(0.0, 1 - self.engine.spec.num_blocks / (num_rows * -(-num_tokens // self.engine.spec.block_size)))


def open_model(setting: Setting, shape: str, dtype: str, parent: Path) -> OpenedEngine:
    """Loads weights, makes a pool in the remaining memory, and captures graphs for the measured batches."""
    clock, folder = setting.clock, setting.folder(shape, parent)
    began_s = time.monotonic()
    model = read_config(folder)
    size = setting.choice.block_size
    block_bytes = 2 * size * model.num_layers * model.num_kv_heads * model.head_dim * dtype_bytes(setting)
    wanted = max(rows * -(-(context + 4 * setting.num_steps) // size) for rows, context in setting.decodes)
    wanted = max(wanted, -(-setting.max_context_tokens // size))
    held = weight_bytes(model, torch.bfloat16, rounding="none")
    room = int(0.85 * (setting.memory_bytes - held)) // block_bytes
    eager = open_torch_engine(
        WorkerConfig(
            model=str(folder),
            worker_id="bench",
            load="dummy",
            device=clock.device.type,
            dtype="float32" if setting.is_rehearsal else dtype,
            kv_blocks=min(wanted, room),
            block_size=size,
            kv_dtype=setting.choice.kv_dtype,
            max_context_tokens=setting.max_context_tokens,
            max_batch_tokens=setting.chunk_tokens,
        )
    )
    with torch.inference_mode():
        if eager.pool.scales is None:
            eager.pool.tensor.normal_()  # zeros would be read faster
        else:
            eager.pool.tensor.view(torch.uint8).random_(0, 100)
            eager.pool.scales.fill_(0.01)
    clock.sync()
    loaded_s = time.monotonic()
    buckets = sorted({rows for rows, _ in setting.decodes})
    is_cuda = clock.device.type == "cuda"
    decode = StaticDecode(
        eager.model,
        eager.pool,
        most_rows=buckets[-1],
        max_context_tokens=eager.spec.max_context_tokens,
        vocab_size=eager.spec.vocab_size,
        num_processors=torch.cuda.get_device_properties(clock.device).multi_processor_count if is_cuda else 4,
    )
    replays = TimedReplays(make_replays(decode, buckets) if is_cuda else EagerReplays(decode, buckets), clock)
    clock.sync()
    engine = GraphEngine(eager, decode, replays)
    return OpenedEngine(engine, replays, clock, loaded_s - began_s, time.monotonic() - loaded_s)


def dtype_bytes(setting: Setting) -> int:
    return 4 if setting.is_rehearsal else 2


@dataclass(frozen=True)
class Decoded:
    step_s: float  # wall, from launch to launch
    idle: float  # share of the device's time between replays, the copies of inputs and draws included


class AsyncRows:
    """Rows of a batch that decode continuously; another call of `steps` continues where the last one ended."""

    def __init__(self, opened: OpenedEngine, num_rows: int, context: int, num_steps: int) -> None:
        self._opened, self._position = opened, context - 1
        self._tables = opened.tables(num_rows, context + num_steps)
        self._last = context + num_steps - 1
        self._first = context - 1
        self._history = [7] * (self._last + 1)
        self.num_tokens = 0

    def steps(self, count: int, goes_on: Callable[[], bool] = lambda: True) -> int:
        """Number of steps taken; the position starts over at the end of the tables, and the cost with it."""
        engine, flight, taken = self._opened.engine, None, 0
        while taken < count and goes_on():
            before, flight = flight, engine.launch(self._rows(flight), flight)
            if before is not None:
                self.num_tokens += len(before.wait())
            self._position = self._position + 1 if self._position < self._last else self._first
            taken += 1
        if flight is not None:
            self.num_tokens += len(flight.wait())
        return taken

    def _rows(self, flight: Flight | None) -> list[Row]:
        start = self._position
        return [
            Row(
                tokens=(7,) if flight is None else (PENDING,),
                start=start,
                blocks=table,
                sample=GREEDY,
                history=self._history[: start + 1] if flight is None else self._history,
                prompt_len=self._first,
                follows=None if flight is None else index,
            )
            for index, table in enumerate(self._tables)
        ]


def decode(opened: OpenedEngine, num_rows: int, context: int, num_steps: int) -> Decoded:
    rows = AsyncRows(opened, num_rows, context, num_steps + _WARM_STEPS)
    rows.steps(_WARM_STEPS)
    opened.clock.sync()
    opened.replays.marks.clear()
    began_s = time.perf_counter()
    rows.steps(num_steps)
    opened.clock.sync()
    step_s = (time.perf_counter() - began_s) / num_steps
    inside, outside = spans(opened)
    return Decoded(step_s, sum(outside) / (sum(outside) + sum(inside)))


def spans(opened: OpenedEngine) -> tuple[list[float], list[float]]:
    """Seconds of each replay, and of each gap between two replays."""
    marks, between_s = opened.replays.marks, opened.clock.between_s
    inside = [between_s(begin, end) for begin, end in marks]
    outside = [between_s(marks[at][1], marks[at + 1][0]) for at in range(len(marks) - 1)]
    return inside, [max(0.0, one) for one in outside]


def prefill_s(opened: OpenedEngine, num_tokens: int, chunk_tokens: int, repeat: int = 3) -> float:
    """Median seconds of one prompt in chunks, until its first token is on the host."""
    engine, [table] = opened.engine, opened.tables(1, num_tokens + 1)
    prompt = [3 + at % 300 for at in range(num_tokens)]

    def run() -> None:
        for start in range(0, num_tokens, chunk_tokens):
            tokens = prompt[start : start + chunk_tokens]
            is_last = start + len(tokens) == num_tokens
            engine.step(
                [
                    Row(
                        tokens=tokens,
                        start=start,
                        blocks=table,
                        sample=GREEDY if is_last else None,
                        history=prompt if is_last else (),
                        prompt_len=num_tokens,
                    )
                ]
            )

    return statistics.median(timed(run) for _ in range(repeat + 1))  # the first one warms up


def timed(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s

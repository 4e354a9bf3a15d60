"""The engine vllm over a device that computes later: its runner queues copies and kernels, as vLLM's does on a GPU.

The runner and its module are stand-ins, because vLLM's build for CUDA needs a GPU. They do what its first runner does
without asynchronous scheduling (vllm/v1/worker/gpu_model_runner.py, 0.32): it fills pinned buffers again in each step,
copies them without blocking, and waits for nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine.interface import EngineSpec, Row
from pdserve.engine.vllm.engine import Limits, VllmEngine
from pdserve.engine.vllm.pool import VllmPool

VOCAB, SIZE = 11, 4


@dataclass
class Stream:
    """Work that the device has not done."""

    queued: deque[Callable[[], None]] = field(default_factory=deque)

    def synchronize(self) -> None:
        while self.queued:
            self.queued.popleft()()


class Runner:
    """Keeps requests; computes at the device's time which tokens it was given."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.pinned = torch.zeros(64, dtype=torch.long)
        self.computed: list[list[int]] = []
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(
            req_ids=[],
            req_id_to_index={},
            token_ids_cpu=np.zeros((8, 64), dtype=np.int32),
            num_tokens_no_spec=[0] * 8,
        )
        self.execute_model_state: Any = None

    def execute_model(self, scheduled: Any) -> None:
        assert self.execute_model_state is None
        batch, first = self.input_batch, {}
        for name in scheduled.finished_req_ids:
            self.requests.pop(name, None)
        for one in scheduled.scheduled_new_reqs:
            self.requests[one.req_id] = one
            first[one.req_id] = one.num_computed_tokens
        for name, start in zip(
            scheduled.scheduled_cached_reqs.req_ids, scheduled.scheduled_cached_reqs.num_computed_tokens, strict=True
        ):
            first[name] = start
        tokens: list[int] = []
        for name, count in scheduled.num_scheduled_tokens.items():
            known = batch.req_id_to_index.get(name)
            row = self.requests[name].prompt_token_ids if known is None else batch.token_ids_cpu[known].tolist()
            tokens += row[first[name] : first[name] + count]
        old = {name: batch.token_ids_cpu[at].copy() for name, at in batch.req_id_to_index.items()}
        batch.req_ids = list(scheduled.num_scheduled_tokens)
        batch.req_id_to_index = {name: at for at, name in enumerate(batch.req_ids)}
        for name, at in batch.req_id_to_index.items():
            if name in old:
                batch.token_ids_cpu[at] = old[name]
        self.pinned[: len(tokens)] = torch.tensor(tokens)
        self.stream.queued.append(lambda: self.computed.append(self.pinned[: len(tokens)].tolist()))
        hidden = torch.zeros(len(tokens), VOCAB)
        self.execute_model_state = SimpleNamespace(hidden_states=hidden, logits=torch.zeros(len(batch.req_ids), VOCAB))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    names = {
        "vllm": {},
        "vllm.config": {"set_current_vllm_config": lambda config: nullcontext()},
        "vllm.sampling_params": {"SamplingParams": SimpleNamespace},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.output": {
            "CachedRequestData": SimpleNamespace(
                make_empty=lambda: SimpleNamespace(
                    req_ids=[], new_block_ids=[], num_computed_tokens=[], num_output_tokens=[]
                )
            ),
            "NewRequestData": SimpleNamespace,
            "SchedulerOutput": SimpleNamespace,
        },
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return stream


@pytest.fixture
def engine(stream: Stream) -> VllmEngine:
    unused: Any = None  # grammars: no row has one
    pool = VllmPool(8, 64, 1, torch.device("meta"))
    spec = EngineSpec(
        model="m",
        weights_hash="",
        dtype="float32",
        layout="opaque.x",
        vocab_size=VOCAB,
        max_context_tokens=32,
        eos_token_ids=(),
        block_size=SIZE,
        num_blocks=8,
        block_bytes=64,
        kv_dtype="float32",
        kv_layers=1,
        kv_heads=1,
        kv_head_dim=4,
        num_layers=1,
    )
    worker: Any = SimpleNamespace(model_runner=Runner(stream))
    worker.execute_model = worker.model_runner.execute_model
    return VllmEngine(spec, pool, unused, None, worker, Limits(rows=2, tokens=8))


def computed(engine: VllmEngine) -> list[list[int]]:
    runner: Runner = engine._runner
    return runner.computed


def test_a_chunk_without_a_sample_is_not_overwritten_by_the_next(engine: VllmEngine, stream: Stream) -> None:
    """No result of it is read on the host, so nothing else waits until its input was copied."""
    engine.step([Row(tokens=[1, 2, 3, 4], start=0, blocks=[0])])
    engine.step([Row(tokens=[5, 6, 7, 8], start=4, blocks=[0, 1])])
    stream.synchronize()
    assert computed(engine) == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_rows_that_are_computed_in_parts_are_not_overwritten(engine: VllmEngine, stream: Stream) -> None:
    engine.step([Row(tokens=[first, first], start=0, blocks=[first]) for first in range(5)])
    stream.synchronize()
    assert sorted(token for tokens in computed(engine) for token in tokens) == sorted([*range(5), *range(5)])


def test_layers_are_reported_when_the_device_has_computed_them(engine: VllmEngine, stream: Stream) -> None:
    """A transfer waits for the default stream only, and vLLM computes on another."""
    left: list[int] = []
    engine.step([Row(tokens=[1, 2, 3], start=0, blocks=[0])], on_layer=lambda layers: left.append(len(stream.queued)))
    assert left == [0]


def test_a_failed_step_leaves_no_work_behind(engine: VllmEngine, stream: Stream) -> None:
    runner: Runner = engine._runner
    execute = engine._worker.execute_model

    def fail(scheduled: Any) -> None:
        execute(scheduled)
        raise RuntimeError("after the launch")

    engine._worker.execute_model = fail
    with pytest.raises(RuntimeError):
        engine.step([Row(tokens=[1, 2], start=0, blocks=[0])])
    assert not stream.queued
    engine._worker.execute_model = execute
    runner.input_batch.req_ids = []
    engine.step([Row(tokens=[3, 4], start=0, blocks=[0])])
    assert computed(engine) == [[1, 2], [3, 4]]

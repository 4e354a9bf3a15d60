"""A program whose engine computes on a GPU announces a GPU's batch and chunk, and does not speculate."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from decode_worker.program import DecodeProgram
from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.toy import ToyEngine
from pdserve.worker.context import ProgramContext, parts_of, with_defaults
from prefill_worker.program import PrefillProgram


class DevicePool:
    """A pool whose bytes the host cannot reach."""

    is_on_host = False
    buffer = descriptor = None

    def __init__(self, pool: Any) -> None:
        self.num_blocks, self.block_bytes = pool.num_blocks, pool.block_bytes


class DeviceEngine:
    def __init__(self) -> None:
        self._engine = ToyEngine(num_blocks=64, block_size=4, max_context_tokens=256)
        self.spec, self.step, self.pool = self._engine.spec, self._engine.step, DevicePool(self._engine.pool)


def program(role: Role, **settings: Any) -> Any:
    config = WorkerConfig(model="toy", worker_id="w", cluster_secret="0" * 64, **settings)
    context = ProgramContext(config=config, role=role, incarnation="i", endpoint="here", post=lambda call: None)
    engine: Any = DeviceEngine()
    context = with_defaults(context, engine)
    parts = parts_of(context, engine, None, ExitStack())
    if role is Role.PREFILL:
        return PrefillProgram(context, parts, None)  # type: ignore[arg-type]
    return DecodeProgram(context, parts, None, lambda server: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("role", "chunk"), [(Role.PREFILL, 2048), (Role.DECODE, 512)])
def test_hello_has_gpu_defaults(role: Role, chunk: int) -> None:
    found = program(role)
    hello = found.hello()
    assert (hello.max_batch, hello.max_batch_tokens) == (256, chunk)
    assert found.context.config.speculation == "off"


def test_explicit_settings_win() -> None:
    found = program(Role.DECODE, max_batch=3, max_batch_tokens=32, speculation="ngram")
    assert (found.hello().max_batch, found.hello().max_batch_tokens) == (3, 32)
    assert found.context.config.speculation == "ngram"

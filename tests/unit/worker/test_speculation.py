"""A decode worker with speculation reports several tokens at once and counts them; speculation can be disabled."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.engine.interface import Engine
from pdserve.engine.toy import ToyEngine, answer

PROMPT = list(b"a b a b a b ")


def load_terse(config: WorkerConfig, role: Role) -> Engine:
    """A toy engine with only two characters, so that its text repeats itself."""
    return ToyEngine(
        num_blocks=config.kv_blocks,
        block_size=config.block_size,
        max_context_tokens=config.max_context_tokens,
        num_answers=2,
        step_s=0.001,
    )


def counted(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("pdserve_")]
    return {name: float(value) for name, value in lines}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_several_tokens_of_a_step_are_sent_in_one_row(
    start: Any, attach: Any, ask: Any, unused_tcp_port: int, temperature: float
) -> None:
    port = unused_tcp_port
    p = start(Role.PREFILL, load=load_terse)
    d = start(Role.DECODE, load=load_terse, metrics_port=port, heartbeat_s=0.001)
    router = await attach(p, d)
    asked = {"max_tokens": 120, "temperature": temperature, "seed": 9}
    expected = answer(PROMPT, 120, num_answers=2, seed=9 if temperature else None)
    assert await router.remote(ask("remote", PROMPT, **asked)) == expected
    assert await router.local(ask("local", PROMPT, **asked)) == expected
    rows = [*router.rows("remote"), *router.rows("local")]
    assert max(len(row.tokens) for row in rows) > 1
    assert [row.finish for row in rows].count(0) == len(rows) - 2
    seen = counted(port)
    assert seen["pdserve_sampled_tokens_total"] == 239
    accepted = seen['pdserve_draft_tokens_total{outcome="accepted"}']
    assert accepted == 239 - len(rows)
    assert seen['pdserve_draft_tokens_total{outcome="rejected"}'] > 0
    assert 0 < seen["pdserve_speculated_steps_total"] <= len(rows)


async def test_speculation_can_be_disabled(start: Any, attach: Any, ask: Any, unused_tcp_port: int) -> None:
    d = start(Role.DECODE, load=load_terse, metrics_port=unused_tcp_port, speculation="off")
    router = await attach(d)
    assert await router.local(ask("r", PROMPT, max_tokens=60)) == answer(PROMPT, 60, num_answers=2)
    assert [len(row.tokens) for row in router.rows("r")] == [1] * 60
    assert counted(unused_tcp_port)["pdserve_speculated_steps_total"] == 0


@pytest.mark.parametrize(("field", "value"), [("speculation", "model"), ("max_drafts", 0), ("max_drafts", 16)])
def test_impossible_settings_are_rejected(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        WorkerConfig(model="toy", worker_id="d", **{field: value})

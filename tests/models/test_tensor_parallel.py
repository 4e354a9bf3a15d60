"""vLLM's worker on two tensor-parallel ranks: real processes, judged by transformers in float64."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pdserve.core.errors import InternalError, ModelError
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row
from tests.models.conftest import open_vllm
from tests.models.far_oracle import FarOracle
from tests.models.test_exactness import (
    test_mixed_batches_match_transformers,
    test_prompts_that_share_blocks_match_transformers,
    test_sampling_drafts_and_logprobs_match_transformers,
    test_scores_of_prompts_match_transformers,
)
from tests.models.tiny import TINY, build

__all__ = [  # run for each of MODELS
    "test_mixed_batches_match_transformers",
    "test_prompts_that_share_blocks_match_transformers",
    "test_sampling_drafts_and_logprobs_match_transformers",
    "test_scores_of_prompts_match_transformers",
]

#: Name -> what the model has beside that of TINY. In some, both ranks store the same keys and values.
MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 1},
    "qwen3-moe": {},
    "deepseek-v2": {},
}
GREEDY: Final = Sampling(temperature=0.0, max_tokens=32)


# --- what ranks listen for, and how they end ------------------------------------------------------------------


@pytest.fixture
def pair(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine of two ranks, where gloo's own settings name another interface."""
    for _, interface in socket.if_nameindex():
        if interface != "lo" and is_up(interface):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    opened = open_vllm(tiny("llama"), tensor_parallel=2, stall_s=10.0)
    yield opened
    opened.close()


def is_up(interface: str) -> bool:
    return "up" in Path(f"/sys/class/net/{interface}/operstate").read_text()


def test_ranks_listen_on_loopback_only(pair: Any) -> None:
    pids = [os.getpid(), pair._followers[0].pid]
    found = [listening(pid) for pid in pids]
    assert all(found), "gloo listens"
    assert {address for each in found for address in each} == {"0100007F"}  # 127.0.0.1


def listening(pid: int) -> list[str]:
    """The addresses on which the process accepts connections, in hexadecimal numbers."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except FileNotFoundError:
            continue  # closed meanwhile
    tables = (Path(f"/proc/{pid}/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()]
    return [words[1].rpartition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in sockets]


def row_of(tokens: list[int]) -> Row:
    return Row(tokens=tokens, start=0, blocks=[0], sample=GREEDY, history=tokens, prompt_len=len(tokens))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_rank_fails_the_step(pair: Any, how: signal.Signals) -> None:
    assert len(pair.step([row_of([5, 6, 7])])[0].sampled) == 1
    with pytest.raises(InternalError, match="outside the pool"):
        pair.step([Row(tokens=[5], start=0, blocks=[10**6])])
    assert len(pair.step([row_of([5, 6, 7])])[0].sampled) == 1, "a row that is refused reaches no rank"
    follower = pair._followers[0].pid
    os.kill(follower, how)
    try:
        began_s = time.monotonic()
        with pytest.raises(RuntimeError):
            pair.step([row_of([5, 6, 7])])
        assert time.monotonic() - began_s < 60.0
        with pytest.raises(InternalError, match="failed before"):
            pair.step([row_of([5, 6, 7])])
    finally:
        os.kill(follower, signal.SIGKILL)


def test_heads_that_cannot_be_divided_are_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="attention heads"):
        open_vllm(tiny("llama"), tensor_parallel=3)


# --- exactness ------------------------------------------------------------------------------------------------
# These come last, because a process has the ranks of one engine at a time.


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, own = TINY[name]
    return build(family, own | MODELS[name], tmp_path_factory.mktemp("models") / name)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    opened = open_vllm(folder, tensor_parallel=2)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def oracle(folder: Path) -> FarOracle:
    return FarOracle(folder)


def test_the_spec_names_the_rank_and_its_heads(engine: Engine, name: str) -> None:
    spec = engine.spec
    heads = max(1, spec.kv_heads // 2)
    assert (spec.tp_degree, spec.tp_rank) == (2, 0)
    assert spec.kv_heads == {"llama": 2, "qwen3": 1, "qwen3-moe": 2, "deepseek-v2": 1}[name]
    assert spec.kv_layers * spec.block_size * heads * spec.kv_head_dim * 4 == spec.block_bytes

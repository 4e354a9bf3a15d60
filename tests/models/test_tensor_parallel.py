"""vLLM's worker on two tensor-parallel ranks: real processes, judged by transformers in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pdserve.engine.interface import Engine
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

"""What vLLM's own classes of attention on GPUs say, on a host without one: the order of the pool, and block sizes."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

from pdserve.core.errors import ConfigError
from pdserve.engine.vllm.pool import check_block_size, choose_layout

# Those of platforms/cuda.py whose classes can be imported without CUDA's packages. Of the others FlashInfer, FlashInfer
# MLA, CUTLASS MLA and FlashAttention MLA state what docs/engine.md says.
CHOSEN = (
    "FLASH_ATTN",
    "TRITON_ATTN",
    "TRITON_MLA",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASHINFER_MLA_SPARSE",
    "FLASH_ATTN_MLA_SPARSE",
    "TOKENSPEED_MLA",
)


def layouts(name: str) -> list[str]:
    return [layout.name for layout in get_supported_kv_cache_layouts([backend(name)])]


def backend(name: str) -> Any:
    return AttentionBackendEnum[name].get_class()


@pytest.mark.parametrize("name", CHOSEN)
def test_a_gpu_backend_reads_blocks_outermost(name: str) -> None:
    assert choose_layout(layouts(name), [backend(name).get_name()], is_gpu=True) == "BLHNC"


@pytest.mark.parametrize("name", ["FLEX_ATTENTION", "TURBOQUANT"])
def test_a_backend_that_needs_layers_outermost_is_refused_on_a_gpu(name: str) -> None:
    assert choose_layout(layouts(name), [name]) == "LBNHC"
    assert choose_layout(layouts(name), [name], is_gpu=True) is None


def test_blocks_that_vllm_would_have_to_divide_are_refused() -> None:
    """vLLM accepts them, because it divides them where layers are outermost (select_common_block_size)."""
    assert backend("FLASHMLA").supports_block_size(128)
    with pytest.raises(ConfigError, match="expected 64, the largest of its divisors that FLASHMLA reads") as caught:
        check_block_size(128, {"FLASHMLA": backend("FLASHMLA")})
    assert caught.value.field == "block_size"
    with pytest.raises(ConfigError, match="a size that the attention backends FLASHMLA read"):
        check_block_size(16, {"FLASHMLA": backend("FLASHMLA")})
    both = {name: backend(name) for name in ("FLASH_ATTN", "FLASHMLA")}
    check_block_size(64, both)
    check_block_size(48, {"FLASH_ATTN": backend("FLASH_ATTN")})

"""What the engine refuses by name, before it reads weights, and what it does with a model's settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError, ModelError
from pdserve.engine.interface import Row
from tests.models.conftest import open_vllm
from tests.models.tiny import REFUSED, build

Tiny = Callable[[str], Path]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_state_is_not_kv_of_text_is_refused(name: str, tiny: Tiny) -> None:
    folder = tiny(name)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-64:] = b"\xff" * 64  # they are not read, so it does not matter
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=REFUSED[name][2]) as caught:
        open_vllm(folder)
    assert caught.value.field == "architectures"


def test_mla_on_a_cpu_is_refused_because_its_tokens_differ(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
    own = {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, **sizes, **experts}
    with pytest.raises(ModelError, match="got CPU_MLA, expected a backend that takes blocks outermost") as caught:
        open_vllm(build("DeepseekV2", own, tmp_path / "mla"))
    assert caught.value.field == "attention"


def test_an_unknown_architecture_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    for file in tiny("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes().replace(b"LlamaForCausalLM", b"NoSuchForCausalLM"))
    with pytest.raises(ModelError, match=r"a model that vLLM 0\.32\.\d+ serves: .*NoSuchForCausalLM"):
        open_vllm(tmp_path)


def test_the_gpu_is_refused_with_the_build_for_cpus(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="built for CPUs"):
        open_vllm(tiny("llama"), device="cuda")


def test_the_spec_describes_the_pool(tiny: Tiny) -> None:
    engine = open_vllm(tiny("llama"), block_size=16, kv_blocks=7, dtype="auto", max_context_tokens=100)
    try:
        spec, pool = engine.spec, engine.pool
        assert spec.block_size == 32  # the attention kernels of the CPU take multiples
        assert (pool.num_blocks, pool.runs_per_block, len(pool.buffer)) == (7, 1, 7 * spec.block_bytes)
        assert pool.descriptor is not None
        assert (spec.dtype, spec.kv_dtype, spec.max_context_tokens) == ("float32", "float32", 100)
        assert spec.layout.startswith("opaque.vllm-0.32-CPU_ATTN-")
        assert spec.kv_layers * spec.block_size * spec.kv_heads * spec.kv_head_dim * 4 == spec.block_bytes
        engine.pool.buffer[:] = b"\x3f" * len(engine.pool.buffer)
        engine.step([Row(tokens=[5, 6, 7], start=0, blocks=[2])])
        written = engine.pool.buffer[2 * spec.block_bytes : 3 * spec.block_bytes]
        values_per_token = spec.block_bytes // 4 // spec.block_size
        assert 0 < sum(1 for value in written.cast("f") if value) <= 3 * values_per_token  # the rest is cleared
        assert engine.pool.buffer[3 * spec.block_bytes :] == b"\x3f" * (4 * spec.block_bytes)
    finally:
        engine.close()

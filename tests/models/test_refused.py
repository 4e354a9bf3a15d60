"""What the engine refuses by name, before it reads weights, and what it does with a model's settings."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pdserve.cli.main import main
from pdserve.core.errors import ConfigError, ModelError
from pdserve.engine.interface import Row
from tests.models.conftest import open_vllm
from tests.models.quantised import change_config
from tests.models.tiny import COMMON, REFUSED, TINY, build

Tiny = Callable[[str], Path]


def spoilt(folder: Path) -> bytes:
    """The file of weights, the last of which are NaN: they are not read, so it does not matter."""
    return (folder / "model.safetensors").read_bytes()[:-64] + b"\xff" * 64


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_state_is_not_kv_of_text_is_refused(name: str, tiny: Tiny) -> None:
    folder = tiny(name)
    (folder / "model.safetensors").write_bytes(spoilt(folder))
    with pytest.raises(ModelError, match=REFUSED[name][2]) as caught:
        open_vllm(folder)
    assert caught.value.field == "architectures"


@pytest.mark.parametrize(
    ("family", "own", "field", "expected"),
    [
        ("Cohere", {"tie_word_embeddings": False}, "tie_word_embeddings", "lm_head.weight vLLM does not read"),
        ("GPTNeoX", {"num_key_value_heads": 2}, "num_key_value_heads", "2 of 32, by its config"),
        ("Doge", {}, "attention", "without a mask of the model's own"),
    ],
    ids=["head", "kv-heads", "mask"],
)
def test_what_vllm_would_ignore_is_refused(
    family: str, own: dict[str, Any], field: str, expected: str, tmp_path: Path
) -> None:
    """vLLM serves these models, with tokens of its own."""
    folder = build(family, own, tmp_path / "model")
    with pytest.raises(ModelError, match=expected) as caught:
        open_vllm(folder)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculators_config", {"verifier": {"name_or_path": "owner/other-model"}}),
        ("configuration_files", ["config.4.0.0.json"]),
    ],
)
def test_a_config_that_names_another_model_or_config_is_refused(
    field: str, value: object, tiny: Tiny, tmp_path: Path
) -> None:
    """vLLM would ask the Hub for the model, and compute with a config that is not part of the fingerprint."""
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    (folder / "config.4.0.0.json").write_bytes((folder / "config.json").read_bytes())
    change_config(folder, **{field: value})
    with pytest.raises(ModelError) as caught:
        open_vllm(folder).close()
    assert caught.value.field == field


def test_the_config_is_config_json(tiny: Tiny, tmp_path: Path) -> None:
    """Mistral's repositories also have their own form of config and weights, which is not part of the fingerprint."""
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    whole, shard = folder / "model.safetensors", "model-00001-of-00001.safetensors"
    shutil.copy(whole, folder / "consolidated.safetensors")
    with safe_open(whole, "pt") as tensors:
        index = {"weight_map": dict.fromkeys(tensors.keys(), shard)}
    whole.rename(folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = {"dim": 128, "n_layers": 3, "head_dim": 32, "hidden_dim": 192, "n_heads": 4, "n_kv_heads": 2}
    params = {"vocab_size": 384, "norm_eps": 1e-6, "rope_theta": 777.0, "max_seq_len": 77}
    (folder / "params.json").write_text(json.dumps(sizes | params))
    engine = open_vllm(folder)
    engine.close()
    assert engine.spec.max_context_tokens == COMMON["max_position_embeddings"]


def test_code_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """`make vllm-env` leaves out torchvision, which vLLM's code of this family imports, also for text."""
    folder = build(
        "Qwen3_5Text",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        tmp_path / "model",
    )
    with pytest.raises(ModelError, match=r"Qwen3_5ForCausalLM cannot be imported: .*torchvision"):
        open_vllm(folder)


def test_sizes_of_mla_without_a_kernel_are_refused(tmp_path: Path) -> None:
    family, own = TINY["deepseek-v2"]
    folder = build(family, own | {"kv_lora_rank": 256}, tmp_path / "small")
    (folder / "model.safetensors").write_bytes(spoilt(folder))
    with pytest.raises(ModelError, match="512 and 64, the only sizes of MLA that vLLM computes on a CPU") as caught:
        open_vllm(folder)
    assert (caught.value.field, caught.value.seen) == ("kv_lora_rank and qk_rope_head_dim", "256 and 64")


def test_fp8_kv_with_mla_on_a_cpu_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="auto: ") as caught:
        open_vllm(tiny("deepseek-v2"), kv_dtype="fp8")
    assert (caught.value.field, caught.value.seen) == ("kv_dtype", "fp8")


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


def test_a_block_of_mla_is_one_run_for_each_layer(tiny: Tiny) -> None:
    """vLLM's attention on a CPU needs each layer's KV in one piece, and writes where KvPool says that a run is."""
    engine = open_vllm(tiny("deepseek-v2"), kv_blocks=7)
    try:
        spec, pool = engine.spec, engine.pool
        layers, run_bytes = COMMON["num_hidden_layers"], spec.block_size * (512 + 64) * 4
        assert (spec.block_size, spec.block_bytes) == (16, layers * run_bytes)
        assert (pool.runs_per_block, spec.kv_layers, spec.num_layers) == (layers, layers, layers)
        assert (spec.kv_heads, spec.kv_head_dim) == (1, 512 + 64)
        assert spec.layout.startswith("opaque.vllm-0.32-CPU_MLA-LB")
        pool.buffer[:] = b"\x3f" * len(pool.buffer)
        engine.step([Row(tokens=[5, 6, 7], start=0, blocks=[2])])
        for layer in range(layers):
            for block in range(pool.num_blocks):
                begin = (layer * pool.num_blocks + block) * run_bytes
                run = pool.buffer[begin : begin + run_bytes]
                if block == 2:
                    written = 3 * (512 + 64) * 4  # bytes of three tokens; the rest is cleared
                    assert run[written:] == bytes(run_bytes - written)
                    assert sum(1 for value in run[:written].cast("f") if value) > written // 4 * 0.9
                else:
                    assert run == b"\x3f" * run_bytes
    finally:
        engine.close()


def test_doctor_asks_this_environment(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """tests/unit/cli/test_doctor_engines.py has answers of other environments."""
    words = ["doctor", "--skip-pairs", "--port", "0", "--http", "0", "--engine-python", sys.executable, "--model"]
    main([*words, str(tiny("glm4"))])
    served = capsys.readouterr().out
    assert "vllm, chosen by auto: our own engine does not know Glm4ForCausalLM" in served
    assert re.search(r"ok    vllm              0\.32\.\d+, built for CPUs, ", served)
    assert main([*words, str(tiny("mamba"))]) == 1
    assert re.search(r"FAIL  model             architectures: .*state besides KV", capsys.readouterr().out)

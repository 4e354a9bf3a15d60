"""What config.json and the tensors state differently is taken from the tensors with a warning, or refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.config import WorkerConfig
from pdserve.core.errors import ModelError
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load.build_engine import open_torch_engine
from pdserve.engine.load.checkpoint import open_model
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.engine.load.weights import load_weights
from pdserve.engine.model.attention import inverse_frequencies
from pdserve.engine.model.config import read_config
from pdserve.engine.model.linear import Linear
from pdserve.engine.model.parameters import Shard
from pdserve.launch.serve import capacity_warnings
from pdserve.launch.spec import ClusterSpec
from tests.unit.engine.conftest import TINY
from tests.unit.engine.test_int4 import pack_folder
from tests.unit.engine.test_quantised import quantise_folder

CPU = torch.device("cpu")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKENS = [5, 9, 300, 17, 44]
LAYER = "model.layers.1."
Tensors = dict[str, Tensor]
Config = dict[str, Any]


@pytest.fixture
def copied(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a tiny model."""
    return lambda name: Path(shutil.copytree(tiny(name), tmp_path / "model"))


def edit(folder: Path, tensors: Callable[[Tensors], object] | None = None, **config: Any) -> None:
    if config:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | config))
    if tensors is not None:
        stored = load_file(folder / "model.safetensors")
        tensors(stored)
        save_file({name: one.contiguous() for name, one in stored.items()}, folder / "model.safetensors")


def add_own_head(folder: Path) -> Tensor:
    """Makes config.json say that the head is tied, beside a head that differs."""
    head: list[Tensor] = []

    def change(stored: Tensors) -> None:
        torch.manual_seed(5)
        head.append(torch.randn(stored[EMBEDDING].shape).to(stored[EMBEDDING].dtype) * 0.25)
        stored[HEAD] = head[0]

    edit(folder, change, tie_word_embeddings=True)
    return head[0]


def load(folder: Path, **settings: Any) -> Any:
    return load_weights(read_config(folder), open_checkpoint(folder), CPU, torch.float32, **settings)


def load_opened(folder: Path) -> None:
    opened = open_model(folder)
    assert opened.checkpoint is not None
    load_weights(opened.config, opened.checkpoint, CPU, torch.float32)


def contradictions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.contradiction for one in caplog.records if hasattr(one, "contradiction")]


def matrix(linear: Linear, num_inputs: int) -> Tensor:
    return linear(torch.eye(num_inputs)).T


def top(engine: Engine) -> list[tuple[int, float]]:
    row = Row(tokens=TOKENS, start=0, blocks=[1], sample=Sampling(temperature=0.0, logprobs=8), history=TOKENS)
    [out] = engine.step([row])
    return list(out.sampled[0].top)


@pytest.mark.parametrize("name", TINY)
def test_an_own_head_is_kept_in_every_family(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    head = add_own_head(folder)
    weights = load(folder)
    assert torch.equal(matrix(weights.head, head.shape[1]), head.float())
    ranks = [matrix(load(folder, shard=Shard(rank, 2)).head, head.shape[1]) for rank in range(2)]
    assert torch.equal(torch.cat(ranks), head.float())


def test_an_own_head_decides_the_tokens(
    copied: Callable[[str], Path], open_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("qwen2-window-by-layer")
    tied = top(open_engine(folder))
    add_own_head(folder)
    with caplog.at_level(logging.WARNING):
        kept = top(open_engine(folder))
    [told] = contradictions(caplog)
    assert "tie_word_embeddings" in told
    edit(folder, tie_word_embeddings=False)
    caplog.clear()
    assert kept == top(open_engine(folder)) != tied
    assert contradictions(caplog) == []


def test_two_ranks_keep_an_own_head(copied: Callable[[str], Path], open_engine: Callable[..., Any]) -> None:
    folder = copied("llama-tied-biased")
    add_own_head(folder)
    alone, together = top(open_engine(folder)), open_engine(folder, tensor_parallel=2)
    try:
        found = top(together)
    finally:
        together.close()
    assert [token for token, _ in found] == [token for token, _ in alone]
    assert [logprob for _, logprob in found] == pytest.approx([logprob for _, logprob in alone], abs=1e-4)


@pytest.mark.parametrize("name", ["fp8-block", "int-channel", "gptq", "awq"])
def test_quantised_checkpoints_keep_an_own_head(
    name: str, copied: Callable[[str], Path], open_engine: Callable[..., Engine]
) -> None:
    folder = copied("llama")
    (pack_folder if name in ("gptq", "awq") else quantise_folder)(folder, name)
    own = top(open_engine(folder))
    edit(folder, tie_word_embeddings=True)
    assert top(open_engine(folder)) == own


def test_memory_counts_an_own_head(copied: Callable[[str], Path]) -> None:
    folder = copied("llama-tied-biased")
    assert open_model(folder).config.is_tied
    add_own_head(folder)
    assert not open_model(folder).config.is_tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_embedding_stays_tied(dtype: torch.dtype, copied: Callable[[str], Path]) -> None:
    """Also a copy in another dtype, if its values are equal."""
    folder = copied("llama-tied-biased")

    def change(stored: Tensors) -> None:
        stored[EMBEDDING] = stored[EMBEDDING].bfloat16().float()
        stored[HEAD] = stored[EMBEDDING].to(dtype, copy=True)

    edit(folder, change)
    opened = open_model(folder)
    assert (opened.config.is_tied, opened.corrections) == (True, ())
    weights = load(folder)
    assert torch.equal(matrix(weights.head, 64), weights.embedding_VE)


def halved(stored: Tensors) -> None:
    stored.update({name: one.bfloat16() for name, one in stored.items()})


@pytest.mark.parametrize(("says", "stored", "used"), [("bfloat16", None, "float32"), ("float32", halved, "bfloat16")])
def test_the_dtype_is_that_of_the_tensors(
    says: str, stored: Any, used: str, copied: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("llama")
    edit(folder, stored, dtype=says)
    opened = open_model(folder)
    assert opened.config.stored == used
    assert [f"dtype: {says}" in one and used in one for one in opened.corrections] == [True]
    with caplog.at_level(logging.WARNING):
        open_torch_engine(WorkerConfig(model=str(folder), worker_id="w", kv_blocks=8, device="cpu", dtype="float32"))
    assert len(contradictions(caplog)) == 1


def test_the_bundled_model_needs_no_correction() -> None:
    assert open_model(Path(__file__).parents[3] / "pdserve/models/stdlib-5m").corrections == ()


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda stored: stored.pop(name)


def put(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda stored: stored.update({name: torch.ones(*shape)})


def rename_layer(stored: Tensors) -> None:
    for name in [name for name in stored if ".layers.2." in name]:
        stored[name.replace(".layers.2.", ".layers.7.")] = stored.pop(name)


#: the model, changes of the tensors, changes of config.json, the name in the error
CONTRADICTIONS: Mapping[str, tuple[str, Callable[[Tensors], object] | None, Config, str]] = {
    "untied without a head": ("llama-tied-biased", None, {"tie_word_embeddings": False}, HEAD),
    "tied, a head of another vocabulary": ("llama-tied-biased", put(HEAD, 400, 64), {}, HEAD),
    "tied, a head with a bias": ("llama-tied-biased", put("lm_head.bias", 384), {}, "lm_head.bias"),
    "more tokens than rows": ("llama", None, {"vocab_size": 400}, "vocab_size"),
    "fewer tokens than rows": ("llama", None, {"vocab_size": 380}, "vocab_size"),
    "head of another size": ("llama", put(HEAD, 380, 64), {}, HEAD),
    "more layers": ("llama", None, {"num_hidden_layers": 4}, "num_hidden_layers"),
    "fewer layers": ("llama", None, {"num_hidden_layers": 2}, "num_hidden_layers"),
    "layers with other numbers": ("llama", rename_layer, {}, "model.layers.2."),
    "another hidden size": ("llama", None, {"hidden_size": 32, "head_dim": 16}, "hidden_size"),
    "another mlp size": ("llama", None, {"intermediate_size": 80}, "intermediate_size"),
    "more query heads": ("llama", None, {"num_attention_heads": 8, "head_dim": 16}, "num_attention_heads"),
    "another number of kv heads": ("llama", None, {"num_key_value_heads": 4}, "num_key_value_heads"),
    "another head size": ("llama", None, {"head_dim": 8}, "head_dim"),
    "biases that config denies": ("llama-tied-biased", None, {"attention_bias": False}, ".bias"),
    "mlp biases that config denies": ("llama-tied-biased", None, {"mlp_bias": False}, "mlp."),
    "no biases that config states": ("llama", None, {"attention_bias": True}, ".bias"),
    "no mlp biases that config states": ("llama", None, {"mlp_bias": True}, ".bias"),
    "a bias in one layer": ("llama", put(f"{LAYER}self_attn.q_proj.bias", 64), {}, "q_proj.bias"),
    "a family without the bias": ("mistral-window", put(f"{LAYER}self_attn.k_proj.bias", 48), {}, "k_proj.bias"),
    "a bias that the family needs": ("qwen2-window-by-layer", drop(f"{LAYER}self_attn.v_proj.bias"), {}, "v_proj.bias"),
    "norms of queries": ("llama", put(f"{LAYER}self_attn.q_norm.weight", 16), {}, "q_norm"),
    "no norms of queries": ("qwen3", drop(f"{LAYER}self_attn.q_norm.weight"), {}, "q_norm"),
    "norms of queries of all heads": ("qwen3", put(f"{LAYER}self_attn.q_norm.weight", 128), {}, "q_norm"),
    "more experts": ("qwen3-moe-renormalised", None, {"num_local_experts": 17}, "experts"),
    "fewer experts": ("qwen3-moe-renormalised", None, {"num_local_experts": 15}, "experts"),
    "experts of another size": ("qwen3-moe-renormalised", None, {"moe_intermediate_size": 16}, "moe_intermediate_size"),
    "a dense layer with experts": ("qwen3-moe-renormalised", None, {"mlp_only_layers": [0]}, "model.layers.0.mlp."),
    "experts in a dense layer": ("qwen3-moe", None, {"mlp_only_layers": []}, "model.layers.1.mlp."),
    "norms after the mlp": ("gemma2", drop(f"{LAYER}post_feedforward_layernorm.weight"), {}, "post_feedforward"),
    "a tensor of no layer": ("llama", put("model.extra.weight", 4, 4), {}, "model.extra.weight"),
    "scales without a scheme": ("llama", put(f"{LAYER}mlp.up_proj.weight_scale", 96, 1), {}, "weight_scale"),
    "scales of a KV cache": ("llama", put(f"{LAYER}self_attn.k_proj.k_scale", 1), {}, "k_scale"),
    "a scheme without scales": ("llama", None, {"quantization_config": {"quant_method": "fp8"}}, "weight_scale"),
    "frequencies of another rope": (
        "llama",
        lambda stored: stored.update({f"{LAYER}self_attn.rotary_emb.inv_freq": 1.0 / 5e5 ** (torch.arange(8) / 8)}),
        {},
        "inv_freq",
    ),
    "frequencies of another head size": ("llama", put(f"{LAYER}self_attn.rotary_emb.inv_freq", 4), {}, "inv_freq"),
}


@pytest.mark.parametrize("which", CONTRADICTIONS)
def test_what_the_tensors_contradict_is_refused_by_name(which: str, copied: Callable[[str], Path]) -> None:
    name, change, config, named = CONTRADICTIONS[which]
    folder = copied(name)
    edit(folder, change, **config)
    with pytest.raises(ModelError) as caught:
        load_opened(folder)
    assert named in caught.value.field


#: changes of config.json, and the whole error, which the launcher reports before it starts a worker
SIZES: Mapping[str, tuple[str, Config, str]] = {
    "layers": (
        "llama",
        {"num_hidden_layers": 12},
        "config.json: num_hidden_layers: got 12, expected 3, because the weights have the layers 0 to 2",
    ),
    "hidden size": (
        "llama",
        {"hidden_size": 32, "head_dim": 16},
        "config.json: hidden_size: got 32, expected 64, because model.embed_tokens.weight has the shape [384, 64]",
    ),
    "head size": ("qwen3", {"head_dim": 8}, "config.json: head_dim: got 8, expected "),
    "keys": ("llama", {"num_key_value_heads": 4}, "config.json: num_key_value_heads * head_dim: got 64, expected 32, "),
    "experts": ("qwen3-moe-renormalised", {"num_local_experts": 17}, "config.json: num_local_experts: got 17, "),
    "experts by another name": (
        "qwen3-moe-renormalised",
        {"num_local_experts": None, "num_experts": 17},
        "config.json: num_experts: got 17, expected 16, because model.layers.0.mlp.gate.weight has the shape [16, ",
    ),
    "wide experts": ("qwen3-moe-renormalised", {"moe_intermediate_size": 16}, "config.json: moe_intermediate_size: "),
    "experts as wide as others": ("mixtral-window", {"intermediate_size": 80}, "config.json: intermediate_size: "),
}


@pytest.mark.parametrize("which", SIZES)
def test_sizes_are_compared_before_the_start(which: str, copied: Callable[[str], Path]) -> None:
    name, config, words = SIZES[which]
    folder = copied(name)
    spec = ClusterSpec(model=str(folder))
    capacity_warnings(spec)
    edit(folder, None, **config)
    with pytest.raises(ModelError) as caught:
        capacity_warnings(spec)
    assert caught.value.message.startswith(words)
    capacity_warnings(ClusterSpec(model=str(folder), settings={"worker": {"load": "dummy"}}))  # generated weights


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equal_frequencies_are_accepted(dtype: torch.dtype, is_scaled: bool, copied: Callable[[str], Path]) -> None:
    folder = copied("llama-linear-rope")
    config = read_config(folder)
    frequency = inverse_frequencies(config.ropes[0], config.head_dim) * (1.0 if is_scaled else config.ropes[0].factor)
    edit(folder, lambda stored: stored.update({f"{LAYER}self_attn.rotary_emb.inv_freq": frequency.to(dtype)}))
    load(folder)


@pytest.mark.parametrize(
    ("scheme", "suffix", "change"),
    [
        ("gptq", "g_idx", lambda found: found.flip(0)),
        ("gptq", "bias", lambda found: torch.full((96,), 0.5)),
        ("packed-symmetric", "weight_shape", lambda found: found.flip(0)),
    ],
)
def test_a_tensor_that_is_not_read_adds_nothing(
    scheme: str, suffix: str, change: Callable[[Tensor], Tensor], copied: Callable[[str], Path]
) -> None:
    folder = copied("llama")
    pack_folder(folder, scheme)
    load(folder)
    name = f"{LAYER}mlp.up_proj.{suffix}"
    edit(folder, lambda stored: stored.update({name: change(stored.get(name, torch.zeros(0)))}))
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert caught.value.field == name


def test_experts_in_two_forms_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen3-moe-renormalised")
    edit(folder, lambda stored: stored.update({f"{LAYER}mlp.experts.down_proj": torch.ones(16, 64, 32)}))
    with pytest.raises(ModelError, match=r"down_proj.weight: got the same weights in .*experts.down_proj"):
        load(folder)


def test_a_whole_file_beside_an_index_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    stored = load_file(folder / "model.safetensors")
    save_file(stored, folder / "shard.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(stored, "shard.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model.safetensors: got a file that the index"):
        open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    load(folder)

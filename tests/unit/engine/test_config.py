"""config.json is read exactly, or rejected with the name of the field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from pdserve.core.errors import ModelError
from pdserve.engine.model.config import ModelConfig, RopeConfig, parse_config, read_config
from scripts.drawn_pages import COMMAND, DOCS, with_section

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


def parse(values: dict[str, Any], **own: Any) -> ModelConfig:
    return parse_config(values | own, {})


def test_absent_fields_have_transformers_defaults() -> None:
    assert parse(LLAMA) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        mlp_size=128,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        norm_eps=1e-5,
        ropes=(RopeConfig(theta=10_000.0), RopeConfig(theta=10_000.0)),
        windows=(None, None),
        activation="silu",
        embedding_scale=1.0,
        attention_scale=8**-0.5,
        attention_softcap=None,
        logit_softcap=None,
        experts=None,
        is_tied=False,
        is_norm_offset=False,
        has_post_norms=False,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        max_context_tokens=4096,
        eos_token_ids=(),
        dtype="float32",
    )
    bare = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert parse(bare).num_kv_heads == 8
    assert parse(QWEN3).head_dim == 128
    assert parse(MISTRAL).windows == (4096, 4096)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma2"])
def test_configs_that_transformers_writes_are_read(family: str, tmp_path: Path) -> None:
    config = getattr(transformers, family + "Config")(architectures=[family + "ForCausalLM"])
    config.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.num_kv_heads == config.num_key_value_heads
    assert set(ours.ropes) == {RopeConfig(theta=config.rope_parameters["rope_theta"])}
    assert ours.max_context_tokens == config.max_position_embeddings
    assert ours.attention_scale == getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5
    assert ours.attention_softcap == getattr(config, "attn_logit_softcapping", None)
    assert ours.logit_softcap == getattr(config, "final_logit_softcapping", None)
    assert ours.norm_eps == config.rms_norm_eps
    assert ours.is_tied == config.tie_word_embeddings


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3"])
def test_an_absent_field_means_what_the_full_config_says(family: str, tmp_path: Path) -> None:
    """For a config without any number, we use the same defaults as transformers."""
    name = "Gemma3TextConfig" if family == "Gemma3" else family + "Config"
    config = getattr(transformers, name)(architectures=[family + "ForCausalLM"], num_hidden_layers=13)
    config.save_pretrained(tmp_path)
    full = json.loads((tmp_path / "config.json").read_text())
    required = {
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    }
    bare = {key: value for key, value in full.items() if key in required}
    same = {"eos_token_ids": (), "dtype": "float32"}
    assert replace(parse_config(bare, {}), **same) == replace(parse_config(full, {}), **same)


def test_experts_are_read_under_each_of_their_names() -> None:
    old = parse(MOE, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24, norm_topk_prob=True)
    assert old == parse(MOE, num_local_experts=16, num_experts_per_tok=4, moe_intermediate_size=24, norm_topk_prob=True)
    assert old.experts is not None
    assert (old.experts.num_experts, old.experts.num_chosen, old.experts.mlp_size) == (16, 4, 24)
    assert (old.experts.is_renormalised, old.experts.layers) == (True, {0, 1})
    mixtral = parse(MIXTRAL).experts
    assert mixtral is not None
    assert (mixtral.num_experts, mixtral.num_chosen, mixtral.mlp_size) == (8, 2, 128)
    assert mixtral.is_renormalised


def test_expert_layers_follow_step_and_list() -> None:
    def layers(**own: Any) -> set[int]:
        experts = parse(MOE, num_hidden_layers=6, **own).experts
        assert experts is not None
        return set(experts.layers)

    assert layers() == {0, 1, 2, 3, 4, 5}
    assert layers(decoder_sparse_step=2) == {1, 3, 5}
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3, 4]) == {1, 5}
    assert layers(decoder_sparse_step=7) == set()


def test_both_spellings_of_gemma_ropes_and_windows_are_read() -> None:
    old = parse(
        GEMMA3,
        num_hidden_layers=4,
        rope_theta=1e6,
        rope_local_base_freq=5e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=512,
        sliding_window_pattern=3,
    )
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert old == parse(GEMMA3, num_hidden_layers=4, rope_parameters=ropes, sliding_window=512, layer_types=kinds)
    local, whole = RopeConfig(theta=5e3), RopeConfig(kind="linear", theta=1e6, factor=8.0)
    assert old.ropes == (local, local, whole, local)
    assert old.windows == (512, 512, None, 512)
    assert old.max_context_tokens == 4096  # For Gemma, it is the length after scaling.


def test_a_null_softcap_differs_from_an_absent_one() -> None:
    assert (parse(GEMMA2).attention_softcap, parse(GEMMA2).logit_softcap) == (50.0, 30.0)
    bare = parse(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (bare.attention_softcap, bare.logit_softcap) == (None, None)
    assert parse(GEMMA3, final_logit_softcapping=7.0).logit_softcap == 7.0


def test_both_spellings_of_rope_are_read() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 1024}
    old = parse(QWEN2, rope_theta=1e6, rope_scaling={"type": "yarn", **scaling})
    new = parse(QWEN2, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **scaling})
    assert old == new
    assert old.ropes[0].theta == 1e6
    assert old.ropes[0].attention_factor == pytest.approx(1.1386294361)
    assert old.max_context_tokens == 4096


def test_scaled_ropes_extend_the_context() -> None:
    assert parse(LLAMA, rope_scaling={"type": "linear", "factor": 2.0}).max_context_tokens == 8192
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert parse(LLAMA, rope_scaling=yarn).max_context_tokens == 16_384
    dynamic = parse(LLAMA, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (dynamic.ropes[0], dynamic.max_context_tokens) == (RopeConfig(), 4096)


def test_windows_follow_each_family() -> None:
    assert parse(MISTRAL, sliding_window=None).windows == (None, None)
    assert parse(MISTRAL, sliding_window=128).windows == (128, 128)
    assert parse(QWEN2, sliding_window=128).windows == (None, None)
    assert parse(QWEN2, use_sliding_window=True, sliding_window=128, max_window_layers=1).windows == (None, 128)
    by_layer = ["sliding_attention", "full_attention"]
    layered = parse(QWEN3, use_sliding_window=True, sliding_window=128, layer_types=by_layer)
    assert layered.windows == (128, None)


def test_biases_follow_each_family() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias

    assert biases(parse(LLAMA, attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert biases(parse(QWEN2)) == (True, False, False)
    assert biases(parse(QWEN3, attention_bias=True)) == (True, True, False)
    assert biases(parse(MISTRAL, attention_bias=False)) == (False, False, False)


def test_ends_of_sequence_come_from_both_files() -> None:
    assert parse_config(LLAMA | {"eos_token_id": 7}, {"eos_token_id": [9, 7]}).eos_token_ids == (7, 9)
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id: got 1000"):
        parse_config(LLAMA, {"eos_token_id": 1000})


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("architectures", LLAMA, {"architectures": ["GemmaForCausalLM"]}),
    ("architectures", LLAMA, {"architectures": ["LlamaForCausalLM", "Other"]}),
    ("architectures", {}, {"model_type": "gpt2"}),
    ("model_type", LLAMA, {"model_type": "qwen2"}),
    ("hidden_act", LLAMA, {"hidden_act": "gelu"}),
    ("hidden_size", LLAMA, {"hidden_size": None}),
    ("hidden_size", LLAMA, {"hidden_size": "64"}),
    ("num_hidden_layers", LLAMA, {"num_hidden_layers": 0}),
    ("num_hidden_layers", LLAMA, {"num_hidden_layers": True}),
    ("num_key_value_heads", LLAMA, {"num_key_value_heads": 3}),
    ("head_dim", LLAMA, {"head_dim": 7}),
    ("rms_norm_eps", LLAMA, {"rms_norm_eps": 0}),
    ("rms_norm_eps", LLAMA, {"rms_norm_eps": float("nan")}),
    ("tie_word_embeddings", LLAMA, {"tie_word_embeddings": "yes"}),
    ("quantization_config.quant_method", LLAMA, {"quantization_config": {"quant_method": "exl2"}}),
    ("quantization_config.bits", LLAMA, {"quantization_config": {"quant_method": "awq"}}),
    ("dtype", LLAMA, {"torch_dtype": "float8_e4m3fn"}),
    ("eos_token_id", LLAMA, {"eos_token_id": 1000}),
    ("eos_token_id", LLAMA, {"eos_token_id": [1, "2"]}),
    ("rope_scaling.rope_type", LLAMA, {"rope_scaling": {"type": "su", "factor": 2.0}}),
    ("rope_scaling.rope_type", LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
    ("rope_scaling", LLAMA, {"rope_scaling": 2.0}),
    ("rope_scaling.factor", LLAMA, {"rope_scaling": {"type": "linear"}}),
    ("rope_scaling.factor", LLAMA, {"rope_scaling": {"type": "linear", "factor": -1.0}}),
    ("rope_scaling.mrope_section", LLAMA, {"rope_scaling": {"type": "default", "mrope_section": [1]}}),
    ("rope_scaling.high_freq_factor", LLAMA, {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}),
    ("rope_parameters.full_attention", LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
    ("rope_parameters.partial_rotary_factor", LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("partial_rotary_factor", LLAMA, {"partial_rotary_factor": 0.5}),
    ("rope_theta", LLAMA, {"rope_theta": 0}),
    ("sliding_window", LLAMA, {"sliding_window": 4096}),
    ("sliding_window", MISTRAL, {"sliding_window": 0}),
    ("layer_types", QWEN2, {"layer_types": ["full_attention"]}),
    ("layer_types", QWEN2, {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}),
    ("layer_types", QWEN3, {"layer_types": ["full_attention", "linear_attention"]}),
    ("mlp_bias", QWEN2, {"mlp_bias": True}),
    ("attention_bias", MISTRAL, {"attention_bias": True}),
    ("auto_map", LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}),
    ("final_logit_softcapping", LLAMA, {"final_logit_softcapping": 30.0}),
    ("num_experts", QWEN3, {"num_experts": 8}),
    ("architectures", LLAMA, {"architectures": ["Gemma3ForConditionalGeneration"]}),
    ("hidden_act", MOE, {"hidden_act": "gelu"}),
    ("num_experts", MOE, {"num_experts": 0}),
    ("num_local_experts", MOE, {"num_experts": 8, "num_local_experts": 4}),
    ("num_experts_per_tok", MOE, {"num_experts": 8, "num_experts_per_tok": 9}),
    ("norm_topk_prob", MOE, {"norm_topk_prob": "yes"}),
    ("decoder_sparse_step", MOE, {"decoder_sparse_step": 0}),
    ("mlp_only_layers", MOE, {"mlp_only_layers": [2]}),
    ("mlp_only_layers", MOE, {"mlp_only_layers": [True]}),
    ("use_sliding_window", MOE, {"use_sliding_window": True}),
    ("scoring_func", MOE, {"scoring_func": "sigmoid"}),
    ("shared_expert_intermediate_size", MOE, {"shared_expert_intermediate_size": 64}),
    ("n_group", MIXTRAL, {"n_group": 2}),
    ("norm_topk_prob", MIXTRAL, {"norm_topk_prob": False}),
    ("hidden_activation", GEMMA3, {"hidden_activation": "gelu"}),
    ("hidden_act", GEMMA3, {"hidden_act": "silu"}),
    ("query_pre_attn_scalar", GEMMA3, {"query_pre_attn_scalar": 0}),
    ("attn_logit_softcapping", GEMMA3, {"attn_logit_softcapping": 50.0}),  # transformers reads it, but does not use it.
    ("final_logit_softcapping", GEMMA3, {"final_logit_softcapping": -1.0}),
    ("use_bidirectional_attention", GEMMA3, {"use_bidirectional_attention": True}),
    ("sliding_window_pattern", GEMMA3, {"sliding_window_pattern": 0}),
    ("layer_types", GEMMA3, {"sliding_window": None}),
    ("rope_local_base_freq", GEMMA3, {"rope_local_base_freq": 0.5}),
    ("rope_local_base_freq", QWEN3, {"rope_local_base_freq": 1e4}),
    ("rope_parameters", GEMMA3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("rope_parameters", GEMMA3, {"rope_parameters": {"chunked_attention": {"rope_theta": 1e4}}}),
    (
        "rope_parameters.sliding_attention.rope_type",
        GEMMA3,
        {"rope_parameters": {"sliding_attention": {"rope_type": "su"}}},
    ),
    ("attention_multiplier", LLAMA, {"attention_multiplier": 0.5}),
]


@pytest.mark.parametrize(
    ("field", "base", "own"), REFUSED, ids=[f"{field}-{n}" for n, (field, *_) in enumerate(REFUSED)]
)
def test_unsupported_fields_are_rejected_by_name(field: str, base: dict[str, Any], own: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        parse(base, **own)
    assert caught.value.field == field


def test_harmless_and_null_fields_are_ignored() -> None:
    harmless = {"use_cache": True, "initializer_range": 0.02, "use_mrope": False, "rope_scaling": None, "novel": None}
    assert parse(LLAMA, **harmless) == parse(LLAMA)


def test_a_missing_or_unreadable_config_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="folder of a Hugging Face checkpoint"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config.json: got nothing in .*"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: .*readable JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="a JSON object"):
        read_config(tmp_path)


def test_the_page_lists_the_architectures_that_are_tried() -> None:
    page = (DOCS / "models.md").read_text()
    assert with_section("models.md", page) == page, f"run `{COMMAND}`"

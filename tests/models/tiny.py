"""Tiny random models of many architectures, of sizes that vLLM's kernels take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
import transformers

COMMON: Final[dict[str, Any]] = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS: Final = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GROUPS: Final = {"n_group": 1, "topk_group": 1}  # of experts
_ROUTED: Final = {**_GROUPS, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT: Final = {  # sizes of MLA that vLLM computes on a CPU
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_DEEPSEEK: Final = {
    **_LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

#: Test -> the day and the commit of its last complete run, which the page on models repeats.
LAST_RUN: Final = {
    "tests/models/test_exactness.py": "2026-11-27",
    "tests/models/test_architectures.py": "2026-11-27",
    "tests/models/test_refused.py": "2026-11-27",
}
#: Name -> the family in transformers, and what its config has beside COMMON.
TINY: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "biogpt": ("BioGpt", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "bitnet": ("BitNet", {}),
    "bloom": ("Bloom", {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {"head_dim": 32, "sliding_window": 33, "logit_scale": 0.25, "tie_word_embeddings": True}),
    "ctrl": ("CTRL", {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 1024, "num_key_value_heads": 4}),
    "cwm": ("Cwm", {"head_dim": 32, "sliding_window": 33}),
    "deepseek-v2": ("DeepseekV2", {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 96,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_parameters": _YARN,
        },
    ),
    # As transformers writes its config, without fields that vLLM reads.
    "deepseek-v3-saved": ("DeepseekV3", {**_DEEPSEEK, "q_lora_rank": None, "n_group": 4, "topk_group": 2}),
    "dots1": ("Dots1", {**_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 33}),
    "ernie": ("Ernie4_5", {"head_dim": 32}),
    "ernie-moe": ("Ernie4_5_Moe", {**_EXPERTS, "moe_num_experts": 8, "moe_k": 2}),
    "exaone-moe": (
        "ExaoneMoe",
        {**_EXPERTS, **_GROUPS, "num_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 33},
    ),
    "exaone4": ("Exaone4", {"sliding_window": 33}),
    "falcon": ("Falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "flex-olmo": ("FlexOlmo", {"num_experts": 8, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {"tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 33},
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 33}),
    "gemma4-unified": (
        "Gemma4UnifiedText",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 33,
            "tie_word_embeddings": True,
        },
    ),
    "glm": ("Glm", {"head_dim": 32}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "glm4-moe": ("Glm4Moe", {**_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 32}),
    "glm4-moe-lite": ("Glm4MoeLite", {**_DEEPSEEK, **_GROUPS, "q_lora_rank": 96}),
    "gpt-bigcode": (
        "GPTBigCode",
        {
            "n_embd": 128,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 1024,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-j": (
        "GPTJ",
        {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 1024, "n_inner": 192, "rotary_dim": 16},
    ),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": 4}),
    "gpt-oss": ("GptOss", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 33}),
    "gpt2": ("GPT2", {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 1024}),
    "granite": ("Granite", {"attention_multiplier": 0.17}),
    "granite-moe": ("GraniteMoe", {"attention_multiplier": 0.17, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
    ),
    "granite-swa": ("GraniteSWA", {"sliding_window": 33}),
    "helium": ("Helium", {"head_dim": 32}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32}),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 2, "head_dim": 32}),
    "hyperclovax": ("HyperCLOVAX", {"head_dim": 32}),
    "jais2": ("Jais2", {"head_dim": 32}),
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama4": (
        "Llama4Text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "head_dim": 32,
            "intermediate_size_mlp": 192,
            "attention_chunk_size": 64,
        },
    ),
    "mellum": ("Mellum", {**_EXPERTS, "head_dim": 32, "sliding_window": 33}),
    "minicpm3": ("MiniCPM3", {**_LATENT, "q_lora_rank": 96}),
    "ministral": ("Ministral", {"head_dim": 32, "sliding_window": 33}),
    "ministral3": ("Ministral3", {"head_dim": 32, "sliding_window": 33}),
    "mistral": ("Mistral", {"sliding_window": 33, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "nanochat": ("NanoChat", {}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 33}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "opt": ("OPT", {"word_embed_proj_dim": 128, "ffn_dim": 192}),
    "persimmon": ("Persimmon", {"num_key_value_heads": 4}),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "phi3": ("Phi3", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 32}),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {}),
    "solar-open": ("SolarOpen", {**_ROUTED, "head_dim": 32}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "vaultgemma": ("VaultGemma", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 33}),
}
#: Models whose logits vLLM itself computes in another way. Their tokens are judged, and their logprobs are not.
OTHER_LOGITS: Final = {"bloom": "vLLM's GELU is exact, and that of transformers an approximation by tanh"}
#: Models that vLLM itself computes by another reading of the config: fields with which transformers reads it so.
OTHER_FIELDS: Final[dict[str, dict[str, Any]]] = {
    "cohere2": {"sliding_window": 34},  # vLLM adds the token itself to the window
}
#: Models that the engine refuses before it reads weights, and what the error names.
REFUSED: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "bart": ("Bart", {"d_model": 128, "encoder_layers": 1, "decoder_layers": 1}, "encoder-decoder"),
    "bert": ("Bert", {}, "pooling"),
    "mamba": ("Mamba", {"state_size": 16}, "Mamba"),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "short convolutions"),
    "bamba": ("Bamba", {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 16}, "state besides KV"),
    "gemma3n": (
        "Gemma3nText",
        {
            "head_dim": 32,
            "num_kv_shared_layers": 0,
            "intermediate_size": [192] * 3,
            "activation_sparsity_pattern": [0.0] * 3,
        },
        "vLLM 0.32 itself gets wrong",
    ),
    "gemma3-vision": (
        "Gemma3",
        {
            "text_config": COMMON | {"head_dim": 32},
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
        "images or audio",
    ),
    "hrm": ("HrmText", {"head_dim": 32}, "attend to later tokens"),
    "zaya": ("Zaya", {"num_experts": 8, "num_experts_per_tok": 1, "head_dim": 32}, "state besides KV"),
}
#: Of models that generate no text from text.
_OTHER_KINDS: Final = {"Bart": "AutoModelForSeq2SeqLM", "Bert": "AutoModel", "Gemma3": "AutoModelForImageTextToText"}


def reference(name: str, folder: Path, copy: Path) -> Path:
    """The folder that transformers reads to judge the model in `folder`."""
    if name not in OTHER_FIELDS:
        return folder
    shutil.copytree(folder, copy)
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | OTHER_FIELDS[name]))
    return copy


def build(family: str, own: dict[str, Any], folder: Path) -> Path:
    """A model with random weights and norms."""
    torch.manual_seed(20_26)
    config = getattr(transformers, f"{family}Config")(**COMMON | own)
    kind = transformers.AutoModelForCausalLM
    if family in _OTHER_KINDS:
        kind = getattr(transformers, _OTHER_KINDS[family])
    model = kind.from_config(config).float()
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        if "alpha_" in name:  # of Apertus: vLLM reads these two into bfloat16, as which the Hub has them
            parameter.data = parameter.data.bfloat16().float()
    if model.can_generate():
        model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder

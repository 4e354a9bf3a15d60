"""Tiny random models of many architectures, of sizes that vLLM's kernels take."""

from __future__ import annotations

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

#: Name -> the family in transformers, and what its config has beside COMMON.
TINY: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "arcee": ("Arcee", {}),
    "bloom": ("Bloom", {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
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
    "ernie": ("Ernie4_5", {"head_dim": 32}),
    "falcon": ("Falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "gemma": ("Gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {"tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 33},
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 33}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "gpt2": ("GPT2", {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 1024}),
    "gpt-oss": ("GptOss", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 33}),
    "granite": ("Granite", {"attention_multiplier": 0.17}),
    "granite-moe": ("GraniteMoe", {"attention_multiplier": 0.17, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 32}),
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": 33, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "opt": ("OPT", {"word_embed_proj_dim": 128, "ffn_dim": 192}),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "phi3": ("Phi3", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 32}),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "smollm3": ("SmolLM3", {}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
}
#: Models whose logits vLLM itself computes in another way. Their tokens are judged, and their logprobs are not.
OTHER_LOGITS: Final = {"bloom": "vLLM's GELU is exact, and that of transformers an approximation by tanh"}
#: Models that the engine refuses before it reads weights, and what the error names.
REFUSED: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "bart": ("Bart", {"d_model": 128, "encoder_layers": 1, "decoder_layers": 1}, "encoder-decoder"),
    "bert": ("Bert", {}, "pooling"),
    "mamba": ("Mamba", {"state_size": 16}, "Mamba"),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "short convolutions"),
}


def build(family: str, own: dict[str, Any], folder: Path) -> Path:
    """A model with random weights and norms."""
    torch.manual_seed(20_26)
    config = getattr(transformers, f"{family}Config")(**COMMON | own)
    kind = transformers.AutoModelForCausalLM
    if family in ("Bart", "Bert"):
        kind = transformers.AutoModelForSeq2SeqLM if family == "Bart" else transformers.AutoModel
    model = kind.from_config(config).float()
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    if model.can_generate():
        model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder

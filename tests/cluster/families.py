"""Tiny random checkpoints of each family with that family's real settings. tests/oracle.py judges the answers.

Weights are sampled wide, so that the two most likely tokens of a position are rarely as close as float32 rounding,
which differs with the batch and the processor. The bundled tokenizer is copied in; its vocabulary is used whole.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers  # imports a model's module when the model is built, not when tests are collected

ROOT = Path(__file__).parents[2]
BUNDLED = next((ROOT / "pdserve/models").glob("stdlib-*"))
VOCAB = json.loads((BUNDLED / "config.json").read_text())["vocab_size"]
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 500_000.0,
}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama-2": lambda: transformers.LlamaConfig(**{**COMMON, "num_key_value_heads": 4}),
    "llama-3": lambda: transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**COMMON, head_dim=16, sliding_window=40),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=32),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "gemma-3": lambda: transformers.Gemma3TextConfig(
        **COMMON,
        head_dim=32,
        query_pre_attn_scalar=8,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=False,
    ),
}


def build(name: str, folder: Path) -> Path:
    """Writes the checkpoint as Hugging Face does and returns its folder."""
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]()).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):  # transformers sets it to zero, which would test nothing
                parameter.normal_(0.0, 0.3)
            elif "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / part, folder / part)
    return folder


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, VOCAB) for _ in range(n)] for n in lengths]

"""Writes a Llama checkpoint of random weights, so that a shape can be measured without a download.

    python -m examples.make_random_model DIR --shape 125m [--dtype float32] [--seed 0]

config.json, safetensors shards with their index, and the bundled model's tokenizer: its 4,096 words are fewer than
the vocabulary of a larger shape, so measure such a model with token ids. The weights are sampled as transformers
initialises them (normal, deviation 0.02; norms 1), and the same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

TOKENIZER: Final = Path(__file__).parents[1] / "pdserve/models/stdlib-5m"
COPIED: Final = ("tokenizer.json", "tokenizer_config.json")
DEVIATION: Final = 0.02

#: The name of each shape, and what its config.json says.
SHAPES: Final[dict[str, dict[str, int]]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
    "125m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
}


def write_model(folder: Path, shape: str, dtype: torch.dtype, seed: int) -> int:
    """Writes the checkpoint and returns how many parameters it has; one shard is in memory at a time."""
    sizes = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    shards = 1 + sizes["num_hidden_layers"]
    draw = torch.Generator().manual_seed(seed)
    where: dict[str, str] = {}
    num_parameters = num_bytes = 0
    for index, names in enumerate(_shards(sizes)):
        tensors = {
            name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=draw) * DEVIATION
            for name, size in names.items()
        }
        stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        save_file(stored, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(stored, file)
        num_parameters += sum(tensor.numel() for tensor in stored.values())
        num_bytes += sum(tensor.nbytes for tensor in stored.values())
    index_json = {"metadata": {"total_size": num_bytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(_config(sizes, dtype), indent=1) + "\n")
    for name in COPIED:
        shutil.copyfile(TOKENIZER / name, folder / name)
    return num_parameters


def _shards(sizes: dict[str, int]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and sizes of the parameters, shard by shard: what lies outside the layers, then each layer."""
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    kv = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }


def _config(sizes: dict[str, int], dtype: torch.dtype) -> dict[str, object]:
    return {
        **sizes,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    num_parameters = write_model(flags.folder, flags.shape, getattr(torch, flags.dtype), flags.seed)
    print(f"{flags.folder}: {num_parameters:,} parameters in {flags.dtype}")


if __name__ == "__main__":
    main()

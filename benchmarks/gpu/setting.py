"""The size of each part of benchmarks.gpu, on a GPU and in the rehearsal on a CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.failures import CASE_S, Cases, chosen
from benchmarks.gpu.report import Report

MIB: Final = 2**20
_LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _LLAMA3_ROPE,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}
#: The changes to a shape in the rehearsal.
SMALL: Final = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, kw_only=True)
class PartChoice:
    """What one run of a part measures, where it differs from the others."""

    label: str  # of its findings
    only: str = ""  # cases that match (failures.py)
    start: str = ""  # the first of them
    num_failed: int = 0  # before this process
    block_size: int = 16  # tokens of a KV block
    chunk_tokens: int = 2048
    kv_dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Setting:
    is_rehearsal: bool
    choice: PartChoice
    clock: Clock
    copy_bytes: int  # of the device copy that is the bandwidth's measure
    matrix_size: int
    decodes: tuple[tuple[int, int], ...]  # rows, context
    num_steps: int
    prefills: tuple[int, ...]  # prompt tokens
    chunk_tokens: int
    max_context_tokens: int
    memory_bytes: int  # of the device, for weights, KV and what a step needs
    peer_rows: tuple[int, ...]  # transformers
    peer_context: int
    transfer_bytes: tuple[int, ...]
    transfer_block_bytes: int
    serve_tokens: int
    serve_at_once: int

    def report(self, folder: Path, title: str, columns: Sequence[str]) -> Report:
        return Report(folder, self.choice.label, title, columns, goes_on=self.choice.num_failed > 0)

    def cases(self, names: Sequence[str], most_s: float = CASE_S) -> Cases:
        """Those of the names that this run measures. Raises ValueError if none matches."""
        choice = self.choice
        wanted = chosen(names, choice.only, choice.start)
        return Cases(wanted, None if self.is_rehearsal else self.clock.sync, most_s, choice.num_failed)

    def folder(self, shape: str, parent: Path) -> Path:
        """A folder with the model's config.json only."""
        folder = parent / shape
        folder.mkdir(exist_ok=True)
        config = SHAPES[shape] | (SMALL if self.is_rehearsal else {})
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def rehearsal(clock: Clock, choice: PartChoice) -> Setting:
    return Setting(
        is_rehearsal=True,
        choice=choice,
        clock=clock,
        copy_bytes=1 * MIB,
        matrix_size=64,
        decodes=((1, 20), (2, 40)),
        num_steps=2,
        prefills=(24, 40),
        chunk_tokens=32,
        max_context_tokens=64,
        memory_bytes=64 * MIB,
        peer_rows=(1, 2),
        peer_context=16,
        transfer_bytes=(65536, 4 * 65536),
        transfer_block_bytes=65536,
        serve_tokens=6,
        serve_at_once=2,
    )


def full(clock: Clock, memory_bytes: int, choice: PartChoice) -> Setting:
    return Setting(
        is_rehearsal=False,
        choice=choice,
        clock=clock,
        copy_bytes=2048 * MIB,
        matrix_size=8192,
        decodes=(*((rows, 1024) for rows in (1, 8, 32, 64, 128, 256)), (64, 4096), (64, 8192)),
        num_steps=40,
        prefills=(512, 2048, 4096, 8192, 16384),
        chunk_tokens=choice.chunk_tokens,
        max_context_tokens=16640,
        memory_bytes=memory_bytes,
        peer_rows=(1, 32),
        peer_context=1024,
        transfer_bytes=(1 * MIB, 16 * MIB, 128 * MIB, 1024 * MIB),
        transfer_block_bytes=1 * MIB,
        serve_tokens=64,
        serve_at_once=8,
    )

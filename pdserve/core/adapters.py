"""LoRA adapters, as routers and workers name them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """`fingerprint` is a hash of all that the adapter computes with, its config and the bytes of its weights, as 32
    hexadecimal digits. It is part of the salt of block hashes, so texts of two adapters never share KV."""

    name: str  # that requests choose as their model
    fingerprint: str
    folder: Path
    rank: int
    num_bytes: int  # of the weights

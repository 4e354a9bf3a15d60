"""LoRA adapters, their names and their limits. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.core.errors import ConfigError

MAX_NAME_CHARS: Final = 256
MAX_FOLDER_CHARS: Final = 4096
MAX_FINGERPRINT_CHARS: Final = 64
MAX_UNLOADED: Final = 64  # names that were unloaded, which a worker or a router remembers

_NAME: Final = re.compile(rf"[^\s,=]{{1,{MAX_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True)
class AdapterMatrix:
    name: str  # in the adapter's file
    dtype: str  # F32, BF16 or F16
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A linear layer W x of the model, computed as W x + scaling * B (A x)."""

    name: str  # as in the model's checkpoint, without .weight
    rank: int
    scaling: float
    a: AdapterMatrix  # [rank, inputs]
    b: AdapterMatrix  # [outputs, rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What was read from a folder.

    `fingerprint` is a hash of all that the adapter computes with, its config and the bytes of its weights, as 32
    hexadecimal digits. It is part of the salt of block hashes, so texts of two adapters never share KV.
    """

    name: str  # that requests choose as their model
    fingerprint: str
    folder: Path
    num_bytes: int  # of the weights
    modules: tuple[AdaptedModule, ...]

    @property
    def rank(self) -> int:
        return max(module.rank for module in self.modules)


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Of one adapter."""

    rank: int
    num_bytes: int  # of the weights


def check_adapter_name(name: str, field: str = "lora") -> None:
    """Raises ConfigError. A comma separates two adapters on a command line, and an equals sign a name from its
    folder."""
    if not _NAME.fullmatch(name) or not name.isprintable():
        expected = f"a name of 1 to {MAX_NAME_CHARS} printable characters without spaces, commas and equals signs"
        raise ConfigError(field, repr(name[:300]), expected)


def split_adapter(text: str) -> tuple[str, Path]:
    """Name and folder of NAME=FOLDER. Raises ConfigError."""
    name, sign, folder = text.partition("=")
    if not sign or not folder or "," in folder or not folder.isprintable():
        raise ConfigError("lora", repr(text[:300]), "NAME=FOLDER, with a path without commas")
    check_adapter_name(name)
    return name, Path(folder)

"""Names and limits of LoRA adapters. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.core.errors import ConfigError

_NAME: Final = re.compile(r"[^\s,=]{1,256}")


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Of one adapter."""

    rank: int
    num_bytes: int  # of the weights


def check_adapter_name(name: str, field: str = "lora") -> None:
    """Raises ConfigError. A comma separates two adapters on a command line, and an equals sign a name from its
    folder."""
    if not _NAME.fullmatch(name) or not name.isprintable():
        expected = "a name of 1 to 256 printable characters without spaces, commas and equals signs"
        raise ConfigError(field, repr(name[:300]), expected)


def split_adapter(text: str) -> tuple[str, Path]:
    """Name and folder of NAME=FOLDER. Raises ConfigError."""
    name, sign, folder = text.partition("=")
    if not sign or not folder or "," in folder or not folder.isprintable():
        raise ConfigError("lora", repr(text[:300]), "NAME=FOLDER, with a path without commas")
    check_adapter_name(name)
    return name, Path(folder)

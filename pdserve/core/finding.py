"""What `pdserve doctor` reports of one thing that it checked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`advice` says what to do about it."""

    level: Level
    name: str
    text: str
    advice: str = ""

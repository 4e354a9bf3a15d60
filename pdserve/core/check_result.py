"""The result of one check of `pdserve doctor`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`advice` tells the user how to repair a failed check."""

    level: Level
    name: str
    text: str
    advice: str = ""

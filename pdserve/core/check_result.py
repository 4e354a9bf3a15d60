"""The result of one check of `pdserve doctor`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`advice` says how to repair it."""

    level: Level
    name: str
    text: str
    advice: str = ""

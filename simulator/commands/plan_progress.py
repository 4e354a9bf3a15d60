"""The progress line of `pdserve plan` on stderr; none without a terminal."""

from __future__ import annotations

import sys
from typing import Final, final

_BAR: Final = 30


@final
class PlanProgress:
    def __init__(self) -> None:
        self._is_seen = sys.stderr.isatty()

    def show(self, text: str, done: int, total: int) -> None:
        if self._is_seen:
            full = round(_BAR * done / total)
            print(f"\r\x1b[K[{'#' * full}{'.' * (_BAR - full)}] {text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._is_seen:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

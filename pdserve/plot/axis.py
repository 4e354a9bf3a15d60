"""Axes of charts: the place of a value, the ticks and their texts. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_FEWEST: Final = 3  # ticks of a logarithmic axis
_NEAREST: Final = 0.12  # share of a logarithmic axis between two ticks
_GAP: Final = 1e-12  # relative tolerance for ticks that round to just beyond the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    low: float
    high: float
    label: str = ""
    is_log: bool = False
    unit: str = ""  # "%": values are shares; "s": seconds; "n": a count

    def place(self, value: float) -> float:
        """0 at its low end, 1 at its high end, clipped."""
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(max((at - low) / (high - low), 0.0), 1.0) if high > low else 0.0

    def ticks(self) -> list[float]:
        ticks = _log_ticks(self.low, self.high) if self.is_log else _even_ticks(self.low, self.high)
        return [tick for tick in ticks if self.unit != "n" or tick == round(tick)]

    def text(self, value: float) -> str:
        if self.unit == "%":
            return f"{100.0 * value:.0f}%"
        if self.unit == "s" and 0.0 < value < 0.9995:
            return f"{1000.0 * value:.3g} ms"
        return f"{value:.4g}" + (" s" if self.unit == "s" else "")


def _even_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1.0, 2.0, 5.0, 10.0) if size * factor >= raw * (1.0 - _GAP))
    begin = math.ceil(low / step - 1e-9)
    return [number * step for number in range(begin, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Powers of ten, with 2 and 5 between them if there is room; even steps where these are too few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0, 2.0, 5.0), (1.0,)):
        ticks = [factor * 10.0**power for power in decades for factor in factors]
        inside = [tick for tick in ticks if low * (1.0 - 1e-9) <= tick <= high * (1.0 + 1e-9)]
        if len(inside) < _FEWEST and high < 10.0 * low:
            return _apart(_even_ticks(low, high), math.log(high / low))
        if len(inside) <= most:
            return inside
    return inside[:: math.ceil(len(inside) / most)]


def _apart(ticks: list[float], length: float) -> list[float]:
    """Without ticks that a logarithmic axis of this length would show too close to the one before."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or math.log(tick / kept[-1]) >= _NEAREST * length:
            kept.append(tick)
    return kept

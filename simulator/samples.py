"""Samples the cluster's state over time in bounded memory: a run twice as long is sampled half as often. Pure."""

from __future__ import annotations

from typing import Final, final

from simulator.model import Sample

FIRST_INTERVAL_S: Final = 0.1
MOST: Final = 2048


@final
class Samples:
    def __init__(self) -> None:
        self.interval_s = FIRST_INTERVAL_S
        self.kept: list[Sample] = []

    def add(self, sample: Sample) -> None:
        self.kept.append(sample)
        if len(self.kept) >= MOST:
            del self.kept[1::2]
            self.interval_s *= 2.0

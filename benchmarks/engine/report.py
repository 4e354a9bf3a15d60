"""Turns the turns of benchmarks.engine into tables (text that is also markdown). Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.engine.turns import Point, Turn
from benchmarks.engine.work import EngineWork
from benchmarks.harness import spread

GB = 1e9
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Memory:
    load_s: float
    load_peak_bytes: int
    run_peak_bytes: int
    own_bytes: int  # at the end, without pages of mapped files


def speed_table(turns: Sequence[Turn], others: Sequence[str], work_of: Callable[[Turn], EngineWork]) -> list[list[str]]:
    """A row per point and peer. The times and rates are medians over the rounds; a ratio is taken round by round."""
    head = ["point", "peer", "ms", "tokens/s", "of read rate", "of matrix rate", *(f"x {name}" for name in others)]
    rows = [head]
    for point in dict.fromkeys(turn.point for turn in turns):
        here = [turn for turn in turns if turn.point == point]
        for peer in dict.fromkeys(turn.peer for turn in sorted(here, key=lambda turn: turn.round)):
            own = by_round(here, peer)
            rows.append(
                [
                    point.label,
                    peer,
                    spread([1e3 * turn.seconds for turn in own.values()], "{:.1f}"),
                    f"{median_rate(here, peer):.0f}",
                    percent([work_of(t).read_bytes / t.seconds / t.read_bytes_per_s for t in own.values()]),
                    percent([work_of(t).flops / t.seconds / t.flops_per_s for t in own.values()]),
                    *(_ratio(own, by_round(here, name)) if name != peer else "1" for name in others),
                ]
            )
    return rows


def cost_table(turns: Sequence[Turn], base: str) -> list[list[str]]:
    """The cost of a step relative to that of `base`: medians of the ratios of each round, with the interval that holds
    the true median with a probability of 95 %."""
    rows = [["point", "peer", "ms", "CPU ms", f"time / {base}", f"CPU time / {base}"]]
    for point in dict.fromkeys(turn.point for turn in turns):
        here = [turn for turn in turns if turn.point == point]
        based = by_round(here, base)
        for peer in sorted({turn.peer for turn in here} - {base}):
            own = by_round(here, peer)
            rows.append(
                [
                    point.label,
                    peer,
                    *(
                        " and ".join(f"{1e3 * statistics.median(map(cost, one.values())):.2f}" for one in (own, based))
                        for cost in (_seconds, _cpu_s)
                    ),
                    *(
                        "{:.3f} ({:.3f} to {:.3f})".format(
                            *median_interval([cost(turn) / cost(based[number]) for number, turn in own.items()])
                        )
                        for cost in (_seconds, _cpu_s)
                    ),
                ]
            )
    return rows


def median_interval(values: Sequence[float], risk: float = 0.05) -> tuple[float, float, float]:
    """The median, and two of the values between which the true median lies with a probability of 1 - `risk`, whatever
    the distribution; the least and the greatest where there are too few for that.

    Each value is below the true median with a probability of a half, so the number of those is binomial.
    """
    ordered, outside, rank = sorted(values), 0.0, 0
    while rank < len(ordered) // 2:
        outside += 2.0 * math.comb(len(ordered), rank) / 2.0 ** len(ordered)
        if outside > risk:
            break
        rank += 1
    at = max(rank - 1, 0)
    return statistics.median(ordered), ordered[at], ordered[-1 - at]


def _seconds(turn: Turn) -> float:
    return turn.seconds


def _cpu_s(turn: Turn) -> float:
    return turn.cpu_s


def peer_table(turns: Sequence[Turn], memory: Mapping[str, Memory], oracle: str | None) -> list[list[str]]:
    """The memory of each process, and in how many decode turns its first sequence equals the oracle's."""
    rows = [["peer", "load s", "peak MiB, loading", "peak MiB, measured", "own MiB", f"same tokens as {oracle}"]]
    for peer, one in memory.items():
        pairs = [
            (turn.tokens, other.tokens)
            for turn in turns
            for other in turns
            if turn.tokens
            and turn.peer == peer
            and other.peer == oracle
            and (turn.point, turn.round) == (other.point, other.round)
        ]
        same = sum(own == other for own, other in pairs)
        rows.append(
            [
                peer,
                f"{one.load_s:.1f}",
                *(f"{size / MIB:.0f}" for size in (one.load_peak_bytes, one.run_peak_bytes, one.own_bytes)),
                f"{same} of {len(pairs)}" if pairs else "-",
            ]
        )
    return rows


def limits_line(turns: Sequence[Turn]) -> str:
    reads = [turn.read_bytes_per_s / GB for turn in turns]
    flops = [turn.flops_per_s / GB for turn in turns]
    return f"machine: reads {spread(reads, '{:.1f}')} GB/s, multiplies {spread(flops, '{:.0f}')} GFLOP/s (float32)"


def by_round(turns: Sequence[Turn], peer: str) -> dict[int, Turn]:
    return {turn.round: turn for turn in turns if turn.peer == peer}


def median_rate(turns: Sequence[Turn], peer: str) -> float:
    """Tokens per second at the median time of the rounds; `turns` are of one point."""
    own = by_round(turns, peer)
    return turns[0].point.size / statistics.median(turn.seconds for turn in own.values())


def percent(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.0%}"


def _ratio(own: Mapping[int, Turn], other: Mapping[int, Turn]) -> str:
    """The speed relative to the other peer, for each round."""
    return spread([other[number].seconds / turn.seconds for number, turn in own.items()], "{:.2f}")


def points_of(turns: Sequence[Turn], kind: str) -> list[Point]:
    return [point for point in dict.fromkeys(turn.point for turn in turns) if point.kind == kind]

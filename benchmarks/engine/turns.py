"""Runs the peers of benchmarks.engine as processes in turns: one computes while all others are stopped.

Each peer keeps the thread settings that it chose for itself. In every round of a point the peers come in another order,
and before and after each of their turns the machine's limits are measured, since those of a shared machine move within
seconds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import JsonProcess

PROMPT_TOKENS = 32  # of a decode point
WARM_STEPS = 2
#: What the caller's shell says of threads would bind some peers and not others.
UNSAID = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "LD_PRELOAD")


class PeerFailed(Exception):
    """A peer's process gave an error or ended; `log` is what it wrote to stderr."""

    def __init__(self, name: str, reason: str, log: Path) -> None:
        super().__init__(f"{name}: {reason}; its output is in {log}")
        self.name, self.reason, self.log = name, reason, log


class PeerEngine:
    """One child process. It stands stopped except while it answers an order."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        said = {name: value for name, value in os.environ.items() if name not in UNSAID}
        with log.open("w") as stderr:
            self._process = JsonProcess(command, {**said, **env}, stderr=stderr, is_alone=True)
        try:
            self.loaded = self._checked(self._process.hear)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        return self._checked(lambda: self._process.ask({"do": do, **values}))

    def close(self) -> None:
        self._process.close()

    def _checked(self, hear: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            answer = hear()
        except OSError as error:
            raise PeerFailed(self.name, str(error), self._log) from None
        if "error" in answer:
            raise PeerFailed(self.name, answer["error"], self._log)
        return answer


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement, the same for every peer. `size` is the batch of a decode step, or the tokens of a prefill."""

    kind: str  # decode or prefill
    size: int

    def order(self, steps: int, salt: int) -> dict[str, Any]:
        if self.kind == "prefill":
            return {"do": "prefill", "tokens": self.size, "salt": salt}
        return {
            "do": "decode",
            "batch": self.size,
            "prompt_tokens": PROMPT_TOKENS,
            "warm": WARM_STEPS,
            "steps": steps,
            "salt": salt,
        }

    @property
    def label(self) -> str:
        return f"decode, batch {self.size}" if self.kind == "decode" else f"prefill, {self.size} tokens"


@dataclass(frozen=True, slots=True)
class Turn:
    """One peer at one point in one round."""

    point: Point
    round: int
    peer: str
    seconds: float  # the median of the turn's steps, or the prefill
    cpu_s: float  # the same of the CPU time of all threads
    tokens: tuple[int, ...]  # of the first sequence, where the peer tells
    read_bytes_per_s: float  # what the machine could do just before and after, the mean of both
    flops_per_s: float


def take_turns(
    peers: Sequence[PeerEngine], limits: PeerEngine, points: Sequence[Point], rounds: int, steps: int
) -> Iterator[list[Turn]]:
    """Yields the turns of each round; a first one per point warms up and is thrown away."""
    for index, point in enumerate(points):
        for peer in peers:
            peer.ask(**point.order(steps, salt=index))
        before = limits.ask("probe")
        for number in range(rounds):
            turns = []
            first = number % len(peers)
            for peer in (*peers[first:], *peers[:first]):
                answer = peer.ask(**point.order(steps, salt=(index + 1) * 1000 + number))
                after = limits.ask("probe")
                turns.append(
                    Turn(
                        point=point,
                        round=number,
                        peer=peer.name,
                        seconds=statistics.median(answer["step_s"]),
                        cpu_s=statistics.median(answer["cpu_s"]),
                        tokens=tuple(answer.get("tokens", ())),
                        read_bytes_per_s=(before["read_bytes_per_s"] + after["read_bytes_per_s"]) / 2,
                        flops_per_s=(before["flops_per_s"] + after["flops_per_s"]) / 2,
                    )
                )
                before = after
            yield turns

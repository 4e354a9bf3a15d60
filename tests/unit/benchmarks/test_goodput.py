"""What benchmarks.goodput reports of workers with vLLM's runner beside `vllm serve`, without either."""

from __future__ import annotations

import pytest

from benchmarks.goodput.__main__ import report
from benchmarks.goodput.load import Seen
from benchmarks.goodput.run import Cell, Course
from pdserve.core.types import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
COURSE = Course(model="m", rates=(1.0, 2.0), seconds=10.0, settle_s=0.0, slo=SLO)


def cell(contender: str, rate_rps: float, kept: int, seed: int = 1) -> Cell:
    """Of 100 requests, `kept` of them within both targets."""
    rows = [Seen(outcome="served", tokens=9, ttft_s=0.5 if at < kept else 1.5, tpot_s=0.05) for at in range(100)]
    return Cell(contender=contender, rate_rps=rate_rps, seed=seed, rows=rows, late_start_s=0.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "behind", "share"),
    [
        ((100, 95), (100, 80), "0.00%, bar 1.0%: met", "75.00%, bar 87.0%: met"),
        ((99, 95), (100, 80), "1.00%, bar 1.0%: met", "75.00%, bar 87.0%: met"),
        ((98, 95), (100, 95), "2.00%, bar 1.0%: MISSED", "100.00%, bar 87.0%: MISSED"),
    ],
)
def test_one_worker_is_held_to_the_server_at_every_rate(
    ours: tuple[int, int], theirs: tuple[int, int], behind: str, share: str
) -> None:
    counts = {"goodput 0P+1D": ours, "vllm bfloat16": theirs}
    cells = [
        cell(label, rate, kept, seed)
        for seed in (1, 2)
        for label, kepts in counts.items()
        for rate, kept in zip(COURSE.rates, kepts, strict=True)
    ]
    bars = [line for line in report(cells, COURSE, [1, 2]).splitlines() if line.startswith("- ") and "vllm" in line]
    assert bars == [
        f"- goodput 0P+1D: attainment behind vllm bfloat16 at its worst rate: {behind}",
        f"- vllm bfloat16: goodput as a share of that of goodput 0P+1D: {share}",
    ]

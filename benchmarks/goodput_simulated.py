"""The recorded run of one contender in the simulator: what its router's own account of the cluster foretells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.goodput_run import Cell
from simulator.traces import FileTrace
from simulator.world import simulate


def add_simulated(record: Path, cells: Sequence[Cell]) -> None:
    """Tells each cell which of its requests kept their promises in a simulation of the whole recording.

    Requests of the warm-up come first in the recording and belong to no cell.
    """
    trace = FileTrace(record)
    cluster = trace.cluster()
    assert cluster is not None, "a recording knows its cluster"
    kept = [row.has_met_slo for row in simulate(trace, cluster.config()).requests]
    end = len(kept)
    for cell in reversed(cells):
        cell.simulated = kept[end - len(cell.rows) : end]
        end -= len(cell.rows)

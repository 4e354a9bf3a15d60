"""The recorded run of one contender in the simulator: what its router's own account of the cluster foretells."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.goodput.run import Cell
from pdserve.core.cost.latency import CostModel
from pdserve.core.protocol import BatchTimed
from router.recording import replay
from router.state.events import WorkerConnected
from simulator.cluster.world import simulate
from simulator.traces.files import FileTrace


def add_simulated(record: Path, cells: Sequence[Cell]) -> None:
    """Adds to each cell the attainment of its requests in a simulation of the whole recording.

    Requests of the warm-up come first in the recording and belong to no cell.
    """
    trace = FileTrace(record)
    cluster = trace.cluster()
    assert cluster is not None, "a recording knows its cluster"
    kept = [row.has_met_slo for row in simulate(trace, cluster.config()).requests]
    end, batch_errors = len(kept), _batch_errors(record)
    for cell in reversed(cells):
        cell.batch_errors = batch_errors
        cell.simulated = kept[end - len(cell.rows) : end]
        end -= len(cell.rows)


def _batch_errors(record: Path) -> dict[str, float]:
    """Median |predicted - actual| / actual of single batches, a limit for any prediction on this machine."""
    models: dict[str, CostModel] = {}
    errors: defaultdict[str, list[float]] = defaultdict(list)
    with record.open(encoding="utf-8") as lines:
        next(lines)  # the settings
        for step in replay.read(lines):
            match step.event:
                case WorkerConnected() as hello:
                    models[hello.worker_id] = CostModel(hello.cost)
                case BatchTimed() as batch if batch.step_s > 0.0 and batch.worker_id in models:
                    model = models[batch.worker_id]
                    work = (batch.rows, batch.context_tokens, batch.prefill_tokens, batch.prefill_token_context)
                    errors[batch.worker_id].append(abs(model.step_s(*work) / batch.step_s - 1.0))
                    model.observe(
                        rows=batch.rows,
                        prefill_tokens=batch.prefill_tokens,
                        prefill_token_context=batch.prefill_token_context,
                        context_tokens=batch.context_tokens,
                        step_s=batch.step_s,
                    )
    return {worker_id: statistics.median(found) for worker_id, found in sorted(errors.items())}

"""`colocated`: the decode worker with the fewest sequences also computes the prompt, in chunks within its decode steps.
Pure.

This is aggregated serving, on the same engine as all other policies. It is best on a cluster without prefill workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from router.policy.interface import Decision, PolicyEntry, PolicyInput
from router.policy.two_stage import TwoStage, sequences
from router.state.view import WorkerView

_COLOCATED: Final = TwoStage(prefill=sequences, decode=sequences, together=sequences, reason="fewest sequences")


def colocated(
    request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
) -> Decision:
    return _COLOCATED(request, (), decodes, now_s)


POLICY: Final = PolicyEntry(make=lambda settings, links: colocated, uses_prefill=False)

"""`lmetric`: Dynamo's alternative cost without a weight. Pure.

The cost is `adj * (decode_blocks + 1)`, with the terms of dynamo.py.

A prefill worker has no decode blocks, and in the decode stage `adj` is the same everywhere, so with separate workers
it chooses like `dynamo`. Without prefill workers it differs.
"""

from __future__ import annotations

from typing import Final

from router.policy.interface import PolicyEntry, PolicyInput
from router.policy.two_stage import TwoStage, decode_blocks, prompt_cost
from router.state.view import WorkerView


def product(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    return prompt_cost(request, view, now_s) * (decode_blocks(request, view, now_s) + 1)


POLICY: Final = PolicyEntry(
    make=lambda settings, links: TwoStage(
        prefill=prompt_cost, decode=decode_blocks, together=product, reason="least blocks times blocks"
    )
)

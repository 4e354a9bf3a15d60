"""`lmetric`: Dynamo's alternative cost without a weight, adj * (decode_blocks + 1) (scheduling.md 1.2). Pure.

`adj` and `decode_blocks` are those of dynamo.py. A prefill worker has no decode blocks, and in the decode stage `adj`
is the same everywhere, so with separate workers it chooses like `dynamo`. Without prefill workers it differs.
"""

from __future__ import annotations

from router.policy.dynamo import decode_blocks, prompt_cost
from router.policy.interface import PolicyInput
from router.policy.two_stage import TwoStage
from router.view import WorkerView


def product(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    return prompt_cost(request, view, now_s) * (decode_blocks(request, view, now_s) + 1)


def make_lmetric() -> TwoStage:
    return TwoStage(prefill=prompt_cost, decode=decode_blocks, together=product, reason="least blocks times blocks")

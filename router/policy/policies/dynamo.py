"""`dynamo`: the cost of NVIDIA Dynamo's KV router, in blocks. Pure.

    adj  = max(active_prefill_blocks + prompt_blocks - overlap_blocks, 0)
    cost = prefill_load_scale * adj + decode_blocks            the lowest wins

With its defaults: prefill_load_scale 1, full credit for blocks in device memory, no decay, temperature 0 (no
softmax). Prefill workers hold no decode blocks, so the prefill stage compares only `adj`. The decode stage ignores
overlap, so `adj` is the prompt on every worker and decode_blocks decides. Without prefill workers, both count.

Deviations: blocks that a worker would read from its host memory or its disk have full credit, and those of a shared
store none. Prefill load falls when a prefill ends, as in Dynamo without its optional decay.
"""

from __future__ import annotations

from typing import Final

from router.policy.interface import PolicyEntry, PolicyInput
from router.policy.two_stage import TwoStage, decode_blocks, prompt_cost
from router.state.view import WorkerView

PREFILL_LOAD_SCALE: Final = 1.0


def cost(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    return PREFILL_LOAD_SCALE * prompt_cost(request, view, now_s) + decode_blocks(request, view, now_s)


POLICY: Final = PolicyEntry(
    make=lambda settings, links: TwoStage(
        prefill=prompt_cost, decode=decode_blocks, together=cost, reason="least blocks"
    )
)

"""`dynamo`: the cost of NVIDIA Dynamo's KV router, in blocks (scheduling.md 1.2). Pure.

    adj  = max(active_prefill_blocks + prompt_blocks - overlap_blocks, 0)
    cost = prefill_load_scale * adj + decode_blocks            the lowest wins

With its defaults: prefill_load_scale 1, full credit for blocks in device memory, no decay, temperature 0 (no softmax).
Prefill workers hold no decode blocks, so the prefill stage compares only `adj`. The decode stage ignores overlap, so
`adj` is the prompt on every worker and decode_blocks decides. Without prefill workers, both count.

Deviations: there are no host, disk or shared tiers here, so their credits are zero; prefill load falls when a prefill
ends, as in Dynamo without its optional decay.
"""

from __future__ import annotations

from typing import Final

from router.policy.interface import PolicyInput
from router.policy.two_stage import TwoStage
from router.view import WorkerView

PREFILL_LOAD_SCALE: Final = 1.0


def prompt_cost(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    """`adj`: blocks that the worker must compute until this request's first token."""
    active = view.prefill_tokens_ahead / view.hello.block_size
    overlap = request.cached_on(view) // view.hello.block_size
    return max(active + view.blocks_for(request.num_tokens) - overlap, 0.0)


def decode_blocks(request: PolicyInput, view: WorkerView, now_s: float) -> int:
    """Blocks of the sequences that decode there or are arriving."""
    return view.blocks_for(view.estimated_load()[2])


def cost(request: PolicyInput, view: WorkerView, now_s: float) -> float:
    return PREFILL_LOAD_SCALE * prompt_cost(request, view, now_s) + decode_blocks(request, view, now_s)


def make_dynamo() -> TwoStage:
    return TwoStage(prefill=prompt_cost, decode=decode_blocks, together=cost, reason="least blocks")

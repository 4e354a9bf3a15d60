"""ClusterService.Explain of real routers: each explains its own decisions."""

from __future__ import annotations

import pytest

from pdserve.core.errors import NotFound
from tests.unit.router_io.conftest import Connect
from tests.unit.router_io.processes import Program

PROMPT = "explained: words that no other test has at the head of its prompt, and enough of them"


async def test_only_the_deciding_router_explains(connect: Connect, decode: Program, prefill: Program) -> None:
    here = await connect(decode, prefill, router_id="here")
    there = await connect(decode, prefill, router_id="there")
    done = await here.client.generate(PROMPT, max_tokens=8, temperature=0, priority=3)
    one = await here.client.explain(done.request_id)
    assert (one.router_id, one.outcome, one.stage, one.attempt, one.priority) == ("here", "served", "", 1, 3)
    assert one.prompt_tokens == done.usage.prompt_tokens
    assert one.actual_ttft_s == done.timings.ttft_s
    assert one.actual_tpot_s == done.timings.tpot_s
    assert one.chosen is not None
    assert one.predicted_ttft_s == one.waited_s + one.chosen.predicted_ttft_s
    assert one.chosen.cost == min(each.cost for each in one.candidates if each.cost is not None)
    with pytest.raises(NotFound):
        await there.client.explain(done.request_id)


async def test_a_running_request_is_explained_too(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode)
    async with front.client.stream(PROMPT, max_tokens=50, request_id="slow", ignore_eos=True) as stream:
        await anext(stream)
        one = await front.client.explain("slow")
        assert one.decision == "local"
        assert (one.stage, one.outcome) == ("local", "")
        assert one.actual_ttft_s is not None
    # Leaving the stream cancels the request.


async def test_a_forgotten_request_is_a_typed_error(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    with pytest.raises(NotFound, match="recent request"):
        await front.client.explain("x" * 5000)

"""ClusterService.GetDemand of real routers: what has arrived since their start, and the workers' capacity."""

from __future__ import annotations

import pytest

from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.core.types import Role
from pdserve.launch.changes.autoscale import ask_routers
from pdserve.launch.ports import free_ports
from pdserve.launch.spec import ClusterSpec
from pdserve.telemetry.metrics import Metrics
from pdserve.v1 import cluster_pb2
from router.scaling.observing import RouterDemand
from router.service.demand import Advisor, read_demand
from tests.unit.router_io.conftest import Connect, Front
from tests.unit.router_io.processes import Program

PROMPT = "demand: words that no other test has at the head of its prompt, and enough of them"


async def demand(front: Front) -> RouterDemand:
    return read_demand(await front.cluster.GetDemand(cluster_pb2.GetDemandRequest()))


async def test_arrivals_are_summed_since_the_start(connect: Connect, decode: Program, prefill: Program) -> None:
    front = await connect(decode, prefill)
    assert (await demand(front)).sums.requests == 0
    done = await front.client.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True, slo={"ttft_s": 3.0})
    first = await demand(front)
    sums = first.sums
    assert (sums.requests, sums.answers, sums.answer_tokens, sums.tokens) == (1, 1, 8.0, 8.0)
    assert sums.met + sums.missed == 1
    assert sums.prompt_tokens == done.usage.prompt_tokens
    assert (sums.ttft_targets_s, first.answers, first.queued, first.running) == (3.0, 0, 0, 0)
    await front.client.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
    again = await demand(front)
    assert again.sums.requests == 2, "a question takes nothing away"
    assert again.incarnation == first.incarnation


async def test_the_workers_capacity_is_told(connect: Connect, decode: Program, prefill: Program) -> None:
    front = await connect(decode, prefill)
    workers = {one.worker_id: one for one in (await demand(front)).workers}
    assert {name: one.role for name, one in workers.items()} == {"d0": Role.DECODE, "p0": Role.PREFILL}
    for one in workers.values():
        assert one.is_ready
        assert one.kv_tokens > one.max_batch > 0
        assert one.max_batch_tokens > 0
        assert one.cost.decode_base_s >= 0.0
    await front.client.drain("d0")
    assert [one.worker_id for one in (await demand(front)).workers if not one.is_ready] == ["d0"]
    await front.client.undrain("d0")


async def test_a_running_answer_is_told(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode)
    async with front.client.stream(PROMPT, max_tokens=100, ignore_eos=True) as stream:
        await anext(stream)
        now = await demand(front)
        assert (now.answers, now.running) == (1, 1)
        assert now.answer_tokens >= 1
    # Leaving the stream cancels the request.


async def test_a_router_without_a_launcher_explains_no_number_of_workers(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    with pytest.raises(Unavailable, match="has no launcher"):
        await front.client.scaling()
    with pytest.raises(InvalidRequest, match="limit"):
        await front.client.scaling(-1)


# --- advice ---------------------------------------------------------------------------------------------------


async def test_a_router_tells_how_many_workers_there_should_be(connect: Connect, decode: Program) -> None:
    """Without a launcher: the arrivals of the routers at the addresses count, which is itself here."""
    metrics = Metrics("router")
    [port] = free_ports(1)
    front = await connect(decode, metrics=metrics, port=port, scaling="2:4", scaling_routers=f"localhost:{port}")
    advisor = Advisor(front.server._config, front.server._ask_demand, front.server._tell_wanted)
    for now_s in (0.0, 5.0):
        await advisor.step(now_s)
    told = metrics.text()
    assert 'pdserve_desired_workers{role="decode"} 2.0' in told, "one is there, and two is the least"
    assert 'pdserve_desired_workers{role="prefill"} 0.0' in told


async def test_advice_waits_for_routers_that_answer(connect: Connect, decode: Program) -> None:
    told: list[int] = []
    [port] = free_ports(1)
    front = await connect(decode, scaling="1:4", scaling_routers=f"127.0.0.1:{port}")
    advisor = Advisor(front.server._config, front.server._ask_demand, lambda role, number: told.append(number))
    with pytest.raises(Unavailable):
        await advisor.step(0.0)
    assert told == []
    assert front.server.is_healthy, "its own advisor runs too"


async def test_a_launcher_counts_the_arrivals_of_routers_that_others_started(connect: Connect, decode: Program) -> None:
    own_port, other_port = free_ports(2)
    own, other = await connect(decode, port=own_port), await connect(decode, port=other_port)
    for front in (own, other, other):
        await front.client.generate(PROMPT, max_tokens=2, temperature=0, ignore_eos=True)
    for port, requests in ((None, [1]), (own_port, [1]), (other_port, [1, 2])):
        router = {} if port is None else {"scaling_routers": f"127.0.0.1:{port}"}
        spec = ClusterSpec(model="toy", port=own_port, settings={"router": router})
        answers = await ask_routers(spec, f"127.0.0.1:{own_port}")
        assert [one.sums.requests for one in answers.values()] == requests


@pytest.mark.parametrize("wrong", [{"scaling": "4"}, {"scaling": "1:2", "scaling_routers": "nowhere"}])
def test_wrong_settings_of_advice_are_named(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="scaling"):
        RouterConfig(model="toy", **wrong)  # type: ignore[arg-type]

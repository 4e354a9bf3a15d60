"""`up --autoscale` with a launcher and routers that are fakes: what is seen, decided, made, told and recorded."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.cli.explain import render_scaling
from pdserve.client.results import SCALING, Scaling
from pdserve.config import bounds_of
from pdserve.core.cost.latency import CostPrior
from pdserve.core.errors import ChangeFailed, ConfigError, InvalidRequest, Unauthenticated, Unavailable
from pdserve.core.types import Role, Slo
from pdserve.launch.changes.autoscale import EVERY_S, Autoscaler, first_settings, record_of
from pdserve.launch.changes.server import ChangeServer
from pdserve.launch.spec import ClusterSpec
from pdserve.v1 import cluster_pb2
from router.recording.replay_command import run as replay
from router.scaling.controller import FIRST_PAUSE_S, Controller
from router.scaling.demand import true_interval
from router.scaling.observing import RouterDemand, WorkerCapacity, together
from router.service.cluster import LauncherLink

#: A worker decodes about 2.5 of the requests below per second.
COST = CostPrior(
    prefill_base_s=0.0,
    prefill_per_token_s=1e-4,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.01,
    decode_per_row_s=2e-3,
    decode_per_context_token_s=0.0,
)
SLO = Slo(ttft_s=2.0, tpot_s=0.05)
SPEC: dict[str, Any] = {"model": "toy", "prefill": 0, "decode": 2, "autoscale": "2:8"}
TOKEN = "the-operators-token-of-these-tests"


class FakeCluster:
    """Workers that start and end at once, or when `gate` is set."""

    def __init__(self, **spec: Any) -> None:
        self.spec = ClusterSpec(**{**SPEC, **spec})
        self.lines: list[tuple[str, str]] = []
        self.made: list[str] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.drained: set[str] = set()
        self.away: set[str] = set()
        self.autoscaler: Autoscaler | None = None

    def say(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    async def scale(self, prefill: int | None, decode: int | None, say: Callable[[str, str], None]) -> None:
        self.made.append(f"scale {prefill}:{decode}")
        say("d9", "starting")
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        changes = {name: count for name, count in (("prefill", prefill), ("decode", decode)) if count is not None}
        self.spec = replace(self.spec, **changes)

    async def change_roles(self, role: Role, count: int, say: Callable[[str, str], None]) -> None:
        self.made.append(f"{count} to {role.value}")
        sign = 1 if role is Role.PREFILL else -1
        self.spec = replace(self.spec, prefill=self.spec.prefill + sign * count, decode=self.spec.decode - sign * count)

    def workers(self) -> tuple[WorkerCapacity, ...]:
        roles = [Role.PREFILL] * self.spec.prefill + [Role.DECODE] * self.spec.decode
        return tuple(
            WorkerCapacity(
                worker_id=name,
                role=role,
                is_connected=name not in self.away,
                is_draining=False,
                is_drained=name in self.drained,
                rows=1,
                kv_tokens=400_000,
                max_batch=256,
                max_batch_tokens=2048,
                cost=COST,
            )
            for name, role in zip(self.spec.worker_ids, roles, strict=True)
        )


class Scene:
    """A cluster with routers, whose time passes at `pass_time` alone."""

    def __init__(self, tmp_path: Path, *, routers: int = 1, record: str = "", **spec: Any) -> None:
        settings = {"router": {"record": record}} if record else {}
        self.cluster = FakeCluster(settings=settings, **spec)
        self.changes = ChangeServer(self.cluster, tmp_path / "s", TOKEN)  # type: ignore[arg-type]
        self.now_s = 100.0
        self.sizes: list[Mapping[Role, int]] = []
        self.sums = {f"router-{number}": true_interval(0.0, 0.0, []) for number in range(routers)}
        self.incarnations = dict.fromkeys(self.sums, "first")
        self.silent: list[str] = []
        first = first_settings(self.cluster.spec, 20.0)
        self.scaler = self.cluster.autoscaler = Autoscaler(
            self.cluster,
            self.changes,
            first,
            self.ask,
            record=record_of(self.cluster.spec, first),
            on_size=self.sizes.append,
            clock=lambda: self.now_s,
        )

    async def ask(self) -> dict[str, RouterDemand]:
        if self.silent:
            raise Unavailable(f"{', '.join(self.silent)} did not answer")
        return {name: self.answer(name) for name in self.sums}

    def answer(self, name: str) -> RouterDemand:
        return RouterDemand(
            incarnation=self.incarnations[name],
            sums=self.sums[name],
            queued=1,
            running=2,
            answers=2,
            answer_tokens=100,
            workers=self.cluster.workers(),
        )

    def arrive(self, name: str, count: int) -> None:
        more = replace(true_interval(0.0, 0.0, [(1000, 0, 100, SLO)] * count), met=count)
        self.sums[name] = together([self.sums[name], more], 0.0, self.now_s)

    async def pass_time(self, rate_rps: float, seconds: float) -> None:
        """The same rate at each router."""
        for _ in range(round(seconds / EVERY_S)):
            self.now_s += EVERY_S
            for name in self.sums:
                self.arrive(name, round(rate_rps * EVERY_S))
            await self.scaler.step()
            for _ in range(3):  # the task of a change begins, and ends unless it waits
                await asyncio.sleep(0)

    @property
    def told(self) -> Scaling:
        return SCALING.decode(self.scaler.explain(0))

    @property
    def said(self) -> list[str]:
        return [text for name, text in self.cluster.lines if name == "autoscale"]


def step(name: str) -> Callable[[str, str], None]:
    return lambda worker_id, text: None


async def test_workers_are_added_with_the_load_and_end_after_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.pass_time(2.0, 60.0)
    assert scene.cluster.made == []
    await scene.pass_time(12.0, 120.0)
    most = scene.cluster.spec.decode
    assert most > 2
    assert scene.sizes[-1] == {Role.PREFILL: 0, Role.DECODE: most}
    await scene.pass_time(0.2, 900.0)
    assert scene.cluster.spec.decode == 2, "the lower bound"
    first = next(one for one in scene.told.decisions if one.change.startswith("start"))
    assert first.outcome is not None
    assert any(text.startswith(f"{first.change}, from 0:2 to 0:") for text in scene.said)
    assert any(text.startswith(f"{first.change}: took ") for text in scene.said)
    assert ("d9", "starting") in scene.cluster.lines, "each step is told"


async def test_arrivals_of_all_routers_count_together(tmp_path: Path) -> None:
    scene = Scene(tmp_path, routers=3)
    await scene.pass_time(2.0, 40.0)
    assert scene.told.decisions[-1].seen_rate_rps == pytest.approx(6.0)
    assert scene.told.decisions[-1].queued == 3


async def test_a_router_that_starts_again_counts_from_zero(tmp_path: Path) -> None:
    scene = Scene(tmp_path, routers=2)
    await scene.pass_time(2.0, 20.0)
    scene.sums["router-0"] = true_interval(0.0, 0.0, [])
    scene.incarnations["router-0"] = "second"
    await scene.pass_time(2.0, 5.0)
    assert scene.told.decisions[-1].seen_rate_rps == pytest.approx(4.0)


async def test_nothing_is_decided_without_an_answer_of_each_router(tmp_path: Path) -> None:
    """Their arrivals count when they answer again, over the whole time."""
    scene = Scene(tmp_path)
    await scene.pass_time(2.0, 40.0)
    scene.silent = ["router-0"]
    await scene.pass_time(4.0, 20.0)
    assert scene.told.trouble == "router-0 did not answer"
    assert scene.said[-1] == "cannot decide: router-0 did not answer"
    assert scene.said.count(scene.said[-1]) == 1
    scene.silent = []
    await scene.pass_time(4.0, 5.0)
    assert scene.told.trouble == ""
    assert scene.said[-1] == "decides again"
    assert scene.told.decisions[-1].seen_rate_rps == pytest.approx(4.0)


async def test_a_mistake_in_a_decision_does_not_end_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)

    def wrong(self: Controller, observed: Any, now_s: float) -> None:
        raise ZeroDivisionError("a mistake")

    with monkeypatch.context() as patched:
        patched.setattr(Controller, "decide", wrong)
        await scene.pass_time(2.0, 20.0)
        assert scene.told.trouble == "ZeroDivisionError: a mistake"
    await scene.pass_time(2.0, 20.0)
    assert scene.told.trouble == "", "a new controller decides again"


async def begun(scene: Scene) -> asyncio.Event:
    """A change of the controller is under way until the result is set."""
    gate = scene.cluster.gate = asyncio.Event()
    await scene.pass_time(2.0, 40.0)
    await scene.pass_time(12.0, 60.0)
    assert scene.changes.running.startswith("autoscale: start")
    return gate


async def test_one_change_is_made_at_a_time_of_whomever(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    gate = await begun(scene)
    made = list(scene.cluster.made)
    with pytest.raises(Unavailable, match=r"another change \(autoscale: start \d decode\)"):
        scene.changes.begin("scale", lambda: scene.cluster.scale(None, 3, step("scale")))
    await scene.pass_time(12.0, 30.0)
    assert scene.cluster.made == made, "it decides nothing meanwhile"
    assert scene.told.decisions[-1].reason.startswith("under way: start")
    gate.set()
    await scene.pass_time(12.0, 5.0)
    assert scene.changes.running == "", "an operator may change the cluster again"


async def test_nothing_is_decided_during_a_change_of_an_operator(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.pass_time(2.0, 40.0)
    gate = asyncio.Event()

    async def roll() -> None:
        await gate.wait()

    scene.changes.begin("roll", roll)
    await scene.pass_time(12.0, 60.0)
    assert scene.cluster.made == []
    assert scene.told.decisions[-1].reason == "nothing changes during a change by an operator (roll)"
    gate.set()
    await scene.pass_time(12.0, 20.0)
    assert scene.cluster.made


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("away", "recovery of d1"), ("drained", "drain of d1 by an operator")],
)
async def test_nothing_changes_while_a_worker_is_not_ready(tmp_path: Path, kind: str, reason: str) -> None:
    scene = Scene(tmp_path)
    await scene.pass_time(2.0, 40.0)
    getattr(scene.cluster, kind).add("d1")
    await scene.pass_time(12.0, 60.0)
    assert scene.cluster.made == []
    assert scene.told.decisions[-1].reason == f"nothing changes during a {reason}"
    getattr(scene.cluster, kind).clear()
    await scene.pass_time(12.0, 20.0)
    assert scene.cluster.made


async def test_a_change_that_fails_is_tried_again_ever_later(tmp_path: Path) -> None:
    scene = Scene(tmp_path, record=str(tmp_path / "run.jsonl"))
    scene.cluster.error = ChangeFailed("Ray did not place d2")
    await scene.pass_time(2.0, 40.0)
    await scene.pass_time(12.0, FIRST_PAUSE_S)
    assert len(scene.cluster.made) == 1
    assert [one.failure for one in scene.told.decisions if one.change] == ["Ray did not place d2"]
    assert re.fullmatch(
        r"start \d decode would cost less than keeping the size, but such a change failed; again in \d+ s",
        scene.told.decisions[-1].reason,
    )
    await scene.pass_time(12.0, 300.0)
    assert 3 <= len(scene.cluster.made) <= 4, "after 30, 60 and 120 s"
    scene.cluster.error = None
    await scene.pass_time(12.0, 300.0)
    assert scene.cluster.spec.decode > 2
    assert not any(one.outcome for one in scene.told.decisions if one.failure), "nothing came of it"
    scene.scaler.close()
    assert replay(SimpleNamespace(file=str(tmp_path / "run-scaling.jsonl"), json=False)) == 0  # type: ignore[arg-type]


async def test_only_roles_change_where_no_bounds_are_given(tmp_path: Path) -> None:
    scene = Scene(tmp_path, autoscale="", roles="auto", prefill=6, decode=2)
    await scene.pass_time(2.0, 40.0)
    await scene.pass_time(12.0, 200.0)
    assert scene.cluster.made
    assert all(one.endswith("to decode") for one in scene.cluster.made)
    assert scene.cluster.spec.prefill + scene.cluster.spec.decode == 8
    await scene.cluster.scale(0, 12, step("an operator"))
    await scene.pass_time(12.0, 100.0)
    assert scene.cluster.spec.prefill + scene.cluster.spec.decode == 12, "the number is the operator's"


async def test_the_recorded_decisions_are_decided_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene(tmp_path, record=str(tmp_path / "run.jsonl"))
    await scene.pass_time(2.0, 60.0)
    await scene.pass_time(12.0, 120.0)
    scene.scaler.close()
    file = tmp_path / "run-scaling.jsonl"
    assert file.stat().st_mode & 0o077 == 0
    assert replay(SimpleNamespace(file=str(file), json=False)) == 0  # type: ignore[arg-type]
    assert capsys.readouterr().out == "the controller decided the same in all 35 decisions\n"
    first, *rows = file.read_text().splitlines(keepends=True)
    other = first.replace('"max_workers":8', '"max_workers":3')
    assert other != first
    changed = tmp_path / "other.jsonl"
    changed.write_text("".join([other, *(row.replace('"max_workers":8', '"max_workers":3') for row in rows)]))
    assert replay(SimpleNamespace(file=str(changed), json=True)) == 1  # type: ignore[arg-type]
    assert '"decisions":35' in capsys.readouterr().out.replace(" ", "")


async def test_a_damaged_recording_of_decisions_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text('{"scaling":{"max_workers":8}}\n{"now_s":1.0}\n')
    with pytest.raises(ConfigError, match=r"2"):
        replay(SimpleNamespace(file=str(file), json=False))  # type: ignore[arg-type]


async def test_the_explanation_shows_what_was_compared(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.told.decisions == ()
    await scene.pass_time(2.0, 40.0)
    await scene.pass_time(12.0, 60.0)
    text = render_scaling(scene.told)
    assert text.startswith("2 to 8 workers, roles are fixed, decided every 5 s\n")
    for words in ("start ", "keep", "why       saves ", "came      took ", "IN TARGETS"):
        assert words in text
    for wrong in (201, -1):
        with pytest.raises(InvalidRequest, match="limit"):
            scene.scaler.explain(wrong)
    assert len(SCALING.decode(scene.scaler.explain(1)).decisions) == 1


async def test_a_router_passes_the_question_to_its_launcher(tmp_path: Path) -> None:
    scene, request = Scene(tmp_path), cluster_pb2.GetScalingRequest(limit=3)
    link = LauncherLink(str(tmp_path / "s"), TOKEN)
    await scene.changes.start()
    try:
        with pytest.raises(Unavailable, match="still starting"):
            await link.scaling(request)
        scene.changes.is_ready = True
        await scene.pass_time(2.0, 40.0)
        assert SCALING.decode(await link.scaling(request)) == SCALING.decode(scene.scaler.explain(3))
        with pytest.raises(Unauthenticated):
            await LauncherLink(str(tmp_path / "s"), "another-token").scaling(request)
        with pytest.raises(InvalidRequest, match="limit"):
            await link.scaling(cluster_pb2.GetScalingRequest(limit=2**31))
        scene.cluster.autoscaler = None
        with pytest.raises(Unavailable, match="`up --autoscale` or `--roles auto`"):
            await link.scaling(request)
    finally:
        await scene.changes.close()


@pytest.mark.parametrize("wrong", ["", "2", "2:", "0:4", "8:2", "2:8:9", "1:513", "-1:2", "a:b", "٢:٨", "1:99999"])
def test_wrong_bounds_are_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match="autoscale"):
        bounds_of("autoscale", wrong)

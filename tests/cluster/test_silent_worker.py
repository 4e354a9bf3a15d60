"""A silent worker delays other requests by at most one step; its own requests continue elsewhere with exact tokens.

The delays are measured only by the slow tests, because they depend on other work of this machine. A step takes a fifth
of a second there, so that other work has little effect, and the delay that this machine causes is measured at the same
time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pytest

from pdserve import AsyncClient
from pdserve.engine.toy import answer
from tests.cluster.cluster import Cluster
from tests.cluster.faults import decode_worker_of
from tests.cluster.gaps import Lateness, Timed, longest_gap, until
from tests.cluster.netns import NetCluster
from tests.cluster.suite import toy_prompt
from tests.support.netns import Network, why_not

pytestmark = pytest.mark.timeout(400)

STEP_S = 0.2
SILENCE_S = (
    1.5  # a worker that is silent for this long gets no new requests; after twice this time its requests are retried
)
WATCHED_S = 1.2
NOISE_S = 0.05  # scheduling delay of a quiet machine
PROCESSES = 3  # that handle a token; each may be late
TOKENS = 36  # more steps than the test observes
WORKERS = ("--set", f"worker.toy_step_s={STEP_S}", "--set", "worker.max_batch_tokens=256")
ROUTER = (
    *("--set", f"router.worker_silence_s={SILENCE_S}"),
    # At two and a half steps, at most one retried prompt is prefilled between two steps of the others.
    *("--set", "router.slo_ttft_s=60", "--set", f"router.slo_tpot_s={2.5 * STEP_S}"),
    *("--set", "router.policy=least-loaded"),  # so that both decode workers have streams
)


def flags(words: Sequence[str]) -> list[str]:
    """The same settings as flags of a worker or the router."""
    settings = (word.partition(".")[2].partition("=") for word in words[1::2])
    return [f"--{name.replace('_', '-')}={value}" for name, _, value in settings]


class Stopping(Protocol):
    """A cluster in which a worker can be silenced."""

    target: str

    def silence(self, worker_id: str) -> None: ...

    def wake(self, worker_id: str) -> None: ...

    def wait_until_idle(self, within_s: float) -> None: ...


class Stopped(Cluster):
    """Silences a worker by SIGSTOP."""

    def silence(self, worker_id: str) -> None:
        self._pid = self.pid_of(worker_id)
        os.kill(self._pid, signal.SIGSTOP)

    def wake(self, worker_id: str) -> None:
        os.kill(self._pid, signal.SIGCONT)


class Cut(NetCluster):
    """Silences a worker by cutting its cable."""

    def silence(self, worker_id: str) -> None:
        self.network.cut(worker_id)

    def wake(self, worker_id: str) -> None:
        self.network.heal(worker_id)


@dataclass(frozen=True)
class Watched:
    calm_s: float  # when the observation before the silence begins
    stopped_s: float
    ended_s: float
    late_s: float  # the delay of a token that this machine may have caused

    def check(self, others: list[Timed], what: str) -> None:
        """The others' longest gap grows by at most one step."""
        before_s = longest_gap(others, self.calm_s, self.stopped_s)
        during_s = longest_gap(others, self.stopped_s, self.ended_s)
        print(f"{what}: longest gap of the others {before_s:.3f} s before, {during_s:.3f} s meanwhile")
        assert during_s <= before_s + STEP_S + NOISE_S + self.late_s


async def watch(cluster: Stopping, streams: list[Timed], who: str, latecomers: list[Timed]) -> Watched:
    """Silences worker `who` while streams run; without a name, the decode worker of the first stream.

    `latecomers` start just before; the worker is silenced when it has one of them."""
    lateness = Lateness()
    async with AsyncClient(cluster.target) as client:
        ticking = asyncio.create_task(lateness.run())
        running = [asyncio.create_task(one.follow(client)) for one in streams]
        await until(streams, 4)
        calm_s = time.monotonic()
        await asyncio.sleep(WATCHED_S)
        running += [asyncio.create_task(one.follow(client)) for one in latecomers]
        worker = who or await decode_worker_of(client, streams[0].request_id)
        while latecomers and not await _is_busy(client, worker):
            await asyncio.sleep(0.01)
        stopped_s = time.monotonic()
        await asyncio.to_thread(cluster.silence, worker)
        try:
            await asyncio.sleep(2 * SILENCE_S + WATCHED_S)
        finally:
            await asyncio.to_thread(cluster.wake, worker)
        ended_s = time.monotonic()
        await asyncio.wait_for(asyncio.gather(*running), 60)
        ticking.cancel()
        return Watched(calm_s, stopped_s, ended_s, PROCESSES * lateness.longest_s)


async def _is_busy(client: AsyncClient, worker_id: str) -> bool:
    topology = await client.topology()
    return any(w.worker_id == worker_id and w.running > 0 for w in topology.workers)


def check_exact(streams: list[Timed]) -> None:
    assert [one.tokens for one in streams] == [answer(one.prompt, one.max_tokens, seed=one.seed) for one in streams]


def a_silent_decode_worker_delays_only_its_own(cluster: Stopping, how: str) -> None:
    streams = [Timed(toy_prompt(60 + 9 * i, salt=i), TOKENS, seed=i if i % 2 else None) for i in range(8)]
    watched = asyncio.run(watch(cluster, streams, "", []))
    check_exact(streams)
    victims = [one for one in streams if one.attempts > 1]
    others = [one for one in streams if one.attempts == 1]
    assert victims, "nobody was on the silent worker"
    assert others, "everybody was on the silent worker"
    watched.check(others, f"decode worker {how}")
    longest_s = longest_gap(victims, watched.stopped_s, watched.ended_s)
    assert longest_s < 2 * SILENCE_S + 1.5 + watched.late_s, "the victims wait too long"
    cluster.wait_until_idle(within_s=60)


def a_silent_prefill_worker_delays_only_its_own(cluster: Stopping, how: str) -> None:
    """The affected requests are prompts. Streams that decode, and prompts on the other worker, are not affected."""
    streams = [Timed(toy_prompt(60 + 9 * i, salt=20 + i), TOKENS) for i in range(6)]
    prompts = [Timed(toy_prompt(1500 + 100 * i, salt=30 + i), 8, seed=i) for i in range(6)]
    watched = asyncio.run(watch(cluster, streams, "p0", prompts))
    check_exact(streams + prompts)
    assert max(one.attempts for one in prompts) > 1, "nobody was on the silent worker"
    assert min(one.attempts for one in prompts) == 1, "everybody was on the silent worker"
    assert {one.attempts for one in streams} == {1}
    watched.check(streams, f"prefill worker {how}")
    cluster.wait_until_idle(within_s=60)


def test_streams_of_a_stopped_worker_end_elsewhere_while_it_is_silent() -> None:
    """The others are not placed again."""
    streams = [Timed(toy_prompt(60 + 9 * i, salt=i), 100, seed=i if i % 2 else None) for i in range(8)]
    settings = ("--set", "worker.toy_step_s=0.1", "--set", "router.policy=least-loaded")

    async def run(cluster: Stopped) -> None:
        async with AsyncClient(cluster.target) as client, asyncio.timeout(120):
            running = [asyncio.create_task(one.follow(client)) for one in streams]
            await until(streams, 4)
            placed = [await decode_worker_of(client, one.request_id) for one in streams]
            await asyncio.to_thread(cluster.silence, placed[0])
            try:
                await asyncio.gather(*running)
            finally:
                await asyncio.to_thread(cluster.wake, placed[0])
        assert [one.attempts > 1 for one in streams] == [worker == placed[0] for worker in placed]
        assert len(set(placed)) == 2

    with Stopped("--model", "toy", "--prefill", "1", "--decode", "2", *settings) as cluster:
        asyncio.run(run(cluster))
        check_exact(streams)
        cluster.wait_until_idle(within_s=60)


@pytest.fixture(scope="module")
def stopping() -> Iterator[Stopped]:
    with Stopped("--model", "toy", "--prefill", "2", "--decode", "2", *WORKERS, *ROUTER) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_decode_worker_that_stops_delays_only_its_own(stopping: Stopped) -> None:
    a_silent_decode_worker_delays_only_its_own(stopping, "stopped")


@pytest.mark.slow
def test_a_prefill_worker_that_stops_delays_only_its_own(stopping: Stopped) -> None:
    a_silent_prefill_worker_delays_only_its_own(stopping, "stopped")


@pytest.fixture(scope="module")
def cutting() -> Iterator[Cut]:
    if missing := why_not():
        pytest.skip(missing)
    with Network(("p0", "p1", "d0", "d1")) as network, Cut(network, flags(WORKERS), flags(ROUTER)) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_decode_worker_whose_network_is_cut_delays_only_its_own(cutting: Cut) -> None:
    a_silent_decode_worker_delays_only_its_own(cutting, "cut off")


@pytest.mark.slow
def test_a_prefill_worker_whose_network_is_cut_delays_only_its_own(cutting: Cut) -> None:
    a_silent_prefill_worker_delays_only_its_own(cutting, "cut off")

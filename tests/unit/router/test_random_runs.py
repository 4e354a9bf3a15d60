"""RouterState under random faults: each client receives the right tokens, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.core.types import FinishReason, Role, Slo
from router.policy import POLICIES
from router.state.attempts import INNOCENT_TOKENS
from router.state.interface import EndCancelled, FailKind, FailRequest, FinishRequest, RouterSettings
from tests.unit.router.router_events import arrival
from tests.unit.router.world import WEIGHTS, World
from tests.unit.router.world_parts import Client

SEEDS = range(25)
DEFAULT = RouterSettings().policy


def runs(num_seeds: int, num_short: int) -> list[Any]:
    """Pairs of a policy and a seed. `make test` runs the first seeds, and more of them for the default policy."""
    return [
        pytest.param(
            policy, seed, marks=() if seed < (3 * num_short if policy == DEFAULT else num_short) else pytest.mark.slow
        )
        for policy in sorted(POLICIES)
        for seed in range(num_seeds)
    ]


ALLOWED_FAILURES = {
    FailKind.OVERLOADED,
    FailKind.NO_WORKERS,
    FailKind.DEADLINE,
    FailKind.TRANSFER,
    FailKind.KV_LOST,
    FailKind.UNAVAILABLE,
    FailKind.INTERNAL,
}


def run(seed: int, faults: float, policy: str, requests: int = 25, stirs: int = 3000) -> World:
    settings = RouterSettings(policy=policy, is_strict=True, max_queue=20, max_attempts=5, worker_silence_s=1.0)
    world = World(seed, settings, faults)
    rng = world.rng
    pulls_kv = seed % 2 == 0
    for index in range(rng.randint(1, 3)):
        world.start(f"p{index}", Role.PREFILL, pulls_kv=pulls_kv)
    for index in range(rng.randint(1, 3)):
        world.start(f"d{index}", Role.DECODE, pulls_kv=pulls_kv)
    arrivals = sorted(rng.randrange(stirs * 3 // 4) for _ in range(requests))
    for turn in range(stirs):
        while arrivals and arrivals[0] <= turn:
            arrivals.pop(0)
            name = f"r{len(world.clients)}"
            most = rng.choice([1, 2, 8, 30])
            world.arrive(
                arrival(
                    name,
                    prompt=rng.choice([1, 5, 40, 100, 300]),
                    max_tokens=most,
                    deadline_s=rng.choice([None, None, 0.5, 20.0]) if faults else None,
                    priority=rng.choice([0, 0, 1]),
                    slo=Slo(ttft_s=rng.choice([0.1, 2.0])),
                    cached_blocks={"p0": rng.randint(0, 3), "d0": rng.randint(0, 3), "gone": 2},
                ),
                length=rng.randint(1, most),
                stop_after=rng.choice([None, None, None, 1, 3]),
            )
        world.stir()
    world.settle()
    return world


@pytest.mark.parametrize(("policy", "seed"), runs(len(SEEDS), 4))
def test_clients_get_exact_tokens_and_one_end_under_faults(policy: str, seed: int) -> None:
    world = run(seed, faults=0.02, policy=policy)
    _check_ends(world)
    topology = world.state.snapshot()
    assert (topology.queued, topology.running, topology.releasing) == (0, 0, 0)
    for view in world.state._cluster.fleet.workers.values():
        assert (view.totals.pulls, view.totals.gives) == (0, 0), "a pull has no end"
    assert all(worker.booked_blocks == 0 for worker in topology.workers)


def test_random_runs_pull() -> None:
    """Otherwise they would check nothing about pulls."""
    assert sum(run(seed, faults=0.02, policy="goodput").num_pulls for seed in (0, 2)) > 0


@pytest.mark.parametrize(("policy", "seed"), runs(10, 2))
def test_without_faults_one_attempt_is_enough(policy: str, seed: int) -> None:
    world = run(seed, faults=0.0, policy=policy)
    rejected = 0
    for client in world.clients.values():
        word = client.last_word
        if isinstance(word, FailRequest):
            assert word.kind is FailKind.OVERLOADED
            rejected += 1
            continue
        assert isinstance(word, FinishRequest), word
        _check_finish(client, word)
        assert word.timings.attempts == 1
    counters = world.state.counters
    assert not {name for name in counters if name.startswith(("lost", "illegal", "odd", "never"))}, counters
    assert rejected < len(world.clients)


def run_with_drains(seed: int, policy: str, faults: float = 0.0, weights: Sequence[str] = ("",)) -> World:
    """Decode workers drain in turn, also two of the three at a time. With even seeds they send the KV of answers."""
    world = World(seed, RouterSettings(policy=policy, is_strict=True), faults)
    rng = world.rng
    for index in range(2):
        world.start(f"p{index}", Role.PREFILL, weights=weights[index % len(weights)])
    decodes = [
        world.start(f"d{index}", Role.DECODE, sends_kv=seed % 2 == 0, weights=weights[index % len(weights)])
        for index in range(3)
    ]
    for turn in range(4000):
        if turn % 100 == 0 and len(world.clients) < 30:
            name = f"r{len(world.clients)}"
            world.arrive(
                arrival(
                    name,
                    prompt=rng.choice([5, 40, 100]),
                    max_tokens=60,
                    slo=Slo(ttft_s=100.0),
                    weights=world.state.next_weights,
                ),
                length=rng.randint(20, 60),
            )
        if turn % 300 == 0:
            for worker in decodes:
                worker.is_draining = False
            for worker in rng.sample(decodes, rng.choice([1, 1, 2])):
                worker.is_draining = True
            world.beat()
        world.stir()
    world.settle()
    return world


@pytest.mark.parametrize(("policy", "seed"), runs(10, 1))
def test_an_answer_keeps_its_weights(policy: str, seed: int) -> None:
    """Workers drain, and crashed ones come back with other weights. The world checks each pair, and each attempt that
    continues an answer."""
    world = run_with_drains(seed, policy, faults=0.02, weights=WEIGHTS)
    _check_ends(world)
    assert {client.weights for client in world.clients.values()} - {""} <= set(WEIGHTS)


@pytest.mark.parametrize(("policy", "seed"), runs(10, 1))
def test_answers_are_whole_and_exact_while_workers_drain(policy: str, seed: int) -> None:
    world = run_with_drains(seed, policy)
    num_migrations = 0
    for client in world.clients.values():
        word = client.last_word
        assert isinstance(word, FinishRequest), word
        _check_finish(client, word)
        num_migrations += word.timings.migrations
        # Each attempt but the first and the last has made progress.
        assert word.timings.migrations <= 1 + len(client.heard) // INNOCENT_TOKENS
    counters = world.state.counters
    assert counters["migrated"] == num_migrations > 0
    assert counters["migrated_with_kv"] == 0 or seed % 2 == 0
    assert not {name for name in counters if name.startswith(("lost", "illegal", "odd", "never"))}, counters


@pytest.mark.parametrize(("policy", "seed"), runs(10, 1))
def test_answers_are_exact_under_faults_while_workers_drain(policy: str, seed: int) -> None:
    _check_ends(run_with_drains(seed, policy, faults=0.02))


def test_answers_migrate_under_faults() -> None:
    missing = {"migrated", "migrated_with_kv", "refused_no_kv", "lost_transfer"}
    for seed in SEEDS[::2]:
        missing -= (+run_with_drains(seed, DEFAULT, faults=0.02).state.counters).keys()
        if not missing:
            return
    raise AssertionError(f"no run reaches {missing}")


def _check_ends(world: World) -> None:
    for client in world.clients.values():
        word = client.last_word
        if isinstance(word, FinishRequest | FailRequest | EndCancelled) and word.timings is not None:
            assert word.timings.phases.total_s == pytest.approx(word.timings.total_s, abs=1e-9)
        match client.last_word:
            case FinishRequest():
                _check_finish(client, client.last_word)
            case FailRequest():
                assert client.last_word.kind in ALLOWED_FAILURES
            case EndCancelled():
                pass
            case _:
                raise AssertionError(f"no last word for {client.request.request_id}")


def _check_finish(client: Client, word: FinishRequest) -> None:
    stop_after = client.stop_after
    if stop_after is not None and stop_after <= len(client.heard) and word.reason is FinishReason.STOP:
        assert word.usage.completion_tokens in (stop_after, client.length)
    else:
        assert len(client.heard) == client.length == word.usage.completion_tokens
    assert word.usage.prompt_tokens == client.request.num_prompt_tokens


REACHED = {
    "outcome_served",
    "outcome_cancelled",
    "outcome_expired",
    "outcome_failed",
    "lost_death",
    "lost_silence",
    "lost_transfer",
    "lost_internal",
    "lost_plan",
    "late",
    "refused_inbox_full",
    "refused_draining",
}


def test_random_runs_cover_every_outcome_and_loss() -> None:
    missing = set(REACHED)
    for seed in SEEDS:
        for faults in (0.02, 0.06, 0.2):  # A request fails only after several faults.
            missing -= (+run(seed, faults=faults, policy="least-ttft").state.counters).keys()
        if not missing:
            return
    raise AssertionError(f"no run reaches {missing}")

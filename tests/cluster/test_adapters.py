"""LoRA adapters in a cluster of processes: exact tokens while adapters are loaded, replaced and unloaded, and workers
are killed. The toy's tokens and KV depend on the adapter."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pdserve.core.adapters import AdapterLimits
from pdserve.core.errors import Unavailable, UnknownModel
from pdserve.engine.adapters import read_adapter
from pdserve.engine.toy import answer
from tests.cluster.cluster import Cluster
from tests.support.adapters import write_adapter

DEADLINE_S = 60.0
NUM_BLOCKS = 4
MAX_TOKENS = 60


def prompt(number: int) -> list[int]:
    """Those with the same remainder share three of four blocks."""
    return [33 + (number % 3 + 7 * i) % 90 for i in range(16 * (NUM_BLOCKS - 1))] + [33 + number % 90] * 16


def until_candidate(cluster: Cluster, worker_id: str, model: str) -> None:
    """Waits until the worker is considered for requests of the model."""
    until_s = time.monotonic() + DEADLINE_S
    for number in range(100_000):
        name = f"{model}-{worker_id}-{number}"
        cluster.client.generate([40 + number % 50] * 20, max_tokens=2, temperature=0, model=model, request_id=name)
        seen = cluster.client.explain(name).candidates
        if worker_id in {one for each in seen for one in (each.prefill_worker, each.decode_worker)}:
            return
        assert time.monotonic() < until_s, f"{worker_id} never gets requests of {model}"


@pytest.mark.timeout(240)
def test_adapters_stay_exact_through_every_change(tmp_path: Path) -> None:
    folders = {name: write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("abcdef")}
    prints = {name: read_adapter(name, one, AdapterLimits(512, 2**30)).fingerprint for name, one in folders.items()}
    prints["toy"] = ""
    flags = ["--lora", f"a={folders['a']}", "--lora", f"b={folders['b']},c={folders['c']}"]
    flags += ["--lora-folders", str(tmp_path), "--set", "worker.toy_step_s=0.003", "--prefill", "2", "--decode", "2"]
    with Cluster("--model", "toy", *flags) as cluster, ThreadPoolExecutor(24) as pool:
        client = cluster.client
        served = dict(prints)  # what each name means now

        def begin(model: str, number: int) -> tuple[Future[tuple[int, ...]], tuple[int, ...]]:
            """Begins a request, and returns its tokens and the expected ones, by what its name means now."""
            ids = prompt(number)

            def run() -> tuple[int, ...]:
                return client.generate(ids, max_tokens=MAX_TOKENS, temperature=0, model=model).token_ids

            return pool.submit(run), tuple(answer(ids, MAX_TOKENS, adapter=served[model]))

        def check(running: list[tuple[Future[tuple[int, ...]], tuple[int, ...]]]) -> None:
            for tokens, expected in running:
                assert tokens.result(DEADLINE_S) == expected

        assert client.load_adapter("d", str(folders["d"])) == prints["d"]
        names = ("a", "b", "c", "d", "toy")
        check([begin(names[number % 5], number) for number in range(20)])

        stream = client.stream(prompt(0), max_tokens=200, temperature=0, model="a")
        tokens = list(next(stream).token_ids)
        client.load_adapter("a", str(folders["e"]))
        served["a"] = prints["e"]
        running = [begin(names[number % 5], number) for number in range(10)]
        client.unload_adapter("a")
        with pytest.raises(UnknownModel):
            client.generate("x", model="a")
        # A request that was accepted before the name was unloaded ends exactly, or is Unavailable if it waited for a
        # worker. One that comes later names an unknown model.
        for one, expected in running:
            try:
                assert one.result(DEADLINE_S) == expected
            except (Unavailable, UnknownModel):
                assert expected in [each for _, each in running[::5]]
        for piece in stream:
            tokens += piece.token_ids
        assert tokens == answer(prompt(0), 200, adapter=prints["a"])

        client.load_adapter("hot", str(folders["f"]))
        served["hot"] = prints["f"]
        names = ("b", "c", "d", "hot", "toy")
        for worker_id in ("d0", "p1"):  # one after the other: a request that two dying workers had ends with an error
            running = [begin(names[number % 5], number) for number in range(20)]
            cluster.kill(worker_id)
            check(running)
        for worker_id in ("d0", "p1"):
            until_candidate(cluster, worker_id, "hot")
        cluster.kill("d1")
        check([begin(names[number % 5], number) for number in range(10)])
        with pytest.raises(UnknownModel):
            client.generate("x", model="a")
        cluster.wait_until_idle(30.0)

"""Both roles with two tensor-parallel ranks, started by `up`: exact tokens, also when a rank of each is killed.

The short version is tests/unit/worker/test_tensor_parallel.py: it judges such workers' answers and kills their ranks.
"""

from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.families import build, prompts
from tests.cluster.faults import kill_rank, ranks_of
from tests.cluster.suite import generate_all, tokens_of
from tests.oracle import Oracle

TOKENS = 64
LENGTHS = (1, 16, 17, 64, 200, 350, 511, 700)


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("num_decode", [1, 2])
def test_two_ranks_match_transformers_and_survive_kills(num_decode: int, tmp_path: Path) -> None:
    """With two decode workers, a rank of one and a rank of the prefill worker are killed."""
    folder = build("llama-3", tmp_path / "model")
    texts = prompts(LENGTHS)
    oracle = Oracle(folder)
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    flags = ("--model", str(folder), "--decode", str(num_decode), "--set", "worker.tensor_parallel=2")
    with Cluster(*flags, "--set", "worker.max_batch_tokens=96", "--set", "worker.kv_check=step") as cluster:
        done = generate_all(cluster, texts, **options)
        oracle.assert_exact(texts, tokens_of(done, TOKENS))
        assert {one.timings.path for one in done} == {"remote", "local"}
        cluster.wait_until_idle()
        if num_decode == 1:
            return

        def kill_ranks(request_id: str) -> None:
            kill_rank(cluster, cluster.decode_worker_of(request_id))
            kill_rank(cluster, "p0")

        done = generate_all(cluster, texts, meanwhile=kill_ranks, **options)
        oracle.assert_exact(texts, tokens_of(done, TOKENS))
        assert max(one.timings.attempts for one in done) > 1, "nobody was on the killed rank"
        cluster.wait_until_idle(60.0)
        for worker_id in cluster.workers():
            assert ranks_of(cluster, worker_id), f"{worker_id} came back alone"

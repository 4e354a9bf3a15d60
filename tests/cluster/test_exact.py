"""Answers of whole clusters have the tokens of transformers in float64, for each family.

Seeded answers of two batch shapes may differ at a near-tie on some processors, so the oracle judges them as well.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, free_ports, scrape
from tests.cluster.families import BUNDLED, FAMILIES, build, prompts
from tests.cluster.suite import LENGTHS, generate_all, sampling_of, tokens_of
from tests.oracle import Oracle

TOKENS = 64
# One thread: two would wait for each other in every layer, which is a hundred times slower on a busy machine.
COLOCATED = ("--prefill", "0", "--set", "worker.threads=1")
COLOCATED_TOO = ("mistral",)  # other families take the local path beside the remote one


@pytest.mark.slow  # tests/unit/engine/test_exactness.py judges the engine of each family in `make test`
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_answers_match_transformers(family: str, tmp_path: Path) -> None:
    """16 prompts of 1 to 700 tokens at once, remote or local, in one chunk or in many."""
    folder = build(family, tmp_path / family)
    texts = prompts(LENGTHS)
    oracle = Oracle(folder)
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    config = tmp_path / "small-chunks.toml"
    config.write_text("[worker]\nmax_batch_tokens = 96\n")
    with Cluster("--model", str(folder), "--config", str(config)) as cluster:
        done = generate_all(cluster, texts, **options)
        oracle.assert_exact(texts, tokens_of(done, TOKENS))
        assert {one.timings.path for one in done} == {"remote", "local"}
        again = generate_all(cluster, texts, **options)  # now from the prefix caches
        oracle.assert_exact(texts, tokens_of(again, TOKENS))
        assert sum(one.usage.cached_prompt_tokens for one in again) > 0
        cluster.wait_until_idle()
    if family in COLOCATED_TOO:
        with Cluster("--model", str(folder), *COLOCATED) as colocated:
            local = generate_all(colocated, texts, **options)
            assert {one.timings.path for one in local} == {"local"}
            oracle.assert_exact(texts, tokens_of(local, TOKENS))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One colocated decode worker without speculative decoding."""
    config = tmp_path_factory.mktemp("plain") / "plain.toml"
    config.write_text('[decode_worker]\nspeculation = "off"\n[worker]\ndtype = "float32"\n')
    with Cluster(*COLOCATED, "--config", str(config)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_ports(3)  # the launcher gives worker i the port after it


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[Cluster]:
    """Two decode workers with memory for a third of the requests."""
    config = tmp_path_factory.mktemp("narrow") / "narrow.toml"
    decode = f"[decode_worker]\nkv_blocks = 24\nmetrics_port = {metrics_port}\n"
    config.write_text(f'{decode}[worker]\ndtype = "float32"\nmax_context_tokens = 256\n')
    with Cluster("--decode", "2", "--config", str(config)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One decode worker with memory for a few requests at a time."""
    config = tmp_path_factory.mktemp("crowded") / "crowded.toml"
    config.write_text('[decode_worker]\nkv_blocks = 24\n[worker]\ndtype = "float32"\nmax_context_tokens = 256\n')
    with Cluster("--config", str(config)) as cluster:
        yield cluster


@pytest.mark.timeout(400)
def test_the_bundled_models_answers_match_transformers(crowded: Cluster) -> None:
    """Real text; a seed gives the same tokens in any batch, on both paths, cached or not."""
    texts = [
        "def fib(n):",
        "import json\n\n\nclass Encoder(",
        "# Return the sum of two numbers\n",
        '"""A queue.\n\n' * 12,
    ]
    seeded = {"max_tokens": 48, "temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1234, "ignore_eos": True}
    oracle, sampling = Oracle(BUNDLED), sampling_of(BUNDLED, **seeded)
    ids = [crowded.client.tokenize(text) for text in texts]
    done = generate_all(crowded, texts, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    oracle.assert_exact(ids, tokens_of(done, TOKENS))
    alone = [crowded.client.generate(text, **seeded) for text in texts]
    together = generate_all(crowded, texts * 4, **seeded)
    oracle.assert_exact(ids * 5, tokens_of([*alone, *together], 48), sampling=sampling)


@pytest.mark.slow  # a document outlives its worker in test_options.py, with seeds too
@pytest.mark.timeout(400)
def test_seeded_answers_survive_preemption_and_worker_death(plain: Cluster, narrow: Cluster, metrics_port: int) -> None:
    """With memory for a third of the requests, and a SIGKILL, each answer is that of its seed."""
    texts = ["import os\n" * 9 + f"\n\ndef work_{i}(self, value):\n" for i in range(9)]
    options = {"max_tokens": 96, "temperature": 0.3, "top_p": 0.95, "seed": 99, "ignore_eos": True}
    options |= {"bad_words": ["return", "self.value"], "logit_bias": {10: -1.5}, "repetition_penalty": 1.1}
    oracle, sampling = Oracle(BUNDLED), sampling_of(BUNDLED, **options)
    ids = [plain.client.tokenize(text) for text in texts]
    alone = [plain.client.generate(text, **options) for text in texts]
    oracle.assert_exact(ids, tokens_of(alone, 96), sampling=sampling)

    def count(name: str) -> float:
        return sum(scrape(metrics_port + i, name) for i in (1, 2))

    drafts, preemptions = count("pdserve_draft_tokens_total"), count("pdserve_preemptions_total")
    for _ in range(8):  # drafts are used only while the measured step times favour them
        done = generate_all(narrow, texts, **options)
        oracle.assert_exact(ids, tokens_of(done, 96), sampling=sampling)
        if count("pdserve_draft_tokens_total") > drafts:
            break
    assert count("pdserve_draft_tokens_total") > drafts
    assert count("pdserve_preemptions_total") > preemptions
    done = generate_all(narrow, texts, **options, meanwhile=lambda one: narrow.kill(narrow.decode_worker_of(one)))
    oracle.assert_exact(ids, tokens_of(done, 96), sampling=sampling)
    assert max(one.timings.attempts for one in done) > 1, "nobody was on the killed worker"
    narrow.wait_until_idle(within_s=60)

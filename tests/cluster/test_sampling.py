"""What users set, through SDK, router and workers: against transformers on the bundled model, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from pdserve.core.types import Sampling
from router import group
from tests.cluster.cluster import Cluster
from tests.cluster.families import BUNDLED
from tests.oracle import Oracle

SHORT = "def read(path):\n"
LONG = "import json\n\n\nclass Encoder:\n    def encode(self, value):\n        return json.dumps(value)\n\n" * 3
TOKENS = 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Answers are compared with those of other batches: in this mode they have the same bits on every processor."""
    with Cluster("--model", str(BUNDLED), "--set", "worker.deterministic=true") as one:
        yield one


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(BUNDLED)


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_bans_bias_and_penalties_are_those_of_transformers(cluster: Cluster, oracle: Oracle, text: str) -> None:
    client = cluster.client
    ids = client.tokenize(text)
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    plain = client.generate(text, **options).token_ids
    oracle.assert_exact([ids], [plain])
    first, second = plain[0], plain[1]
    biased = client.generate(text, logit_bias={first: -3.5, second: 2.5}, repetition_penalty=1.2, **options).token_ids
    bias = SequenceBiasLogitsProcessor([[[first], -3.5], [[second], 2.5]])
    oracle.assert_exact([ids], [biased], processors=[bias, RepetitionPenaltyLogitsProcessor(1.2)])
    allowed = sorted({*plain, 5, 6, 7} - {first})
    others = [token for token in range(client.model().vocab_size) if token not in allowed]
    among = client.generate(text, allowed_token_ids=allowed, **options).token_ids
    oracle.assert_exact([ids], [among], processors=[SuppressTokensLogitsProcessor(others)])
    assert biased != plain
    assert among != plain
    word = client.detokenize(plain[1:3], prompt=ids)
    without = client.generate(text, bad_words=[word], **options)
    assert word in client.generate(text, **options).text
    assert word not in without.text


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_a_prompts_logprobs_are_those_of_transformers(cluster: Cluster, oracle: Oracle, text: str) -> None:
    """Both times: nothing of it is read from a cache."""
    ids = cluster.client.tokenize(text)
    expected = oracle.logits(ids).log_softmax(-1)
    for _ in range(2):
        first, *others = cluster.client.generate(text, max_tokens=2, prompt_logprobs=2).prompt_logprobs
        assert first is None
        for position, one in enumerate(others):
            assert one is not None
            assert one.token_id == ids[position + 1]
            assert one.logprob == pytest.approx(float(expected[position, one.token_id]), abs=1e-3)
            assert one.top[0][1] == pytest.approx(float(expected[position].max()), abs=1e-3)


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_several_answers_are_those_of_their_seeds(cluster: Cluster, text: str) -> None:
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.9, "top_p": 0.95}
    seeds = [one.seed for one in group.samplings(Sampling(seed=17), 4, 4)]
    alone = [cluster.client.generate(text, seed=seed, logprobs=0, **options).choices[0] for seed in seeds]
    done = cluster.client.generate(text, n=4, seed=17, **options)
    assert [one.token_ids for one in done.choices] == [one.token_ids for one in alone]
    best = cluster.client.generate(text, n=2, best_of=4, seed=17, **options)
    ranked = sorted(alone, key=lambda one: (one.cumulative_logprob or 0.0) / len(one.token_ids), reverse=True)
    assert [one.token_ids for one in best.choices] == [one.token_ids for one in ranked[:2]]
    assert best.usage.completion_tokens == sum(len(one.token_ids) for one in alone)
    cluster.wait_until_idle()


def test_beams_are_those_of_transformers(cluster: Cluster, oracle: Oracle) -> None:
    """The best beam is transformers' own in float64, or as good as that to four digits."""
    [eos] = cluster.client.model().eos_token_ids
    for text, length_penalty in ((SHORT, 1.0), (LONG, 0.5)):
        ids = cluster.client.tokenize(text)
        beams = cluster.client.beam_search(text, width=4, max_tokens=16, length_penalty=length_penalty)
        best = oracle.beam(ids, width=4, max_tokens=16, length_penalty=length_penalty, end_ids=[eos])
        for tokens in (best, beams[0].token_ids):
            score = oracle.logprob(ids, tokens) / len(tokens) ** length_penalty
            assert beams[0].score == pytest.approx(score, abs=1e-4)
        assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
        again = cluster.client.beam_search(ids, width=4, max_tokens=16, length_penalty=length_penalty)
        assert [beam.token_ids for beam in again] == [beam.token_ids for beam in beams]
        # Read from the cache or computed, alone or in company: logits differ in their last bits.
        assert [beam.score for beam in again] == pytest.approx([beam.score for beam in beams], abs=1e-4)

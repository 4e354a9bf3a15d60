"""Sampling options through SDK, router and workers on the bundled model, compared with transformers in float64.

Also structured output, by each kind of grammar and while a worker dies (the last test of the file).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import transformers

from pdserve import AsyncClient, InvalidRequest
from pdserve.core.types import Sampling
from pdserve.text.tokenizer import load_tokenizer
from router.service import answer
from tests.cluster.cluster import Cluster
from tests.cluster.families import BUNDLED
from tests.cluster.faults import all_have, decode_worker_of
from tests.cluster.suite import generate_all
from tests.oracle import Oracle

pytestmark = pytest.mark.timeout(400)

PROMPT = "def load_config(path):\n    # Returns the settings of the program, as read from the file:\n    return "
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "kind": {"enum": ["file", "folder", "link"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99999},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
ITEMS = {"type": "array", "items": ITEM, "minItems": 8, "maxItems": 9}
SHORT = "def read(path):\n"
LONG = "import json\n\n\nclass Encoder:\n    def encode(self, value):\n        return json.dumps(value)\n\n" * 3
NUM_TOKENS = 40
MAX_TOKENS = 400
MOST_TURNS = 5  # to kill a worker in mid-document
TOKENIZER = load_tokenizer(str(BUNDLED))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Deterministic mode: answers do not depend on the batch on any processor, so they can be compared."""
    exact = ("--set", "worker.deterministic=on", "--set", "worker.dtype=float32")
    with Cluster("--model", str(BUNDLED), "--prefill", "1", "--decode", "2", *exact) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(BUNDLED)


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_bans_bias_and_penalties_match_transformers(cluster: Cluster, oracle: Oracle, text: str) -> None:
    client = cluster.client
    ids = client.tokenize(text)
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    plain = client.generate(text, **options).token_ids
    oracle.assert_exact([ids], [plain])
    first, second = plain[0], plain[1]
    biased = client.generate(text, logit_bias={first: -3.5, second: 2.5}, repetition_penalty=1.2, **options).token_ids
    bias = transformers.SequenceBiasLogitsProcessor([[[first], -3.5], [[second], 2.5]])
    oracle.assert_exact([ids], [biased], processors=[bias, transformers.RepetitionPenaltyLogitsProcessor(1.2)])
    allowed = sorted({*plain, 5, 6, 7} - {first})
    others = [token for token in range(client.model().vocab_size) if token not in allowed]
    among = client.generate(text, allowed_token_ids=allowed, **options).token_ids
    oracle.assert_exact([ids], [among], processors=[transformers.SuppressTokensLogitsProcessor(others)])
    assert biased != plain
    assert among != plain
    word = client.detokenize(plain[1:3], prompt=ids)
    without = client.generate(text, bad_words=[word], **options)
    assert word in client.generate(text, **options).text
    assert word not in without.text


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_prompt_logprobs_match_transformers(cluster: Cluster, oracle: Oracle, text: str) -> None:
    """Twice: prompt logprobs are not read from a cache."""
    ids = cluster.client.tokenize(text)
    for _ in range(2):
        first, *others = cluster.client.generate(text, max_tokens=2, prompt_logprobs=2).prompt_logprobs
        assert first is None
        scored = [one for one in others if one is not None]
        assert [one.token_id for one in scored] == ids[1:]
        oracle.assert_logprobs(ids[:-1], 0, scored)


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_several_answers_follow_from_their_seeds(cluster: Cluster, text: str) -> None:
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.9, "top_p": 0.95}
    seeds = [one.seed for one in answer.samplings(Sampling(seed=17), 4, 4)]
    alone = [cluster.client.generate(text, seed=seed, logprobs=0, **options).choices[0] for seed in seeds]
    done = cluster.client.generate(text, n=4, seed=17, **options)
    assert [one.token_ids for one in done.choices] == [one.token_ids for one in alone]
    best = cluster.client.generate(text, n=2, best_of=4, seed=17, **options)
    ranked = sorted(alone, key=lambda one: (one.cumulative_logprob or 0.0) / len(one.token_ids), reverse=True)
    assert [one.token_ids for one in best.choices] == [one.token_ids for one in ranked[:2]]
    assert best.usage.completion_tokens == sum(len(one.token_ids) for one in alone)
    cluster.wait_until_idle()


def test_beams_match_transformers(cluster: Cluster, oracle: Oracle) -> None:
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
        # Logits differ in their last bits between cached and computed prefixes, and between batches.
        assert [beam.score for beam in again] == pytest.approx([beam.score for beam in beams], abs=1e-4)


def test_each_kind_of_structured_output_works(cluster: Cluster) -> None:
    client, greedy = cluster.client, {"max_tokens": 100, "temperature": 0.0}
    item = client.generate(PROMPT, json_schema=ITEM, **greedy)
    jsonschema.validate(json.loads(item.text), ITEM)
    assert item.finish_reason == "stop"  # the router chooses its path by measured costs
    assert client.generate(PROMPT, json_schema=json.dumps(ITEM), ignore_eos=True, **greedy).text == item.text
    short = client.generate("x", json_schema=ITEM, max_tokens=100, seed=1)
    jsonschema.validate(json.loads(short.text), ITEM)
    assert short.timings.path == "local"
    assert client.generate(PROMPT, choice=["left", "right"], **greedy).text in ("left", "right")
    assert client.generate(PROMPT, regex="[0-9]{3}-[0-9]{3}", **greedy).text.count("-") == 1
    assert set(client.generate(PROMPT, grammar='start: "a" | "a" start', **greedy).text) == {"a"}
    assert client.generate(PROMPT, json_object=True, **greedy).text.startswith("{")
    cut = client.generate(PROMPT, json_schema=ITEMS, max_tokens=20, temperature=0.0)
    assert (cut.finish_reason, cut.usage.completion_tokens) == ("length", 20)
    with pytest.raises(InvalidRequest, match=r"json_schema: got one that cannot be used \(Unsatisfiable schema"):
        client.generate(PROMPT, json_schema={"type": "string", "minLength": 5, "maxLength": 2})
    with pytest.raises(InvalidRequest, match='"not" at # excludes every document'):
        client.generate(PROMPT, json_schema={"not": {}})
    with pytest.raises(InvalidRequest, match="grammar: got stuck after 1 tokens"):
        client.generate(PROMPT, grammar='start: ("a" | "b") X\nX: /a/ & /b/')
    answers = generate_all(cluster, [PROMPT] * 6, json_schema=ITEM, max_tokens=100, temperature=1.0, seed=3)
    assert len({one.text for one in answers}) == 1
    cluster.wait_until_idle()


def test_a_document_survives_the_death_of_its_worker(cluster: Cluster) -> None:
    """Greedy, sampled and without a schema: each answer equals the undisturbed one, token for token.

    On a busy machine the worker may have generated a document before this process asks for its end: then the next turn
    tries.
    """
    asked: list[dict[str, Any]] = [
        {"json_schema": ITEMS, "temperature": 0.0},
        {"json_schema": ITEMS, "temperature": 1.0, "seed": 7},
        {"temperature": 0.0, "ignore_eos": True},
    ]

    async def turn_of(client: AsyncClient, turn: int) -> tuple[list[list[int]], list[int]]:
        """Tokens and attempts of each answer, when a worker is killed after twelve tokens."""
        seen: list[list[int]] = [[] for _ in asked]
        attempts = [0] * len(asked)

        async def follow(i: int) -> None:
            stream = client.stream(PROMPT, max_tokens=MAX_TOKENS, request_id=f"document-{i}-{turn}", **asked[i])
            async for piece in stream:
                seen[i].extend(piece.token_ids)
            attempts[i] = stream.completion.timings.attempts

        streams = [asyncio.create_task(follow(i)) for i in range(len(asked))]
        await all_have(12, seen, streams)
        cluster.kill(await decode_worker_of(client, f"document-1-{turn}"))
        await asyncio.gather(*streams)
        return seen, attempts

    async def run() -> None:
        async with AsyncClient(cluster.target) as client:
            whole = await asyncio.gather(*(client.generate(PROMPT, max_tokens=MAX_TOKENS, **one) for one in asked))
            for tokens in (one.token_ids for one in whole[:2]):
                jsonschema.validate(json.loads(TOKENIZER.decode(list(tokens))), ITEMS)
            for turn in range(MOST_TURNS):
                seen, attempts = await turn_of(client, turn)
                assert seen == [list(one.token_ids) for one in whole]
                await asyncio.to_thread(cluster.wait_until_idle, within_s=60)
                if max(attempts[:2]) > 1:
                    return
        raise AssertionError(f"no document was on the killed worker, {MOST_TURNS} times")

    asyncio.run(asyncio.wait_for(run(), 300))

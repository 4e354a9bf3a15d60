"""Documents through SDK, router, prefill and decode workers; refusals; and a worker that dies in mid-document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from pdserve import AsyncClient, InvalidRequest
from pdserve.text.tokenizer import load_tokenizer
from tests.cluster.cluster import Cluster
from tests.cluster.families import BUNDLED
from tests.cluster.faults import all_have, decode_worker_of
from tests.cluster.suite import generate_all

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
LONG = {"type": "array", "items": ITEM, "minItems": 8, "maxItems": 9}
MAX_TOKENS = 400
TOKENIZER = load_tokenizer(str(BUNDLED))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Answers are compared with those of other batches: in this mode they have the same bits on every processor."""
    exact = ("--set", "worker.deterministic=true")
    with Cluster("--model", str(BUNDLED), "--prefill", "1", "--decode", "2", *exact) as cluster:
        yield cluster


def test_each_kind_of_structured_output_reaches_the_answer(cluster: Cluster) -> None:
    client, greedy = cluster.client, {"max_tokens": 100, "temperature": 0.0}
    item = client.generate(PROMPT, json_schema=ITEM, **greedy)
    jsonschema.validate(json.loads(item.text), ITEM)
    assert item.finish_reason == "stop"  # its path is the router's choice, by what it has measured
    assert client.generate(PROMPT, json_schema=json.dumps(ITEM), ignore_eos=True, **greedy).text == item.text
    short = client.generate("x", json_schema=ITEM, max_tokens=100, seed=1)
    jsonschema.validate(json.loads(short.text), ITEM)
    assert short.timings.path == "local"
    assert client.generate(PROMPT, choice=["left", "right"], **greedy).text in ("left", "right")
    assert client.generate(PROMPT, regex="[0-9]{3}-[0-9]{3}", **greedy).text.count("-") == 1
    assert set(client.generate(PROMPT, grammar='start: "a" | "a" start', **greedy).text) == {"a"}
    assert client.generate(PROMPT, json_object=True, **greedy).text.startswith("{")
    cut = client.generate(PROMPT, json_schema=LONG, max_tokens=20, temperature=0.0)
    assert (cut.finish_reason, cut.usage.completion_tokens) == ("length", 20)
    with pytest.raises(InvalidRequest, match="json_schema: got Unsatisfiable schema"):
        client.generate(PROMPT, json_schema={"type": "string", "minLength": 5, "maxLength": 2})
    with pytest.raises(InvalidRequest, match=r'Unimplemented keys: ."not"'):
        client.generate(PROMPT, json_schema={"not": {}})
    with pytest.raises(InvalidRequest, match="grammar: got stuck after 1 tokens"):
        client.generate(PROMPT, grammar='start: ("a" | "b") X\nX: /a/ & /b/')
    answers = generate_all(cluster, [PROMPT] * 6, json_schema=ITEM, max_tokens=100, temperature=1.0, seed=3)
    assert len({one.text for one in answers}) == 1
    cluster.wait_until_idle()


def test_a_document_outlives_the_worker_that_writes_it(cluster: Cluster) -> None:
    """Greedy and sampled, beside one without a schema: each is the undisturbed answer, token for token."""
    asked: list[dict[str, Any]] = [
        {"json_schema": LONG, "temperature": 0.0},
        {"json_schema": LONG, "temperature": 1.0, "seed": 7},
        {"temperature": 0.0, "ignore_eos": True},
    ]
    expected = [list(cluster.client.generate(PROMPT, max_tokens=MAX_TOKENS, **one).token_ids) for one in asked]
    seen: list[list[int]] = [[] for _ in asked]
    attempts = [0] * len(asked)

    async def follow(client: AsyncClient, i: int) -> None:
        stream = client.stream(PROMPT, max_tokens=MAX_TOKENS, request_id=f"document-{i}", **asked[i])
        async for piece in stream:
            seen[i].extend(piece.token_ids)
        attempts[i] = stream.completion.timings.attempts

    async def run() -> None:
        async with AsyncClient(cluster.target) as client:
            streams = [asyncio.create_task(follow(client, i)) for i in range(len(asked))]
            await all_have(12, seen, streams)
            cluster.kill(await decode_worker_of(client, "document-1"))
            for tokens, whole in zip(seen, expected, strict=True):
                assert len(tokens) < len(whole) - 20, "too fast to be killed in mid-document"
            await asyncio.gather(*streams)

    asyncio.run(asyncio.wait_for(run(), 90))
    assert seen == expected
    assert max(attempts[:2]) > 1, "no document was on the killed worker"
    for tokens in seen[:2]:
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), LONG)
    cluster.wait_until_idle(within_s=60)

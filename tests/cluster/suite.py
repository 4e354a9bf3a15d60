"""Requests that every cluster must answer correctly, however it is deployed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdserve import AsyncClient, Completion
from pdserve.client.request import generate_request
from pdserve.core.types import Sampling
from pdserve.engine.toy import answer
from pdserve.text.tokenizer import bad_word_ids, load_tokenizer
from pdserve.wire.convert import sampling_from_proto
from tests.cluster.cluster import Cluster

LOOKUPS = 5  # on a busy machine, all answers of the index may be late, and then requests do not wait for them
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 128, 200, 257, 350, 511, 600, 700)


def generate_all(
    cluster: Cluster, prompts: Sequence[Any], *, meanwhile: Callable[[str], object] | None = None, **options: Any
) -> list[Completion]:
    """Sends all prompts at once. Calls `meanwhile` with the id of the first request that has tokens.

    Nearly all of the work is then still to be done, however fast this machine is."""

    async def one(client: AsyncClient, prompt: Any) -> Completion:
        nonlocal meanwhile
        stream = client.stream(prompt, **options)
        async for _ in stream:
            if meanwhile is not None:
                call, meanwhile = meanwhile, None
                call(stream.request_id)
        return stream.completion

    async def run() -> list[Completion]:
        async with AsyncClient(cluster.target) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    return asyncio.run(run())


def tokens_of(done: Sequence[Completion], num_tokens: int) -> list[list[int]]:
    """The tokens of each answer; each must have the requested number."""
    answers = [list(one.token_ids) for one in done]
    assert [len(answer) for answer in answers] == [num_tokens] * len(answers)
    return answers


def sampling_of(folder: Path, **options: Any) -> Sampling:
    """The sampling parameters as the engine gets them: numbers rounded by the message, bad words as tokens."""
    message = generate_request([1], options).sampling
    return sampling_from_proto(message, bad_words=bad_word_ids(message.bad_words, load_tokenizer(str(folder))))


def toy_prompt(length: int, salt: int = 0) -> list[int]:
    """Printable bytes without the toy's end-of-text byte."""
    return [33 + (i * 7 + salt * 13 + length) % 90 for i in range(length)]


def toy_answers_are_exact(cluster: Cluster) -> None:
    """16 at once, greedy and seeded, remote and local, give the computed answers."""
    prompts = [toy_prompt(n) for n in LENGTHS]
    greedy = generate_all(cluster, prompts, max_tokens=64, temperature=0)
    assert [list(done.token_ids) for done in greedy] == [answer(p, 64) for p in prompts]
    paths = {done.timings.path for done in greedy}
    assert paths == {"remote", "local"}
    seeded = generate_all(cluster, prompts, max_tokens=64, temperature=0.8, seed=7)
    assert [list(done.token_ids) for done in seeded] == [answer(p, 64, seed=7) for p in prompts]
    num_cached = 0
    for _ in range(LOOKUPS):
        again = generate_all(cluster, prompts, max_tokens=64, temperature=0.8, seed=7)
        assert [done.text for done in again] == [done.text for done in seeded]
        num_cached = sum(done.usage.cached_prompt_tokens for done in again)
        if num_cached:
            break
    assert num_cached > 0
    cluster.wait_until_idle()


def streams_are_whole(cluster: Cluster) -> None:
    """The pieces of a stream make up the completion, and a stop string ends the text at the right character."""
    prompt = toy_prompt(120, salt=3)
    whole = cluster.client.generate(prompt, max_tokens=80, temperature=0)
    with cluster.client.stream(prompt, max_tokens=80, temperature=0) as stream:
        pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [t for piece in pieces for t in piece.token_ids] == list(whole.token_ids)
    stop = whole.text[40:43]
    cut = cluster.client.generate(prompt, max_tokens=80, temperature=0, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop) == ("stop", stop)


def endings_are_right(cluster: Cluster) -> None:
    """End of sequence, stop token ids, min_tokens and max_tokens, each on both paths."""
    for length in (6, 90):
        text = [*toy_prompt(length - 2), 5, 4]  # the toy ends after five characters
        ended = cluster.client.generate(text, max_tokens=32, temperature=0)
        assert list(ended.token_ids) == answer(text, 32)
        assert ended.finish_reason == "stop"
        assert ended.usage.completion_tokens == len(answer(text, 32))
        prompt = toy_prompt(length, salt=5)
        tokens = answer(prompt, 32)
        stopped = cluster.client.generate(prompt, max_tokens=32, temperature=0, stop_token_ids=[tokens[9]])
        first = tokens.index(tokens[9])
        assert list(stopped.token_ids) == tokens[: first + 1]
        assert (stopped.finish_reason, stopped.stop_token_id) == ("stop", tokens[9])
        one = cluster.client.generate(prompt, max_tokens=1, temperature=0)
        assert (list(one.token_ids), one.finish_reason) == (tokens[:1], "length")


def a_request_id_may_be_used_again(cluster: Cluster) -> None:
    """Immediately, after a complete answer and after a cancelled one, on both paths."""
    for length in (4, 200):
        prompt = toy_prompt(length, salt=7)
        options = {"temperature": 0, "request_id": f"again-{length}", "timeout_s": 30.0}
        for _ in range(2):
            whole = cluster.client.generate(prompt, max_tokens=8, **options)
            assert list(whole.token_ids) == answer(prompt, 8)
        with cluster.client.stream(prompt, max_tokens=400, **options) as left:
            next(left)
        whole = cluster.client.generate(prompt, max_tokens=8, **options)
        assert list(whole.token_ids) == answer(prompt, 8)


ALL = (toy_answers_are_exact, streams_are_whole, endings_are_right, a_request_id_may_be_used_again)

"""CPU time of each stage that a prompt of 30,000 tokens passes in the router, in Redis and in a worker.

    python -m benchmarks.long_prompt [--words 28000] [--repeats 10]

Random English words, as in the workload W3 of `benchmarks.peers`, with the bundled model's tokenizer. The peer of the
tokenizer is the `tokenizers` library on the whole text, in the same run. Medians of CPU time, which other load changes
less than wall time; stages alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.harness import cpu_s
from pdserve.core import protocol as pr
from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.kv.hashing import block_hashes, chain_key
from pdserve.core.types import Role, Sampling
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.prefix.publisher import WorkerPublisher
from pdserve.prefix.redis_index import RedisIndex
from pdserve.prefix.registry import Registration
from pdserve.text.tokenizer import HuggingFaceTokenizer
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import SEQUENCE, encode_request
from pdserve.worker.messages import SequenceLimits, read_sequence

MODEL: Final = next((Path(__file__).parents[1] / "pdserve/models").glob("stdlib-*"))
WORDS: Final = (
    "return value of the function is used when a list or dict object has no other name in this module and self class "
    "method import error string file path open read write line data index key item type none true false raise example "
    "default argument should not be set if it was given as an option to call with each number from first last next "
    "minimum maximum average header body length"
)
BLOCK_SIZE: Final = 16
SEED: Final = bytes(32)
HELD: Final = bytes(16)  # a block that both workers hold
TURN_WORDS: Final = 200  # that the next turn of a conversation adds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", type=int, default=28_000)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    tokenizer = HuggingFaceTokenizer(MODEL)
    tokenizer.warm_up()
    library, draw = tokenizer._backend, random.Random(1)
    words = WORDS.split()
    texts = [" ".join(draw.choices(words, k=arguments.words)) for _ in range(arguments.repeats)]
    longer = [" ".join([text, *draw.choices(words, k=TURN_WORDS)]) for text in texts]
    prompts = [tuple(library.encode_batch_fast([text])[0].ids) for text in texts]
    assert [tuple(tokenizer.encode(text)) for text in texts] == prompts
    key, sent = chain_key(b"", SEED), list(map(_messages, prompts))
    limits = SequenceLimits(vocab_size=2**17, max_context_tokens=2**17, hash_seed=SEED)

    def read(at: int) -> None:
        sequence = worker_pb2.AttachRequest.FromString(sent[at][0]).reserve.sequence
        read_sequence(sequence, AttemptKey(1, "r", 1), limits, 0.0)

    stages: dict[str, Callable[[int], object]] = {
        "tokenizers library, whole text": lambda at: library.encode_batch_fast([texts[at]])[0].ids,
        "router: tokens of a new prompt": lambda at: tokenizer.encode(texts[at], salt=b"%d" % at),
        "router: tokens of the next turn": lambda at: tokenizer.encode(longer[at], salt=b"%d" % at),
        "router or worker: block hashes": lambda at: block_hashes(prompts[at], BLOCK_SIZE, key),
        "router: messages to two workers": lambda at: _messages(prompts[at]),
        "worker: one message": read,
    }
    times: dict[str, list[float]] = {name: [] for name in stages}
    for at in range(arguments.repeats):
        for name, stage in stages.items():
            began_s = time.process_time()
            stage(at)
            times[name].append(time.process_time() - began_s)
    chains = [block_hashes(prompt, BLOCK_SIZE, key) for prompt in prompts]
    times |= asyncio.run(_index(chains))
    print(f"{len(texts[0])} characters, {len(prompts[0])} tokens, {len(chains[0])} blocks\n")
    print("| stage | CPU ms |\n|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {1e3 * statistics.median(seconds):.2f} |")


def _messages(prompt: tuple[int, ...]) -> list[bytes]:
    attempt = Attempt(key=AttemptKey("", "r", 0), prompt_ids=prompt, sampling=Sampling(max_tokens=16))
    sequence = SEQUENCE.encode(attempt)
    return [
        encode_request(command, sequence).SerializeToString()
        for command in (
            pr.Reserve(key=AttemptKey("d", "r", 1), is_local=False),
            pr.Prefill(key=AttemptKey("p", "r", 1), grant=b""),
        )
    ]


async def _index(chains: list[list[bytes]]) -> dict[str, list[float]]:
    """A lookup that finds nothing, and a publication by two workers; in Redis, and in this process."""
    names = ("Redis: lookup", "router: lookup", "Redis: publication by two workers", "two workers: publication")
    times: dict[str, list[float]] = {name: [] for name in names}
    with EmbeddedRedis.start() as server:
        workers = [
            WorkerPublisher(server.url, "bench", _registration(f"w{number}"), hash_seed=SEED, lease_s=60.0)
            for number in range(2)
        ]
        index = RedisIndex(server.url, "bench", hash_seed=SEED, timeout_s=10.0)
        await index.start()
        for one in workers:
            one.offer(stored=[HELD])
            await one.start()
        while len(await index.lookup([HELD])) < len(workers):
            await asyncio.sleep(0.01)
        for chain in chains:
            marks = [cpu_s(server.pid), time.process_time()]
            await index.lookup(chain)
            marks += [cpu_s(server.pid), time.process_time()]
            for one in workers:
                one.offer(stored=chain)
            while any(one.num_waiting for one in workers):
                await asyncio.sleep(0.005)
            marks += [cpu_s(server.pid), time.process_time()]
            for name, before, after in zip(names, marks, marks[2:], strict=False):
                times[name].append(after - before)
        for one in workers:
            await one.stop()
        await index.close()
    return times


def _registration(name: str) -> Registration:
    return Registration(worker_id=name, incarnation="1", role=Role.DECODE, endpoint="127.0.0.1:1")


if __name__ == "__main__":
    main()

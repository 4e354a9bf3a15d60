"""Which cached blocks a pool keeps: `python -m benchmarks.retention [--mooncake FILE]`.

Block hits of the pool's own code (`KvCache`), of the least recently used order (LRU), of LRU-2, of an oracle that knows
which blocks will be used again but not when, and of Belady's offline optimum, which evicts the block whose next use is
farthest away. Each request takes the blocks of its prompt and releases them before the next one arrives, so these
differ only in what they evict. Of blocks with the same next use, the optimum evicts the deepest first: a block without
those before it gives no hit.

The traces are two of generated agents (`--seeds` each; the rule was chosen on others) and, with `--mooncake`,
Mooncake's conversations, whose arrivals are spread over the 3 s to which they are rounded. Capacities are shares of the
blocks that are used at least twice. The bar is 90 % of the optimum's hits, without what clients may say. The
last column has our hits if the client of each generated session says after its last turn that it has ended.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.harness import table
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from simulator.model import Trace
from simulator.traces.files import FileTrace
from simulator.traces.reshaped import Reshaped, jittered
from simulator.traces.workloads import assisted_agents, coding_agents

SHARES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
BAR: Final = 0.9
NEVER: Final = 1 << 60

Texts = Sequence[tuple[float, tuple[int, ...]]]  # time and blocks of each request


def ours(texts: Texts, capacity: int, last: Collection[int] = ()) -> int:
    """`last`: numbers of the texts after which their session has ended, as its client says."""
    kv = KvCache(BlockAllocator(capacity), 1)
    hits = 0
    for number, (at_s, ids) in enumerate(texts):
        kv.advance(at_s)
        hashes = [one.to_bytes(16, "big") for one in ids]
        found = kv.allocate(len(ids) + 1, hashes)
        assert found is not None, "a prompt is larger than the pool"
        hits += found.cached_tokens
        kv.commit(found.blocks, hashes, found.cached_tokens, len(ids))
        kv.release(found.blocks)
        if number in last:
            kv.end(hashes)
    return hits


def least_recently_used(texts: Texts, capacity: int) -> int:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for _, ids in texts:
        hits += _num_cached(ids, kept)
        for one in reversed(ids):
            kept[one] = None
            kept.move_to_end(one)
        while len(kept) > capacity - 1:  # a block for the token to compute, as above
            kept.popitem(last=False)
    return hits


def knowing_which(texts: Texts, capacity: int) -> int:
    """An oracle that knows which blocks will be used again, but not when: the others leave first, then the least
    recently used."""
    last = {one: number for number, (_, ids) in enumerate(texts) for one in ids}
    kept: OrderedDict[int, None] = OrderedDict()
    unused: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, (_, ids) in enumerate(texts):
        hits += next((at for at, one in enumerate(ids) if one not in kept and one not in unused), len(ids))
        for one in reversed(ids):
            kept.pop(one, None)
            unused.pop(one, None)
        while len(kept) + len(unused) + len(ids) > capacity - 1:
            (unused or kept).popitem(last=False)
        for one in reversed(ids):
            (kept if last[one] > number else unused)[one] = None
    return hits


def twice_used_first(texts: Texts, capacity: int) -> int:
    """LRU-2, of the known orders the one with the most hits in small pools on Mooncake's trace: the block whose last
    use but one was earliest leaves first, and before them those that were used once. It forgets no use."""
    uses: dict[int, tuple[int, int]] = {}  # the last but one, and the last
    queue: list[tuple[int, int, int, int]] = []  # also entries that no longer hold
    kept: dict[int, int] = {}  # number of its last text
    hits = 0
    for number, (_, ids) in enumerate(texts):
        hits += _num_cached(ids, kept)
        running = set(ids)
        num_evicted = len(kept) + sum(one not in kept for one in ids) - (capacity - 1)
        while num_evicted > 0:
            _, used, _, one = heapq.heappop(queue)
            if kept.get(one) == used and one not in running:
                del kept[one]
                num_evicted -= 1
        for depth, one in enumerate(ids):
            uses[one] = (uses[one][1] if one in uses else -1, number)
            kept[one] = number
            heapq.heappush(queue, (*uses[one], -depth, one))
    return hits


def optimum(texts: Texts, capacity: int) -> int:
    following: dict[int, int] = {}
    nexts: list[list[int]] = []
    for number in range(len(texts) - 1, -1, -1):
        ids = texts[number][1]
        nexts.append([following.get(one, NEVER) for one in ids])
        following.update(dict.fromkeys(ids, number))
    nexts.reverse()
    kept: dict[int, int] = {}  # next use of each block
    queue: list[tuple[int, int, int]] = []  # also entries that no longer hold
    hits = 0
    for (_, ids), uses in zip(texts, nexts, strict=True):
        hits += _num_cached(ids, kept)
        running = set(ids)
        num_evicted = len(kept) + sum(one not in kept for one in ids) - (capacity - 1)
        while num_evicted > 0:
            use, _, one = heapq.heappop(queue)
            if kept.get(one) == -use and one not in running:
                del kept[one]
                num_evicted -= 1
        for depth, (one, use) in enumerate(zip(ids, uses, strict=True)):
            kept[one] = use
            heapq.heappush(queue, (-use, -depth, one))
    return hits


def _num_cached(ids: Sequence[int], kept: OrderedDict[int, None] | dict[int, int]) -> int:
    return next((at for at, one in enumerate(ids) if one not in kept), len(ids))


def texts_of(trace: Trace) -> tuple[Texts, frozenset[int]]:
    """With the full blocks of each prompt; and the numbers of the last ones of ended sessions."""
    size, texts, last = trace.block_tokens, [], set()
    for number, one in enumerate(trace):
        texts.append((one.arrival_s, one.block_ids[: one.prompt_tokens // size]))
        if one.ends_session:
            last.add(number)
    return texts, frozenset(last)


def compare(texts: Texts, last: Collection[int], shares: Sequence[float]) -> list[tuple[float, ...]]:
    """For each capacity: blocks, the optimum's share of hits, the others' hits and ours over the optimum's, ours if
    ends of sessions are told, CPU seconds of ours."""
    seen: set[int] = set()
    again: set[int] = set()
    for _, ids in texts:
        again.update(one for one in ids if one in seen)
        seen.update(ids)
    longest = max(len(ids) for _, ids in texts)
    total = sum(len(ids) for _, ids in texts)
    found = []
    for share in shares:
        capacity = max(round(share * len(again)), longest + 1)
        best = optimum(texts, capacity)
        began_s = time.process_time()
        hits = ours(texts, capacity)
        spent_s = time.process_time() - began_s
        others = [one(texts, capacity) / best for one in (least_recently_used, twice_used_first, knowing_which)]
        told = ours(texts, capacity, last) / best if last else hits / best
        found.append((capacity, best / total, *others, hits / best, told, spent_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", metavar="FILE", help="Mooncake's conversation_trace.jsonl; without it, no row")
    parser.add_argument("--seeds", type=int, default=2, help="of each generated trace")
    parser.add_argument("--duration", type=float, default=900.0, help="seconds in which their sessions begin")
    parser.add_argument("--first-seed", type=int, default=100)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    traces = {
        make(rate_rps=1.0, duration_s=1.0).name: [
            texts_of(replace(make(rate_rps=2.0, duration_s=arguments.duration, seed=seed), ended_share=1.0))
            for seed in seeds
        ]
        for make in (coding_agents, assisted_agents)
    }
    if arguments.mooncake is None:
        print("Mooncake's trace: skipped, because no file is given with --mooncake", flush=True)
    elif not Path(arguments.mooncake).is_file():
        print(f"Mooncake's trace: skipped, because {arguments.mooncake} does not exist", flush=True)
    else:
        file = FileTrace(arguments.mooncake)
        traces["Mooncake conversations"] = [texts_of(Reshaped(file, jittered(seeds[0], file.quantum_s)))]
    rows = [
        [
            "trace",
            "blocks",
            "optimum's hits",
            "LRU / optimum",
            "LRU-2",
            "oracle",
            "ours",
            "bar",
            "us per block",
            "ends told",
        ]
    ]
    for name, several in traces.items():
        for results in zip(*(compare(texts, last, SHARES) for texts, last in several), strict=True):
            blocks, best, *others, mine, told, spent_s = (
                statistics.mean(column) for column in zip(*results, strict=True)
            )
            total = statistics.mean(sum(len(ids) for _, ids in texts) for texts, _ in several)
            rows.append(
                [
                    name,
                    f"{blocks:.0f}",
                    f"{100 * best:.1f} %",
                    *(f"{one:.3f}" for one in others),
                    f"{mine:.3f}",
                    "met" if mine >= BAR else "missed",
                    f"{1e6 * spent_s / total:.1f}",
                    f"{told:.3f}",
                ]
            )
        print(table([rows[0], *rows[-len(SHARES) :]]), "\n", flush=True)


if __name__ == "__main__":
    main()

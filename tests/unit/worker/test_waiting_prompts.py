"""Prompts that wait, on the schedulers of both roles: their order follows what the cache has, and a step looks up a few
blocks of each, however long it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdserve.core.kv.blocks import BlockAllocator
from tests.unit.worker.test_fetches import ROLES, SIZE, TEXT, Role, Worker

NUM_PROMPTS = 6
MOST = 3  # blocks that are looked up for a prompt of which nothing has changed


class Lookups:
    """Counts the blocks that are looked up without being taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        contains, num_matched = BlockAllocator.__contains__, BlockAllocator.num_matched

        def counted_contains(blocks: BlockAllocator, block_hash: object) -> bool:
            self.count += 1
            return contains(blocks, block_hash)

        def counted_num_matched(blocks: BlockAllocator, hashes: Sequence[bytes]) -> int:
            found = num_matched(blocks, hashes)
            self.count += min(found + 1, len(hashes))
            return found

        monkeypatch.setattr(BlockAllocator, "__contains__", counted_contains)
        monkeypatch.setattr(BlockAllocator, "num_matched", counted_num_matched)

    def of_step(self, worker: Worker) -> int:
        before = self.count
        assert worker.step()
        return self.count - before


def with_waiting_prompts(role: Role) -> Worker:
    """A worker that computes a long prompt, while others wait whose beginning is cached."""
    worker = Worker(role, num_blocks=100)
    worker.offer("first", TEXT)
    worker.run()
    worker.offer("long", [3] * 100)
    for number in range(NUM_PROMPTS):
        worker.offer(f"waiting {number}", [*TEXT, *[number] * SIZE, 1])
    return worker


@ROLES
def test_a_step_looks_up_few_blocks_of_waiting_prompts(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, lookups = with_waiting_prompts(role), Lookups(monkeypatch)
    assert lookups.of_step(worker) >= NUM_PROMPTS * len(TEXT) // SIZE, "each prompt is looked up completely once"
    for _ in range(3):
        assert 0 < lookups.of_step(worker) <= MOST * NUM_PROMPTS
    worker.run()
    worker.close()


@ROLES
@pytest.mark.parametrize("is_evicted", [False, True])
def test_the_order_follows_what_the_cache_gets_and_loses(role: Role, is_evicted: bool) -> None:
    worker = Worker(role)
    worker.offer("first", TEXT[:8], ttft_s=1000.0)
    worker.offer("new", [5] * 16, ttft_s=1000.0)
    worker.offer("sharing", TEXT[:20], ttft_s=1000.0)
    worker.step()
    worker.offer("tiny", [6] * 8, ttft_s=1000.0)
    worker.step()
    if is_evicted:
        blocks = worker.blocks.allocate(worker.blocks.num_available)
        assert blocks is not None
        worker.blocks.give_back(blocks)
    worker.run()
    last = ["new", "sharing"] if is_evicted else ["sharing", "new"]  # 20 tokens are left of it, or 12
    assert [key.request_id for key in worker.cached] == ["first", "tiny", *last]
    worker.close()


@ROLES
def test_prompts_that_may_fetch_look_up_few_blocks_of_those_before_them(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, lookups = with_waiting_prompts(role), Lookups(monkeypatch)
    num_blocks = len(TEXT) // SIZE + 1
    at_first = 2 * num_blocks  # once for the fetch, once for the order
    assert lookups.of_step(worker) <= NUM_PROMPTS * (at_first + MOST * NUM_PROMPTS)
    worker.run()
    worker.close()

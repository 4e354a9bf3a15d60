"""kv_check: a wrong block causes a recomputation, and never a wrong token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.core.effects import KvMistaken
from pdserve.core.protocol import TokenRow
from tests.unit.decode_worker.conftest import BLOCK_SIZE, Bench

PROMPT = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5]  # Two and a half blocks.


def answer(make_bench: Callable[..., Bench], is_checked: bool = False) -> list[int]:
    bench = make_bench(is_checked=is_checked)
    land(bench)
    bench.run()
    return bench.sampled["a"]


def land(bench: Bench, name: str = "a", prompt: list[int] = PROMPT) -> tuple[int, ...]:
    """A text that arrived from a prefill worker. Returns its granted blocks."""
    bench.offer(name, prompt, is_local=False)
    first = bench.write(name)
    bench.receive(name)
    bench.admit(name, first)
    return bench.grants[bench.key(name)].blocks


def mistakes(effects: list[object]) -> list[str]:
    return [effect.error for effect in effects if isinstance(effect, KvMistaken)]


def test_an_undisturbed_text_passes_every_check_and_is_the_same(make_bench: Callable[..., Bench]) -> None:
    assert answer(make_bench, is_checked=True) == answer(make_bench)


def test_commit_marks_every_received_block(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.offer("a", PROMPT, is_local=False)
    content_hashes = bench.scheduler.content_hashes(bench.key("a"))
    blocks = bench.grants[bench.key("a")].blocks
    assert len(set(content_hashes)) == len(blocks) == 3
    assert bench.scheduler.blocks.stamps.content_hashes(blocks) == (0, 0, 0)
    bench.receive("a")
    assert bench.scheduler.blocks.stamps.content_hashes(blocks) == content_hashes
    bench.scheduler.cancel(bench.key("a"))


def test_hashes_of_granted_blocks_exclude_cached_ones(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    land(bench)
    bench.run()
    bench.offer("b", PROMPT, is_local=False)
    assert bench.grants[bench.key("b")].num_cached_blocks == 2
    assert len(bench.scheduler.content_hashes(bench.key("b"))) == 1
    bench.scheduler.cancel(bench.key("b"))
    bench.scheduler.lost(bench.key("b"), "over")


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_block_of_another_text_is_recomputed(make_bench: Callable[..., Bench], at: int, steps: int) -> None:
    """Once the half block has grown, the content hash with which it was received is invalid."""
    expected = answer(make_bench)
    bench = make_bench(is_checked=True)
    blocks = land(bench)
    for _ in range(steps):
        bench.step()
    size = bench.engine.pool.block_bytes
    bench.scheduler.blocks.stamps.mark(blocks[at], 666)
    # The blocks that it would have read.
    bench.engine.pool.buffer[blocks[at] * size : (blocks[at] + 1) * size] = b"\x11" * size
    bad = bench.step()
    if at == 2 and steps in (1, 5):
        return  # A growing block has no content hash, so its epoch is checked.
    [error] = mistakes(bad)
    assert f"block {blocks[at]} is stamped 000000000000029a, expected" in error
    assert not [effect for effect in bad if isinstance(effect, TokenRow)]
    bench.run()
    assert bench.sampled["a"] == expected


@pytest.mark.parametrize("at", [0, 2])
def test_a_reassigned_block_is_recomputed(make_bench: Callable[..., Bench], at: int) -> None:
    expected = answer(make_bench)
    bench = make_bench(is_checked=True)
    blocks = land(bench)
    bench.step()
    bench.scheduler.blocks.stamps.begin([blocks[at]])
    bad = bench.step()
    assert mistakes(bad) == [f"block {blocks[at]} was reassigned while a sequence used it"]
    assert not [effect for effect in bad if isinstance(effect, TokenRow)]
    bench.run()
    assert bench.sampled["a"] == expected


def test_blocks_allocated_while_decoding_are_checked(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(is_checked=True)
    land(bench, prompt=PROMPT[: 2 * BLOCK_SIZE])
    bench.step()
    [sequence] = bench.scheduler.sequences.by_key.values()
    grown = sequence.blocks[-1]
    bench.scheduler.blocks.stamps.begin([grown])
    assert mistakes(bench.step()) == [f"block {grown} was reassigned while a sequence used it"]
    bench.run()


def test_an_invalidated_block_is_never_reused(make_bench: Callable[..., Bench]) -> None:
    expected = answer(make_bench)
    bench = make_bench(is_checked=True)
    blocks = land(bench)
    bench.run()
    bench.sampled.clear()
    bench.scheduler.blocks.stamps.mark(blocks[0], 666)  # Now cached, with wrong contents.
    bench.offer("b", PROMPT)
    assert len(mistakes(bench.run())) == 1
    assert bench.sampled["b"] == expected
    bench.offer("c", PROMPT)
    assert mistakes(bench.run()) == []
    assert bench.sampled["c"] == expected


def test_without_kv_check_nothing_is_checked(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    blocks = land(bench)
    bench.scheduler.blocks.stamps.mark(blocks[0], 666)
    assert mistakes(bench.run()) == []


def test_a_wrong_block_in_an_async_step_costs_no_token(make_bench: Callable[..., Bench]) -> None:
    expected = answer(make_bench)
    bench = make_bench(is_checked=True, is_async=True)
    blocks = land(bench)
    bench.step()
    assert bench.flight is not None
    bench.scheduler.blocks.stamps.begin([blocks[0]])
    assert len(mistakes(bench.run())) == 1
    assert bench.sampled["a"] == expected

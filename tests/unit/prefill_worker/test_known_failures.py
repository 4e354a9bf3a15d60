"""Known failures of other systems in the tables of a prefill worker. Each test names the report."""

from __future__ import annotations

from pdserve.core.effects import SendAborted, TransferLost
from pdserve.core.protocol import AttemptFailed, Released
from tests.unit.prefill_worker.conftest import BLOCK_SIZE, Bench

PROMPT = list(range(1, 3 * BLOCK_SIZE + 2))


def test_blocks_being_sent_are_not_evicted(bench: Bench) -> None:
    """TensorRT-LLM#12542: a block was evicted before the sender had read it; the receiver waited for ever."""
    bench.offer("one", PROMPT)
    pushed = [push for effect in [bench.run()] for push in bench.pushes(effect, "one")]
    sources = {block for push in pushed for _, block in push.blocks}
    assert len(sources) == 4
    blocks = bench.scheduler.blocks
    taken = blocks.allocate(blocks.num_available)
    assert taken is not None
    assert not sources & set(taken)
    blocks.release(taken)
    assert bench.sent("one") == [Released(key=bench.key("one"))]
    assert blocks.num_referenced == 0


def test_blocks_of_a_cancelled_prompt_are_kept_while_read(bench: Bench) -> None:
    """vllm#21570: the prefill side's timeout freed blocks that were then read with another prompt's KV."""
    bench.offer("one", PROMPT)
    bench.run()
    key = bench.key("one")
    assert bench.scheduler.cancel(key) == [SendAborted(key=key)]
    assert bench.scheduler.blocks.num_referenced == 4
    assert bench.scheduler.cancel(key) == []
    assert bench.scheduler.sent(key, is_whole=False, error="aborted") == [Released(key=key)]
    assert bench.scheduler.blocks.num_referenced == 0


def test_ends_of_unknown_sends_are_ignored(bench: Bench) -> None:
    """vllm PR#25067, llm-d#187: a send that ended after its request raised KeyError and ended the engine."""
    key = bench.key("one")
    assert bench.scheduler.sent(key, is_whole=True) == []
    bench.offer("one", PROMPT)
    assert bench.scheduler.sent(key, is_whole=False, error="early") == []  # It holds no block yet.
    bench.run()
    assert bench.sent("one") == [Released(key=key)]
    assert bench.sent("one") == []
    assert bench.scheduler.sent(key, is_whole=False, error="late") == []


def test_a_send_that_fails_during_prefill_frees_the_prompt(bench: Bench) -> None:
    """vllm PR#41269: the prefill side continued, and held its blocks until a timeout of minutes."""
    bench.offer("one", PROMPT)
    bench.step()
    key = bench.key("one")
    lost = TransferLost(key=key, error="the receiver refused")
    assert bench.scheduler.sent(key, is_whole=False, error="the receiver refused") == [lost, Released(key=key)]
    assert bench.scheduler.blocks.num_referenced == 0
    assert not bench.scheduler.has_work


def test_a_grant_of_the_wrong_size_is_rejected_first(bench: Bench) -> None:
    """vllm#52234, case 1, seen from the prefill side: fewer or more blocks than the prompt has."""
    for num_granted in (0, 3, 5):
        effects = bench.offer("one", PROMPT, num_granted=num_granted)
        assert [type(one) for one in effects] == [AttemptFailed, Released]
    assert bench.scheduler.blocks.num_referenced == 0

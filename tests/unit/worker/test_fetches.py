"""Prompts that wait for blocks of a slower tier, on the schedulers of both roles, with a source that is late, fails, or
supplies a part. Tokens are right, no block is lost, and no prompt waits for longer than computing takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from decode_worker.planning import ChunkRule
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence_table import KvCheck
from pdserve.core.attempt import Attempt, AttemptKey, EndRule, FailureKind
from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.cost.step_rule import PromptOrder
from pdserve.core.effects import SendAborted, TokensSampled
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.fetch import LATE_LOOKUP, MOST_ALONE, Fetch, FetchAborted, Fetches, FetchStarted, Lookup
from pdserve.core.kv.hashing import block_hashes
from pdserve.core.kv.host_tier import HostTier, LoadRule
from pdserve.core.protocol import AttemptFailed, FirstToken, Released
from pdserve.core.types import Role, Sampling
from pdserve.engine.toy import EOS, ToyEngine, answer, cell
from prefill_worker.pushing import PushRule
from prefill_worker.scheduler import PrefillScheduler
from tests.support.examples import examples

SIZE = 4
TOKEN_S = 1.0  # to compute a token
KEY = b"k" * 32
PRIOR = CostPrior(prefill_base_s=0.0, prefill_per_token_s=TOKEN_S, prefill_per_token_context_s=0.0, decode_base_s=0.0)
GARBAGE = b"\xee" * 8 * SIZE


class Copies:
    """The host tier's memory."""

    def __init__(self, engine: ToyEngine, num_slots: int) -> None:
        self.num_slots, self._slots = num_slots, [b""] * num_slots
        self._buffer, self._size = engine.pool.buffer, engine.pool.block_bytes

    def save(self, block: int, slot: int) -> None:
        self._slots[slot] = bytes(self._buffer[block * self._size : (block + 1) * self._size])

    def load(self, slot: int, block: int) -> None:
        self._buffer[block * self._size : (block + 1) * self._size] = self._slots[slot]


class Source:
    """Has the blocks of texts that it was given, of which it says the first `most`."""

    name = "disk"

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.most = 1000
        self.seconds = 0.0  # for each block
        self.num_asked = 0

    def keep(self, tokens: Sequence[int]) -> None:
        cells = [cell(token, position).to_bytes(8, "little") for position, token in enumerate(tokens)]
        for index, one in enumerate(block_hashes(tokens, SIZE, KEY)):
            self.blocks[one] = b"".join(cells[index * SIZE : (index + 1) * SIZE])

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        self.num_asked += 1
        known = next((at for at, one in enumerate(hashes) if one not in self.blocks), len(hashes))
        return min(known, self.most)

    def predict_s(self, attempt: Attempt, num_blocks: int) -> float:
        assert num_blocks, "nothing was found"
        return self.seconds * num_blocks


class LateSource(Source):
    """Finds nothing before a lookup has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup_s = TOKEN_S
        self.share = 1.0
        self.has_looked = False

    def num_found(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> int:
        return super().num_found(attempt, hashes, first) if self.has_looked else 0

    def lookup(self, attempt: Attempt, hashes: Sequence[bytes], first: int) -> Lookup | None:
        return None if self.has_looked else Lookup(self.lookup_s, self.share)


class Worker:
    """A scheduler of one role, driven by hand. What a fetch has not finished is garbage."""

    def __init__(self, role: Role, num_blocks: int = 24, num_slots: int = 0, source: type[Source] = Source) -> None:
        self.engine = ToyEngine(num_blocks=num_blocks, block_size=SIZE)
        tier = None
        if num_slots:
            tier = HostTier(Copies(self.engine, num_slots), LoadRule(0.0, lambda uncached, cached: 0.0), 64)
        self.blocks = BlockAllocator(num_blocks, tier=tier)
        kv = KvCache(self.blocks, SIZE)
        self.source = source()
        self.fetches = Fetches(kv, [self.source], CostModel(PRIOR).prefill_s)
        rule = EndRule(eos_token_ids=frozenset({EOS}), max_context_tokens=num_blocks * SIZE)
        self.role = role
        self.scheduler: Any
        if role is Role.PREFILL:
            self.scheduler = PrefillScheduler(
                kv=kv,
                fetches=self.fetches,
                prompt_order=PromptOrder(CostModel(PRIOR), most=8),
                inbox_depth=8,
                end_rule=rule,
                pushing=PushRule(PRIOR, block_size=SIZE, block_bytes=8 * SIZE, num_layers=1, max_batch_tokens=8),
            )
        else:
            self.scheduler = DecodeScheduler(
                kv=kv,
                fetches=self.fetches,
                max_batch=4,
                chunks=ChunkRule(CostModel(PRIOR), most=8),
                inbox_depth=8,
                end_rule=rule,
                check=KvCheck(self.blocks.stamps),
            )
        self.now_s = 0.0
        self.running: dict[int, Fetch] = {}
        self.aborted: set[int] = set()
        self.prompts: dict[AttemptKey, list[int]] = {}
        self.sampled: dict[AttemptKey, list[int]] = {}
        self.cached: dict[AttemptKey, int] = {}
        self.num_fetched = 0

    def offer(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        deadline_at_s: float | None = None,
        ttft_s: float | None = None,
    ) -> Any:
        key = AttemptKey(1, name, 1)
        attempt = Attempt(
            key=key,
            prompt_ids=tuple(prompt),
            sampling=Sampling(temperature=0.0, max_tokens=max_tokens),
            chain_key=KEY,
            arrived_s=self.now_s,
            deadline_at_s=deadline_at_s,
            ttft_s=ttft_s,
        )
        if self.role is Role.PREFILL:
            effects = self.scheduler.offer(
                attempt,
                receiver="d",
                receiver_cached_blocks=0,
                num_granted=-(-len(prompt) // SIZE),
                granted_size=SIZE,
                may_divide=False,
                now_s=self.now_s,
            )
        else:
            effects = self.scheduler.offer(attempt, is_local=True, now_s=self.now_s)
        if key in self.scheduler:
            self.prompts[key], self.sampled[key] = list(prompt), []
        self.act(effects)
        return key

    def act(self, effects: Iterable[Any]) -> None:
        for effect in effects:
            match effect:
                case FetchStarted(fetch):
                    self.running[fetch.number] = fetch
                    self.write(fetch)
                case FetchAborted(number, _):
                    assert number not in self.aborted
                    self.aborted.add(number)
                case SendAborted():
                    self.act(self.scheduler.sent(effect.key, is_whole=False))
                case FirstToken():
                    self.sampled[effect.key].append(effect.token.token_id)
                    self.cached[effect.key] = effect.cached_tokens
                    if effect.finish is None:
                        self.act(self.scheduler.sent(effect.key, is_whole=True))
                case TokensSampled():
                    for row in effect.rows:
                        self.sampled[row.key].extend(token.token_id for token in row.tokens)
                        self.cached.setdefault(row.key, row.cached_tokens)
                    plain = effect.plain
                    if plain is not None:
                        for key, token_id in zip(plain.keys, plain.token_ids, strict=True):
                            self.sampled[key].append(token_id)
                case AttemptFailed():
                    self.prompts.pop(effect.key, None)
        self.check()

    def write(self, fetch: Fetch, count: int = 0) -> None:
        """The first `count` blocks, and garbage into the others."""
        size = 8 * SIZE
        for index, (block, one) in enumerate(zip(fetch.blocks, fetch.hashes, strict=True)):
            self.engine.pool.buffer[block * size : (block + 1) * size] = (
                self.source.blocks[one] if index < count else GARBAGE
            )

    def end(self, number: int, count: int | None = None) -> None:
        fetch = self.running.pop(number)
        self.aborted.discard(number)
        count = len(fetch.blocks) if count is None else min(count, len(fetch.blocks))
        self.write(fetch, count)
        self.num_fetched += count
        self.fetches.ended(number, count)
        self.check()

    def cancel(self, key: AttemptKey) -> None:
        self.prompts.pop(key, None)
        self.act(self.scheduler.cancel(key))

    def step(self) -> bool:
        plan, effects = self.scheduler.plan(self.now_s)
        rows = list(plan.rows)
        self.act(effects)
        self.now_s += 1.0
        if rows:
            self.act(self.scheduler.apply(plan, self.engine.step(rows), self.now_s))
        return bool(rows)

    def run(self) -> None:
        """Ends what can end if the source only reports the ends of aborted fetches, whose memory may be needed."""
        for _ in range(1000):
            if not self.scheduler.live():
                return
            if not self.step():
                for number in list(self.aborted):
                    self.end(number, 0)
        raise AssertionError(f"these never end: {self.scheduler.live()}")

    def check(self) -> None:
        self.scheduler.check()
        fetched = sum(len(fetch.blocks) for fetch in self.running.values())
        assert fetched <= MOST_ALONE * self.blocks.num_blocks
        for key, prompt in self.prompts.items():
            sampled = self.sampled[key]
            assert sampled == answer(prompt, len(sampled)), f"{key}: wrong tokens"

    def close(self) -> None:
        for key in self.scheduler.live():
            self.cancel(key)
        for number in list(self.running):
            assert number in self.aborted, "a fetch of nobody was not aborted"
            self.end(number, 0)
        assert self.blocks.num_referenced == 0
        assert len(self.fetches) == 0
        assert self.fetches.next_give_up_s == math.inf


ROLES = pytest.mark.parametrize("role", list(Role))
TEXT = [10 + number % 50 for number in range(60)]


@ROLES
def test_a_prompt_uses_what_it_has_waited_for(role: Role) -> None:
    worker = Worker(role)
    worker.source.keep(TEXT[:20])
    key = worker.offer("a", TEXT[:22])
    other = worker.offer("b", [7, 8, 9])
    assert worker.step()  # the later prompt does not wait
    assert worker.sampled[other]
    assert not worker.sampled[key]
    assert not worker.step()
    worker.end(1)
    worker.run()
    assert worker.cached[key] == 20
    worker.close()


@ROLES
def test_a_late_fetch_is_a_miss(role: Role) -> None:
    worker = Worker(role)
    worker.source.keep(TEXT[:20])
    key = worker.offer("a", TEXT[:22])
    worker.step()
    assert worker.fetches.next_give_up_s == 20 * TOKEN_S
    worker.run()
    assert worker.cached[key] == 0
    assert worker.now_s <= 20 * TOKEN_S + 6
    worker.close()


@ROLES
def test_prompts_share_a_fetch(role: Role) -> None:
    worker = Worker(role)
    worker.source.keep(TEXT[:20])
    keys = [worker.offer(name, TEXT[:length]) for name, length in (("a", 21), ("b", 22), ("c", 13))]
    worker.step()
    assert list(worker.running) == [1]
    worker.cancel(keys[0])
    assert not worker.aborted  # the others wait for it too
    worker.end(1)
    worker.run()
    assert [worker.cached[key] for key in keys[1:]] == [20, 12]
    assert worker.num_fetched == 5
    worker.close()


@ROLES
def test_a_part_of_a_fetch_is_used(role: Role) -> None:
    worker = Worker(role)
    worker.source.keep(TEXT[:20])
    key = worker.offer("a", TEXT[:22])
    worker.step()
    worker.end(1, 2)
    worker.run()
    assert worker.cached[key] == 8
    assert not worker.running  # what failed is not tried again
    worker.close()


@ROLES
def test_a_slow_source_is_not_asked_for_blocks(role: Role) -> None:
    worker = Worker(role)
    worker.source.keep(TEXT[:20])
    worker.source.seconds = SIZE * TOKEN_S
    key = worker.offer("a", TEXT[:22])
    worker.run()
    assert worker.cached[key] == 0
    assert not worker.running
    assert worker.source.num_asked == 1  # and not in each plan
    worker.close()


@ROLES
def test_a_fetch_may_take_until_the_turn_of_its_prompt(role: Role) -> None:
    worker = Worker(role)
    worker.source.keep(TEXT[1:21])
    worker.source.seconds = 1.5 * SIZE * TOKEN_S
    worker.offer("a", TEXT[:22])
    key = worker.offer("b", TEXT[1:23])
    worker.step()
    assert list(worker.running) == [1]
    assert worker.fetches.next_give_up_s == pytest.approx((22 + 20) * TOKEN_S)
    worker.end(1)
    worker.run()
    assert worker.cached[key] == 20
    worker.close()


@ROLES
def test_what_arrives_before_the_turn_of_a_prompt_is_fetched(role: Role) -> None:
    worker = Worker(role)
    worker.source.keep(TEXT[1:21])
    worker.source.seconds = 2.2 * SIZE * TOKEN_S  # all five blocks would take 44 s, and 22 + 20 to compute
    worker.offer("a", TEXT[:22])
    key = worker.offer("b", TEXT[1:23])
    worker.step()
    assert [len(fetch.blocks) for fetch in worker.running.values()] == [2]
    worker.end(1)
    worker.run()
    assert worker.cached[key] == 8
    worker.close()


@ROLES
def test_a_prompt_waits_for_a_lookup(role: Role) -> None:
    worker = Worker(role, source=LateSource)
    late = worker.source
    assert isinstance(late, LateSource)
    late.keep(TEXT[:20])
    key = worker.offer("a", TEXT[:22])
    assert not worker.step()
    assert not worker.running
    assert worker.fetches.next_give_up_s == LATE_LOOKUP * TOKEN_S
    late.has_looked = True
    worker.fetches.looked_up()
    worker.step()
    assert list(worker.running) == [1]
    assert worker.fetches.next_give_up_s == pytest.approx(20 * TOKEN_S)
    worker.end(1)
    worker.run()
    assert worker.cached[key] == 20
    worker.close()


@ROLES
@pytest.mark.parametrize(("lookup_s", "share"), [(30 * TOKEN_S, 1.0), (TOKEN_S, 0.01), (TOKEN_S, 0.0)])
def test_a_lookup_that_hardly_pays_is_not_waited_for(role: Role, lookup_s: float, share: float) -> None:
    worker = Worker(role, source=LateSource)
    late = worker.source
    assert isinstance(late, LateSource)
    late.lookup_s, late.share = lookup_s, share
    key = worker.offer("a", TEXT[:22])
    assert worker.step()
    worker.run()
    assert worker.cached[key] == 0
    worker.close()


@ROLES
def test_a_lookup_that_hangs_or_finds_nothing_is_a_miss(role: Role) -> None:
    for has_ended in (False, True):
        worker = Worker(role, source=LateSource)
        late = worker.source
        assert isinstance(late, LateSource)
        key = worker.offer("a", TEXT[:22])
        assert not worker.step()
        late.has_looked = has_ended
        if has_ended:
            worker.fetches.looked_up()
        worker.run()
        assert worker.cached[key] == 0
        assert worker.now_s <= LATE_LOOKUP * TOKEN_S + 6
        worker.close()


@ROLES
def test_a_fetch_follows_the_host_tier(role: Role) -> None:
    worker = Worker(role, num_blocks=10, num_slots=30)
    first = worker.offer("a", TEXT[:25])
    worker.run()
    assert worker.cached[first] == 0
    worker.offer("b", [5] * 39)  # moves the blocks of the first prompt to the tier
    worker.run()
    worker.source.keep(TEXT[:36])
    key = worker.offer("c", TEXT[:38])
    worker.step()
    assert [(fetch.first, len(fetch.blocks)) for fetch in worker.running.values()] == [(6, 3)]
    worker.end(1)
    worker.run()
    assert worker.cached[key] == 36
    worker.close()


@ROLES
def test_room_for_a_prompt_does_not_displace_its_copies(role: Role) -> None:
    """What is evicted for it goes to the host tier too, where other copies leave for it."""
    worker = Worker(role, num_blocks=10, num_slots=14)
    for name, prompt in (("a", TEXT[:25]), ("b", [4] * 25), ("c", [5] * 39)):
        worker.offer(name, prompt)
        worker.run()
    key = worker.offer("again", TEXT[:26])
    worker.run()
    assert worker.cached[key] == 24
    worker.close()


@ROLES
def test_fetches_leave_room(role: Role) -> None:
    """The second waits for the end of the first, because both together would hold too much of the pool."""
    worker = Worker(role, num_blocks=24)
    texts = [[one, *TEXT[:44]] for one in (3, 4)]
    for text in texts:
        worker.source.keep(text)
    first = worker.offer("a", texts[0][:33])
    second = worker.offer("b", texts[1][:42])
    worker.step()
    assert [len(fetch.blocks) for fetch in worker.running.values()] == [8]
    assert worker.fetches.is_waiting(second)
    worker.end(1)
    worker.step()
    worker.end(2)
    worker.run()
    assert worker.cached[first] == 32
    assert worker.cached[second] > 0
    worker.close()


@ROLES
def test_a_source_that_hangs_leaves_room(role: Role) -> None:
    """The end of its fetch is never reported. It holds at most half of the pool, and no prefix of the prompt."""
    worker = Worker(role, num_blocks=24)
    text = [10 + number % 50 for number in range(92)]
    worker.offer("before", text[:21])
    worker.run()
    worker.source.keep(text[:88])
    key = worker.offer("a", text[:90])
    worker.step()
    assert [(fetch.first, len(fetch.blocks)) for fetch in worker.running.values()] == [(5, 12)]
    worker.cancel(key)
    assert worker.aborted == {1}
    assert worker.blocks.num_referenced == 12
    for number in range(3):
        other = worker.offer(f"other-{number}", [7 + number] * 47)  # 12 blocks
        while other in worker.scheduler.live():
            assert worker.step(), "there is no memory"
    assert worker.running.keys() == {1}
    worker.close()


@ROLES
def test_a_fetch_leaves_the_memory_of_an_earlier_prompt(role: Role) -> None:
    """Which starts in the same step."""
    worker = Worker(role, num_blocks=24)
    worker.source.keep(TEXT)
    first = worker.offer("a", [7] * 59)  # 15 blocks, of which none is on disk
    second = worker.offer("b", TEXT[:50])
    assert worker.step()
    assert [len(fetch.blocks) for fetch in worker.running.values()] == [9 if role is Role.PREFILL else 8]
    worker.step()
    for number in list(worker.running):
        worker.end(number)
    worker.run()
    assert [len(worker.sampled[key]) for key in (first, second)] == [1, 1]
    worker.close()


@ROLES
def test_prompt_logprobs_are_computed(role: Role) -> None:
    worker = Worker(role)
    worker.source.keep(TEXT[:20])
    attempt = Attempt(
        key=AttemptKey(1, "a", 1),
        prompt_ids=tuple(TEXT[:22]),
        sampling=Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0),
        chain_key=KEY,
    )
    if role is Role.DECODE:
        worker.scheduler.offer(attempt, is_local=True, now_s=0.0)
    else:
        worker.scheduler.offer(
            attempt,
            receiver="d",
            receiver_cached_blocks=0,
            num_granted=6,
            granted_size=SIZE,
            may_divide=False,
            now_s=0.0,
        )
    _, effects = worker.scheduler.plan(0.0)
    assert not [one for one in effects if isinstance(one, FetchStarted)]
    worker.close()


def live(role: Role, seed: int, num_events: int) -> Worker:
    """Random events. `check` follows each of them."""
    rng = random.Random(seed)
    worker = Worker(role, num_blocks=rng.choice([10, 16, 24, 40]), num_slots=rng.choice([0, 0, 6, 30]))
    texts = [[one, *rng.choices(range(10, 60), k=70)] for one in (1, 2, 3)]
    for text in texts:
        worker.source.keep(text[: rng.randrange(70)])
    num_offered = 0
    for _ in range(num_events):
        match rng.choice(["offer", "offer", "step", "step", "step", "end", "end", "cancel", "fail", "source", "time"]):
            case "offer":
                num_offered += 1
                text = rng.choice(texts)[: rng.randrange(1, min(70, worker.blocks.num_blocks * SIZE))]
                deadline_at_s = worker.now_s + rng.choice([1.0, 5.0, 20.0]) if rng.random() < 0.1 else None
                max_tokens = rng.choice([1, 2]) if role is Role.PREFILL else rng.randrange(1, 9)
                worker.offer(f"{num_offered}", text, max_tokens=max_tokens, deadline_at_s=deadline_at_s)
            case "step":
                worker.step()
            case "end" if worker.running:
                number = rng.choice(list(worker.running))
                worker.end(number, rng.choice([None, None, 0, 1, 3]))
            case "cancel" if worker.scheduler.live():
                worker.cancel(rng.choice(worker.scheduler.live()))
            case "fail" if worker.scheduler.live() and rng.random() < 0.2:
                for key in worker.scheduler.live():  # as a broken engine does
                    worker.act(worker.scheduler.fail(key, FailureKind.INTERNAL, "broken"))
            case "source":
                worker.source.most = rng.choice([0, 1, 5, 1000])
                worker.source.seconds = rng.choice([0.0, 0.5, 3.0, 10.0])
            case "time":
                worker.now_s += rng.choice([0.5, 5.0, 50.0])
                worker.act(worker.scheduler.expire(worker.now_s))
    worker.run()
    worker.close()
    return worker


@ROLES
def test_random_events(role: Role) -> None:
    workers = [live(role, seed, 120) for seed in range(examples(60))]
    assert sum(worker.num_fetched for worker in workers) > 0


@pytest.mark.slow
@ROLES
def test_more_random_events(role: Role) -> None:
    for seed in range(1000, 1500):
        live(role, seed, 200)


def test_released_comes_once_and_last() -> None:
    worker = Worker(Role.PREFILL)
    worker.source.keep(TEXT[:20])
    key = worker.offer("a", TEXT[:22])
    worker.step()
    effects = worker.scheduler.cancel(key)
    assert [type(one) for one in effects] == [FetchAborted, Released]
    worker.act(effects)
    worker.close()

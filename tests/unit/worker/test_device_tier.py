"""The host tier of pools on GPUs, in real workers over a stand-in for the device: tokens, memory, and settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.steps_in_flight import DeferredFlight
from kvtransfer.device_tier import DeviceTier
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.engine.interface import Row, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.engine.memory.disk import ReadSpeed
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2
from pdserve.worker.program import RoleProgram
from tests.support.fake_device import DeviceEngine, FakeCopying, FakeDevice, Trouble, wait_for
from tests.support.fake_ends import stand_ins
from tests.support.tooled_model import BUNDLED
from tests.unit.worker.conftest import Running
from tests.unit.worker.test_disk_tier import hashes_of
from tests.unit.worker.test_pulls import from_, idle
from tests.unit.worker.test_sending import MAX_TOKENS, SLOW, begin, finish, order

pytestmark = pytest.mark.gpu_checks

PROMPT = list(b"The quick brown fox jumps over it")  # 33 bytes: 8 blocks and a token
NUM_BLOCKS = 16
LATE = Trouble(late=0.3, late_s=0.02)


def others(count: int) -> list[list[int]]:
    return [[number + 1, *PROMPT[1:]] for number in range(count)]


def load_on_device(settings: Any, role: Role) -> Any:
    return DeviceEngine(load_engine(settings, role))


def load_as_vllm(settings: Any, role: Role) -> Any:
    return load_on_device(replace(settings, engine="auto"), role)


class Flight:
    """A launched step, which the device runs on its own: what is queued later runs after it, and it waits for copies
    that held the engine before."""

    def __init__(self, engine: AsyncDeviceEngine, rows: Sequence[Row], after: Flight | None) -> None:
        assert engine.pool.device is not None
        self._whole, self._held = engine, engine.pool.device.take_held()
        self._ended = engine.pool.device.begin_step()
        self._flight = DeferredFlight(self, rows, None if after is None else after._flight)  # type: ignore[arg-type]
        self.unsampled = self._flight.unsampled
        assert not self.unsampled
        self._outs = engine.stream.submit(self._run)

    def step(self, rows: Sequence[Row]) -> Any:
        wait_for(self._held)
        return self._whole._step(rows)

    def _run(self) -> Sequence[RowOut]:
        try:
            return self._flight.wait()
        finally:
            self._ended.set()

    def wait(self) -> Sequence[RowOut]:
        return self._outs.result(60.0)


class AsyncDeviceEngine(DeviceEngine):
    num_async = 0

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.stream = ThreadPoolExecutor(1)

    def launch(self, rows: Sequence[Row], after: Flight | None) -> Flight:
        self.num_async += after is not None
        return Flight(self, rows, after)


def load_async(settings: Any, role: Role) -> Any:
    return AsyncDeviceEngine(load_engine(settings, role))


@pytest.fixture(autouse=True)
def devices() -> Iterator[dict[int, FakeDevice]]:
    """Some of their copies take long."""
    with stand_ins(LATE) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a prompt may wait, and how fast copies are expected to be, do not depend on the machine."""
    whole, measure_s = RoleProgram.fetches_with, DeviceTier.measure_s

    def measured_s(tier: DeviceTier) -> float:
        assert measure_s(tier) > 0.0
        tier._speed = ReadSpeed(1e12)
        return 0.0

    monkeypatch.setattr(RoleProgram, "fetches_with", lambda self, _: whole(self, lambda tokens, cached: 60.0))
    monkeypatch.setattr(DeviceTier, "measure_s", measured_s)


def copies_of(worker: Running) -> DeviceTier:
    tier = worker.program.sources["host"]
    assert isinstance(tier, DeviceTier)
    return tier


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_blocks_come_back_from_pinned_memory(start: Any, attach: Any, ask: Any, role: Role) -> None:
    settings = {"kv_blocks": NUM_BLOCKS, "kv_host_bytes": 2**20}
    d = start(Role.DECODE, load_on_device, model="toy", **(settings if role is Role.DECODE else {}))
    p = start(Role.PREFILL, load_on_device, model="toy", **settings)
    tiered = p if role is Role.PREFILL else d
    router = await attach(p, d)
    run = router.remote if role is Role.PREFILL else router.local
    expected = answer(PROMPT, 8)
    assert await run(ask("first", PROMPT)) == expected
    for number, other in enumerate(others(4)):
        assert await run(ask(f"other-{number}", other)) == answer(other, 8)
    tier = tiered.program.blocks.tier
    assert tier.num_saved > 0
    assert await run(ask("again", PROMPT)) == expected
    assert tier.num_loaded == tiered.program.fetches.num_filled["host"] == 8
    assert await run(ask("cached", PROMPT)) == expected
    assert tier.num_loaded == 8


async def test_many_prompts_stay_exact_while_their_blocks_move(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, load_on_device, model="toy", kv_blocks=NUM_BLOCKS, kv_host_bytes=40 * 32)
    router = await attach(d)
    for number in range(60):
        prompt = [number * number % 7 + 1, *PROMPT[: 8 + number * 5 % 20]]
        assert await router.local(ask(f"r{number}", prompt)) == answer(prompt, 8)
        await d.on_engine(lambda program: program.check())
    tier = d.program.blocks.tier
    assert tier.num_loaded > 0
    assert len(tier) == tier.num_slots
    assert copies_of(d).flushed(20.0)
    assert copies_of(d).room == len(copies_of(d)._free_rows) == min(40, 2 * tier._most_saved)


async def test_blocks_move_beside_steps_that_were_launched(start: Any, attach: Any, ask: Any) -> None:
    """Sequences end while a step for them runs, and their blocks are loaded into and copied from at once."""
    d = start(
        Role.DECODE,
        load_async,
        model="toy",
        kv_blocks=40,
        kv_host_bytes=2**13,
        speculation="off",
        async_scheduling="on",
        inbox_depth=32,
    )
    router = await attach(d)
    for turn in range(4):
        prompts = [[number % 5 + 1, *PROMPT[: 12 + number * 5 % 20]] for number in range(turn, turn + 12)]
        names = [f"{turn}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask(name, prompt), is_local=True))
        for name, prompt in zip(names, prompts, strict=True):
            assert await router.finished(name) == answer(prompt, 8), name
    await d.on_engine(lambda program: program.check())
    assert d.program.engine.num_async > 10
    assert d.program.blocks.tier.num_loaded > 0


@pytest.mark.slow
async def test_a_real_engine_continues_from_loaded_blocks(start: Any, attach: Any, ask: Any) -> None:
    small = {"model": str(BUNDLED), "kv_blocks": NUM_BLOCKS, "deterministic": "on"}
    d = start(Role.DECODE, load_on_device, **small, kv_host_bytes=2**24)
    router = await attach(d)
    first = await router.local(ask("first", PROMPT))
    for number, other in enumerate(others(3)):
        await router.local(ask(f"other-{number}", other))
    assert await router.local(ask("again", PROMPT)) == first
    assert d.program.blocks.tier.num_loaded == 8


async def test_a_wrong_copy_is_a_miss(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, load_on_device, model="toy", kv_blocks=NUM_BLOCKS, kv_host_bytes=2**20)
    router = await attach(d)
    await router.local(ask("first", PROMPT))
    for number, other in enumerate(others(4)):
        await router.local(ask(f"other-{number}", other))
    copies, tier = copies_of(d), d.program.blocks.tier
    assert copies.flushed(20.0)
    first, *_ = hashes_of(d, PROMPT)
    copies._slots.view(tier.slot_of(first))[0] ^= 1
    assert await router.local(ask("again", PROMPT)) == answer(PROMPT, 8)
    assert tier.num_loaded == 0
    await d.until(lambda program: first not in program.blocks.tier, "the copy has left")
    await d.on_engine(lambda program: program.check())


async def test_without_a_hold_the_stand_in_shows_wrong_tokens(
    start: Any, attach: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in is no more lenient than a device: a step overwrites blocks whose copy has not begun."""
    monkeypatch.setattr(FakeDevice, "hold_engine", lambda self, copying: None)
    d = start(Role.DECODE, load_on_device, model="toy", kv_blocks=NUM_BLOCKS, kv_host_bytes=2**20)
    router = await attach(d)
    for number in range(200):
        prompt = [number % 3 + 1, *PROMPT[1:]]
        if await router.local(ask(f"r{number}", prompt)) != answer(prompt, 8):
            return
    pytest.fail("blocks were not overwritten")


async def test_the_default_takes_a_part_of_the_host(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.device_tier.pin_slots.__defaults__", (lambda: 2**14,))
    d = start(Role.DECODE, load_on_device, model="toy", kv_blocks=NUM_BLOCKS)
    assert d.program.blocks.tier.num_slots == 2**14 // 8 // d.program.engine.spec.block_bytes
    assert start(Role.DECODE, model="toy", worker_id="cpu").program.blocks.tier is None
    vllm = {"model": "toy", "kv_blocks": NUM_BLOCKS, "engine": "vllm"}
    assert start(Role.DECODE, load_as_vllm, **vllm, worker_id="vllm").program.blocks.tier is None
    asked = start(Role.DECODE, load_as_vllm, **vllm, worker_id="asked", kv_host_bytes=2**12)
    assert asked.program.blocks.tier is not None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_host_bytes": 8}, "one block of this model"),
        ({"kv_host_bytes": 2**45}, "bytes are free"),
        ({"kv_host_bytes": 2**20, "is_prefix_cache_on": False}, "is_prefix_cache_on"),
    ],
)
def test_a_tier_that_cannot_be_is_an_error(start: Any, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        start(Role.DECODE, load_on_device, **changes)


def test_copies_that_go_wrong_at_start_turn_the_tier_off(
    start: Any, monkeypatch: pytest.MonkeyPatch, devices: dict[int, FakeDevice]
) -> None:
    """And the host gets its memory back."""
    numbers = iter(range(1000))
    monkeypatch.setattr(FakeCopying, "sums", lambda self: [next(numbers)])
    d = start(Role.DECODE, load_on_device, model="toy", kv_blocks=NUM_BLOCKS, kv_host_bytes=2**20)
    assert d.program.blocks.tier is None
    assert "host" not in d.program.sources
    assert [device.num_unpinned for device in devices.values()] == [1]


# -- pulls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl", "tcp"])
async def test_pools_on_devices_pull_from_each_other(start: Any, attach: Any, ask: Any, transport: str) -> None:
    """Into blocks whose copies are under way: the pulling worker's pool is full."""
    settings: dict[str, Any] = {"model": "toy", "transport": transport, "kv_blocks": NUM_BLOCKS}
    p, d0, d1 = (
        start(role, load_on_device, **settings, worker_id=name, kv_host_bytes=2**20)
        for role, name in ((Role.PREFILL, "p"), (Role.DECODE, "d0"), (Role.DECODE, "d1"))
    )
    expected = answer(PROMPT, 8)
    assert await (await attach(p, d0)).remote(ask("before", PROMPT)) == expected
    router = await attach(d1, name="router of d1")
    for number, other in enumerate(others(4)):
        assert await router.local(ask(f"other-{number}", other)) == answer(other, 8)
    for source in (p, d0):  # the second time, it has the prefix
        name = f"of {source.program.context.config.worker_id}"
        assert await router.local(from_(source, ask(name, PROMPT))) == expected
        assert [one.num_tokens for one in router.all("pull_ended", name)] == ([32] if source is p else [])
    turn = [*PROMPT, *expected, *b"next"]
    other = await attach(p, d1, name="router of p")
    assert await other.remote(from_(d0, ask("turn", turn), 40)) == answer(turn, 8)
    assert other.all("pull_ended", "turn")[0].num_tokens == 8
    await idle(p, d0, d1)


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl", "tcp"])
async def test_an_answer_moves_between_devices(start: Any, attach: Any, ask: Any, transport: str) -> None:
    settings: dict[str, Any] = {"transport": transport, "kv_host_bytes": 2**20}
    p, d0 = start(Role.PREFILL, load_on_device, **settings), start(Role.DECODE, load_on_device, **settings, **SLOW)
    d1 = start(Role.DECODE, load_on_device, **settings, worker_id="decode-1")
    source, target = await attach(p, d0), await attach(d1)
    assert source.hellos[Role.DECODE].sends_kv
    before = await begin(source, ask("r", PROMPT, max_tokens=MAX_TOKENS), 9)
    await order(source, target, ask("r", PROMPT, attempt=2, output=before, max_tokens=MAX_TOKENS))
    assert [*before, *await finish(source, target, "r")] == answer(PROMPT, MAX_TOKENS, prefilled=len(PROMPT))
    [committed] = target.all("transfer_ended", "r")
    assert committed.num_bytes == -(-(len(PROMPT) + 9) // 4) * d1.program.engine.spec.block_bytes

"""The disk tier and the shared store of pools on GPUs, in real workers over a stand-in for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.device_staging import DeviceStaging
from kvtransfer.device_tier import DeviceTier
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.types import Role
from pdserve.engine.memory import store as store_module
from pdserve.engine.memory.block_files import BlockFiles
from pdserve.engine.memory.slow_tier import ReadSpeed
from pdserve.engine.toy import answer
from pdserve.worker.program import RoleProgram
from tests.support.fake_device import FakeDevice
from tests.support.fake_ends import stand_ins
from tests.unit.worker.conftest import Running
from tests.unit.worker.test_device_tier import LATE, NUM_BLOCKS, PROMPT, load_async, load_on_device, others
from tests.unit.worker.test_disk_tier import hashes_of

pytestmark = pytest.mark.gpu_checks

PATIENT_S = 60.0


@pytest.fixture(autouse=True)
def devices() -> Iterator[dict[int, FakeDevice]]:
    """Some of their copies take long."""
    with stand_ins(LATE) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a prompt may wait, and what the tiers are expected to do, do not depend on the machine."""
    whole, measure_s, measure = RoleProgram.fetches_with, DeviceTier.measure_s, store_module.measure

    def measured_s(tier: DeviceTier) -> float:
        assert measure_s(tier) > 0.0
        tier._speed = ReadSpeed(1e12)
        return 0.0

    def measured(*arguments: Any) -> tuple[ReadSpeed, float]:
        measure(*arguments)
        return ReadSpeed(1e12), PATIENT_S / 10

    monkeypatch.setattr(RoleProgram, "fetches_with", lambda self, _: whole(self, lambda tokens, cached: PATIENT_S))
    monkeypatch.setattr(BlockFiles, "read_bytes_s", lambda self: 1e12)
    monkeypatch.setattr(DeviceTier, "measure_s", measured_s)
    monkeypatch.setattr(store_module, "measure", measured)


def settings_of(tier: str, folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"model": "toy", "kv_blocks": NUM_BLOCKS, "toy_step_s": 0.005}
    (folder / "kv").mkdir(exist_ok=True)
    if tier == "disk":
        return {**settings, "kv_disk_path": str(folder / "kv"), "kv_disk_bytes": 2**20}
    return {**settings, "kv_store": f"file://{folder}/kv"}


def tier_of(worker: Running, tier: str) -> Any:
    found = worker.program.sources[tier]
    assert isinstance(found._staging, DeviceStaging)
    return found


def num_kept(worker: Running, tier: str) -> int:
    return int(tier_of(worker, tier).num_found(None, hashes_of(worker, PROMPT), 0))


@pytest.mark.parametrize("tier", ["disk", "store"])
@pytest.mark.parametrize("host_bytes", [0, 10 * 32])
@pytest.mark.parametrize("load", [load_on_device, load_async])
async def test_blocks_come_back(
    start: Any, attach: Any, ask: Any, tmp_path: Path, tier: str, host_bytes: int, load: Any
) -> None:
    d = start(Role.DECODE, load, **settings_of(tier, tmp_path), kv_host_bytes=host_bytes)
    router = await attach(d)
    expected = answer(PROMPT, 8)
    assert await router.local(ask("first", PROMPT)) == expected
    for number, other in enumerate(others(6)):
        assert await router.local(ask(f"other-{number}", other)) == answer(other, 8)
    kept = tier_of(d, tier)
    await d.until(lambda _: kept.flush(0.01) and num_kept(d, tier) == 8, "blocks below memory")
    assert await router.local(ask("again", PROMPT)) == expected
    assert d.program.fetches.num_filled[tier] > 0
    assert kept.events["damaged"] == kept.events["failed_reads"] == 0
    await d.on_engine(lambda program: program.check())


@pytest.mark.parametrize("tier", ["disk", "store"])
async def test_blocks_outlive_the_process(start: Any, attach: Any, ask: Any, tmp_path: Path, tier: str) -> None:
    """Nothing was evicted: what the pool and pinned memory had is written at the end."""
    settings = {**settings_of(tier, tmp_path), "kv_host_bytes": 2**12}
    first = start(Role.DECODE, load_on_device, **settings)
    router = await attach(first)
    assert await router.local(ask("first", PROMPT)) == answer(PROMPT, 8)
    await router.close()
    first.host.stop()
    second = start(Role.DECODE, load_on_device, **settings)
    router = await attach(second)
    assert await router.local(ask("again", PROMPT)) == answer(PROMPT, 8)
    assert second.program.fetches.num_filled[tier] == 8


@pytest.mark.parametrize("tier", ["disk", "store"])
async def test_many_prompts_stay_exact_while_their_blocks_move(
    start: Any, attach: Any, ask: Any, tmp_path: Path, tier: str
) -> None:
    d = start(Role.DECODE, load_on_device, **settings_of(tier, tmp_path), kv_host_bytes=20 * 32)
    router = await attach(d)
    for number in range(40):
        prompt = [number * number % 7 + 1, *PROMPT[: 8 + number * 5 % 20]]
        assert await router.local(ask(f"r{number}", prompt)) == answer(prompt, 8)
        await d.on_engine(lambda program: program.check())
    assert tier_of(d, tier).flush(PATIENT_S)
    assert tier_of(d, tier)._num_arriving == 0


@pytest.mark.parametrize("tier", ["disk", "store"])
def test_settings_that_cannot_be_are_errors(
    start: Any, tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for the staging."""

    def fail(self: FakeDevice, num_bytes: int) -> Any:
        raise TransferFailed("the host cannot pin")

    monkeypatch.setattr(FakeDevice, "pinned", fail)
    with pytest.raises(ConfigError, match="none for this pool: the host cannot pin"):
        start(Role.DECODE, load_on_device, **settings_of(tier, tmp_path), kv_host_bytes=0)

"""A worker whose start fails, wherever that is, leaves nothing open: no thread, descriptor, lock or pinned memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.transports.tcp_staged import PlainBytes
from pdserve.bounded_file import lock_folder
from pdserve.core.types import Role
from pdserve.engine.load_engine import load_engine
from pdserve.engine.memory import store as store_module
from pdserve.engine.memory.block_files import BlockFiles
from pdserve.engine.memory.slow_tier import ReadSpeed
from pdserve.engine.ranks import leader
from pdserve.engine.ranks.leader import Follower, StartedRanks
from pdserve.worker import calibrate
from pdserve.worker.context import ProgramContext
from pdserve.worker.program import RoleProgram
from tests.support.failed_starts import Injected, Open, calls_of, fail_in, name_of
from tests.support.fake_device import DeviceEngine, FakeDevice
from tests.support.fake_ends import stand_ins
from tests.support.tooled_model import BUNDLED
from tests.unit.worker.conftest import BUILDS, config


class Machine:
    """One worker with every slower tier, which starts in this thread."""

    def __init__(self, role: Role, folder: Path, *, is_on_device: bool) -> None:
        (folder / "store").mkdir()
        self.folder = folder
        self.num_engines = 0  # that are loaded, and not closed
        self._is_on_device = is_on_device
        settings = config(
            role,
            model="toy",
            kv_blocks=16,
            toy_step_s=0.01,
            kv_host_bytes=2**12,
            kv_disk_path=str(folder / "disk"),
            kv_disk_bytes=2**20,
            kv_store=f"file://{folder}/store",
        )
        self.context = ProgramContext(
            config=settings, role=role, incarnation="i", endpoint="127.0.0.1:1", post=lambda call: None
        )

    def build(self) -> RoleProgram[Any, Any, Any]:
        return BUILDS[self.context.role](self.context, self.load)

    def load(self, settings: Any, role: Role) -> Any:
        engine: Any = load_engine(settings, role)
        engine.close = partial(self._close, engine.close)
        self.num_engines += 1
        return DeviceEngine(engine) if self._is_on_device else engine

    def _close(self, close: Callable[[], None]) -> None:
        self.num_engines -= 1
        close()

    def check_folder(self, where: str) -> None:
        """The next process can open it."""
        path = self.folder / "disk" / self.context.config.worker_id
        if not path.exists():
            return
        folder = os.open(path, os.O_RDONLY)
        try:
            os.close(lock_folder(folder, self.folder, where))
        finally:
            os.close(folder)


@dataclass(frozen=True, slots=True)
class Devices:
    """Stand-ins, and the memory that they have given out."""

    _made: dict[int, FakeDevice]
    _given: list[Any]

    def check(self, where: str) -> None:
        """All memory has been closed. Ends the devices, which refer to pools."""
        assert all(map(is_closed, self._given)), where
        self._given.clear()
        while self._made:
            self._made.popitem()[1].end()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    given: list[Any] = []

    def note(take: Callable[..., Any]) -> Callable[..., Any]:
        def took(self: FakeDevice, count: int) -> Any:
            given.append(take(self, count))
            return given[-1]

        return took

    monkeypatch.setattr(FakeDevice, "pinned", note(FakeDevice.pinned))
    monkeypatch.setattr(FakeDevice, "staging", note(FakeDevice.staging))
    with stand_ins() as made:
        yield Devices(made, given)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tier is worthwhile, and nothing is measured for long."""
    cost = replace(calibrate.UNKNOWN, prefill_base_s=10.0)
    monkeypatch.setattr(calibrate, "calibrate", lambda engine, role, config: cost)
    monkeypatch.setattr(calibrate, "calibrate_again", lambda engine, role, config, cost, kv: cost)
    monkeypatch.setattr(BlockFiles, "read_bytes_s", lambda self: 1e12)
    monkeypatch.setattr(store_module, "measure", lambda *arguments: (ReadSpeed(1e12), 1e-6))


@pytest.mark.gpu_checks
@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("role", list(Role))
def test_an_error_leaves_nothing_open(role: Role, is_on_device: bool, tmp_path: Path, devices: Devices) -> None:
    """In the first call of each function that the start calls."""
    machine, before = Machine(role, tmp_path, is_on_device=is_on_device), Open()
    program, codes = calls_of(machine.build)
    assert {"disk", "store", "peer"} <= set(program.sources)
    assert ("host" in program.sources) is is_on_device
    program.close()
    del program
    devices.check("no function")
    before.until_nothing_is_left("no function")
    num_raised = 0
    for code in codes:
        try:
            fail_in(code, machine.build).close()
        except Injected:
            num_raised += 1
            machine.check_folder(name_of(code))  # while the error refers to what was open
        assert machine.num_engines == 0, name_of(code)
        devices.check(name_of(code))
        before.until_nothing_is_left(name_of(code))
    assert num_raised > 100


@pytest.mark.gpu_checks
@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("role", list(Role))
def test_a_process_with_too_many_threads(
    role: Role, is_on_device: bool, tmp_path: Path, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, before = Machine(role, tmp_path, is_on_device=is_on_device), Open()
    start, most = threading.Thread.start, 0

    def limited(self: threading.Thread) -> None:
        nonlocal num_started
        if self.name.startswith("kv-"):
            num_started += 1
            if num_started > most:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    while True:
        num_started = 0
        try:
            machine.build().close()
            break
        except RuntimeError:
            machine.check_folder(f"thread {most}")
        assert machine.num_engines == 0
        devices.check(f"thread {most}")
        before.until_nothing_is_left(f"thread {most}")
        most += 1
    assert most >= 12  # of the receiver, the disk tier and the store


@pytest.mark.parametrize("role", list(Role))
def test_an_error_while_it_takes_the_other_role(role: Role, tmp_path: Path) -> None:
    """The former program ends what it has handed over, and nothing else is open."""
    machine, before = Machine(role, tmp_path, is_on_device=False), Open()
    [other] = set(Role) - {role}

    def change(build_with: Callable[[Callable[[], Any]], Any]) -> Any:
        former = machine.build()
        context = replace(machine.context, role=other, kept=former.hand_over())
        made: list[RoleProgram[Any, Any, Any]] = []
        try:
            return build_with(lambda: made.append(BUILDS[other](context, machine.load)))
        finally:
            for one in made:
                one.close_transfers()
            former.close()
            machine.check_folder("the other role")

    _, codes = change(calls_of)
    before.until_nothing_is_left("no function")
    num_raised = 0
    for code in codes:
        try:
            change(partial(fail_in, code))
        except Injected:
            num_raised += 1
        assert machine.num_engines == 0, name_of(code)
        before.until_nothing_is_left(name_of(code))
    assert num_raised > 50


def is_closed(memory: Any) -> bool:
    return not memory.view if isinstance(memory, PlainBytes) else memory.memory is None


def test_a_rank_that_cannot_be_started_ends_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Follower] = []

    def start(*arguments: Any) -> Follower:
        if started:
            raise OSError("no more processes")
        started.append(Follower(*arguments))
        return started[-1]

    monkeypatch.setattr(leader, "Follower", start)
    settings = config(Role.DECODE, model=str(BUNDLED), tensor_parallel=3)
    with pytest.raises(OSError, match="no more processes"):
        StartedRanks(settings, torch.device("cpu"))
    [first] = started
    assert not first.is_alive

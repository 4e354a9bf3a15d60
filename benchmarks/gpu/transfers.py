"""Parts of benchmarks.gpu between two processes on one GPU: the transfer rate, and the slowdown of a decode step.

Without MPS two processes take turns on a GPU, so neither the rate of a transfer nor the step beside it shows what two
GPUs would do: these figures have no bar. Judged are the copy of cuda_ipc alone, and a decode step while copies of this
process arrive in its pool at the rate of a link, on the copy streams and by the kernel that a transfer uses.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.clock import seconds_of
from benchmarks.gpu.ends import (
    Landing,
    Memory,
    ProcessSender,
    SenderSetup,
    device_of,
    make_pool,
    nccl_environment,
)
from benchmarks.gpu.failures import Cases
from benchmarks.gpu.parts import LLAMA
from benchmarks.gpu.report import Report
from benchmarks.gpu.setting import MIB, Setting
from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.protocol.grants import fingerprint_of
from tests.support.fake_ends import DEVICE_TRANSPORTS, stand_ins
from tests.support.transfer_ends import fingerprint

REPEAT = 5
ONE_STREAM = CopyLimits(num_streams=1)
LANDING_BYTES = 256 * MIB
RELAY_BYTES = 64 * MIB  # of one copy, as cuda_ipc queues them
LANDING_S = 4.0
#: What a link of 400 Gb/s brings. Bytes that land faster take their share of the device's bandwidth, whoever copies
#: them: of 3 TB/s, 50 GB/s that are read, written and summed at both ends are five percent.
LINK_GB_S = 50.0
#: What arrives beside a decode step: transport and GB/s (0: as fast as it goes); None: a copy within this process.
BESIDE: Final[dict[str, tuple[str, float] | None]] = {
    f"beside a copy in this process at {LINK_GB_S:.0f} GB/s": None,
    f"beside cuda_ipc at {LINK_GB_S:.0f} GB/s": ("cuda_ipc", LINK_GB_S),
    "beside cuda_ipc": ("cuda_ipc", 0.0),
    "beside nccl": ("nccl", 0.0),
}


def transfers(setting: Setting, folder: Path) -> None:
    report = setting.report(folder, "two processes, one GPU; one way", ["way", "MiB", "GB/s", "ms", "of a device copy"])
    with stand_ins() if setting.is_rehearsal else nullcontext():
        block_bytes = setting.transfer_block_bytes
        num_blocks = max(setting.transfer_bytes) // block_bytes
        pool = make_pool(memory_of(setting), num_blocks, block_bytes, seed=1)
        floors = {size: device_copy_s(setting, pool, size // block_bytes) for size in setting.transfer_bytes}
        for size, took_s in floors.items():
            report.row("device copy", shown_mib(size), size / took_s / 1e9, took_s * 1e3, "1")
        ways: list[tuple[str, CopyLimits | None]] = [(transport, None) for transport in DEVICE_TRANSPORTS]
        ways += [(transport, ONE_STREAM) for transport in ("cuda_ipc", "tcp_staged")]
        cases = setting.cases([*(way_name(*way) for way in ways), *BESIDE])
        for way in ways:

            def measure(transport: str, limits: CopyLimits | None) -> None:
                # A pool keeps the settings of its first connection.
                own = pool if limits is None else make_pool(memory_of(setting), num_blocks, block_bytes, seed=1)
                one_transport(setting, report, transport, own, floors, limits)

            name = way_name(*way)
            cases.run(name, partial(measure, *way), partial(report.error, name))
        if any(name in BESIDE for name in cases):
            try:
                while_decoding(setting, report, cases)
            except Exception as error:
                report.error("decode while blocks arrive", error)


def way_name(transport: str, limits: CopyLimits | None) -> str:
    return transport if limits is None else f"{transport}, one copy stream"


def one_transport(
    setting: Setting,
    report: Report,
    transport: str,
    pool: Any,
    floors: dict[int, float],
    limits: CopyLimits | None,
) -> None:
    facts = fingerprint(pool.block_bytes)
    name = way_name(transport, limits)
    landing, sender = Landing(pool, facts, transport, limits), None
    try:
        setup = sender_setup(setting, transport, facts, pool.num_blocks)
        sender = ProcessSender(dataclasses.replace(setup, limits=limits))
        if name == "cuda_ipc":
            kernel(setting, report, sender, pool, floors)
        for size, floor_s in floors.items():
            blocks = range(size // pool.block_bytes)
            took = []
            for _ in range(REPEAT + 1):  # the first one connects, compiles and warms up
                outcome, error, took_s = sender.ask("send", landing.expect(blocks), 60.0)
                if outcome != "sent":
                    raise RuntimeError(f"a transfer of {size} bytes: {outcome} {error}")
                took.append(took_s)
            middle = statistics.median(took[1:])
            report.row(name, shown_mib(size), size / middle / 1e9, middle * 1e3, floor_s / middle)
            for number in (blocks[0], blocks[-1]):
                if pool.block(number) != sender.ask("block", number):
                    raise RuntimeError(f"block {number} differs")
    finally:
        if sender is not None:
            sender.close()
        landing.close()


def kernel(setting: Setting, report: Report, sender: ProcessSender, pool: Any, floors: dict[int, float]) -> None:
    """Only the copy of cuda_ipc, from the other process's pool into ours, without the protocol."""
    device = device_of(memory_of(setting), pool)
    source = device.open(sender.ask("export"))
    for size, floor_s in floors.items():
        blocks = list(range(size // pool.block_bytes))
        took = []
        for _ in range(REPEAT + 1):
            done = threading.Event()
            began_s = time.perf_counter()
            copying = device.copy(source, blocks, device.pool(), blocks, done.set, None)
            while not copying.is_done:
                time.sleep(0)
            took.append(time.perf_counter() - began_s)
            done.wait(10.0)
        middle = statistics.median(took[1:])
        report.row("cuda_ipc, its copy alone", shown_mib(size), size / middle / 1e9, middle * 1e3, floor_s / middle)
    report.bar("cuda_ipc, the copy alone of the largest size, of a device copy", floor_s / middle, least=0.8)
    source.close()


def while_decoding(setting: Setting, report: Report, cases: Cases) -> None:
    """The decode step of the Llama shape, 64 rows, alone and while blocks arrive in its pool."""
    from benchmarks.gpu.engine import AsyncRows, open_model, spans

    rows, context = next(one for one in reversed(setting.decodes) if one[1] == setting.decodes[0][1] and one[0] <= 64)
    with tempfile.TemporaryDirectory() as parent:
        opened = open_model(setting, LLAMA, "bfloat16", Path(parent))
    engine, facts = opened.engine, fingerprint_of(opened.engine.spec)
    pool: Any = engine.pool
    if setting.is_rehearsal:  # an engine on the CPU, with its transfers
        pool = make_pool("stand-in", engine.spec.num_blocks, engine.spec.block_bytes, seed=2)
    count = max(1, min(engine.spec.num_blocks // 4, LANDING_BYTES // pool.block_bytes))
    blocks = range(engine.spec.num_blocks - count, engine.spec.num_blocks)
    async_rows = AsyncRows(opened, rows, context, setting.num_steps)

    def step_s(seconds: float, goes_on: Any = lambda: True) -> float:
        opened.replays.marks.clear()
        ends_s = time.perf_counter() + seconds
        async_rows.steps(10_000, lambda: goes_on() and (time.perf_counter() < ends_s or len(opened.replays.marks) < 3))
        opened.clock.sync()
        inside, outside = spans(opened)
        return statistics.mean(inside) + statistics.mean(outside)

    seconds = 0.2 if setting.is_rehearsal else LANDING_S
    step_s(0.0)
    alone_s = step_s(seconds)
    report.row(f"decode of {rows} rows, alone", "", "", alone_s * 1e3, "")

    def beside(name: str, send: Callable[[], object], num_bytes: int, pace_gb_s: float) -> float:
        """The step time while `send` is called again and again, relative to alone."""
        pump = Pump(send, num_bytes / (pace_gb_s * 1e9) if pace_gb_s else 0.0)
        send()
        pump.start()
        during_s = step_s(seconds)
        pump.stop()
        rate = pump.num_sent * num_bytes / pump.took_s / 1e9
        label = f"decode of {rows} rows {name}"
        report.row(label, shown_mib(num_bytes), rate, during_s * 1e3, f"{during_s / alone_s - 1:+.1%} step time")
        return during_s / alone_s

    def relayed(name: str) -> None:
        few = blocks[: max(1, RELAY_BYTES // pool.block_bytes)]
        memory = memory_of(setting)
        device, source = device_of(memory, pool), make_pool(memory, len(few), pool.block_bytes, seed=3)
        send = partial(copy_once, device, device_of(memory, source).pool(), list(range(len(few))), list(few))
        ratio = beside(name, send, len(few) * pool.block_bytes, LINK_GB_S)
        report.bar(f"decode of {rows} rows {name}, of alone", ratio, most=1.05)

    def sent(name: str, transport: str, pace_gb_s: float) -> None:
        landing, sender = Landing(pool, facts, transport), None
        try:
            sender = ProcessSender(sender_setup(setting, transport, facts, count))
            beside(name, partial(send_once, sender, landing, blocks), count * pool.block_bytes, pace_gb_s)
        finally:
            if sender is not None:
                sender.close()
            landing.close()

    for name, way in BESIDE.items():
        run = partial(relayed, name) if way is None else partial(sent, name, *way)
        cases.run(name, run, partial(report.error, name))


def send_once(sender: ProcessSender, landing: Landing, blocks: range) -> None:
    outcome, error, _ = sender.ask("send", landing.expect(blocks), 60.0)
    if outcome != "sent":
        raise RuntimeError(f"{outcome} {error}")


def copy_once(device: Any, source: Any, sources: list[int], targets: list[int]) -> None:
    """One copy on the copy streams into the device's own pool."""
    done = threading.Event()
    copying = device.copy(source, sources, device.pool(), targets, done.set, None)
    if not done.wait(10.0) or not copying.is_done:
        raise TimeoutError("a copy inside this process does not end")


class Pump:
    """Calls `send` from a thread again and again, each time `pause_s` after the last one began at the earliest."""

    def __init__(self, send: Callable[[], object], pause_s: float) -> None:
        self._send, self._pause_s = send, pause_s
        self._ends, self.num_sent, self.took_s = threading.Event(), 0, 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        began_s = time.perf_counter()
        try:
            while not self._ends.is_set() or not self.num_sent:
                self._send()
                self.num_sent += 1
                self._ends.wait(max(0.0, began_s + self.num_sent * self._pause_s - time.perf_counter()))
        except Exception as error:  # raised when the pump is stopped
            self._error = error
        self.took_s = time.perf_counter() - began_s


def sender_setup(setting: Setting, transport: str, facts: Any, num_blocks: int) -> SenderSetup:
    environment: dict[str, str] = {}
    if transport == "nccl" and not setting.is_rehearsal:
        os.environ.update(nccl_environment("receiver"))
        environment = nccl_environment("sender")
    return SenderSetup(
        memory=memory_of(setting),
        transport=transport,
        fingerprint=facts,
        num_blocks=num_blocks,
        environment=environment,
        is_thread=setting.is_rehearsal,
    )


def memory_of(setting: Setting) -> Memory:
    return "stand-in" if setting.is_rehearsal else "cuda"


def device_copy_s(setting: Setting, pool: Any, num_blocks: int) -> float:
    if setting.is_rehearsal:
        memory = pool.on_device[: num_blocks * pool.block_bytes]
        return seconds_of(setting.clock, lambda: bytes(memory))
    import torch

    target = torch.empty_like(pool.raw[:num_blocks])
    return seconds_of(setting.clock, lambda: target.copy_(pool.raw[:num_blocks]))


def shown_mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.4g}"

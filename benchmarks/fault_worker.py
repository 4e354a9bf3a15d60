"""A process of the fault storm: a prefill or a decode worker's pool, books and transfer end, without the model."""

from __future__ import annotations

import heapq
import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import torch

from benchmarks.fake_device import Trouble
from benchmarks.fake_ends import stand_in_each
from benchmarks.fault_cases import Case, OwnerFault, case_of, fault_of
from benchmarks.fault_ranks import RANKS_PATIENCE, RankedStorage, Ranks, fingerprint_of_ranks, in_order, text_of
from benchmarks.fault_report import kind_of
from benchmarks.fault_storage import OTHER_TEXT, REUSED, SHAPES, Memory, Storage, block_hash, content_hash_of
from benchmarks.gpu_ends import nccl_environment
from benchmarks.netns import enter
from benchmarks.secret import SECRET
from benchmarks.transfer_ends import GrpcHost, fingerprint
from kvtransfer.channel import Waker
from kvtransfer.copy_streams import CopyLimits
from kvtransfer.endpoint import make_receiver, make_sender
from kvtransfer.fault_injector import FaultInjector
from kvtransfer.grants import grant_from_proto, grant_to_proto
from kvtransfer.transport import Received, ReceiveOutcome, SendOutcome, Sent
from pdserve.core.grant import Grant
from pdserve.v1 import transfer_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    name: str
    role: str  # "prefill" or "decode"
    transport: str
    seed: int
    shape: str
    host: str
    netns: str = ""
    device_kills: float = 0.0  # of stand-ins
    memory: Memory = "host"
    ranks: int = 0  # tensor-parallel ones, each with a pool of its own; 0: a pool of plain bytes

    def deadline_s(self, case: Case) -> float:
        """A transfer of several ranks is as many connections and threads as it has parts."""
        return case.deadline_s * (RANKS_PATIENCE if self.ranks else 1.0)


DEVICE_KILLS: Final = 0.0002  # share of the copies on a device in whose middle the process is killed
#: Less staging than all connections want: some have one slot, and nccl's two ends disagree.
LIMITS: Final = CopyLimits(num_streams=3, staging_bytes=200 * 2**20)
STAGING_BACK_S: Final = 8.0  # a handshake's longest wait, and less than the driver's patience
NUM_LAYERS: Final = 2  # of a block, as the fingerprint has it: every other transfer comes in so many layer groups


def trouble_of(setup: Setup) -> Trouble:
    """Of the stand-ins in this process; two of a storm's four notice a killed peer by an error, the others never."""
    return Trouble(
        seed=setup.seed + os.getpid(),  # one that was killed and started again has other luck
        late=0.002,
        killed=setup.device_kills,
        hung=0.0005,
        failed=0.002,
        flipped=0.01,
        loses_the_dead=setup.name.endswith("1"),
    )


class Worker:
    """The loop that both roles share: commands from the driver, ends from transfer threads, timers."""

    def __init__(self, setup: Setup, driver: Connection) -> None:
        self.setup, self.driver = setup, driver
        if setup.ranks:
            self.storage: Storage = RankedStorage(setup.ranks, setup.memory)
        else:
            self.storage = Storage(SHAPES[setup.shape], setup.memory)
        self.devices = stand_in_each(trouble_of(setup), LIMITS) if setup.memory == "stand-in" else {}
        if setup.ranks:
            self.fingerprint = fingerprint_of_ranks(setup.ranks)
        else:
            self.fingerprint = fingerprint(self.storage.pool.block_bytes, NUM_LAYERS)
        self.fault_injector = FaultInjector(lambda tag: fault_of(setup.seed, tag), self.storage.pool.block_bytes)
        self.incarnation = secrets.token_hex(4)
        self._ends: deque[tuple[float, Received | Sent]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._news: list[tuple[Any, ...]] = []

    def run(self) -> None:
        self._tell("ready", self.greeting())
        while True:
            self._flush()
            timeout_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            ready: list[Any] = wait([self.driver, self._waker.fileno()], timeout_s)
            if self._waker.fileno() in ready:
                self._waker.clear()
            while self._calls:
                self._calls.popleft()()
            while self._ends:
                self.ended(*self._ends.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
            if self.driver in ready:
                for command in self.driver.recv():
                    if not self._obey(*command):
                        return

    def greeting(self) -> str:
        return ""

    def on_end(self, end: Received | Sent) -> None:
        """From any thread."""
        self._ends.append((time.monotonic(), end))
        self._waker.set()

    def soon(self, call: Callable[[], None]) -> None:
        """From any thread."""
        self._calls.append(call)
        self._waker.set()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._number, call))

    def late_s(self, deadline_at_s: float) -> float:
        """How long after its deadline a transfer is freed now, not counting the time that this process was stopped."""
        now_s = time.monotonic()
        pauses = sum(max(0.0, min(end, now_s) - max(begin, deadline_at_s)) for begin, end in self.fault_injector.pauses)
        return max(0.0, now_s - deadline_at_s - pauses)

    def _check_staging(self) -> None:
        """Every connection has ended: none may hold a slot. Handshakes that nobody waits for end by themselves."""
        ends_s = time.monotonic() + STAGING_BACK_S
        while held := sum(device.budget.taken_bytes for device in self.devices.values()):
            if time.monotonic() > ends_s:
                sys.exit(f"{self.setup.name} leaked {held} bytes of staging")
            time.sleep(0.01)

    def _tell(self, *news: Any) -> None:
        self._news.append(news)

    def _flush(self) -> None:
        if self._news:
            self.driver.send(self._news)
            self._news = []

    def _obey(self, command: str, *arguments: Any) -> bool:
        if command == "rest":
            self.storage.check_rest(self.held())
            stats = asdict(self.end.stats)
            stats["overtakings"] = sum(device.num_overtakings for device in self.devices.values())
            facts = (len(os.listdir("/proc/self/fd")), threading.active_count())
            self._tell("rest", self.storage.wrong[:20], [repr(key) for key in self.end.open_keys], stats, facts)
            self.storage.wrong.clear()
        elif command == "quit":
            self.close()
            self._check_staging()
            return False
        else:
            getattr(self, command)(*arguments)
        return True

    def ranks(self) -> Ranks | None:
        """Those behind the first."""
        if not isinstance(self.storage, RankedStorage):
            return None
        setup = self.setup
        return Ranks(self.storage, setup.transport, setup.name, self.incarnation, self.fault_injector)

    # What the roles fill in.

    end: Any

    def held(self) -> list[Sequence[int]]:
        raise NotImplementedError

    def ended(self, at_s: float, end: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.end.close()


class Decode(Worker):
    def __init__(self, setup: Setup, driver: Connection) -> None:
        super().__init__(setup, driver)
        self.end = make_receiver(
            self.storage.pool,
            self.fingerprint,
            secret=SECRET,
            worker_id=setup.name,
            incarnation=self.incarnation,
            host=setup.host,
            transport=setup.transport,
            fault_injector=self.fault_injector,
            stamps=self.storage.stamps,
        )
        self._grpc = GrpcHost(self.end.servicer, host=setup.host)
        if (ranks := self.ranks()) is not None:
            self.end = ranks.receiver(self.end)
        self._landings: dict[int, tuple[Case, list[int], float]] = {}
        self._kept: dict[int, list[int]] = {}

    def grant(self, number: int) -> None:
        case = case_of(self.setup.seed, number)
        blocks = self.storage.take(case.count)
        if blocks is None:
            self._tell("full", number)
            return
        grant = Grant(
            key=case.key,
            endpoint=self._grpc.endpoint,
            worker_id=self.setup.name,
            incarnation=self.incarnation,
            fingerprint=self.fingerprint,
            blocks=tuple(blocks),
            rank_endpoints=self.end.rank_endpoints,
            held_blocks=0,
        )
        for block in blocks:
            self.storage.expects_anything(block)
        deadline_s = self.setup.deadline_s(case)
        self._landings[number] = (case, blocks, time.monotonic() + deadline_s)
        content_hashes = [content_hash_of(number, place) for place in range(case.count)]
        told = partial(self._granted, number, grant)
        if self.end.expect(grant, self.on_end, deadline_s, content_hashes, lambda: self.soon(told)):
            told()
        if case.fault is OwnerFault.RECEIVER_ABORTS:
            self.after(case.hold_s / 10, lambda: self.end.abort(case.key))

    def _granted(self, number: int, grant: Grant) -> None:
        if number in self._landings:  # else it has ended before all ranks had opened it
            self._tell("granted", number, grant_to_proto(grant).SerializeToString())

    def abort(self, number: int) -> None:
        self.end.abort(case_of(self.setup.seed, number).key)

    def ended(self, at_s: float, end: Received) -> None:
        number = end.key.generation
        if end.outcome is ReceiveOutcome.QUARANTINED:
            self._tell("quarantined", number)
            return
        if number not in self._landings:
            self.storage.wrong.append(f"{end.key} ended twice: {end}")
            return
        case, blocks, deadline_at_s = self._landings.pop(number)
        if end.outcome is not ReceiveOutcome.VERIFIED:
            self.storage.give_back(blocks, number)
            self._tell("ended", number, end.outcome.value, kind_of(end.error), self.late_s(deadline_at_s))
            return
        for place, block in enumerate(blocks):
            self.storage.must_hold(block, number, place)
            self.storage.stamps.mark(block, content_hash_of(number, place))
            self.storage.allocator.publish(block, block_hash(number, place))
        self._kept[number] = blocks
        self.after(case.hold_s, lambda: self._let_go(number))
        self._tell("ended", number, end.outcome.value, "", 0.0)

    def _let_go(self, number: int) -> None:
        blocks = self._kept.pop(number)
        for block in blocks:
            self.storage.look(block, "was written after its commit")
        self.storage.allocator.release(blocks)  # into the prefix cache, contents and all

    def held(self) -> list[Sequence[int]]:
        return [*(blocks for _, blocks, _ in self._landings.values()), *self._kept.values()]

    def close(self) -> None:
        super().close()
        self._grpc.stop()


class Prefill(Worker):
    def __init__(self, setup: Setup, driver: Connection) -> None:
        super().__init__(setup, driver)
        self._ranks: Ranks | None = None
        self.end = self._make()
        self._sending: dict[int, tuple[Case, Grant, list[int], float]] = {}

    def _make(self) -> Any:
        self.incarnation = secrets.token_hex(4)
        own = make_sender(
            self.storage.pool,
            self.fingerprint,
            secret=SECRET,
            worker_id=self.setup.name,
            incarnation=self.incarnation,
            transport=self.setup.transport,
            fault_injector=self.fault_injector,
            stamps=self.storage.stamps,
        )
        old, self._ranks = self._ranks, self.ranks()
        if old is not None:
            self.after(1.0, old.close)  # once the old end has been closed
        return own if self._ranks is None else self._ranks.sender(own)

    def send(self, number: int, message: bytes) -> None:
        case = case_of(self.setup.seed, number)
        blocks = self.storage.take(case.count)
        if blocks is None:
            self._tell("full", number)
            return
        self.storage.fill(blocks, number + (OTHER_TEXT if case.fault is OwnerFault.OTHER_TEXT else 0))
        grant = grant_from_proto(transfer_pb2.Grant.FromString(message))
        deadline_s = self.setup.deadline_s(case)
        self._sending[number] = (case, grant, blocks, time.monotonic() + deadline_s)
        text = text_of(number, case.count) if self.setup.ranks else None
        groups = 1 + number % NUM_LAYERS if self.end.divides_blocks else 1
        self.end.start(grant, self.on_end, deadline_s, text, groups=groups)
        self._push(number, 0)

    def _push(self, number: int, piece: int) -> None:
        """The piece and, after a pause, what follows."""
        if number not in self._sending:
            return
        case, grant, blocks, _ = self._sending[number]
        is_converted = grant.fingerprint.shape.tp_degree != max(1, self.setup.ranks)
        pieces = in_order(case.pieces) if is_converted else case.pieces
        if piece == case.act_at:
            self._act(case, blocks)
        if piece == len(pieces) or number not in self._sending:
            return
        indices = pieces[piece][1]
        is_last = piece + 1 == len(pieces) and case.fault is not OwnerFault.UNFINISHED
        self.end.push(grant.key, [(index, blocks[index]) for index in indices], is_last)
        pause_s = pieces[piece + 1][0] if piece + 1 < len(pieces) else 0.0
        if pause_s:
            self.after(pause_s, lambda: self._push(number, piece + 1))
        else:
            self._push(number, piece + 1)

    def _act(self, case: Case, blocks: list[int]) -> None:
        if case.fault is OwnerFault.SENDER_ABORTS:
            self.end.abort(case.key)
        elif case.fault is OwnerFault.REUSE:
            self.storage.stamps.begin(blocks)  # as `allocate` does
            self.storage.fill(blocks, case.number + REUSED)
        elif case.fault is OwnerFault.RESTART:
            old, self.end = self.end, self._make()
            old.close()
            if old.open_keys:
                self.storage.wrong.append(f"a closed sender holds {old.open_keys}")

    def abort(self, number: int) -> None:
        self.end.abort(case_of(self.setup.seed, number).key)

    def ended(self, at_s: float, end: Sent) -> None:
        number = end.key.generation
        if number not in self._sending:
            self.storage.wrong.append(f"{end.key} ended twice: {end}")
            return
        _, _, blocks, deadline_at_s = self._sending.pop(number)
        for block in blocks:
            self.storage.look(block, "was written while it was sent")
        self.storage.give_back(blocks, number)
        late_s = 0.0 if end.outcome is SendOutcome.SENT else self.late_s(deadline_at_s)
        self._tell("ended", number, end.outcome.value, kind_of(end.error) if end.error else "", late_s)

    def held(self) -> list[Sequence[int]]:
        return [blocks for _, _, blocks, _ in self._sending.values()]


def main(setup: Setup, driver: Connection) -> None:
    """The process's whole life; it ends with its driver."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # each fault is logged
    if setup.memory == "cuda" and setup.transport == "nccl":
        os.environ.update(nccl_environment(setup.name))
    if setup.netns:
        enter(setup.netns)
    worker = Decode(setup, driver) if setup.role == "decode" else Prefill(setup, driver)
    try:
        worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)

"""The driver of a fault storm: gives transfers to worker processes, restarts those that die, and judges each end."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Final

from benchmarks.fault_storm.cases import Case, case_of
from benchmarks.fault_storm.report import Result
from benchmarks.fault_storm.roles import main as worker_main
from benchmarks.fault_storm.storage import Memory
from benchmarks.fault_storm.worker import DEVICE_KILLS, NUM_LAYERS, Setup
from tests.support.fake_ends import DEVICE_TRANSPORTS
from tests.support.netns import Cables, Network

ROLES: Final = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
IN_LAYERS: Final = ("p0", "d1")  # so that there is a pair of each kind
IN_FLIGHT: Final = 48
CHECK_EVERY: Final = 5000  # transfers between two checks at rest
HANGS_AFTER_S: Final = 15.0  # after its deadline, a transfer that has not ended counts as hung
DIED: Final = "process died"
NEVER: Final = "never began"


@dataclass(slots=True)
class StormMove:
    """A transfer in progress, and how each side has reported its end."""

    case: Case
    prefill: StormMember
    decode: StormMember
    began_s: float
    is_asked: bool = False  # the prefill side was told to send
    sent: str = ""
    received: str = ""
    why: str = ""  # the first reason that was reported


@dataclass(slots=True, eq=False)
class StormMember:
    """A worker process. It keeps its name and its setup when it is restarted."""

    setup: Setup
    process: Any = None
    connection: Any = None  # a Connection, while it runs
    is_ready: bool = False
    orders: list[tuple[Any, ...]] = field(default_factory=list)
    rest: tuple[Any, ...] | None = None


class Storm:
    """Runs transfers 1 .. count of a seed over one transport."""

    def __init__(
        self,
        transport: str,
        seed: int,
        *,
        shape: str = "small",
        network: Network | None = None,
        device_kills: float = DEVICE_KILLS,
        is_on_gpu: bool = False,
        ranks: Sequence[int] = (0, 0, 0, 0),
        is_in_layers: bool = False,
        on_progress: Callable[[Result], None] = lambda result: None,
    ) -> None:
        """`network` has a namespace for each process; cables are cut now and then.

        Transports between devices run over stand-ins unless `is_on_gpu`. `ranks` is the tensor-parallel degree of
        each process, in the order of ROLES; 0 stands for a pool of plain bytes. With `is_in_layers`, the pools of one
        process of each role have a run of bytes for each layer of a block.
        """
        device: Memory = "cuda" if is_on_gpu else "stand-in"
        self._seed, self._on_progress = seed, on_progress
        self.result = Result(transport=transport, seed=seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.fault_storm.roles"])
        self._cables = None if network is None else Cables(network, seed)
        self._members = [
            StormMember(
                Setup(
                    name=name,
                    role=role,
                    transport=transport,
                    seed=seed,
                    shape=shape,
                    netns="" if network is None else network.namespaces[name],
                    host="127.0.0.1" if network is None else network.addresses[name],
                    device_kills=device_kills,
                    memory=device if transport in DEVICE_TRANSPORTS else "host",
                    runs_per_block=NUM_LAYERS if is_in_layers and name in IN_LAYERS else 1,
                    ranks=degree,
                )
            )
            for (name, role), degree in zip(ROLES.items(), ranks, strict=True)
        ]
        self._moves: dict[int, StormMove] = {}
        self._waiting: list[int] = []  # no blocks were free for them
        self._next = 1

    def run(self, count: int) -> Result:
        began_s = time.monotonic()
        for member in self._members:
            self._start(member)
        shown_s = began_s
        try:
            while self.result.transfers < count and not self._has_hung():
                until = min(count, (self.result.transfers // CHECK_EVERY + 1) * CHECK_EVERY)
                self._begin(until)
                self._listen(0.05 if self._cables else 0.5)
                if self._cables is not None:
                    self.result.cuts += self._cables.pull(time.monotonic())
                if self.result.transfers == until:
                    self._look_at_rest()
                self.result.seconds = time.monotonic() - began_s
                if time.monotonic() - shown_s > 1.0:
                    shown_s = time.monotonic()
                    self._on_progress(self.result)
        finally:
            self._end()
        self.result.seconds = time.monotonic() - began_s
        return self.result

    # -- processes ------------------------------------------------------------------------------------------------

    def _start(self, member: StormMember) -> None:
        mine, theirs = self._context.Pipe()
        member.process = self._context.Process(target=worker_main, args=(member.setup, theirs), daemon=True)
        member.process.start()
        theirs.close()
        member.connection, member.is_ready, member.orders = mine, False, []

    def _died(self, member: StormMember) -> None:
        """Each of its moves continues with what the other side reports."""
        member.process.join()
        member.connection.close()
        if member.process.exitcode != -signal.SIGKILL:
            self.result.wrong.append(f"{member.setup.name} ended with {member.process.exitcode}")
        self.result.kills += 1
        for move in list(self._moves.values()):
            if member is move.decode and not move.received:
                self._heard_of(move, received=DIED)
                self._tell_other(move, move.prefill)
            if member is move.prefill and not move.sent:
                self._heard_of(move, sent=DIED)
                self._tell_other(move, move.decode)
        self._start(member)

    def _end(self) -> None:
        for member in self._members:
            self._order(member, "quit")
        self._give_orders()
        for member in self._members:
            member.process.join(10.0)
            if member.process.exitcode is None:
                self.result.wrong.append(f"{member.setup.name} did not end")
                member.process.kill()
                member.process.join()
            elif member.process.exitcode not in (0, -signal.SIGKILL):
                self.result.wrong.append(f"{member.setup.name} ended with {member.process.exitcode}")

    # -- transfers ------------------------------------------------------------------------------------------------

    def _begin(self, until: int) -> None:
        """Starts moves until IN_FLIGHT are in progress; `until` is the last number."""
        ready = [member for member in self._members if member.is_ready]
        prefills = [one for one in ready if one.setup.role == "prefill"]
        decodes = [one for one in ready if one.setup.role == "decode"]
        while prefills and decodes and len(self._moves) < IN_FLIGHT and (self._waiting or self._next <= until):
            number = self._waiting.pop() if self._waiting else self._next
            self._next += number == self._next
            case = case_of(self._seed, number)
            prefill, decode = prefills[number % len(prefills)], decodes[number // 7 % len(decodes)]
            self._moves[number] = StormMove(case, prefill, decode, time.monotonic())
            self._order(decode, "grant", number)
        self._give_orders()

    def _order(self, member: StormMember, *order: Any) -> None:
        member.orders.append(order)

    def _give_orders(self) -> None:
        for member in self._members:
            if member.orders:
                orders, member.orders = member.orders, []
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next read finds that it ended
                    member.connection.send(orders)

    def _listen(self, timeout_s: float) -> None:
        connections: dict[Any, StormMember] = {member.connection: member for member in self._members}
        for found in wait(list(connections), timeout_s):
            member = connections[found]
            try:
                news = member.connection.recv()
            except (EOFError, ConnectionResetError):
                self._died(member)
                continue
            for word, *rest in news:
                getattr(self, f"_on_{word}")(member, *rest)
        self._give_orders()

    def _on_ready(self, member: StormMember, _greeting: str) -> None:
        member.is_ready = True

    def _on_full(self, member: StormMember, number: int) -> None:
        """One side has no free blocks: the transfer is retried if it has not begun, and ends otherwise."""
        move = self._moves[number]
        if member is move.decode:
            del self._moves[number]
            self._waiting.append(number)
            return
        self._heard_of(move, sent=NEVER)
        self._order(move.decode, "abort", number)

    def _on_granted(self, _member: StormMember, number: int, message: bytes) -> None:
        move = self._moves[number]
        if not move.prefill.is_ready:
            self._heard_of(move, sent=NEVER)
            self._order(move.decode, "abort", number)
        elif not move.sent:
            move.is_asked = True
            self._order(move.prefill, "send", number, message)

    def _on_quarantined(self, _member: StormMember, _number: int) -> None:
        self.result.quarantined += 1

    def _on_ended(self, member: StormMember, number: int, outcome: str, why: str, late_s: float) -> None:
        move = self._moves.get(number)
        if move is None:
            self.result.wrong.append(f"{number} ended on {member.setup.name}, but was not under way")
            return
        if outcome not in ("verified", "sent"):
            self.result.freed(late_s, f"{member.setup.name}, {move.case.label}: {why}")
        if member is move.decode:
            move.why = move.why or why
            never = NEVER if not move.sent and not move.is_asked else ""  # it ended before all ranks had opened it
            self._heard_of(move, received=outcome, sent=never)
            if outcome != "verified":
                self._tell_other(move, move.prefill)
        else:
            move.why = move.why or why
            self._heard_of(move, sent=outcome)
            if outcome != "sent":
                self._tell_other(move, move.decode)

    def _tell_other(self, move: StormMove, other: StormMember) -> None:
        has_ended = move.received if other is move.decode else move.sent
        if move.case.tells and not has_ended and move.case.number in self._moves:
            self._order(other, "abort", move.case.number)

    def _heard_of(self, move: StormMove, *, sent: str = "", received: str = "") -> None:
        move.sent, move.received = sent or move.sent, received or move.received
        if received == DIED and not move.sent and not move.is_asked:
            move.sent = NEVER  # the grant never arrived, so no process was told to send
        if move.sent and move.received:
            del self._moves[move.case.number]
            self.result.take(move.case, move.sent, move.received, move.why, time.monotonic() - move.began_s)

    def _has_hung(self) -> bool:
        now_s = time.monotonic()
        hung = [one for one in self._moves.values() if now_s > one.began_s + one.case.deadline_s + HANGS_AFTER_S]
        for move in hung:
            said = f"sent: {move.sent or 'nothing'}, received: {move.received or 'nothing'}"
            self.result.wrong.append(f"transfer {move.case.number} ({move.case.label}) never ended; {said}")
        return bool(hung)

    # -- at rest --------------------------------------------------------------------------------------------------

    def _look_at_rest(self) -> None:
        """No transfer is in progress: no block may be held, no byte changed, and no resource may have grown."""
        ends_s = time.monotonic() + HANGS_AFTER_S
        if self._cables is not None:
            self._cables.heal()
        while not all(member.is_ready for member in self._members) and time.monotonic() < ends_s:
            self._listen(0.1)
        time.sleep(0.2)  # the blocks that were committed last are kept for a moment
        for member in self._members:
            member.rest = None
            self._order(member, "rest")
        self._give_orders()
        while not all(member.rest for member in self._members):
            if time.monotonic() > ends_s:
                self.result.wrong.append("a process does not answer at rest")
                return
            self._listen(0.1)
        self.result.rests += 1

    def _on_rest(
        self, member: StormMember, wrong: list[str], open_keys: list[str], stats: dict[str, int], facts: tuple[int, int]
    ) -> None:
        name = member.setup.name
        self.result.wrong += [f"{name}: {one}" for one in wrong]
        self.result.wrong += [f"{name} leaked {key}" for key in open_keys]
        member.rest = (stats, facts)
        self.result.at_rest(name, stats, facts)

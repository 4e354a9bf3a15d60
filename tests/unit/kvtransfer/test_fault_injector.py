"""Each kind of fault, injected by the product's own injector, over real sockets and rings."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtransfer.faults.injector import FaultInjector, make_fault_injector
from kvtransfer.faults.plan import Fault, FaultKind, Where, parse
from kvtransfer.protocol.frames import Frame, Kind, Tag, tag_of
from kvtransfer.protocol.lease import Lease
from kvtransfer.protocol.session import State
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import Grant
from tests.unit.kvtransfer.harness import WAIT_S, Clock, Heard, Pair, wait_for

ROOT = Path(__file__).parents[3]
BLOCKS = tuple(range(8))
SOURCES = tuple(range(20, 28))
CHUNK = 1  # Frame 0 of the sender is the announcement.


def once(kind: FaultKind, where: Where, nth: int, *, for_s: float = 0.2, at: float = 0.7) -> Callable[[Tag], Fault]:
    """A fault for the first grant of a pair."""
    fault = Fault(kind, where, nth, for_s, at)
    return lambda tag: fault if tag.generation == 1 else None  # type: ignore[return-value]


def run(pair: Pair, deadline_s: float | None = None) -> tuple[str, str]:
    """The first transfer's two ends."""
    grant = pair.grant(BLOCKS)
    for source in SOURCES:
        pair.source_stamps.mark(source, 1 + source)
    received, sent = pair.begin(grant, deadline_s, [1 + source for source in SOURCES])
    pair.sender.push(grant.key, list(enumerate(SOURCES)), True)
    ends = received.wait().outcome.value, sent.wait().outcome.value
    if ends[0] == "verified":
        pair.assert_equal(grant, SOURCES)
    goes_on(pair)
    return ends


def goes_on(pair: Pair) -> None:
    """A later transfer succeeds. One that meets the end of the broken connection fails and is repeated, each time with
    a longer limit, for slow machines."""
    for attempt in range(9):
        grant = pair.grant(tuple(range(30, 38)))
        received, _ = pair.begin(grant, 0.1 * 2**attempt)
        pair.sender.push(grant.key, list(enumerate(SOURCES)), True)
        if received.wait().outcome.value == "verified":
            pair.assert_equal(grant, SOURCES)
            return
    raise AssertionError("the pair does not recover")


FAILS = ("failed", "failed")
GOES_WELL = ("verified", "sent")


@pytest.mark.parametrize(
    ("kind", "where", "nth", "expected"),
    [
        (FaultKind.DROP, Where.SENT, 0, FAILS),
        (FaultKind.DROP, Where.SENT, CHUNK, FAILS),
        (FaultKind.DELAY, Where.SENT, 0, FAILS),  # A chunk that overtakes its announcement belongs to no transfer.
        (FaultKind.DELAY, Where.SENT, CHUNK, GOES_WELL),
        (FaultKind.DUPLICATE, Where.SENT, 0, GOES_WELL),
        (FaultKind.CORRUPT, Where.SENT, 0, FAILS),
        (FaultKind.CORRUPT, Where.SENT, CHUNK, FAILS),
        (FaultKind.STALL, Where.SENT, CHUNK, GOES_WELL),
        (FaultKind.STALL, Where.WRITTEN, 0, GOES_WELL),
        (FaultKind.CUT, Where.SENT, 0, FAILS),
        (FaultKind.CUT, Where.SENT, CHUNK, FAILS),
    ],
)
def test_a_pair_recovers_after_a_fault(
    make_pair: Callable[..., Pair],
    transport: str,
    kind: FaultKind,
    where: Where,
    nth: int,
    expected: tuple[str, str],
) -> None:
    pair = make_pair(transport, fault_of=once(kind, where, nth))
    assert run(pair, None if expected == GOES_WELL else 0.2) == expected


# Messages that are lost or late while both sides live. Only the sender's clock can detect that.

UNCONFIRMED = Lease(beat_s=0.05, silence_s=1000.0, unconfirmed_s=60.0)
UNCONFIRMED_ERROR = "the receiver did not confirm it within 60 s of its last block"
DEADLINE_S = 600.0


def state_of(pair: Pair, grant: Grant) -> State | None:
    """The sender's state; None after the end."""
    [outbound] = pair.sender.plain._pairs.values()
    transfer = outbound._table._open.get(tag_of(grant.key))
    return None if transfer is None else transfer.session.state


def unconfirmed(pair: Pair, grant: Grant, sent: Heard, clock: Clock) -> None:
    """The sender ends the transfer long before the deadline, and its source blocks are free."""
    wait_for(lambda: state_of(pair, grant) is State.SENT, "every block to be on the wire")
    assert sent.all == []
    clock.added_s += UNCONFIRMED.unconfirmed_s
    end = sent.wait()
    assert (end.outcome, end.fault, end.error) == (SendOutcome.FAILED, "expired", UNCONFIRMED_ERROR)
    assert state_of(pair, grant) is None


def told_by_the_sender(received: Heard) -> None:
    end = received.wait()
    assert (end.outcome, end.fault) == (ReceiveOutcome.FAILED, "refused")
    assert end.error == f"the sender gave up: {UNCONFIRMED_ERROR}"


def test_a_lost_confirmation_costs_only_seconds(make_pair: Callable[..., Pair], transport: str, clock: Clock) -> None:
    nth = 1 if transport == "shm" else 0  # After the chunk's credit.
    pair = make_pair(transport, fault_of=once(FaultKind.DROP, Where.ANSWERED, nth), lease=UNCONFIRMED, clock=clock)
    grant = pair.grant(BLOCKS)
    received, sent = pair.begin(grant, DEADLINE_S)
    pair.sender.push(grant.key, list(enumerate(SOURCES)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    unconfirmed(pair, grant, sent, clock)
    pair.assert_equal(grant, SOURCES)
    wait_for(lambda: pair.receiver.stats.late_messages == 1, "the sender's word, which changes nothing")
    assert received.outcomes == ["verified"]
    goes_on(pair)


def test_a_late_announcement_ends_both_sides(make_pair: Callable[..., Pair], transport: str, clock: Clock) -> None:
    """The chunk belonged to no transfer, and is not sent again."""
    pair = make_pair(transport, fault_of=once(FaultKind.DELAY, Where.SENT, 0), lease=UNCONFIRMED, clock=clock)
    grant = pair.grant(BLOCKS)
    received, sent = pair.begin(grant, DEADLINE_S)
    pair.sender.push(grant.key, list(enumerate(SOURCES)), True)
    wait_for(lambda: pair.receiver.stats.late_messages == 1, "the chunk")
    wait_for(lambda: bool(pair.receiver._table._open[tag_of(grant.key)].shards), "the announcement")
    assert received.all == []
    unconfirmed(pair, grant, sent, clock)
    told_by_the_sender(received)
    goes_on(pair)


def test_a_last_chunk_that_is_lost_ends_both_sides_before_the_deadline(
    make_pair: Callable[..., Pair], transport: str, clock: Clock
) -> None:
    pair = make_pair(transport, fault_of=once(FaultKind.DROP, Where.SENT, CHUNK + 1), lease=UNCONFIRMED, clock=clock)
    grant = pair.grant(BLOCKS)
    received, sent = pair.begin(grant, DEADLINE_S)
    pair.sender.push(grant.key, list(enumerate(SOURCES))[:4], False)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the first chunk")
    clock.added_s += UNCONFIRMED.unconfirmed_s  # While the rest of the prompt is computed, no confirmation is due.
    pair.sender.push(grant.key, list(enumerate(SOURCES))[4:], True)
    unconfirmed(pair, grant, sent, clock)
    told_by_the_sender(received)
    assert pair.receiver.stats.chunks == 1
    goes_on(pair)


def test_a_credit_is_not_lost_without_its_connection(make_pair: Callable[..., Pair]) -> None:
    """A network cannot lose a credit and keep the connection, so the first answer over shm is not faulted."""
    assert run(make_pair("shm", fault_of=once(FaultKind.DROP, Where.ANSWERED, 0))) == GOES_WELL


def test_a_repeated_chunk_causes_no_wrong_bytes(make_pair: Callable[..., Pair], transport: str) -> None:
    """The second copy is dropped. On shm, the slot's second credit ends the connection, before or after the end."""
    received, sent = run(make_pair(transport, fault_of=once(FaultKind.DUPLICATE, Where.SENT, CHUNK)))
    assert received == "verified"
    assert sent == "sent" or transport == "shm"


def test_a_truncated_frame_consumes_the_next_bytes(make_pair: Callable[..., Pair], transport: str) -> None:
    """Later frames are not misinterpreted, and the pair recovers on a new connection."""
    pair = make_pair(transport, fault_of=once(FaultKind.TRUNCATE, Where.SENT, CHUNK))
    first, second = pair.grant(BLOCKS), pair.grant(tuple(range(40, 48)))
    ends = [(grant, *pair.begin(grant, 0.3)) for grant in (first, second)]
    for grant, _, _ in ends:
        pair.sender.push(grant.key, list(enumerate(SOURCES)), True)
    assert [received.wait().outcome.value for _, received, _ in ends] == ["failed", "failed"]
    goes_on(pair)


def test_an_unfinished_frame_is_not_forwarded() -> None:
    (mine, theirs), trap = socket.socketpair(), FaultInjector(lambda tag: None)
    theirs.settimeout(WAIT_S)
    near = trap.between(mine, has_slots=False)
    whole = Frame(Kind.ANNOUNCE, Tag(bytes(16), 1, 1)).encode()
    near.sendall(whole + Frame(Kind.RETRACT, Tag(bytes(16), 1, 1), length=100).encode() + b"half of it")
    near.close()
    heard = b"".join(iter(lambda: theirs.recv(4096), b""))
    assert heard == whole
    theirs.close()


def test_a_late_thread_does_nothing_after_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr("kvtransfer.faults.injector.os.kill", lambda process, number: sent.append(number))
    monkeypatch.setattr("kvtransfer.faults.injector.subprocess.Popen", lambda *_, **__: None)
    trap = FaultInjector(lambda tag: None)
    began_s = time.monotonic()
    trap.end_process(Fault(FaultKind.STOP, Where.SENT, 0, 0.05, 0.5))
    assert time.monotonic() - began_s >= 0.05
    assert sent == [signal.SIGSTOP]
    [(begin_s, end_s)] = trap.pauses
    assert end_s - begin_s >= 0.05


LATE = """
import subprocess, threading, time
from kvtransfer.faults.injector import FaultInjector
from kvtransfer.faults.plan import Fault, FaultKind, Where
popen = subprocess.Popen

def late(*words, **options):
    started = popen(*words, **options)
    time.sleep(0.3)  # as on a machine with other things to do
    return started

subprocess.Popen = late
trap = FaultInjector(lambda tag: None)
stop = Fault(FaultKind.STOP, Where.SENT, 0, 0.01, 0.5)
threads = [threading.Thread(target=trap.end_process, args=(stop,)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_a_process_that_is_stopped_late_is_woken() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], timeout=WAIT_S, check=False)
    assert done.returncode == 0


def test_a_workers_setting_defines_its_fault_plan() -> None:
    assert make_fault_injector("") is None
    trap = make_fault_injector("seed=7,share=1,drop=1")
    assert trap is not None
    plan, tag = parse("seed=7,share=1,drop=1"), Tag(bytes(16), 1, 1)
    fault = plan.fault_of(tag)
    assert fault is not None
    met = [trap.due(tag, fault.where) for _ in range(fault.nth + 1)]
    assert met == [None] * fault.nth + [fault]
    with pytest.raises(ConfigError):
        make_fault_injector("explode=1")


def test_frames_are_counted_for_a_limited_number_of_transfers() -> None:
    """The memory of a worker that injects faults for days does not grow."""
    fault = Fault(FaultKind.DROP, Where.SENT, 1, 0.1, 0.5)
    trap = FaultInjector(lambda tag: fault)
    for generation in range(2000):
        assert trap.due(Tag(bytes(16), 1, generation), Where.SENT) is None
    assert len(trap._frames) <= 1024
    assert trap.due(Tag(bytes(16), 1, 1999), Where.SENT) is fault, "the latest ones' second frames"
    assert trap.due(Tag(bytes(16), 1, 0), Where.SENT) is None


def test_without_faults_no_injector_is_used(
    new_threads: Callable[[], list[threading.Thread]], make_pair: Callable[..., Pair], transport: str
) -> None:
    pair = make_pair(transport)
    assert pair.move(pair.grant(BLOCKS), SOURCES)[0].outcome.value == "verified"
    assert not [thread for thread in new_threads() if "fault_injector" in thread.name]


PROCESS = """
import socket, sys, time
from kvtransfer.faults.injector import FaultInjector
from kvtransfer.faults.plan import Fault, FaultKind, Where
from kvtransfer.protocol.frames import Tag
from kvtransfer.protocol.frames import Frame, Kind
where = Where(sys.argv[2])
fault = Fault(FaultKind(sys.argv[1]), where, 1, 0.3, 0.5)
trap = FaultInjector(lambda tag: fault)
tag = Tag(bytes(16), 1, 1)
mine, theirs = socket.socketpair()
near = trap.between(mine, has_slots=False)
frame = Frame(Kind.ANNOUNCE, tag).encode()
def pass_one():
    if where is Where.WRITTEN:
        trap.before_write(tag)
    else:
        near.sendall(frame)
        assert theirs.recv(4096) == frame
pass_one()
print("first", flush=True)
began = time.monotonic()
pass_one()
print(f"{time.monotonic() - began:.2f}", trap.pauses[0][1] - trap.pauses[0][0] > 0.2, flush=True)
"""


@pytest.mark.parametrize("where", ["written", "sent"])
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_process_is_killed_at_the_planned_frame(kind: str, where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, kind, where], capture_output=True, text=True, cwd=ROOT, timeout=100, check=False
    )
    lines = done.stdout.split()
    if kind == "kill":
        assert (done.returncode, lines) == (-signal.SIGKILL, ["first"])
    else:
        assert done.returncode == 0, done.stderr
        assert float(lines[1]) > 0.25
        assert lines[2] == "True"

"""shm: valid and false offers of a sender's pool."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvtransfer.protocol.frames import ANSWER_BYTES, BadFrame
from kvtransfer.protocol.transport import ReceiveOutcome
from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.common.slots import HELLO_BYTES, SharedPool, UnixListener, offer, runs_offered
from kvtransfer.transports.shm import SHM
from tests.unit.kvtransfer.harness import BLOCK_BYTES, HostPool, Pair, fingerprint, wait_for
from tests.unit.kvtransfer.raw import greet

MakePair = Callable[..., Pair]

HELLO = b"PDKP" + (4).to_bytes(4, "little") + BLOCK_BYTES.to_bytes(8, "little")


def descriptor_of(pool: HostPool) -> int:
    assert pool.descriptor is not None
    return os.dup(pool.descriptor)


def test_an_offered_pool_is_read_in_place() -> None:
    near, far = socket.socketpair()
    pool = HostPool(4, seed=3)
    offer(near, pool)
    hello, descriptors, _, _ = socket.recv_fds(far, HELLO_BYTES, 1)
    shared = SharedPool(hello, descriptors, BLOCK_BYTES)
    pool.fill((2,), 9)
    assert shared.memory == pool.memory
    assert shared.memory.readonly
    shared.close()
    near.close()
    far.close()


def test_an_offer_says_if_a_block_is_a_run_for_each_layer() -> None:
    for runs in (1, 2):
        near, far = socket.socketpair()
        offer(near, HostPool(4, runs_per_block=runs))
        hello, descriptors, _, _ = socket.recv_fds(far, HELLO_BYTES, 1)
        assert (hello == HELLO) == (runs == 1), "peers that know one run only reject the other offer"
        shared = SharedPool(hello, descriptors, BLOCK_BYTES)
        form = fingerprint(num_layers=2).shape.form
        assert runs_offered(form, is_in_layers=shared.is_in_layers) == runs
        if runs > 1:
            with pytest.raises(BadFrame, match="int8 blocks end with the scales of all layers"):
                runs_offered(form.stored_as("int8"), is_in_layers=shared.is_in_layers)
        shared.close()
        near.close()
        far.close()


def unsealed(num_bytes: int) -> int:
    descriptor = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def lies() -> dict[str, tuple[bytes, list[int]]]:
    pool = HostPool(3)
    return {
        "no descriptor": (HELLO, []),
        "two descriptors": (HELLO, [unsealed(8), unsealed(8)]),
        "half a hello": (HELLO[:7], [unsealed(4 * BLOCK_BYTES)]),
        "another magic": (b"PDRG" + HELLO[4:], [unsealed(4 * BLOCK_BYTES)]),
        "no blocks": (HELLO[:4] + bytes(4) + HELLO[8:], [unsealed(4 * BLOCK_BYTES)]),
        "blocks of another size": (HELLO[:8] + (512).to_bytes(8, "little"), [unsealed(4 * BLOCK_BYTES)]),
        "a file that can be cut short": (HELLO, [unsealed(4 * BLOCK_BYTES)]),
        "a file that is too short": (HELLO, [descriptor_of(pool)]),
    }


@pytest.mark.parametrize("name", sorted(lies()))
def test_a_false_offer_is_rejected(name: str) -> None:
    hello, descriptors = lies()[name]
    with pytest.raises(BadFrame):
        SharedPool(hello, descriptors, BLOCK_BYTES)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_an_ordinary_file_is_rejected() -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(OSError, match="Invalid argument"):
        SharedPool(HELLO, [read], BLOCK_BYTES)


@pytest.mark.parametrize("lie", [b"", HELLO[:3], HELLO])
def test_a_sender_without_an_offer_ends_only_its_connection(make_pair: MakePair, lie: bytes) -> None:
    pair = make_pair("shm")
    answer = pair.host.open(pair.sender)
    sock = TRANSPORTS[SHM].dial(answer.address, pair.host.endpoint, 5.0)
    sock.sendall(greet(pair, answer) + lie)
    sock.shutdown(socket.SHUT_WR)
    heard = bytearray()
    while data := sock.recv(64):
        heard += data
    assert len(heard) in (0, ANSWER_BYTES)  # The sender may end before the answer is written.
    sock.close()
    wait_for(lambda: not pair.receiver.peers, "the connection's end")
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


def test_a_pool_that_cannot_be_shared_uses_tcp(make_pair: MakePair) -> None:
    pair = make_pair("auto")
    pair.source.descriptor = None
    received, _ = pair.move(pair.grant((1,)), (1,))
    assert received.outcome is ReceiveOutcome.VERIFIED
    [outbound] = pair.sender.plain._pairs.values()
    assert outbound._connection is not None
    assert outbound._connection.transport == "tcp"


def test_shm_alone_reports_why_it_fails(make_pair: MakePair) -> None:
    pair = make_pair("shm")
    pair.source.descriptor = None
    grant = pair.grant((2,))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 0)], True)
    assert "the sender's pool is not in memory that can be shared" in sent.wait().error
    pair.receiver.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.DRAINED


# -- the socket between two processes of one host --------------------------------------------------------------

STRANGER = 54_321  # a user id that owns nothing


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as a second user, which only root can become")
def test_a_receiver_of_another_user_is_refused() -> None:
    """Names of such sockets have no owner: anyone can take that of an ended receiver."""
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
        "one = socket.socket(socket.AF_UNIX); one.bind('\\0pdserve-kv-' + sys.argv[2]); one.listen()\n"
        "print('ready', flush=True); one.accept(); sys.stdin.read()"
    )
    name = f"test-{os.getpid()}"
    command = [sys.executable, "-c", code, str(STRANGER), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        with pytest.raises(PermissionError, match="another user"):
            UnixListener().dial(f"pdserve-kv-{name}", "127.0.0.1:1", 5.0)
        stranger.communicate("")

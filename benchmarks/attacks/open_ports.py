"""Row 4: workers' gRPC and KV ports, without the cluster's secret.

The attacker attaches as a router, to use the worker and to drain it; requests a ticket as p0; replays and guesses
proofs; and connects to the KV ports with invented tickets and without sending anything. It also calls Drain on the
router without the token. Before the fix, all of this succeeded.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks.attacks.calls import ANSWER_S, status_of
from benchmarks.attacks.harness import AttackResult, AttackRow, AttackTarget
from kvtransfer.protocol.frames import Greeting
from pdserve.telemetry import metric_names
from pdserve.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from pdserve.wire.peers import PROOF_KEY

ROUNDS: Final = 20
IDLE_CONNECTIONS: Final = 100  # to each KV port, three times as many as may wait there
HELLO: Final = worker_pb2.AttachRequest(hello=worker_pb2.RouterHello(router_id="stranger", router_incarnation="1"))
Metadata = tuple[tuple[str, bytes], ...]


def open_ports(target: AttackTarget) -> AttackResult:
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    before = sum(_rejected(target, name) for name in ("p0", "d0"))
    for name in ("p0", "d0"):
        with grpc.insecure_channel(target.address(name)) as channel:
            for _ in range(ROUNDS):
                for what, call in _calls(channel, target.address(name)).items():
                    errors[said := status_of(call)] += 1
                    if said != "UNAUTHENTICATED":
                        complaints.append(f"{what} of {name} ended in {said}")
    num_calls = errors.total()
    counted = sum(_rejected(target, name) for name in ("p0", "d0")) - before
    if counted < num_calls:
        complaints.append(f"{counted:.0f} of {num_calls} calls were counted")
    with grpc.insecure_channel(target.router) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        for call in (
            lambda: stub.Drain(cluster_pb2.DrainRequest(worker_id="d0"), timeout=ANSWER_S),
            lambda: stub.Undrain(cluster_pb2.UndrainRequest(worker_id="d0"), timeout=ANSWER_S),
        ):
            errors[said := status_of(call)] += 1
            if said != "UNAUTHENTICATED":
                complaints.append(f"a drain without the token ended in {said}")
    num_connections = _connect(target, errors, complaints)
    attempts = errors.total()
    return AttackResult(
        attempts=attempts,
        rejected=errors["UNAUTHENTICATED"] + errors["closed"],
        counted=counted,
        errors=errors,
        note=f"{num_connections} connections to KV ports",
        complaints=complaints,
    )


def _calls(channel: grpc.Channel, address: str) -> dict[str, Callable[[], Any]]:
    worker, transfer = worker_pb2_grpc.WorkerServiceStub(channel), transfer_pb2_grpc.TransferServiceStub(channel)

    def attach(then: worker_pb2.AttachRequest, metadata: Metadata = ()) -> Callable[[], Any]:
        return lambda: next(worker.Attach(iter((HELLO, then)), timeout=ANSWER_S, metadata=metadata))

    sequence = worker_pb2.Sequence(request_id="free", attempt=1, prompt_token_ids=[1, 2, 3])
    reserve = worker_pb2.AttachRequest(reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
    nonce = secrets.token_bytes(16)
    greeting = peer_pb2.GetChallengeRequest(target=address, nonce=nonce)
    known = peer_pb2_grpc.PeerServiceStub(channel).GetChallenge(greeting, timeout=ANSWER_S)
    guessed = peer_pb2.CallProof(
        role="router", caller="router-0/1", target=address, challenge=known.challenge, nonce=nonce, mac=known.mac
    )
    request = transfer_pb2.OpenRequest(sender_id="p0", sender_incarnation="1")
    return {
        "a reservation": attach(reserve),
        "a drain": attach(worker_pb2.AttachRequest(drain=worker_pb2.DrainWorker())),
        "a proof of noise": attach(reserve, ((PROOF_KEY, secrets.token_bytes(64)),)),
        "the worker's own mac as a proof": attach(reserve, ((PROOF_KEY, guessed.SerializeToString()),)),
        "Open as p0": lambda: transfer.Open(request, timeout=ANSWER_S),
    }


def _rejected(target: AttackTarget, name: str) -> float:
    return target.metric(name, metric_names.REJECTED_CALLS.name, reason="UNAUTHENTICATED")


def _connect(target: AttackTarget, errors: Counter[str], complaints: list[str]) -> int:
    """Idle connections first, so that made-up tickets are tried while they fill the place for unproven ones."""
    count = 0
    for port in _kv_ports(target):
        with contextlib.ExitStack() as held:
            for number in range(IDLE_CONNECTIONS + ROUNDS):
                sock = held.enter_context(socket.create_connection(("127.0.0.1", port), ANSWER_S))
                count += 1
                if number >= IDLE_CONNECTIONS:
                    words = Greeting(secrets.token_bytes(16), secrets.token_bytes(16), secrets.token_bytes(32))
                    errors[said := _end(sock, words.encode())] += 1
                    if said != "closed":
                        complaints.append(f"a KV connection without a ticket {said}")
    if not count:
        complaints.append("no KV port was found")
    return count


def _end(sock: socket.socket, words: bytes) -> str:
    try:
        sock.sendall(words)
        return "was answered" if sock.recv(64) else "closed"
    except ConnectionError:
        return "closed"
    except TimeoutError:
        return "stayed open"


def _kv_ports(target: AttackTarget) -> Iterator[int]:
    """The decode worker's open ports, except those for gRPC and metrics. Linux only."""
    known = {int(target.address("d0").rpartition(":")[2]), target.metrics_ports["d0"]}
    sockets: set[str] = set()
    for entry in Path(f"/proc/{target.pid('d0')}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        port = struct.unpack(">H", bytes.fromhex(fields[1].partition(":")[2]))[0]
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets and port not in known:
            yield port


ROWS: Final = (AttackRow(number=4, name="workers' ports without the secret", attack=open_ports),)

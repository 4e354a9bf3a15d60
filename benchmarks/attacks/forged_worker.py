"""Row 3: a forged registration, so that the router sends prompts to a stranger's worker.

The stranger listens as a decode worker and tries to write itself into the embedded Redis: without a password, and with
guessed ones. Before, the registration was written, the router attached, and the stranger saw prompts and forged
tokens. That a worker in the registry is told nothing before it has proven the cluster's secret, whatever Redis says, is
tested in tests/unit/router_io/test_forged_workers.py, since no stranger gets that far any more.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from concurrent import futures
from typing import Any, Final

import grpc

from benchmarks.attacks.row import Finding, Row, Target
from pdserve.v1 import worker_pb2, worker_pb2_grpc

ANSWER_S: Final = 10.0
WATCH_S: Final = 3.0  # several times as long as a router takes to read the registry and to dial
GUESSES: Final = ("", "redis", "pdserve", "default", "password")


class _Forged(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.num_streams = 0

    def Attach(self, request_iterator: Any, context: Any) -> Any:
        self.num_streams += 1
        for _ in request_iterator:
            yield worker_pb2.AttachResponse(hello=worker_pb2.WorkerHello(worker_id="d9", role=worker_pb2.ROLE_DECODE))


def attack(target: Target) -> Finding:
    forged, errors, complaints = _Forged(), Counter[str](), list[str]()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(forged, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    facts = f'\'{{"role":"decode","endpoint":"{endpoint}"}}\''
    commands = (
        "SADD {pd:default}:workers d9",
        f"HSET {{pd:default}}:worker:d9 incarnation 1 facts {facts}",
        "KEYS *",
        "CONFIG GET requirepass",
        *(f"AUTH {guess or '%'}" for guess in GUESSES),
    )
    try:
        for command in commands:
            answer = _say(target.address("redis"), command)
            errors[answer.split()[0].lstrip("-") if answer.startswith("-") else "OK"] += 1
            if not answer.startswith(("-NOAUTH", "-WRONGPASS", "-ERR")):
                complaints.append(f"Redis answered {command.split()[0]} with {answer[:40]!r}")
        time.sleep(min(WATCH_S, target.seconds))
    finally:
        server.stop(None).wait()
    if forged.num_streams:
        complaints.append(f"the router opened {forged.num_streams} streams to the forged worker")
    return Finding(
        attempts=len(commands),
        rejected=errors.total() - errors["OK"],
        errors=errors,
        note=f"{forged.num_streams} streams to the forged worker",
        complaints=tuple(complaints),
    )


def _say(address: str, command: str) -> str:
    """The first line of Redis's answer to an inline command, on a connection of its own."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), ANSWER_S) as sock:
        sock.sendall(command.encode() + b"\r\n")
        return sock.recv(4096).decode("utf-8", "replace").partition("\r\n")[0]


ROW = Row(number=3, name="forged registration in Redis", attack=attack)

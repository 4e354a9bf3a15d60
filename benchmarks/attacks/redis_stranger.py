"""Row 3: an attacker tries to register its own worker in the embedded Redis, so that the router connects to it.

It listens as a decode worker, reads the server's port from the launcher's output, and sends commands without a password
and with wrong passwords. The next line of defence is not reached here and is tested in
tests/unit/router_io/test_forged_workers.py: a registered worker receives nothing before it has proven the secret.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent import futures
from typing import Any, Final

import grpc
from redis import Redis
from redis.exceptions import AuthenticationError, RedisError

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve.v1 import worker_pb2, worker_pb2_grpc

WATCH_S: Final = 3.0  # several times as long as a router takes to read the registry and to dial
PASSWORDS: Final = (None, "", "redis", "pdserve", "secret", "0" * 64)


class _Forged(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.num_streams = 0

    def Attach(self, request_iterator: Any, context: Any) -> Any:
        self.num_streams += 1
        for _ in request_iterator:
            yield worker_pb2.AttachResponse(hello=worker_pb2.WorkerHello(worker_id="d9", role=worker_pb2.ROLE_DECODE))


def commands(endpoint: str) -> tuple[tuple[str, ...], ...]:
    facts = f'{{"role":"decode","endpoint":"{endpoint}"}}'
    return (
        ("SADD", "{pd:default}:workers", "d9"),
        ("HSET", "{pd:default}:worker:d9", "incarnation", "1", "facts", facts),
        ("KEYS", "*"),
        ("CONFIG", "GET", "requirepass"),
    )


def attack(target: AttackTarget) -> AttackResult:
    forged, server = _Forged(), grpc.server(futures.ThreadPoolExecutor(4))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(forged, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        errors, complaints = _write(target, endpoint)
        time.sleep(min(WATCH_S, target.seconds))
    finally:
        server.stop(None).wait()
    if forged.num_streams:
        complaints.append(f"the router opened {forged.num_streams} streams to the forged worker")
    return AttackResult(
        attempts=errors.total(),
        rejected=errors["AuthenticationError"],
        errors=errors,
        note=f"{forged.num_streams} streams to the forged worker",
        complaints=tuple(complaints),
    )


def _write(target: AttackTarget, endpoint: str) -> tuple[Counter[str], list[str]]:
    host, _, port = target.address("redis").rpartition(":")
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    for password in PASSWORDS:
        for command in commands(endpoint):
            with Redis(host=host, port=int(port), password=password, socket_timeout=5.0) as stranger:
                try:
                    stranger.execute_command(*command)
                    errors["OK"] += 1
                    complaints.append(f"{command[0]} was answered to a stranger with the password {password!r}")
                except AuthenticationError as error:
                    errors[type(error).__name__] += 1
                except RedisError as error:
                    errors[type(error).__name__] += 1
                    complaints.append(f"{command[0]} ended in {error}")
    return errors, complaints


ROW = AttackRow(number=3, name="a stranger in the embedded Redis", attack=attack)

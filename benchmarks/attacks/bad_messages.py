"""Row 6: messages that do not parse, sent to the router with a token, and to the workers without the secret.

Before the fix, each ended with the status UNKNOWN and a traceback in the log.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any, Final

import grpc

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from benchmarks.attacks.watching import LogWatch
from pdserve.telemetry import metric_names

ROUTER: Final = (
    "pdserve.v1.InferenceService/Generate",
    "pdserve.v1.InferenceService/GetModel",
    "pdserve.v1.InferenceService/Tokenize",
    "pdserve.v1.InferenceService/Detokenize",
    "pdserve.v1.ClusterService/GetTopology",
    "pdserve.v1.ClusterService/Explain",
    "pdserve.v1.ClusterService/Drain",
    "grpc.health.v1.Health/Check",
    "grpc.health.v1.Health/Watch",
)
WORKER: Final = (
    "pdserve.v1.WorkerService/Attach",
    "pdserve.v1.TransferService/Open",
    "grpc.health.v1.Health/Check",
)
ANSWER_S: Final = 10.0
MOST: Final = 2000
EXPECTED: Final = ("INVALID_ARGUMENT", "UNAUTHENTICATED")


def attack(target: AttackTarget) -> AttackResult:
    ports = (
        ("router", target.router, ROUTER),
        ("d0", target.address("d0"), WORKER),
        ("p0", target.address("p0"), WORKER),
    )
    before = _counted(target)
    log, chance = LogWatch(target), random.Random(6)
    errors: Counter[str] = Counter()
    ends_s = time.monotonic() + target.seconds
    metadata = (("authorization", f"Bearer {target.token}"),)
    while time.monotonic() < ends_s and errors.total() < MOST:
        for name, address, methods in ports:
            with grpc.insecure_channel(address) as channel:
                for method in methods:
                    call = channel.unary_unary(f"/{method}")
                    # A field of an unfinished length, behind anything: no message parses so.
                    garbage = b"\x0a\xff\xff\xff\x7f" + chance.randbytes(chance.randrange(64))
                    errors[_status(call, garbage, metadata if name == "router" else ())] += 1
    counted = _counted(target) - before
    rejected = sum(errors[code] for code in EXPECTED)
    complaints = [*log.complaints()]
    if rejected != errors.total():
        complaints.append(f"{errors.total() - rejected} messages had another end")
    if counted < rejected:
        complaints.append(f"{counted:.0f} of {rejected} rejections were counted")
    return AttackResult(
        attempts=errors.total(), rejected=rejected, counted=counted, errors=errors, complaints=tuple(complaints)
    )


def _counted(target: AttackTarget) -> float:
    by_router = target.metric("router", metric_names.REQUEST_ERRORS.name)
    return by_router + sum(target.metric(name, metric_names.REJECTED_CALLS.name) for name in ("p0", "d0"))


def _status(call: Any, message: bytes, metadata: tuple[tuple[str, str], ...]) -> str:
    try:
        call(message, timeout=ANSWER_S, metadata=metadata)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


ROW = AttackRow(number=6, name="messages that do not parse", attack=attack, needs="token")

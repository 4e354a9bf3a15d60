"""Row 1: durations that are infinite, negative or NaN, from a caller and on a worker's stream.

A caller with a token sends them as SLO targets and as gRPC deadlines; an attacker without the secret sends them to a
decode worker as deadlines of reservations. Before the fix, one such reservation ended the worker's receiver, and the
next one ended the restarted receiver.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import grpc

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from pdserve import Client, PdserveError
from pdserve.telemetry import metric_names
from pdserve.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

NO_TARGETS: Final = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e300)
NO_DEADLINES: Final = (math.nan, math.inf, -1.0, 3e6, 1e300)
FAR_S: Final = (3e6, 1e9)  # timeouts that gRPC carries, and the router cuts to its own
ANSWER_S: Final = 10.0


def attack(target: AttackTarget) -> AttackResult:
    before = target.metric("router", metric_names.REQUEST_ERRORS.name, reason="INVALID_REQUEST")
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    with grpc.insecure_channel(target.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for name in ("ttft_s", "tpot_s"):
            for seconds in NO_TARGETS:
                status = _generate(stub, target, inference_pb2.Slo(**{name: seconds}))
                errors[status] += 1
                if status != "INVALID_ARGUMENT":
                    complaints.append(f"slo.{name} = {seconds} ended in {status}")
    with Client(target.router, token=target.token) as client:
        for seconds in FAR_S:
            try:
                client.generate([1, 2, 3], max_tokens=1, timeout_s=seconds)
            except PdserveError as error:
                complaints.append(f"a timeout of {seconds:g} s ended in {error.reason}")
    for seconds in NO_DEADLINES:
        said = _reserve(target.address("d0"), seconds)
        errors[said] += 1
        if said not in ("FAILURE_KIND_INVALID", "UNAUTHENTICATED", "PERMISSION_DENIED"):
            complaints.append(f"a reservation with deadline_s = {seconds} ended in {said}")
    counted = target.metric("router", metric_names.REQUEST_ERRORS.name, reason="INVALID_REQUEST") - before
    if counted < 2 * len(NO_TARGETS):
        complaints.append(f"{counted:.0f} of {2 * len(NO_TARGETS)} invalid requests were counted")
    attempts = errors.total()
    return AttackResult(
        attempts=attempts,
        rejected=attempts - sum("ended in" in one for one in complaints),
        counted=counted,
        errors=errors,
        complaints=tuple(complaints),
    )


def _generate(stub: Any, target: AttackTarget, slo: inference_pb2.Slo) -> str:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
        sampling=inference_pb2.SamplingParams(max_tokens=1),
        slo=slo,
    )
    metadata = (("authorization", f"Bearer {target.token}"),)
    try:
        for _ in stub.Generate(request, timeout=ANSWER_S, metadata=metadata):
            pass
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def _reserve(address: str, deadline_s: float) -> str:
    """How the worker answers: the kind of the failure, or the status of the stream."""

    is_over = threading.Event()

    def said() -> Iterator[worker_pb2.AttachRequest]:
        yield worker_pb2.AttachRequest(hello=worker_pb2.RouterHello(router_id="stranger", router_incarnation="1"))
        sequence = worker_pb2.Sequence(
            request_id="endless", attempt=1, prompt_token_ids=[1, 2, 3], deadline_s=deadline_s
        )
        yield worker_pb2.AttachRequest(reserve=worker_pb2.Reserve(sequence=sequence))
        is_over.wait(ANSWER_S)  # the end of what is said is the end of the stream

    with grpc.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Attach(said(), timeout=ANSWER_S)
        try:
            for message in call:
                for one in message.batch.messages or (message,):
                    if one.HasField("granted"):
                        return "granted"
                    if one.HasField("failed"):
                        return str(worker_pb2.FailureKind.Name(one.failed.kind))
        except grpc.RpcError as error:
            return str(error.code().name)
        finally:
            is_over.set()
    return "nothing"


ROW = AttackRow(number=1, name="endless and negative durations", attack=attack, needs="token")

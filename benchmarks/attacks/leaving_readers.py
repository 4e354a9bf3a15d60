"""Row 7: clients that disconnect in the middle of an answer, half of them with a full flow-control window.

Before the fix, 200 of them left 197 tracebacks in the log.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from benchmarks.attacks.watching import LogWatch
from pdserve.telemetry import metric_names
from pdserve.v1 import inference_pb2, inference_pb2_grpc

NUM_READERS: Final = 200
AT_ONCE: Final = 20
SETTLE_S: Final = 20.0
SMALL_WINDOW: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4096),
)


def attack(target: AttackTarget) -> AttackResult:
    before = target.metric("router", metric_names.CLIENT_DISCONNECTS.name)
    log = LogWatch(target)
    metadata = (("authorization", f"Bearer {target.token}"),)
    ends_s = time.monotonic() + target.seconds

    def leave(number: int) -> str:
        if time.monotonic() > ends_s:
            return "not sent"
        sampling = inference_pb2.SamplingParams(max_tokens=400, ignore_eos=True, logprobs=20 if number % 2 else None)
        request = inference_pb2.GenerateRequest(text="def fib(n):", sampling=sampling)
        channel = grpc.insecure_channel(target.router, options=SMALL_WINDOW)
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=metadata)
        try:
            for _ in range(1 + number % 3):
                next(call)
            if number % 2:
                time.sleep(0.5)  # reads no more: the router comes to the end of the window
        except grpc.RpcError as error:
            return str(error.code().name)
        finally:
            channel.close()
        return "disconnected"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        errors = Counter(pool.map(leave, range(NUM_READERS)))
    num_left = errors["disconnected"]
    settled_s = time.monotonic() + SETTLE_S
    while (counted := target.metric("router", metric_names.CLIENT_DISCONNECTS.name) - before) < num_left:
        if time.monotonic() > settled_s:
            break
        time.sleep(0.2)
    complaints = [*log.complaints()]
    if counted < num_left:
        complaints.append(f"{counted:.0f} of {num_left} disconnects were counted")
    if not num_left:
        complaints.append("no reader got so far as to disconnect")
    return AttackResult(
        attempts=NUM_READERS - errors["not sent"],
        rejected=num_left,
        counted=counted,
        errors=errors,
        complaints=tuple(complaints),
    )


ROW = AttackRow(number=7, name="readers that disconnect", attack=attack, needs="token")

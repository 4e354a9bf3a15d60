"""Row 2: sixteen texts of 3.9 MB at a time, as prompts, chat messages, truncated prompts and texts to tokenize.

Before the fix, each was tokenized to 2.3 million tokens before its length was checked. The router's memory grew from 85
MB to 1.6 GB, and prompts over 256 characters waited for 30 s.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from benchmarks.attacks.watching import MemoryPeak
from pdserve import Client, PdserveError, Retries
from pdserve.telemetry import metric_names
from pdserve.v1 import inference_pb2, inference_pb2_grpc

TEXT: Final = "def fib(n):\n    return n if n < 2 else fib(n - 1)\n" * 78_000  # 3.9 MB
WITHOUT_A_CUT: Final = "a" * 3_900_000
NUM_CALLERS: Final = 16
MAX_RISE: Final = 600 * 2**20
MAX_BESIDE_S: Final = 5.0
ANSWER_S: Final = 60.0
BESIDE: Final = "x = 1\n" * 70  # 420 characters: in a thread, as the long ones


def attack(target: AttackTarget) -> AttackResult:
    before = target.metric("router", metric_names.REQUEST_ERRORS.name)
    metadata = (("authorization", f"Bearer {target.token}"),)
    errors: Counter[str] = Counter()
    lock = threading.Lock()
    is_over = threading.Event()
    few = inference_pb2.SamplingParams(max_tokens=1)
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content=TEXT)])
    requests = (
        inference_pb2.GenerateRequest(text=TEXT, sampling=few),
        inference_pb2.GenerateRequest(chat=chat, sampling=few),
        inference_pb2.TokenizeRequest(text=TEXT),
        inference_pb2.GenerateRequest(text=TEXT, sampling=few, truncate_prompt_tokens=16),
        inference_pb2.GenerateRequest(text=WITHOUT_A_CUT, sampling=few, truncate_prompt_tokens=16),
    )
    is_taken = (False, False, False, True, False)

    def call(number: int) -> None:
        kind = number % len(requests)
        with grpc.insecure_channel(target.router, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = requests[kind]
            try:
                if isinstance(request, inference_pb2.TokenizeRequest):
                    stub.Tokenize(request, timeout=ANSWER_S, metadata=metadata)
                else:
                    for _ in stub.Generate(request, timeout=ANSWER_S, metadata=metadata):
                        pass
                said = "OK"
            except grpc.RpcError as error:
                said = error.code().name
        with lock:
            errors[f"truncated: {said}" if is_taken[kind] else said] += 1

    took_s: list[float] = []
    failures: list[str] = []

    def beside() -> None:
        with Client(target.router, token=target.token, retries=Retries(limit=0)) as client:
            while not is_over.wait(0.05):
                began_s = time.monotonic()
                try:
                    client.tokenize(BESIDE)
                except PdserveError as error:
                    failures.append(error.reason)
                took_s.append(time.monotonic() - began_s)

    thread = threading.Thread(target=beside, daemon=True)
    ends_s = time.monotonic() + target.seconds
    num_sent = 0
    with MemoryPeak(target.pid("router")) as memory, ThreadPoolExecutor(NUM_CALLERS) as pool:
        thread.start()
        while time.monotonic() < ends_s:
            list(pool.map(call, range(num_sent, num_sent + NUM_CALLERS)))
            num_sent += NUM_CALLERS
        is_over.set()
        thread.join(ANSWER_S)
    counted = target.metric("router", metric_names.REQUEST_ERRORS.name) - before
    rejected = errors["INVALID_ARGUMENT"] + errors["RESOURCE_EXHAUSTED"] + errors["truncated: RESOURCE_EXHAUSTED"]
    taken = errors["truncated: OK"]
    complaints = []
    if failures:
        complaints.append(f"{len(failures)} short texts failed beside them, the first with {failures[0]}")
    if rejected + taken != num_sent:
        complaints.append(f"{num_sent - rejected - taken} of {num_sent} long texts had another end")
    if counted < rejected:
        complaints.append(f"{counted:.0f} of {rejected} rejections were counted")
    if memory.rise > MAX_RISE:
        complaints.append(f"the router grew by {memory.rise >> 20} MiB, over {MAX_RISE >> 20} MiB")
    if not took_s or max(took_s) > MAX_BESIDE_S:
        complaints.append(f"a text of {len(BESIDE)} characters waited for {max(took_s, default=ANSWER_S):.1f} s")
    return AttackResult(
        attempts=num_sent,
        rejected=rejected,
        counted=counted,
        errors=errors,
        note=(
            f"the router grew by {memory.rise >> 20} MiB at most; a text of {len(BESIDE)} characters beside them took "
            f"{max(took_s, default=0.0) * 1e3:.0f} ms at most"
        ),
        complaints=tuple(complaints),
    )


ROW = AttackRow(number=2, name="texts of 3.9 MB", attack=attack, needs="token")

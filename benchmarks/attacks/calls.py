"""Rows of callers over gRPC: durations, texts, grammars, messages, readers and connections."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import grpc
import psutil  # type: ignore[import-untyped]

from benchmarks.attacks.harness import AttackResult, AttackRow, AttackTarget, Beside, LogWatch, callers, is_closed
from pdserve import Client, PdserveError, Retries
from pdserve.config import RouterConfig
from pdserve.telemetry import metric_names
from pdserve.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdserve.wire.peer_server import HANDSHAKE_S

ANSWER_S: Final = 10.0


def status_of(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)  # type: ignore[attr-defined]  # a call is its own error
    return "OK"


def _metadata(target: AttackTarget) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {target.token}"),)


# ---- Row 1. Before the fix, one such reservation ended the worker's receiver, and the next one the restarted receiver.
NO_TARGETS: Final = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e300)
NO_DEADLINES: Final = (math.nan, math.inf, -1.0, 3e6, 1e300)
FAR_S: Final = (3e6, 1e9)  # timeouts that gRPC carries, and the router cuts to its own


def durations(target: AttackTarget) -> AttackResult:
    """A caller with a token sends them as SLO targets and as gRPC deadlines; an attacker without the secret sends them
    to a decode worker as deadlines of reservations."""
    before = target.metric("router", metric_names.REQUEST_ERRORS.name, reason="INVALID_REQUEST")
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    with grpc.insecure_channel(target.router) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for name, seconds in itertools.product(("ttft_s", "tpot_s"), NO_TARGETS):
            request = inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
                sampling=inference_pb2.SamplingParams(max_tokens=1),
                slo=inference_pb2.Slo(**{name: seconds}),
            )
            call = stub.Generate(request, timeout=ANSWER_S, metadata=_metadata(target))
            errors[said := status_of(lambda call=call: list(call))] += 1  # type: ignore[misc]
            if said != "INVALID_ARGUMENT":
                complaints.append(f"slo.{name} = {seconds} ended in {said}")
    with Client(target.router, token=target.token) as client:
        for seconds in FAR_S:
            try:
                client.generate([1, 2, 3], max_tokens=1, timeout_s=seconds)
            except PdserveError as error:
                complaints.append(f"a timeout of {seconds:g} s ended in {error.reason}")
    for seconds in NO_DEADLINES:
        errors[said := _reserve(target.address("d0"), seconds)] += 1
        if said not in ("FAILURE_KIND_INVALID", "UNAUTHENTICATED", "PERMISSION_DENIED"):
            complaints.append(f"a reservation with deadline_s = {seconds} ended in {said}")
    counted = target.metric("router", metric_names.REQUEST_ERRORS.name, reason="INVALID_REQUEST") - before
    rejected = errors.total() - sum("ended in" in one for one in complaints)
    if counted < 2 * len(NO_TARGETS):
        complaints.append(f"{counted:.0f} of {2 * len(NO_TARGETS)} invalid requests were counted")
    return AttackResult(
        attempts=errors.total(), rejected=rejected, counted=counted, errors=errors, complaints=complaints
    )


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


# ---- Row 2. Before the fix, each was tokenized to 2.3 million tokens before its length was checked. The router's
# memory grew from 85 MB to 1.6 GB, and prompts over 256 characters waited for 30 s.
TEXT: Final = "def fib(n):\n    return n if n < 2 else fib(n - 1)\n" * 78_000  # 3.9 MB
WITHOUT_A_CUT: Final = "a" * 3_900_000
NUM_CALLERS: Final = 16
MAX_RISE: Final = 600 * 2**20
MAX_BESIDE_S: Final = 5.0
LONG_ANSWER_S: Final = 60.0
BESIDE: Final = "x = 1\n" * 70  # 420 characters: in a thread, as the long ones


def long_texts(target: AttackTarget) -> AttackResult:
    """Sixteen texts of 3.9 MB at a time, as prompts, chat messages, truncated prompts and texts to tokenize."""
    before = target.metric("router", metric_names.REQUEST_ERRORS.name)
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

    def call(number: int) -> str:
        kind = number % len(requests)
        request = requests[kind]
        with grpc.insecure_channel(target.router, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            given: dict[str, Any] = {"timeout": LONG_ANSWER_S, "metadata": _metadata(target)}
            if isinstance(request, inference_pb2.TokenizeRequest):
                said = status_of(lambda: stub.Tokenize(request, **given))
            else:
                said = status_of(lambda: list(stub.Generate(request, **given)))
        return f"truncated: {said}" if is_taken[kind] else said

    router = psutil.Process(target.pid("router"))
    resident = [router.memory_info().rss]
    errors: Counter[str] = Counter()
    num_sent = 0
    ends_s = time.monotonic() + target.seconds
    with (
        Client(target.router, token=target.token, retries=Retries(limit=0)) as client,
        Beside(lambda: resident.append(router.memory_info().rss)),
        Beside(lambda: client.tokenize(BESIDE)) as beside,
        ThreadPoolExecutor(NUM_CALLERS) as pool,
    ):
        while time.monotonic() < ends_s:
            errors.update(pool.map(call, range(num_sent, num_sent + NUM_CALLERS)))
            num_sent += NUM_CALLERS
    counted = target.metric("router", metric_names.REQUEST_ERRORS.name) - before
    rejected = errors["INVALID_ARGUMENT"] + errors["RESOURCE_EXHAUSTED"] + errors["truncated: RESOURCE_EXHAUSTED"]
    taken = errors["truncated: OK"]
    rise = max(resident) - resident[0]
    complaints = beside.complaints("short texts beside them", MAX_BESIDE_S)
    if rejected + taken != num_sent:
        complaints.append(f"{num_sent - rejected - taken} of {num_sent} long texts had another end")
    if counted < rejected:
        complaints.append(f"{counted:.0f} of {rejected} rejections were counted")
    if rise > MAX_RISE:
        complaints.append(f"the router grew by {rise >> 20} MiB, over {MAX_RISE >> 20} MiB")
    return AttackResult(
        attempts=num_sent,
        rejected=rejected,
        counted=counted,
        errors=errors,
        note=f"the router grew by {rise >> 20} MiB at most; a text of {len(BESIDE)} characters beside them took "
        f"{beside.longest_s * 1e3:.0f} ms at most",
        complaints=complaints,
    )


# ---- Row 5. Before the fix, a new grammar of the other caller waited 7 to 15 s for the only checker.
NUM_SLOW: Final = 24
MAX_GRAMMAR_S: Final = 3.0
GRAMMAR_PAUSE_S: Final = 0.2


def slow_grammars(target: AttackTarget) -> AttackResult:
    """24 callers send slow grammars, each a new one; meanwhile another caller sends new, quick grammars."""
    before = target.metric("router", metric_names.REQUEST_ERRORS.name)
    lengths = itertools.count(2)

    def slow(client: Client, number: int) -> None:
        schema = {"type": "integer", "multipleOf": 999_983 + 2 * number}
        client.generate("x", max_tokens=1, json_schema=schema)

    with Client(target.router, token=target.token, retries=Retries(limit=0)) as client:

        def quick() -> None:
            client.generate("x", max_tokens=1, regex=f"[a-z]{{1,{next(lengths)}}}")

        quick()  # starts the first process that checks
        with (
            callers(NUM_SLOW, target.router, target.token, slow) as errors,
            Beside(quick, GRAMMAR_PAUSE_S) as beside,
        ):
            time.sleep(target.seconds)
    counted = target.metric("router", metric_names.REQUEST_ERRORS.name) - before
    rejected = errors["INVALID_REQUEST"] + errors["OVERLOADED"]
    complaints = beside.complaints("quick grammars of another caller", MAX_GRAMMAR_S)
    if rejected + errors["served"] != errors.total():  # some numbers make a quick schema
        complaints.append(f"{errors.total() - rejected - errors['served']} slow grammars had another end")
    if counted < rejected:
        complaints.append(f"{counted:.0f} of {rejected} rejections were counted")
    return AttackResult(
        attempts=errors.total(),
        rejected=rejected,
        counted=counted,
        errors=errors,
        note=f"{len(beside.took_s)} new quick grammars of another took {beside.median_ms:.0f} ms in the median, "
        f"{beside.longest_s * 1e3:.0f} ms at most",
        complaints=complaints,
    )


# ---- Row 6. Before the fix, each message ended with the status UNKNOWN and a traceback in the log.
ROUTER_METHODS: Final = (
    *(f"InferenceService/{name}" for name in ("Generate", "GetModel", "Tokenize", "Detokenize")),
    *(f"ClusterService/{name}" for name in ("GetTopology", "Explain", "Drain")),
)
WORKER_METHODS: Final = ("WorkerService/Attach", "TransferService/Open")
MOST: Final = 2000


def bad_messages(target: AttackTarget) -> AttackResult:
    """Messages that do not parse, sent to the router with a token, and to the workers without the secret."""
    health = "grpc.health.v1.Health"
    ports = {
        "router": (*(f"pdserve.v1.{one}" for one in ROUTER_METHODS), f"{health}/Check", f"{health}/Watch"),
        **dict.fromkeys(("d0", "p0"), (*(f"pdserve.v1.{one}" for one in WORKER_METHODS), f"{health}/Check")),
    }
    before = _counted(target)
    log, chance = LogWatch(target), random.Random(6)
    errors: Counter[str] = Counter()
    ends_s = time.monotonic() + target.seconds
    while time.monotonic() < ends_s and errors.total() < MOST:
        for name, methods in ports.items():
            metadata = _metadata(target) if name == "router" else ()
            with grpc.insecure_channel(target.router if name == "router" else target.address(name)) as channel:
                for method in methods:
                    call: Any = channel.unary_unary(f"/{method}")
                    # A field of an unfinished length, behind anything: no message parses so.
                    garbage = b"\x0a\xff\xff\xff\x7f" + chance.randbytes(chance.randrange(64))
                    errors[status_of(partial(call, garbage, timeout=ANSWER_S, metadata=metadata))] += 1
    counted = _counted(target) - before
    rejected = errors["INVALID_ARGUMENT"] + errors["UNAUTHENTICATED"]
    complaints = log.complaints()
    if rejected != errors.total():
        complaints.append(f"{errors.total() - rejected} messages had another end")
    if counted < rejected:
        complaints.append(f"{counted:.0f} of {rejected} rejections were counted")
    return AttackResult(
        attempts=errors.total(), rejected=rejected, counted=counted, errors=errors, complaints=complaints
    )


def _counted(target: AttackTarget) -> float:
    by_router = target.metric("router", metric_names.REQUEST_ERRORS.name)
    return by_router + sum(target.metric(name, metric_names.REJECTED_CALLS.name) for name in ("p0", "d0"))


# ---- Row 7. Before the fix, 200 of them left 197 tracebacks in the log.
NUM_READERS: Final = 200
AT_ONCE: Final = 20
SETTLE_S: Final = 20.0
SMALL_WINDOW: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4096),
)


def leaving_readers(target: AttackTarget) -> AttackResult:
    """Clients that disconnect in the middle of an answer, half of them with a full flow-control window."""
    before = target.metric("router", metric_names.CLIENT_DISCONNECTS.name)
    log = LogWatch(target)
    ends_s = time.monotonic() + target.seconds

    def leave(number: int) -> str:
        if time.monotonic() > ends_s:
            return "not sent"
        sampling = inference_pb2.SamplingParams(max_tokens=400, ignore_eos=True, logprobs=20 if number % 2 else None)
        request = inference_pb2.GenerateRequest(text="def fib(n):", sampling=sampling)
        channel = grpc.insecure_channel(target.router, options=SMALL_WINDOW)
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=_metadata(target))
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
    complaints = log.complaints()
    if counted < num_left:
        complaints.append(f"{counted:.0f} of {num_left} disconnects were counted")
    if not num_left:
        complaints.append("no reader got so far as to disconnect")
    return AttackResult(
        attempts=NUM_READERS - errors["not sent"],
        rejected=num_left,
        counted=counted,
        errors=errors,
        complaints=complaints,
    )


# ---- Row 8. Before the fix, all of 500 such connections were still open after 26 s.
NUM_EACH: Final = 300
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings
LATE_S: Final = 10.0
LIMIT: Final = RouterConfig(model="toy").max_connections


def connections(target: AttackTarget) -> AttackResult:
    """600 connections to the router's port without a call; half of them do not even begin HTTP/2. Lasts as long as the
    router lets a connection be half-open or idle, and LATE_S more at most."""
    host, port = target.router.rsplit(":", 1)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(2 * NUM_EACH)]
        for one in made[NUM_EACH:]:
            with contextlib.suppress(ConnectionError):
                one.sendall(PREFACE)
        for one in made:
            one.setblocking(False)
        time.sleep(2.0)
        num_accepted = sum(not is_closed(one) for one in made)
        shown = target.metric("router", metric_names.CONNECTIONS.name)
        while any(not is_closed(one) for one in made) and time.monotonic() < began_s + HANDSHAKE_S + LATE_S:
            time.sleep(0.1)
        half_open, idle = (sum(not is_closed(one) for one in part) for part in (made[:NUM_EACH], made[NUM_EACH:]))
    took_s = time.monotonic() - began_s
    complaints = []
    if num_accepted > LIMIT:
        complaints.append(f"{num_accepted} connections were open at a time, over {LIMIT}")
    if half_open or idle:
        complaints.append(f"{half_open} half-open and {idle} idle connections were still open after {took_s:.0f} s")
    closed, at_once = 2 * NUM_EACH - half_open - idle, 2 * NUM_EACH - num_accepted
    return AttackResult(
        attempts=2 * NUM_EACH,
        rejected=closed,
        errors=Counter({"closed at once": at_once, "closed later": closed - at_once}),
        note=f"{num_accepted} were open at a time (the router counted {shown:.0f}); all had ended after {took_s:.1f} s",
        complaints=complaints,
    )


ROWS: Final = (
    AttackRow(number=1, name="endless and negative durations", attack=durations, needs="token"),
    AttackRow(number=2, name="texts of 3.9 MB", attack=long_texts, needs="token"),
    AttackRow(number=5, name="slow grammars of 24 callers", attack=slow_grammars, needs="token"),
    AttackRow(number=6, name="messages that do not parse", attack=bad_messages, needs="token"),
    AttackRow(number=7, name="readers that disconnect", attack=leaving_readers, needs="token"),
    AttackRow(number=8, name="idle and half-open connections", attack=connections),
)

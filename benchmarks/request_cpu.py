"""CPU of a request in the router's own code, in one process: `python -m benchmarks.request_cpu`.

    python -m benchmarks.request_cpu [--requests 1000] [--tokens 17] [--repeat 3] [--only metrics] [--profile FILE]

Real: InferenceServicer, admission with the bundled model's tokenizer and chat template, Runtime, RouterState,
telemetry, the log, and the codecs of workers' messages. Stubs: the workers, which answer at once, and gRPC's context.
So gRPC, sockets, the HTTP side and Redis are not part of it. Requests run one after the other, and their prompts of
about 210 tokens are all different. The figures are CPU time of all threads of this process, without the child process
that applies the template: the median of `--repeat` runs.

The rows differ in telemetry only. `per token` is the difference between answers of `--tokens` tokens and of one token,
over their number. The last table has the recording alone, without requests: what each request and each token adds.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from pdserve.core.access.key_file import DEFAULT_TENANT
from pdserve.core.access.shares import BYTES_WEIGHT, Shares
from pdserve.core.kv.kv_shape import Fingerprint, KvShape
from pdserve.core.results import Timings, Usage
from pdserve.core.types import FinishReason, Path, Role, Sampling, Slo
from pdserve.launch.settings import bundled_model
from pdserve.load_gate import LoadGate
from pdserve.prefix.index import MemoryLookup, PrefixIndex
from pdserve.telemetry import names
from pdserve.telemetry.logs import FieldFormatter
from pdserve.telemetry.metrics import Metrics
from pdserve.telemetry.tracing import Service, Tracing, make_tracing
from pdserve.text.chat import read_templates
from pdserve.text.tokenizer import load_tokenizer
from pdserve.v1 import inference_pb2, worker_pb2
from pdserve.wire.protocol import decode_response
from router.service import auth
from router.service.adapters import ClusterAdapters
from router.service.admission import Admission, Limits
from router.service.inference import InferenceServicer
from router.service.measure import Measure, RequestFacts
from router.service.model import ModelFacts
from router.service.runtime import OpenCall, Runtime
from router.service.tenants import Quotas
from router.state.interface import FinishRequest, Outcome, RequestArrived, WorkerConnected
from router.state.state import RouterState

BLOCK_SIZE: Final = 16
CONTEXT_TOKENS: Final = 131_072
SLO: Final = Slo()
NO_COLLECTOR: Final = "127.0.0.1:9"  # spans are built and queued, and cannot be sent
RECORDINGS: Final = 5000  # of the last table
MODES: Final[dict[str, tuple[bool, float | None]]] = {  # metrics, and share of the traces; None: no endpoint
    "off": (False, None),
    "metrics": (True, None),
    "traces-0": (True, 0.0),
    "traces-1": (True, 1.0),
}


class Context:
    """What a handler uses of gRPC's."""

    def __init__(self) -> None:
        self.messages: list[inference_pb2.GenerateResponse] = []
        self.code: Any = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("user-agent", "benchmark"),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return 600.0

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        self.messages.append(message)

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        raise AssertionError(details)

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass


class Router:
    """The router's parts, with workers that answer on the next turn of the event loop."""

    def __init__(self, admission: Admission, metrics: Metrics, tracing: Tracing, token_ids: list[int]) -> None:
        self.state = RouterState()
        self.measure = Measure(metrics, tracing)
        self.measure.listens_at("127.0.0.1", 1)
        self.runtime = Runtime(self.state, self.measure, send=self._send)
        self._token_ids = token_ids
        self._decoding: dict[str, tuple[str, worker_pb2.Sequence]] = {}  # by request
        shape = KvShape(
            layout="block-major.v1", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK_SIZE
        )
        model = ModelFacts(
            name="stdlib-5m",
            max_context_tokens=CONTEXT_TOKENS,
            vocab_size=2**17,
            eos_token_ids=(0,),
            block_size=BLOCK_SIZE,
            hash_seed=b"seed",
            fingerprint=Fingerprint(protocol=1, model="stdlib-5m", engine="none", shape=shape),
        )
        self.servicer = InferenceServicer(
            self.runtime,
            admission,
            lambda: model,
            ClusterAdapters(self._send, lambda: model.names),
            MemoryLookup(PrefixIndex()),
            self.measure,
            Quotas(),
            prefix_lookup_s=0.05,
            held=Shares(2**28, BYTES_WEIGHT),
            gate=LoadGate(),
        )
        for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
            self.runtime.submit(_connected(name, role))

    async def generate(self, request: inference_pb2.GenerateRequest) -> None:
        context = Context()
        await self.servicer.Generate(request, context)
        assert context.code is None, context.code
        assert context.messages[-1].HasField("finished")

    def _send(self, worker_id: str, message: worker_pb2.AttachRequest) -> bool:
        asyncio.get_running_loop().call_soon(self._work, worker_id, message)
        return True

    def _work(self, worker_id: str, message: worker_pb2.AttachRequest) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                sequence = message.reserve.sequence
                self._decoding[sequence.request_id] = worker_id, sequence
                grant = None if message.reserve.is_local else b"opaque to the router"
                self._answer(worker_id, granted=worker_pb2.Granted(**_key(sequence), grant=grant))
                if message.reserve.is_local:
                    self._decode(sequence.request_id, 0)
            case "prefill":
                sequence = message.prefill.sequence
                key, decode = _key(sequence), self._decoding[sequence.request_id][0]
                is_last = sequence.sampling.max_tokens == 1
                end = inference_pb2.FINISH_REASON_LENGTH if is_last else inference_pb2.FINISH_REASON_UNSPECIFIED
                token = worker_pb2.Token(token_id=self._token_ids[0])
                self._answer(worker_id, first_token=worker_pb2.FirstToken(**key, token=token, finish=end))
                if not is_last:
                    moved = worker_pb2.TransferEnded(**key, is_committed=True, transfer_s=0.001, num_bytes=2**20)
                    self._answer(decode, transfer_ended=moved)
                self._answer(worker_id, released=worker_pb2.Released(**key))
            case "admit":
                self._decode(message.admit.request_id, 1)
            case "cancel":
                self._answer(worker_id, released=worker_pb2.Released(**_key(message.cancel)))

    def _decode(self, request_id: str, index: int) -> None:
        """A message for each token, as if a step ran one request."""
        worker_id, sequence = self._decoding.pop(request_id)
        key, most = _key(sequence), sequence.sampling.max_tokens
        for number in range(index, most - 1):
            plain = worker_pb2.PlainTokens(
                request_ids=(request_id,),
                attempts=(sequence.attempt,),
                output_indexes=(number,),
                token_ids=(self._token_ids[number % len(self._token_ids)],),
            )
            self._answer(worker_id, tokens=worker_pb2.Tokens(plain=plain))
        token = worker_pb2.Token(token_id=self._token_ids[0])
        last = worker_pb2.TokenRow(
            **key, output_index=most - 1, tokens=(token,), finish=inference_pb2.FINISH_REASON_LENGTH
        )
        self._answer(worker_id, tokens=worker_pb2.Tokens(rows=(last,)))
        self._answer(worker_id, released=worker_pb2.Released(**key))

    def _answer(self, worker_id: str, **message: Any) -> None:
        asyncio.get_running_loop().call_soon(self._receive, worker_id, worker_pb2.AttachResponse(**message))

    def _receive(self, worker_id: str, message: worker_pb2.AttachResponse) -> None:
        event = decode_response(worker_id, message)
        assert event is not None
        self.runtime.submit(event)


def _key(of: Any) -> dict[str, Any]:
    return {"request_id": of.request_id, "attempt": of.attempt}


def _connected(name: str, role: Role) -> WorkerConnected:
    return WorkerConnected(
        worker_id=name,
        incarnation=name,
        role=role,
        block_size=BLOCK_SIZE,
        num_blocks=100_000,
        max_context_tokens=CONTEXT_TOKENS,
        max_batch=256,
        max_batch_tokens=8192,
        inbox_depth=64,
        block_bytes=2**15,
    )


def _request(number: int, num_tokens: int) -> inference_pb2.GenerateRequest:
    words = f"{number} " + "the list of words that a chat has and a tokenizer reads " * 17
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(messages=(inference_pb2.ChatMessage(role="user", content=words),)),
        sampling=inference_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
    )


@contextmanager
def _recorders(mode: str) -> Iterator[tuple[Metrics, Tracing]]:
    has_metrics, share = MODES[mode]
    metrics = Metrics("router") if has_metrics else Metrics.off()
    tracing = Tracing.off()
    if share is not None:
        tracing = make_tracing(Service("pdserve-router", "benchmark"), NO_COLLECTOR, share=share)
        assert tracing.is_on, "install pdserve[otel]"
    try:
        yield metrics, tracing
    finally:
        tracing.close(0.1)


async def _run(router: Router, count: int, num_tokens: int) -> float:
    """CPU seconds of one request."""
    requests = [_request(number, num_tokens) for number in range(count)]
    began_s = time.process_time()
    for request in requests:
        await router.generate(request)
    return (time.process_time() - began_s) / count


async def _requests(flags: argparse.Namespace) -> None:
    folder = bundled_model()
    templates = read_templates(folder)
    limits = Limits(max_new_tokens=4096, default_slo=SLO, request_timeout_s=600.0)
    admission = Admission(load_tokenizer(str(folder)), templates, limits)
    auth._authorise.set(lambda: DEFAULT_TENANT)
    await admission.load()
    token_ids = admission.tokenizer.encode("a few words of an answer, which is not long", has_special_tokens=False)
    try:
        print("CPU of the router's code, us     request   per token")
        for mode in flags.only or MODES:
            with _recorders(mode) as (metrics, tracing):
                router = Router(admission, metrics, tracing, token_ids)
                await _run(router, 200, flags.tokens)  # warm-up
                gc.collect()
                profile = cProfile.Profile() if flags.profile else None
                if profile is not None:
                    profile.enable()
                    await _run(router, flags.requests, flags.profile_tokens)
                    profile.disable()
                    profile.dump_stats(flags.profile)
                    return
                short = [await _run(router, flags.requests, 1) for _ in range(flags.repeat)]
                long = [await _run(router, flags.requests // 4, flags.tokens) for _ in range(flags.repeat)]
                one, many = statistics.median(short), statistics.median(long)
                print(f"{mode:<30}{one * 1e6:10.0f}{(many - one) / (flags.tokens - 1) * 1e6:12.1f}", flush=True)
    finally:
        await admission.close()


# --- telemetry alone ------------------------------------------------------------------------------------------


def _recordings() -> None:
    print("\nrecording alone, CPU us          request   per token   log line")
    for mode in MODES:
        with _recorders(mode) as (metrics, tracing):
            measure = Measure(metrics, tracing)
            measure.listens_at("127.0.0.1", 1)
            runtime = Runtime(RouterState(), measure, send=lambda worker_id, message: True)
            _record(measure, runtime, 100)
            runs = [_record(measure, runtime, RECORDINGS) for _ in range(5)]
            parts = [min(column) for column in zip(*runs, strict=True)]
            print(f"{mode:<30}" + "".join(f"{one * 1e6:11.2f}" for one in parts), flush=True)


def _record(measure: Measure, runtime: Runtime, count: int) -> tuple[float, float, float]:
    """CPU seconds of what a request, a token and the log line record."""
    request = _request(0, 16)
    timings = Timings(
        ttft_s=0.02, tpot_s=0.005, total_s=0.1, path=Path.REMOTE, prefill_worker="p0", decode_worker="d0", attempts=1
    )
    usage = Usage(prompt_tokens=210, completion_tokens=16, cached_prompt_tokens=0)
    end = FinishRequest(
        request_id="r", reason=FinishReason.LENGTH, usage=usage, timings=timings, outcome=Outcome.SERVED
    )
    arrival = RequestArrived(request_id="r", num_prompt_tokens=210, sampling=Sampling(max_tokens=16), slo=SLO)

    def facts_in(span: Any) -> RequestFacts:
        return RequestFacts(span=span, arrived_s=0.0, slo=SLO, operation=names.CHAT, model="stdlib-5m")

    def record() -> None:
        with measure.call_span(request, "stdlib-5m", "") as span:
            facts = facts_in(span)
            measure.looked_up(span, 0.0001, 0)
            measure.arrived(facts, arrival)
            measure.placed("remote", 1)
            for _ in range(8):  # events of a request besides its tokens
                decided()
            measure.finished(facts, end)
            measure.answered(span)
            measure.delivered(span, 0.1)

    def decided() -> None:
        measure.decided(0.00002)

    with measure.call_span(request, "stdlib-5m", "") as span:
        facts, unused = facts_in(span), cast("Any", None)
        call = OpenCall(answer=unused, sequence=worker_pb2.Sequence(), facts=facts, claim=unused)

        def token() -> None:
            decided()
            measure.emitted(facts, 1)

        def line() -> None:
            runtime._log_end(end, call)

        return _cpu_s(record, count), _cpu_s(token, count), _cpu_s(line, count)


def _cpu_s(work: Callable[[], None], count: int) -> float:
    began_s = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - began_s) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=17, help="of the longer answers")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(MODES))
    parser.add_argument("--profile", metavar="FILE", help="writes a profile of the first row instead, for pstats")
    parser.add_argument("--profile-tokens", type=int, default=1)
    flags = parser.parse_args()
    with open(os.devnull, "w") as nowhere:  # formatted as the router's, and written
        handler = logging.StreamHandler(nowhere)
        handler.setFormatter(FieldFormatter("%(asctime)s %(levelname)s router %(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # there is no collector
        asyncio.run(_requests(flags))
        if not flags.profile:
            _recordings()


if __name__ == "__main__":
    main()

"""InferenceService, the public API. Streams answers, and detects at every stage that a client has disconnected.

No header is sent before the first token or the error, so that a rejected call stays retryable (gRPC A6).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

import grpc.aio
from google.protobuf.message import Message

from pdserve.build import FULL_VERSION
from pdserve.core.access.key_file import Tenant
from pdserve.core.access.shares import Shares, caller_of
from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.errors import (
    NONE_YET,
    IdInUse,
    InternalError,
    NoWorkers,
    Overloaded,
    PdserveError,
    QuotaExceeded,
    UnknownModel,
)
from pdserve.core.kv.kv_shape import TOY_LAYOUT
from pdserve.core.protocol import NamedAdapter
from pdserve.core.types import FinishReason, Slo
from pdserve.load_gate import EnteredRequest, LoadGate
from pdserve.prefix.index import PrefixDepths, PrefixLookup
from pdserve.telemetry import names, trace_context
from pdserve.telemetry.tracing import OpenSpan
from pdserve.v1 import inference_pb2, inference_pb2_grpc
from pdserve.wire import status
from pdserve.wire.protocol import SAMPLING_DEFAULTS, SEQUENCE
from router.service.adapters import ClusterAdapters
from router.service.admission import Admission, Prepared, least_tokens
from router.service.answer import MAX_PENDING_TOKENS, Answer, Group, is_shared, write_answer
from router.service.auth import current_tenant
from router.service.measure import Measure, RequestFacts
from router.service.model import ModelFacts
from router.service.runtime import Runtime
from router.service.sessions import SessionCalls
from router.service.tenants import CallClaim, Quotas
from router.service.text.fair_queue import ClientKey, client_of
from router.state.interface import RequestArrived

log = logging.getLogger(__name__)

WRITE_S: Final = 30.0  # a client that reads nothing for this long is treated as disconnected
MAX_SAME_ID: Final = 16  # concurrent requests with the same id
BASE: Final = NamedAdapter(name="")  # the model alone


@final
class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self,
        runtime: Runtime,
        admission: Admission,
        model: Callable[[], ModelFacts | None],
        adapters: ClusterAdapters,
        lookup: PrefixLookup,
        measure: Measure,
        quotas: Quotas,
        sessions: SessionCalls,
        *,
        models: Callable[[], Sequence[ModelFacts]],
        prefix_lookup_s: float,
        held: Shares,
        gate: LoadGate,
        streaming: Callable[[Slo], contextlib.AbstractContextManager[None]],
        write_s: float = WRITE_S,
    ) -> None:
        """`model` returns the one that a new request should get, of `models`. `streaming` is entered while an answer
        with these targets runs."""
        self._models = models
        self._runtime = runtime
        self._admission = admission
        self._model = model
        self._adapters = adapters
        self._lookup = lookup
        self._measure = measure
        self._quotas = quotas
        self._sessions = sessions
        self._prefix_lookup_s = prefix_lookup_s
        self._held = held
        self._gate = gate
        self._streaming = streaming
        self._write_s = write_s

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        tenant = self._let_in(request, context)
        if tenant is None:
            return
        model = self._model()
        traceparent = trace_context.extract(context.invocation_metadata())
        with self._measure.call_span(request, "" if model is None else model.name, traceparent) as span:
            try:
                with (
                    self._gate.enter(caller_of(tenant.name), request.priority) as entered,
                    self._claim(tenant, least_tokens(request)) as claim,
                    self._hold(tenant, request),
                ):
                    await self._generate(request, context, span, claim, tenant, entered)
                self._measure.answered(span)
            except PdserveError as error:
                self._measure.failed_call(span, error)
                status.end(context, error)
            except (asyncio.CancelledError, grpc.aio.InternalError):
                # The client has disconnected: gRPC cancels the handler or fails its write. Nobody reads the status.
                self._measure.disconnected(span)
                raise asyncio.CancelledError from None
            except Exception:  # on any error, the caller receives a status, and the log has the traceback
                log.exception("a request crashed", extra={"trace_id": span.trace_id})
                failure = InternalError("the router failed; see its log")
                self._measure.failed_call(span, failure)
                status.end(context, failure)

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Any) -> inference_pb2.GetModelResponse:
        model = self._model()
        try:
            tenant = current_tenant().name
            if model is None:
                raise NoWorkers("decode", states=NONE_YET)
        except PdserveError as error:
            return await status.abort(context, error)
        return inference_pb2.GetModelResponse(
            model=model.name,
            aliases=model.aliases,
            max_context_tokens=model.max_context_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=self._admission.has_chat_template,
            tool_format=self._admission.tool_format,
            reasoning_format=self._admission.reasoning_format,
            sampling_defaults=SAMPLING_DEFAULTS.encode(self._admission.limits.sampling),
            version=FULL_VERSION,
            # The prompt takes at least one token of the context.
            max_new_tokens=min(self._admission.limits.max_new_tokens, model.max_context_tokens - 1),
            tenant=tenant,
            adapters=self._adapters.names,
            is_mock=model.fingerprint.shape.layout == TOY_LAYOUT,
        )

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        try:
            tenant = current_tenant()
            client = client_of(context.peer(), tenant.name)
            with self._claim(tenant), self._hold(tenant, request):
                ids = await self._admission.tokenize(request, self._model(), client)
        except PdserveError as error:
            self._measure.rejected(error)
            return await status.abort(context, error)
        return inference_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        try:
            tenant, model = current_tenant(), self._model()
            if model is None:
                raise NoWorkers("decode", states=NONE_YET)
            client = client_of(context.peer(), tenant.name)
            with self._claim(tenant), self._hold(tenant, request):
                text = await self._admission.detokenize(request, model, client)
        except PdserveError as error:
            self._measure.rejected(error)
            return await status.abort(context, error)
        return inference_pb2.DetokenizeResponse(text=text)

    async def GetTokenBytes(
        self, request: inference_pb2.GetTokenBytesRequest, context: Any
    ) -> inference_pb2.GetTokenBytesResponse:
        # No quota: it is a lookup, and the gateway needs it within answers that have their slot already.
        try:
            current_tenant()
            return self._admission.token_bytes(request)
        except PdserveError as error:
            self._measure.rejected(error)
            return await status.abort(context, error)

    async def ListSessions(
        self, request: inference_pb2.ListSessionsRequest, context: Any
    ) -> inference_pb2.ListSessionsResponse:
        try:
            tenant = current_tenant()
            with self._claim(tenant):
                return await self._sessions.page(tenant.name, request.after, request.limit)
        except PdserveError as error:
            self._measure.rejected(error)
            return await status.abort(context, error)

    async def EndSession(
        self, request: inference_pb2.EndSessionRequest, context: Any
    ) -> inference_pb2.EndSessionResponse:
        # No quota: a client that has used it up may also end its sessions.
        try:
            is_known = await self._sessions.end(current_tenant().name, request.session_id)
        except PdserveError as error:
            self._measure.rejected(error)
            return await status.abort(context, error)
        return inference_pb2.EndSessionResponse(is_known=is_known)

    # ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _claim(self, tenant: Tenant, least_tokens: int = 0) -> Iterator[CallClaim]:
        """Claims the tenant's quotas for this call, before any work for it. Raises QuotaExceeded."""
        try:
            claim = self._quotas.open(tenant, time.monotonic(), least_tokens=least_tokens)
            try:
                yield claim
            finally:
                claim.close(time.monotonic())
        except QuotaExceeded as error:
            self._measure.over_quota(tenant.name, error.quota)
            raise

    def _hold(self, tenant: Tenant, request: Message) -> contextlib.AbstractContextManager[object]:
        """Counts the bytes of the request for its caller. Raises Overloaded."""
        return self._held.body(caller_of(tenant.name), request.ByteSize())

    def _let_in(self, request: inference_pb2.GenerateRequest, context: Any) -> Tenant | None:
        """The caller's tenant. None if the gate rejects the call, which has then ended. It has no span and no line in
        the log."""
        try:
            tenant = current_tenant()
            error: PdserveError | None = self._gate.check(caller_of(tenant.name), request.priority)
        except PdserveError as found:  # the caller's key was removed
            error = found
        if error is None:
            return tenant
        self._measure.shed(error)
        status.end(context, error)
        return None

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: Any,
        span: OpenSpan,
        claim: CallClaim,
        tenant: Tenant,
        entered: EnteredRequest,
    ) -> None:
        model = self._model()
        if model is None:
            raise NoWorkers("decode", states=NONE_YET)
        adapter = self._chosen(request.model, model)
        client = client_of(context.peer(), tenant.name)
        prepared = await self._admission.prepare(
            request, model, context.time_remaining(), client, tenant, adapter.fingerprint, self._models()
        )
        model = prepared.model
        prepared_s = time.monotonic()
        claim.admit(prepared.num_computed, prepared.tokens_left, prepared_s)
        # A prompt with prompt_logprobs is computed completely, so prefix caches are not used.
        is_scored = prepared.sampling.prompt_logprobs is not None
        cached = await self._cached_blocks(() if is_scored else prepared.lookup_hashes[prepared.first], span)
        lookup_s = time.monotonic() - prepared_s
        try:
            with self._streaming(prepared.slo):
                if len(prepared.samplings) > 1:
                    await self._generate_many(
                        prepared, model, cached, context, span, claim, lookup_s, adapter, entered, client
                    )
                    return
                answer = self._answer(prepared, 0, model, adapter)
                await self._admission.replay(prepared, [answer], client)
                request_id = self._begin(prepared, 0, cached, answer, span, claim, lookup_s, adapter)
                try:
                    await write_answer(answer, context.write, self._write_s, entered.accepted)
                finally:
                    self._runtime.leave(request_id, answer)
                    self._delivered(span, [answer])
        except Overloaded as error:  # raised by the state
            entered.rejected(error.retry_after_s)
            raise

    def _chosen(self, name: str, model: ModelFacts) -> NamedAdapter:
        """Without a fingerprint: the model alone. Raises UnknownModel."""
        if not name or name in model.names:
            return BASE
        found = self._adapters.find(name)
        if found is None:
            raise UnknownModel(name, (*model.names, *self._adapters.names))
        return found

    async def _generate_many(
        self,
        prepared: Prepared,
        model: ModelFacts,
        cached: PrefixDepths,
        context: Any,
        span: OpenSpan,
        claim: CallClaim,
        lookup_s: float,
        adapter: NamedAdapter,
        entered: EnteredRequest,
        client: ClientKey,
    ) -> None:
        """Sends nothing before every answer was admitted. The first error ends all of them."""
        changed = asyncio.Event()
        answers = [self._answer(prepared, index, model, adapter, changed) for index in range(len(prepared.samplings))]
        await self._admission.replay(prepared, answers, client)
        group = Group(answers, changed, num_kept=prepared.num_answers)
        begun: dict[str, Answer] = {}
        shared: Mapping[str, int] = {}
        try:
            for index, answer in enumerate(answers):
                if answer.is_over:  # before the call was interrupted
                    continue
                is_first = index == prepared.first
                if prepared.resumed and not is_first:  # its tokens are others
                    cached = await self._cached_blocks(prepared.lookup_hashes[index], span)
                known = cached.joined(shared)
                request_id = self._begin(
                    prepared, index, known, answer, span, claim, lookup_s, adapter, is_sibling=not is_first
                )
                begun[request_id] = answer
                if is_first and prepared.block_hashes:
                    await is_shared(answer)
                    shared = self._shared_blocks(request_id, len(prepared.block_hashes))
                if group.error is not None:
                    raise group.error
            changed.set()
            await write_answer(group, context.write, self._write_s, entered.accepted)
        finally:
            for request_id, answer in begun.items():
                self._runtime.leave(request_id, answer)
            self._delivered(span, answers)

    def _delivered(self, span: OpenSpan, answers: Sequence[Answer]) -> None:
        ended = [answer.ended_s for answer in answers if answer.ended_s is not None]
        if ended:
            self._measure.delivered(span, max(ended))

    def _answer(
        self,
        prepared: Prepared,
        index: int,
        model: ModelFacts,
        adapter: NamedAdapter,
        changed: asyncio.Event | None = None,
    ) -> Answer:
        sampling = prepared.samplings[index]
        is_ranked = len(prepared.samplings) > prepared.num_answers
        return Answer(
            prepared.request_id,
            len(prepared.prompt_ids),
            sampling,
            self._admission.tokenizer.detokenizer(
                prepared.prompt_ids, has_special_tokens=not sampling.skip_special_tokens
            ),
            model.eos_token_ids,
            # Ranked answers are sent after the last one has ended, so there is no slow reader to wait for.
            max_pending_tokens=sampling.max_tokens if is_ranked else MAX_PENDING_TOKENS,
            changed=changed,
            shows_logprobs=prepared.sampling.logprobs is not None,
            model=adapter.name or model.name,
            reasoning=prepared.reasoning,
            split=prepared.reasoning_split(),
            resume_keys=prepared.resume_keys,
        )

    def _shared_blocks(self, request_id: str, num_blocks: int) -> Mapping[str, int]:
        """The workers that hold the prompt after the first answer has computed it."""
        held = self._runtime.state.cached_blocks(request_id)
        return {worker_id: min(blocks, num_blocks) for worker_id, blocks in held.items()}

    def _begin(
        self,
        prepared: Prepared,
        index: int,
        cached: PrefixDepths,
        answer: Answer,
        span: OpenSpan,
        claim: CallClaim,
        lookup_s: float,
        adapter: NamedAdapter,
        *,
        is_sibling: bool = False,
    ) -> str:
        """Passes answer number `index` to the state, and returns the id of its request. `lookup_s`: that the prefix
        lookup just before has taken."""
        # A tenant can neither learn nor occupy the ids of another tenant.
        name = f"{prepared.tenant}/{prepared.request_id}" if prepared.tenant else prepared.request_id
        name = f"{name}#{index}" if is_sibling else name
        request_id, sampling = self._unused(name, prepared.tenant), prepared.samplings[index]
        # The runtime adds the number, output and deadline of each attempt.
        attempt = Attempt(
            key=AttemptKey("", request_id, 0),
            prompt_ids=prepared.prompt_ids,
            sampling=sampling,
            ttft_s=prepared.slo.ttft_s,
            tpot_s=prepared.slo.tpot_s,
            itl_s=prepared.slo.itl_s,
            adapter=adapter.fingerprint,
            **prepared.attributes(),
        )
        sequence = SEQUENCE.encode(attempt)
        sequence.traceparent, sequence.cache_salt = span.traceparent, prepared.cache_salt
        now_s = time.monotonic()
        spent_s = now_s - span.started_s
        # The time in which a further answer waited for the first answer's KV does not count against its TTFT target.
        arrival = RequestArrived(
            request_id=request_id,
            num_prompt_tokens=len(prepared.prompt_ids),
            sampling=sampling,
            slo=prepared.slo,
            spent_s=0.0 if is_sibling else spent_s,
            lookup_s=0.0 if is_sibling else lookup_s,
            deadline_s=max(prepared.deadline_s - spent_s, 0.0),
            tenant=prepared.tenant,
            block_hashes=prepared.block_hashes,
            cached_blocks=cached,
            cached_tiers=cached.tiers,
            adapter=adapter.fingerprint,
            adapter_name=adapter.name,
            weights=prepared.model.weights,
            # The call's key is for these weights, and the client may have it before the last answer begins.
            keeps_weights=len(prepared.samplings) > 1 and len(prepared.resume_keys) == 1,
            output_ids=prepared.resumed[index].token_ids if prepared.resumed else (),
            finish=_finish_of(prepared, index, answer),
            expected_tokens=prepared.expected_tokens,
            slo_task_s=prepared.slo_task_s,
            **prepared.attributes(),
        )
        slo = self._runtime.state.targets(arrival, prepared.stated, now_s)
        if slo is not arrival.slo:
            arrival = replace(arrival, slo=slo)
            sequence.ttft_s, sequence.tpot_s = slo.ttft_s, slo.tpot_s
        facts = RequestFacts(
            span=span,
            arrived_s=now_s if is_sibling else span.started_s,
            slo=slo,
            operation=names.CHAT if prepared.is_chat else names.TEXT_COMPLETION,
            model=answer.model,
            tenant=prepared.tenant,
            is_sibling=is_sibling,
            num_resumed=len(arrival.output_ids),
        )
        self._measure.arrived(facts, arrival)
        self._runtime.begin(arrival, answer, sequence, facts, claim.take(), now_s)
        return request_id

    def _unused(self, name: str, tenant: str) -> str:
        """`name`, or an id derived from it if a worker still holds memory for an earlier call with that id."""
        if not self._runtime.knows(name):
            return name
        for number in range(2, MAX_SAME_ID + 1):
            if not self._runtime.knows(f"{name}~{number}"):
                return f"{name}~{number}"
        raise IdInUse(name.removeprefix(f"{tenant}/"))

    async def _cached_blocks(self, hashes: Sequence[bytes], span: OpenSpan) -> PrefixDepths:
        if not hashes:
            return PrefixDepths()
        began_s = time.monotonic()
        cached: PrefixDepths | None = None
        try:
            async with asyncio.timeout(self._prefix_lookup_s):
                cached = await self._lookup.lookup(hashes)
        except TimeoutError:
            pass  # without an answer, the request is placed as if no prefix were cached
        is_told = cached is not None and (bool(cached) or self._lookup.is_available)
        most = max(cached.values(), default=0) if cached is not None and is_told else None
        self._measure.looked_up(span, time.monotonic() - began_s, most)
        return cached or PrefixDepths()


def _finish_of(prepared: Prepared, index: int, answer: Answer) -> FinishReason | None:
    """Why a resumed answer ends with the tokens that its client has; None if it continues."""
    if not prepared.resumed:
        return None
    return FinishReason.STOP if answer.has_stopped else prepared.resumed[index].finish

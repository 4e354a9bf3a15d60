"""What calls return: plain frozen values, no protobuf. Also the reading of each from its message. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from pdserve.core.phases import Phases
from pdserve.core.types import FinishReason, Path, Role
from pdserve.v1 import cluster_pb2, inference_pb2, worker_pb2

_REASONS: Final[dict[int, FinishReason]] = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_PATHS: Final[dict[int, Path]] = {inference_pb2.PATH_REMOTE: Path.REMOTE, inference_pb2.PATH_LOCAL: Path.LOCAL}
_ROLES: Final[dict[int, Role]] = {worker_pb2.ROLE_PREFILL: Role.PREFILL, worker_pb2.ROLE_DECODE: Role.DECODE}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log probability of one drawn token; `top` holds (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One step of a stream. `text` may be empty while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0  # which of the n answers it belongs to


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of a whole call: the prompt once, and the tokens of all answers that were drawn."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int  # of the prompt's tokens, those whose KV came from a prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went: `phases` add up to total_s. What is said of transfers overlaps them."""

    ttft_s: float  # arrival at the router to the first token
    tpot_s: float  # mean per token after the first
    total_s: float
    phases: Phases
    transfer_s: float  # first byte to commit; overlaps prefill
    transfer_busy_s: float  # of it, with bytes on their way
    transfer_exposed_s: float  # after the prefill: what it did not hide
    path: Path | None
    prefill_worker: str
    decode_worker: str
    attempts: int  # placements tried; 1 when nothing went wrong
    transfer_bytes: int
    transfer_saved_bytes: int  # that the decode worker had already
    preemptions: int  # times that memory ended and the sequence was recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the n answers."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None  # sum over its tokens, where logprobs or best_of were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished call. `text` to `stop_token_id` are those of the first of its `choices`; `timings` too."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()  # empty unless asked for
    stop: str | None = None  # the stop string that ended the text
    stop_token_id: int | None = None
    choices: tuple[Choice, ...] = ()
    #: Of each prompt token given those before it; None for the first. Empty unless asked for.
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    max_context_tokens: int
    max_new_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLink:
    """How a prefill worker sends KV to a decode worker."""

    decode_worker: str
    transport: str
    reason: str  # why no other


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    worker_id: str
    incarnation: str
    role: Role | None
    endpoint: str
    is_connected: bool
    is_draining: bool  # takes no new work, for any reason
    is_drained: bool  # since an operator has said so; undrain() ends that
    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    evictable_blocks: int
    context_tokens: int
    steps: int
    kv_links: tuple[KvLink, ...] = ()  # of a prefill worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    router_id: str
    workers: tuple[Worker, ...]
    queued_requests: int
    running_requests: int
    uptime_s: float

    def of_role(self, role: Role | str) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    prefill_worker: str
    decode_worker: str
    predicted_ttft_s: float
    predicted_tpot_s: float
    slack: float | None  # None where a target cannot be met at all
    is_feasible: bool
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a recent request was placed where it was, or refused: the last decision about it, and what came of it."""

    request_id: str
    router_id: str
    decision: str  # remote, local, refuse; wait while it is queued
    reason: str
    candidates: tuple[Candidate, ...]  # the ways that were compared, with predictions from the decision on
    waited_s: float  # from arrival to the decision
    slo_ttft_s: float
    slo_tpot_s: float
    tenant: str
    priority: int
    prompt_tokens: int
    attempt: int  # that the decision began; 0: none
    is_resumed: bool  # the client had tokens before: the TTFT that was predicted then is not the request's
    stage: str  # where it is now; empty once it has ended
    outcome: str  # how it ended; empty while it runs
    ended_because: str  # where it did not get its whole answer
    actual_ttft_s: float | None  # from arrival
    actual_tpot_s: float | None  # over the tokens so far
    retry_after_s: float | None  # of a refusal

    @property
    def chosen(self) -> Candidate | None:
        return next((one for one in self.candidates if one.is_chosen), None)

    @property
    def predicted_ttft_s(self) -> float | None:
        """From arrival, as the actual one; None where nothing comparable was predicted."""
        chosen = self.chosen
        return None if chosen is None or self.is_resumed else self.waited_s + chosen.predicted_ttft_s

    @property
    def predicted_tpot_s(self) -> float | None:
        chosen = self.chosen
        return None if chosen is None else chosen.predicted_tpot_s


def piece(delta: inference_pb2.Delta) -> Piece:
    return Piece(
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        logprobs=tuple(map(token_logprob, delta.logprobs)),
        index=delta.index,
    )


def token_logprob(seen: inference_pb2.TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(
        token_id=seen.token_id, logprob=seen.logprob, top=tuple((top.token_id, top.logprob) for top in seen.top)
    )


def choice(pieces: Sequence[Piece], finished: inference_pb2.Finished) -> Choice:
    """`pieces` of this answer alone."""
    return Choice(
        index=finished.index,
        text="".join(one.text for one in pieces),
        token_ids=tuple(token_id for one in pieces for token_id in one.token_ids),
        finish_reason=_REASONS.get(finished.reason, FinishReason.STOP),
        logprobs=tuple(logprob for one in pieces for logprob in one.logprobs),
        stop=finished.stop if finished.HasField("stop") else None,
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        cumulative_logprob=finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None,
    )


def completion(
    request_id: str,
    choices: Sequence[Choice],
    finished: Sequence[inference_pb2.Finished],
    prompt_logprobs: Sequence[TokenLogprob | None] = (),
) -> Completion:
    """`choices` by index; `finished` as they came: the last one knows the total where there are several."""
    first, last = choices[0], finished[-1]
    used = last.total_usage if last.HasField("total_usage") else last.usage
    timings = next(one.timings for one in finished if one.index == first.index)
    return Completion(
        request_id=request_id,
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=Usage(
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
            cached_prompt_tokens=used.cached_prompt_tokens,
        ),
        timings=_timings(timings),
        logprobs=first.logprobs,
        stop=first.stop,
        stop_token_id=first.stop_token_id,
        choices=tuple(choices),
        prompt_logprobs=tuple(prompt_logprobs),
    )


def _timings(seen: inference_pb2.Timings) -> Timings:
    return Timings(
        ttft_s=seen.ttft_s,
        tpot_s=seen.tpot_s,
        total_s=seen.total_s,
        phases=Phases(**{field.name: getattr(seen.phases, field.name) for field in fields(Phases)}),
        transfer_s=seen.transfer_s,
        transfer_busy_s=seen.transfer_busy_s,
        transfer_exposed_s=seen.transfer_exposed_s,
        path=_PATHS.get(seen.path),
        prefill_worker=seen.prefill_worker,
        decode_worker=seen.decode_worker,
        attempts=seen.attempts,
        transfer_bytes=seen.transfer_bytes,
        transfer_saved_bytes=seen.transfer_saved_bytes,
        preemptions=seen.preemptions,
    )


def model(seen: inference_pb2.GetModelResponse) -> Model:
    return Model(
        name=seen.model,
        max_context_tokens=seen.max_context_tokens,
        max_new_tokens=seen.max_new_tokens,
        vocab_size=seen.vocab_size,
        eos_token_ids=tuple(seen.eos_token_ids),
        has_chat_template=seen.has_chat_template,
    )


def topology(seen: cluster_pb2.GetTopologyResponse) -> Topology:
    return Topology(
        router_id=seen.router_id,
        workers=tuple(_worker(one) for one in seen.workers),
        queued_requests=seen.queued_requests,
        running_requests=seen.running_requests,
        uptime_s=seen.uptime_s,
    )


def _worker(seen: cluster_pb2.WorkerView) -> Worker:
    return Worker(
        worker_id=seen.worker_id,
        incarnation=seen.incarnation,
        role=_ROLES.get(seen.role),
        endpoint=seen.endpoint,
        is_connected=seen.is_connected,
        is_draining=seen.is_draining,
        is_drained=seen.is_drained,
        running=seen.load.running,
        waiting=seen.load.waiting,
        num_blocks=seen.num_blocks,
        free_blocks=seen.load.free_blocks,
        evictable_blocks=seen.load.evictable_blocks,
        context_tokens=seen.load.context_tokens,
        steps=seen.load.steps,
        kv_links=tuple(
            KvLink(decode_worker=one.decode_worker, transport=one.transport, reason=one.reason) for one in seen.kv_links
        ),
    )


def explanation(seen: cluster_pb2.ExplainResponse) -> Explanation:
    return Explanation(
        request_id=seen.request_id,
        decision=seen.decision,
        reason=seen.reason,
        candidates=tuple(
            Candidate(
                prefill_worker=one.prefill_worker,
                decode_worker=one.decode_worker,
                predicted_ttft_s=one.predicted_ttft_s,
                predicted_tpot_s=one.predicted_tpot_s,
                slack=one.slack if one.HasField("slack") else None,
                is_feasible=one.is_feasible,
                is_chosen=one.is_chosen,
            )
            for one in seen.candidates
        ),
        actual_ttft_s=seen.actual_ttft_s if seen.HasField("actual_ttft_s") else None,
        actual_tpot_s=seen.actual_tpot_s if seen.HasField("actual_tpot_s") else None,
        router_id=seen.router_id,
        waited_s=seen.waited_s,
        slo_ttft_s=seen.slo_ttft_s,
        slo_tpot_s=seen.slo_tpot_s,
        tenant=seen.tenant,
        priority=seen.priority,
        prompt_tokens=seen.prompt_tokens,
        attempt=seen.attempt,
        is_resumed=seen.is_resumed,
        stage=seen.stage,
        outcome=seen.outcome,
        ended_because=seen.ended_because,
        retry_after_s=seen.retry_after_s if seen.HasField("retry_after_s") else None,
    )

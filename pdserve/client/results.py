"""The results of calls: frozen dataclasses without protobuf, and the codec that reads each from its message. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.core.results import Timings as Timings
from pdserve.core.results import Usage as Usage
from pdserve.core.types import NO_DEFAULTS, FinishReason, Role, SamplingDefaults
from pdserve.v1 import cluster_pb2, inference_pb2, worker_pb2
from pdserve.wire.codec import Codec
from pdserve.wire.convert import TOPS
from pdserve.wire.protocol import SAMPLING_DEFAULTS, TIMINGS, USAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    token_bytes: bytes  # what it writes after other text; a special token's name
    is_special: bool  # has no text where special tokens are skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log probability of one token; `top` holds (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None  # of a prompt token: 1 plus the number of tokens that are more likely


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One step of a stream. `text` may be empty while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0  # number of its answer, of n


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
    cumulative_logprob: float | None = None  # sum over its tokens, if logprobs or best_of were requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished call. `text` to `stop_token_id` are those of the first of its `choices`; `timings` too."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()  # empty unless requested
    stop: str | None = None  # the stop string that ended the text
    stop_token_id: int | None = None
    choices: tuple[Choice, ...] = ()
    #: Logprobs of each prompt token given those before it; None for the first. Empty unless requested.
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    max_context_tokens: int
    max_new_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    # How the model writes tool calls: hermes, qwen3_coder, llama3, mistral or other; empty if it takes no tools.
    tool_format: str = ""
    # How it marks reasoning: mistral, special, tagged, or open if its prompt begins it; empty if it has no marks.
    reasoning_format: str = ""
    sampling_defaults: SamplingDefaults = NO_DEFAULTS  # of requests that give no value
    version: str = ""  # of the router, with its build; empty if unknown
    tenant: str | None = None  # of the caller; empty for the operator, None if the router does not say
    aliases: tuple[str, ...] = ()  # further names of the model
    adapters: tuple[str, ...] = ()  # names of LoRA adapters that requests may choose as their model
    is_mock: bool = False  # the workers compute no model, and their texts mean nothing

    @property
    def names(self) -> tuple[str, ...]:
        """All that a request may give as its model."""
        return (self.name, *self.aliases, *self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLink:
    """How a prefill worker sends KV to a decode worker."""

    decode_worker: str
    transport: str
    reason: str  # why this one was chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    worker_id: str
    incarnation: str
    role: Role | None
    endpoint: str
    is_connected: bool
    is_draining: bool  # receives no new work, for any reason
    is_drained: bool  # drained by an operator, until undrain()
    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    evictable_blocks: int
    context_tokens: int
    steps: int
    kv_links: tuple[KvLink, ...] = ()  # as a sender of KV
    version: str = ""  # with its build; empty if unknown
    revision: str = ""  # of its weights; empty: that of the cluster's start


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeStep:
    """One step of a change of the workers."""

    worker_id: str  # empty: of the cluster
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDemand:
    """A predicted load."""

    rate_rps: float
    error: float  # relative standard deviation of the rate
    prompt_tokens: float  # means of a request
    uncached_tokens: float
    output_tokens: float
    ttft_s: float  # targets
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingAlternative:
    """A change of the number of workers or their roles that was compared with others."""

    change: str  # "keep", or such as "start 1 decode"
    prefill: int  # workers after it
    decode: int
    attainment: float  # predicted share of the requests that meet both targets
    cost_s: float  # worker-seconds over the horizon, with misses and changes
    change_cost_s: float
    refused: str  # why it may not be chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOutcome:
    """What came of a change."""

    took_s: float
    expected_attainment: float
    seen_attainment: float | None  # None: no request ended
    expected_rate_rps: float
    seen_rate_rps: float

    @property
    def text(self) -> str:
        seen = "no request ended" if self.seen_attainment is None else f"{self.seen_attainment:.0%} met both targets"
        return (
            f"took {self.took_s:.1f} s; {seen} ({self.expected_attainment:.0%} predicted), "
            f"{self.seen_rate_rps:.1f} requests/s ({self.expected_rate_rps:.1f} predicted)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """What the controller of the number of workers saw, compared and decided."""

    age_s: float
    change: str  # empty: none
    reason: str
    prefill: int  # workers that were ready
    decode: int
    seen_rate_rps: float  # in the interval before
    queued: int
    running: int
    met: int  # requests that ended in the interval and met both targets
    missed: int
    now: ScalingDemand | None  # predicted; None: too little was seen
    later: ScalingDemand | None  # at the end of the horizon
    alternatives: tuple[ScalingAlternative, ...]  # the cheapest first
    outcome: ScalingOutcome | None  # once it was seen
    failure: str  # why the change was not made
    capacity_share: float  # of the predicted capacity, that the cluster reaches


MOST_DECISIONS: Final = 200  # that a launcher keeps, and that a call may ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The last decisions about the number of workers."""

    min_workers: int
    max_workers: int
    may_change_roles: bool
    every_s: float
    trouble: str  # why nothing is decided now; empty: nothing prevents it
    decisions: tuple[ScalingDecision, ...]  # oldest first: those with a change, and the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    router_id: str
    workers: tuple[Worker, ...]
    queued_requests: int
    running_requests: int
    uptime_s: float
    version: str = ""  # of the router, with its build; empty if unknown
    num_routers: int = 0  # that share the port; 0 if unknown
    num_answered: int = 0  # of these, whose requests are counted

    def of_role(self, role: Role | str) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPull:
    """Two ways to get the KV of a prompt's first tokens, with predicted seconds."""

    source: str  # the worker from which it can be pulled
    num_tokens: int  # that are pulled
    pull_s: float  # until they have arrived
    recompute_s: float  # of computing them instead
    is_pulled: bool  # which of both the candidate does
    source_read_s: float = 0.0  # the part of `pull_s` in which the source reads its tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedReads:
    """Tokens whose KV a worker reads from its host memory or its disk, with predicted seconds."""

    num_tokens: int
    read_s: float
    recompute_s: float  # of computing them instead


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedCandidate:
    prefill_worker: str
    decode_worker: str
    predicted_ttft_s: float
    predicted_tpot_s: float
    slack: float | None  # None if a target cannot be met at all
    is_feasible: bool
    is_chosen: bool
    # The time that this and other requests lose, in shares of targets, plus the preference for or against a local
    # placement, so it can be negative; policy goodput only
    cost: float | None = None
    preference: float | None = None  # that part of the cost; None if the router did not send it
    pull: ExplainedPull | None = None  # by the worker that computes the prompt; None: no other has more of it
    reads: ExplainedReads | None = None  # by the same worker; None: it reads nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a recent request was placed where it was, or rejected: the last decision about it, and its result."""

    request_id: str
    router_id: str
    decision: str  # remote, local, refuse; wait while it is queued
    reason: str
    candidates: tuple[ExplainedCandidate, ...]  # the compared placements, with predictions from the decision on
    waited_s: float  # from arrival to the decision
    slo_ttft_s: float
    slo_tpot_s: float
    tenant: str
    priority: int
    prompt_tokens: int
    attempt: int  # number of the attempt that the decision began; 0: none
    is_resumed: bool  # the client already had tokens, so the predicted TTFT is not the request's
    stage: str  # its stage; empty once it has ended
    outcome: str  # its outcome; empty while it runs
    ended_because: str  # if the answer is incomplete
    actual_ttft_s: float | None  # from arrival
    actual_tpot_s: float | None  # over the tokens so far
    retry_after_s: float | None  # of a refusal
    adapter: str = ""  # name of its LoRA adapter; empty: the model alone

    @property
    def chosen(self) -> ExplainedCandidate | None:
        return next((one for one in self.candidates if one.is_chosen), None)

    @property
    def predicted_ttft_s(self) -> float | None:
        """Predicted TTFT from arrival, like the actual one; None if there is no comparable prediction."""
        chosen = self.chosen
        return None if chosen is None or self.is_resumed else self.waited_s + chosen.predicted_ttft_s

    @property
    def predicted_tpot_s(self) -> float | None:
        chosen = self.chosen
        return None if chosen is None else chosen.predicted_tpot_s


TOKEN_LOGPROB: Final = Codec(TokenLogprob, inference_pb2.TokenLogprobs, special={"top": TOPS})
_PIECE: Final = Codec(Piece, inference_pb2.Delta, nested=(TOKEN_LOGPROB,))
_CHOICE: Final = Codec(
    Choice,
    inference_pb2.Finished,
    given=("text", "token_ids", "logprobs"),
    ignored=("usage", "timings", "total_usage"),
    renamed={"finish_reason": "reason"},
    unknown={"finish_reason": FinishReason.STOP},
)
MODEL: Final = Codec(Model, inference_pb2.GetModelResponse, nested=(SAMPLING_DEFAULTS,), renamed={"name": "model"})
_KV_LINK: Final = Codec(KvLink, worker_pb2.KvLink)
# Worker has these fields itself; in its message they are in a separate message.
_LOAD: Final = ("running", "waiting", "free_blocks", "evictable_blocks", "context_tokens", "steps")
_WORKER: Final = Codec(
    Worker, cluster_pb2.WorkerView, nested=(_KV_LINK,), given=_LOAD, ignored=("load",), is_lenient=True
)
_TOPOLOGY: Final = Codec(
    Topology, cluster_pb2.GetTopologyResponse, given=("workers",), ignored=("workers",), is_lenient=True
)
CHANGE_STEP: Final = Codec(ChangeStep, cluster_pb2.ChangeWorkersResponse, is_lenient=True)
_SCALING_DECISION: Final = Codec(
    ScalingDecision,
    cluster_pb2.ScalingDecision,
    nested=(
        Codec(ScalingDemand, cluster_pb2.ScalingDemand, is_lenient=True),
        Codec(ScalingAlternative, cluster_pb2.ScalingAlternative, is_lenient=True),
        Codec(ScalingOutcome, cluster_pb2.ScalingOutcome, is_lenient=True),
    ),
    is_lenient=True,
)
SCALING: Final = Codec(Scaling, cluster_pb2.GetScalingResponse, nested=(_SCALING_DECISION,), is_lenient=True)
_PULL: Final = Codec(ExplainedPull, cluster_pb2.PullChoice, is_lenient=True)
_READS: Final = Codec(ExplainedReads, cluster_pb2.ReadChoice, is_lenient=True)
_CANDIDATE: Final = Codec(ExplainedCandidate, cluster_pb2.Candidate, nested=(_PULL, _READS), is_lenient=True)
EXPLANATION: Final = Codec(Explanation, cluster_pb2.ExplainResponse, nested=(_CANDIDATE,), is_lenient=True)


def piece(delta: inference_pb2.Delta) -> Piece:
    """Nearly all messages of a stream are pieces without logprobs, so these are read without the codec."""
    if delta.logprobs:
        return _PIECE.decode(delta)
    return Piece(text=delta.text, token_ids=tuple(delta.token_ids), index=delta.index)


def choice(pieces: Sequence[Piece], finished: inference_pb2.Finished) -> Choice:
    """`pieces` of this answer alone."""
    return _CHOICE.decode(
        finished,
        text="".join(one.text for one in pieces),
        token_ids=tuple(token_id for one in pieces for token_id in one.token_ids),
        logprobs=tuple(logprob for one in pieces for logprob in one.logprobs),
    )


def completion(
    request_id: str,
    choices: Sequence[Choice],
    finished: Sequence[inference_pb2.Finished],
    prompt_logprobs: Sequence[TokenLogprob | None] = (),
) -> Completion:
    """`choices` by index; `finished` in order of arrival: with several answers, the last one has the totals."""
    first, last = choices[0], finished[-1]
    timings = next(one.timings for one in finished if one.index == first.index)
    return Completion(
        request_id=request_id,
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=USAGE.decode(last.total_usage if last.HasField("total_usage") else last.usage),
        timings=TIMINGS.decode(timings),
        logprobs=first.logprobs,
        stop=first.stop,
        stop_token_id=first.stop_token_id,
        choices=tuple(choices),
        prompt_logprobs=tuple(prompt_logprobs),
    )


def topology(seen: cluster_pb2.GetTopologyResponse) -> Topology:
    return _TOPOLOGY.decode(seen, workers=tuple(map(_worker, seen.workers)))


def _worker(seen: cluster_pb2.WorkerView) -> Worker:
    return _WORKER.decode(seen, **{name: getattr(seen.load, name) for name in _LOAD})

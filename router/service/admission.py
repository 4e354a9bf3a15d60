"""Turns a Generate call into a request that can be placed: checks, tokenizes and hashes it.

Long work runs in threads beside the event loop (router/service/text/tokenizing.py). Every limit is checked here or in
router/service/text/prompts.py, with the field's name, before a worker is involved.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar, final

from pdserve.config import RouterConfig
from pdserve.core.access.key_file import DEFAULT_TENANT, Tenant
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.durations import SHORTEST_SLO_S, check_duration
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv.hashing import chain_key, extend_hashes
from pdserve.core.types import (
    NO_DEFAULTS,
    RequestAttributes,
    Sampling,
    SamplingDefaults,
    Slo,
    check_bad_words,
    check_token_ids,
)
from pdserve.isolated.process import ChildProcess
from pdserve.text.chat import TemplateSources
from pdserve.text.stops import MISTRAL_MARKS, THINK_MARKS, ReasoningSplit, ReasoningState
from pdserve.text.tokenizer import Tokenizer, bad_word_ids
from pdserve.v1 import inference_pb2
from pdserve.wire import convert
from router.service import resumption
from router.service.answer import Answer, counts, samplings
from router.service.model import ModelFacts
from router.service.resumption import CallFacts, ResumedAnswer
from router.service.tenants import RESERVED_TOKENS, cache_salt
from router.service.text.child_pool import GrammarCheck
from router.service.text.fair_queue import ANONYMOUS, ClientKey
from router.service.text.prompts import PromptReader
from router.service.text.tokenizing import TextChildren, TokenizerThreads

Result = TypeVar("Result")

MAX_REQUEST_ID_CHARS: Final = 128
DEFAULT_MAX_TOKENS: Final = 256
QUICK_TOKENS: Final = 4096  # a shorter prompt is hashed on the event loop, a longer one in a thread
REPLAY_COST: Final = 16  # of a held token that is replayed, in tokens that are hashed
MAX_PROMPT_LOGPROBS: Final = 2**19  # over all positions of a prompt: 6 MB on the wire
QUICK_WORDS: Final = 16  # fewer bad words are tokenized on the event loop
MAX_TOKENS_PER_CALL: Final = 8192  # in one GetTokenBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_new_tokens: int
    default_slo: Slo
    request_timeout_s: float
    sampling: SamplingDefaults = NO_DEFAULTS  # for requests that give no value

    @classmethod
    def of(cls, config: RouterConfig, sampling: SamplingDefaults) -> Limits:
        return cls(
            max_new_tokens=config.max_new_tokens,
            default_slo=Slo(ttft_s=config.slo_ttft_s, tpot_s=config.slo_tpot_s),
            request_timeout_s=config.request_timeout_s,
            sampling=sampling,
        )

    @property
    def default_max_tokens(self) -> int:
        asked = self.sampling.max_tokens
        return min(DEFAULT_MAX_TOKENS if asked is None else asked, self.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(RequestAttributes):
    """A request that can be placed."""

    request_id: str  # the client's, or a generated one
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    num_answers: int  # answers for the client
    samplings: tuple[Sampling, ...]  # one for each sampled answer; with best_of, more than num_answers
    slo: Slo
    deadline_s: float
    tenant: str
    cache_salt: bytes  # salt of the prompt's block hashes
    block_hashes: tuple[bytes, ...]
    #: For the prefix index, of each answer: of a resumed one also those of its tokens, whose KV workers may still have.
    lookup_hashes: tuple[tuple[bytes, ...], ...]
    is_chat: bool
    reasoning: ReasoningState | None  # of a chat with a model that marks its reasoning
    reasoning_marks: tuple[str, str] | None  # if the answer may have reasoning, to which stop strings do not apply
    model: ModelFacts  # whose hashes these are; of a resumed call the one that began it
    resume_keys: Mapping[str, bytes]  # by the weights that may compute the answers; empty: the call cannot be resumed
    resumed: tuple[ResumedAnswer, ...] = ()  # of a resumed call: one for each of `samplings`
    expected_tokens: int | None = None  # as in RequestArrived
    slo_task_s: float | None = None  # likewise
    stated: frozenset[str] = frozenset()  # fields of `slo` that the request itself states

    @property
    def first(self) -> int:
        """The index of the first answer that has not finished."""
        return next((index for index, held in enumerate(self.resumed) if not held.has_finished), 0)

    @property
    def num_computed(self) -> int:
        """Tokens to compute before the first new one: the prompt, and what a resumed call already has."""
        return len(self.prompt_ids) + sum(len(one.token_ids) for one in self.resumed if not one.has_finished)

    @property
    def tokens_left(self) -> list[int]:
        """For each answer that has not finished: the most tokens that it can still get."""
        if not self.resumed:
            return [one.max_tokens for one in self.samplings]
        pairs = zip(self.samplings, self.resumed, strict=True)
        return [one.max_tokens - len(held.token_ids) for one, held in pairs if not held.has_finished]

    def reasoning_split(self) -> ReasoningSplit | None:
        """For one answer."""
        if self.reasoning_marks is None:
            return None
        return ReasoningSplit(self.reasoning_marks, is_open=self.reasoning is ReasoningState.OPEN)


@final
class Admission:
    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: TemplateSources | None,
        limits: Limits,
        grammars: GrammarCheck | None = None,
        secret: ClusterSecret | None = None,
        folder: str = "",
        quick: ChildProcess | None = None,
    ) -> None:
        """The caller closes `grammars`. Without `grammars`, requests with a grammar are rejected. The salts of block
        hashes are derived from `secret`; without it, hashes have no salt. `folder` is the model's. `quick` is the
        child process that reads `templates`, if it has been launched."""
        self._secret = secret
        self._grammars = GrammarCheck(None) if grammars is None else grammars
        self.tokenizer = tokenizer
        self.has_chat_template = templates is not None
        self._hides_think_marks = _is_hidden(THINK_MARKS[1], tokenizer)
        self.limits = limits
        self._threads = TokenizerThreads()
        self.children = TextChildren(tokenizer, templates, folder, quick)
        self._prompts = PromptReader(tokenizer, templates, self._threads, self.children)

    async def prepare(
        self,
        request: inference_pb2.GenerateRequest,
        model: ModelFacts,
        time_remaining_s: float | None,
        client: ClientKey = ANONYMOUS,
        tenant: Tenant = DEFAULT_TENANT,
        adapter: str = "",
        models: Sequence[ModelFacts] = (),
    ) -> Prepared:
        """`adapter`: fingerprint. `models`: all that workers serve, if there are others than `model`. Raises
        InvalidRequest with the field and its limit, and Overloaded if too many requests wait for a thread."""
        limits = self.limits
        request_id = _request_id(request)
        attributes = convert.attributes_from_proto(request)
        _check_priority(attributes.priority, tenant)
        given_salt = request.cache_salt if request.HasField("cache_salt") else None
        salt = cache_salt(self._secret, tenant.name, given_salt, adapter)
        sampling = await self._sampling(request.sampling, model, client)
        n, best_of = counts(request, sampling)
        slo = convert.slo_from_proto(request.slo, tenant.slo or limits.default_slo)
        slo_task_s = request.slo_task_s if request.HasField("slo_task_s") else None
        if slo_task_s is not None:
            check_duration("slo_task_s", slo_task_s, low=SHORTEST_SLO_S)
        prompt = await self._prompts.read(request, model, client, salt)
        _check_scores(sampling, len(prompt.token_ids))
        if sampling.grammar is not None:
            await self._grammars.check(sampling.grammar, model, client)
        timeout_s = limits.request_timeout_s
        resumed: tuple[ResumedAnswer, ...] = ()
        calls: list[CallFacts] = []
        if best_of == n and self._secret is not None:
            calls = [
                CallFacts(
                    tenant=tenant.name,
                    model=one,
                    adapter=adapter,
                    prompt_ids=prompt.token_ids,
                    sampling=sampling,
                    num_answers=n,
                )
                for one in {model.weights: model, **{one.weights: one for one in models}}.values()
            ]
        if request.HasField("resume"):
            if not calls:
                raise InvalidRequest("resume", "a call that has no key", "none; send the call again without resume")
            facts = resumption.check_key(self._secret, calls, request.resume.key, time.time(), timeout_s)
            model, calls = facts.model, [facts]
            resumed = await self._resumed(request.resume, facts, client)
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)  # the client has them
        secret = self._secret
        keys = {
            one.model.weights: await self._run(
                len(prompt.token_ids), 0, partial(resumption.make_key, secret, one, time.time()), client
            )
            for one in calls
            if secret is not None
        }
        hashes = await self._hashes(prompt.token_ids, model, salt)
        many = tuple(samplings(sampling, n, best_of))
        of_answers = [
            () if one.has_finished else await self._hashes(prompt.token_ids + one.token_ids, model, salt, hashes)
            for one in resumed
        ]
        return Prepared(
            request_id=request_id,
            prompt_ids=prompt.token_ids,
            sampling=sampling,
            num_answers=n,
            samplings=many,
            slo=slo,
            deadline_s=timeout_s if time_remaining_s is None else min(timeout_s, max(time_remaining_s, 0.0)),
            tenant=tenant.name,
            cache_salt=salt,
            block_hashes=hashes,
            lookup_hashes=tuple(of_answers) or (hashes,) * len(many),
            is_chat=request.HasField("chat"),
            reasoning=prompt.reasoning if request.HasField("chat") and self.reasoning_format else None,
            reasoning_marks=self._marks(request, sampling, prompt.reasoning),
            model=model,
            resume_keys=keys,
            resumed=resumed,
            expected_tokens=_expected_tokens(request, sampling),
            slo_task_s=slo_task_s,
            stated=frozenset(one.name for one, _ in request.slo.ListFields()),
            **attributes.attributes(),
        )

    async def _resumed(
        self, message: inference_pb2.Resumption, facts: CallFacts, client: ClientKey
    ) -> tuple[ResumedAnswer, ...]:
        def read() -> tuple[ResumedAnswer, ...]:
            return resumption.read_answers(message, facts)

        num_tokens = resumption.num_resumed_tokens(message)
        return await self._run(num_tokens * REPLAY_COST, message.ByteSize(), read, client)

    async def replay(self, prepared: Prepared, answers: Sequence[Answer], client: ClientKey = ANONYMOUS) -> None:
        """Brings the answers of a resumed call to the state in which its client has them. Raises InvalidRequest."""
        if not prepared.resumed:
            return

        def replay() -> None:
            for one, held in zip(answers, prepared.resumed, strict=True):
                one.resume(held)

        num_tokens = sum(len(held.token_ids) for held in prepared.resumed)
        await self._run(num_tokens * REPLAY_COST, 0, replay, client)

    async def _run(self, num_tokens: int, num_bytes: int, work: Callable[[], Result], client: ClientKey) -> Result:
        """On the event loop if that is quick, otherwise in a thread."""
        if num_tokens <= QUICK_TOKENS:
            return work()
        return await self._threads.run(num_tokens, num_bytes, work, client)

    def _marks(
        self, request: inference_pb2.GenerateRequest, sampling: Sampling, reasoning: ReasoningState
    ) -> tuple[str, str] | None:
        is_whole = sampling.stop_in_reasoning or sampling.grammar is not None or reasoning is ReasoningState.CLOSED
        form = self.reasoning_format
        is_whole |= form in ("mistral", "special") and sampling.skip_special_tokens  # the marks have no text
        if is_whole or not request.HasField("chat") or not form:
            return None
        return MISTRAL_MARKS if form == "mistral" else THINK_MARKS

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, model: ModelFacts | None, client: ClientKey = ANONYMOUS
    ) -> list[int]:
        return await self._prompts.tokenize(request, model, client)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, model: ModelFacts, client: ClientKey = ANONYMOUS
    ) -> str:
        most = model.max_context_tokens
        for field, given in (
            ("token_ids", request.token_ids),
            ("prompt_token_ids", request.prompt_token_ids),
        ):
            if len(given) > most:
                raise InvalidRequest(field, f"{len(given)} tokens", f"at most {most} tokens, the context window")
            if given and max(given) >= model.vocab_size:
                raise InvalidRequest(field, max(given), f"ids below {model.vocab_size}")
        prompt, ids = list(request.prompt_token_ids), list(request.token_ids)

        def text() -> str:
            detokenizer = self.tokenizer.detokenizer(prompt)
            return detokenizer.push(ids) + detokenizer.finish()

        return await self._run(len(prompt) + len(ids), request.ByteSize(), text, client)

    def token_bytes(self, request: inference_pb2.GetTokenBytesRequest) -> inference_pb2.GetTokenBytesResponse:
        ids = request.token_ids
        if len(ids) > MAX_TOKENS_PER_CALL:
            raise InvalidRequest("token_ids", f"{len(ids)} tokens", f"at most {MAX_TOKENS_PER_CALL} tokens")
        return inference_pb2.GetTokenBytesResponse(
            token_bytes=map(self.tokenizer.token_bytes, ids), special_ids=filter(self.tokenizer.is_special, ids)
        )

    @property
    def tool_format(self) -> str:
        """Like `reasoning_format`, known after load(), and after the first chat."""
        return self.children.facts.tool_format

    @property
    def reasoning_format(self) -> str:
        found = self.children.facts.reasoning_format
        return "special" if found not in ("", "mistral") and self._hides_think_marks else found

    async def load(self) -> None:
        """Raises ModelError if a template does not compile."""
        await self.children.load()

    @property
    def can_work(self) -> bool:
        """Whether chats can be read."""
        return self.children.can_work and self._threads.can_work

    async def close(self) -> None:
        self._threads.close()
        await self.children.close()

    async def _sampling(self, message: inference_pb2.SamplingParams, model: ModelFacts, client: ClientKey) -> Sampling:
        most = self.limits.max_new_tokens
        check_bad_words(message.bad_words)
        words = list(message.bad_words)
        if words and not self.tokenizer.is_linear:
            bad = await self.children.bad_words(words, client)
        elif len(words) <= QUICK_WORDS:
            bad = bad_word_ids(words, self.tokenizer)
        else:
            bad = await self._threads.run(0, 0, lambda: bad_word_ids(words, self.tokenizer), client)
        sampling = convert.sampling_from_proto(
            message,
            draw_seed=lambda: secrets.randbits(64),
            default_max_tokens=self.limits.default_max_tokens,
            defaults=self.limits.sampling,
            bad_words=bad,
        )
        if sampling.max_tokens > most:
            window = f"prompt and answer together fill at most the context of {model.max_context_tokens} tokens"
            raise InvalidRequest("max_tokens", sampling.max_tokens, f"at most {most} (router.max_new_tokens); {window}")
        check_token_ids(sampling, model.vocab_size)
        return sampling

    async def _hashes(
        self, token_ids: tuple[int, ...], model: ModelFacts, salt: bytes, known: Sequence[bytes] = ()
    ) -> tuple[bytes, ...]:
        """`known`: those of the first blocks."""

        def hashes() -> list[bytes]:
            return extend_hashes(list(known), token_ids, model.block_size, chain_key(salt, model.hash_seed))

        if len(token_ids) - len(known) * model.block_size <= QUICK_TOKENS:
            return tuple(hashes())
        return tuple(await self._threads.run(0, 0, hashes))


def least_tokens(request: inference_pb2.GenerateRequest) -> int:
    """The least number of tokens that the request will use of its tenant's quota, before its prompt is tokenized."""
    sampling = request.sampling
    most = sampling.max_tokens if sampling.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    held = [len(one.token_ids) for one in request.resume.answers]
    output = min(max(most - max(held, default=0), 0), RESERVED_TOKENS)
    return max(len(request.token_ids.ids), 1) + sum(held) + output


def _is_hidden(mark: str, tokenizer: Tokenizer) -> bool:
    """Whether it is a special token, which has no text unless the request asks for special tokens."""
    token_id = tokenizer.control_tokens(mark).get(mark)
    return token_id is not None and not tokenizer.decode([token_id])


def _check_scores(sampling: Sampling, num_tokens: int) -> None:
    """All logprobs of a prompt are stored and sent together, so their number is limited."""
    if sampling.prompt_logprobs is not None and num_tokens * (1 + sampling.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
        most = MAX_PROMPT_LOGPROBS // (1 + sampling.prompt_logprobs)
        raise InvalidRequest(
            "prompt_logprobs",
            f"{sampling.prompt_logprobs} for a prompt of {num_tokens} tokens",
            f"at most {most} tokens, or fewer logprobs of each",
        )


def _expected_tokens(request: inference_pb2.GenerateRequest, sampling: Sampling) -> int | None:
    if not request.HasField("expected_output_tokens"):
        return None
    expected = request.expected_output_tokens
    if expected < 1:
        raise InvalidRequest("expected_output_tokens", expected, "at least 1")
    return min(expected, sampling.max_tokens)  # a client may expect more than it allows


def _check_priority(priority: int, tenant: Tenant) -> None:
    if tenant.max_priority is not None and priority > tenant.max_priority:
        raise InvalidRequest("priority", priority, f"at most {tenant.max_priority} for tenant {tenant.name}")


def _request_id(request: inference_pb2.GenerateRequest) -> str:
    if not request.HasField("request_id"):
        return secrets.token_hex(8)
    name = request.request_id
    if not 1 <= len(name) <= MAX_REQUEST_ID_CHARS or not name.isprintable():
        raise InvalidRequest(
            "request_id", f"{len(name)} characters", f"1 to {MAX_REQUEST_ID_CHARS} printable characters"
        )
    return name

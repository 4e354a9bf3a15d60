"""From a Generate call to a request that can be placed: checked, tokenised, hashed.

Long work runs in a few threads beside the event loop. How many requests may wait for them is bounded; more are
turned away. Every limit is checked here with the field's name, before anything is spent on a worker.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar, final

from pdserve.core.errors import InvalidRequest, Overloaded
from pdserve.core.hashing import block_hashes, chain_key
from pdserve.core.types import Sampling, Slo, check_bad_words, check_token_ids
from pdserve.text.bad_words import bad_word_ids
from pdserve.text.chat import ChatTemplate, Message
from pdserve.text.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2
from pdserve.wire import convert
from router import group
from router.grammars import GrammarCheck
from router.model import ModelFacts

MAX_REQUEST_ID_CHARS: Final = 128
DEFAULT_MAX_TOKENS: Final = 256
TOKENIZER_THREADS: Final = 2
MAX_WAITING: Final = 512
QUICK_CHARS: Final = 256  # tokenised at once: a thread's hand-over takes longer
QUICK_TOKENS: Final = 4096  # hashed at once
MAX_SCORES: Final = 2**19  # logprobs of a prompt, all its positions together: 6 MB on the wire
QUICK_WORDS: Final = 16  # tokenised at once

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_new_tokens: int
    default_slo: Slo
    request_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that can be placed."""

    request_id: str  # the client's, or ours where it gave none
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    num_answers: int  # that the client gets
    samplings: tuple[Sampling, ...]  # of the answers that are drawn for them
    slo: Slo
    deadline_s: float
    priority: int
    block_hashes: tuple[bytes, ...]
    is_chat: bool


@final
class Admission:
    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        limits: Limits,
        grammars: GrammarCheck | None = None,
    ) -> None:
        """`grammars` is closed by its maker; without it none is admitted."""
        self._grammars = GrammarCheck(None) if grammars is None else grammars
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.limits = limits
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._num_waiting = 0

    async def prepare(
        self, request: inference_pb2.GenerateRequest, model: ModelFacts, time_remaining_s: float | None
    ) -> Prepared:
        """Raises InvalidRequest, naming the field and its limit; Overloaded when too many wait for a thread."""
        limits = self.limits
        request_id = _request_id(request)
        sampling = await self._sampling(request.sampling, model)
        n, best_of = group.counts(request, sampling)
        slo = convert.slo_from_proto(request.slo, limits.default_slo)
        truncate_to = _truncation(request, model)
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            prompt = self._fit("token_ids", list(request.token_ids.ids), model, truncate_to)
        elif kind == "text":
            prompt = self._fit("text", await self._tokenize_text(request.text), model, truncate_to)
        elif kind == "chat":
            prompt = self._fit("chat", await self._tokenize_chat(request.chat), model, truncate_to)
        else:
            raise InvalidRequest("prompt", "nothing", "text, token_ids or chat")
        _check_scores(sampling, len(prompt))
        if sampling.grammar is not None:
            await self._grammars.check(sampling.grammar, model)
        timeout_s = limits.request_timeout_s
        return Prepared(
            request_id=request_id,
            prompt_ids=prompt,
            sampling=sampling,
            num_answers=n,
            samplings=tuple(group.samplings(sampling, n, best_of)),
            slo=slo,
            deadline_s=timeout_s if time_remaining_s is None else min(timeout_s, max(time_remaining_s, 0.0)),
            priority=request.priority,
            block_hashes=await self._hashes(prompt, model),
            is_chat=kind == "chat",
        )

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return await self._tokenize_text(request.text)
        if kind == "chat":
            return await self._tokenize_chat(request.chat)
        raise InvalidRequest("prompt", "nothing", "text or chat")

    async def detokenize(self, request: inference_pb2.DetokenizeRequest, model: ModelFacts) -> str:
        prompt, ids = list(request.prompt_token_ids), list(request.token_ids)
        for field, given in (("token_ids", ids), ("prompt_token_ids", prompt)):
            if given and max(given) >= model.vocab_size:
                raise InvalidRequest(field, max(given), f"ids below {model.vocab_size}")

        def text() -> str:
            detokenizer = self.tokenizer.detokenizer(prompt)
            return detokenizer.push(ids) + detokenizer.finish()

        return await self._run(len(prompt) + len(ids) <= QUICK_TOKENS, text)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _sampling(self, message: inference_pb2.SamplingParams, model: ModelFacts) -> Sampling:
        most, words = self.limits.max_new_tokens, list(message.bad_words)
        check_bad_words(words)
        bad = await self._run(len(words) <= QUICK_WORDS, lambda: bad_word_ids(words, self.tokenizer)) if words else []
        sampling = convert.sampling_from_proto(
            message,
            draw_seed=lambda: secrets.randbits(64),
            default_max_tokens=min(DEFAULT_MAX_TOKENS, most),
            bad_words=bad,
        )
        if sampling.max_tokens > most:
            raise InvalidRequest("max_tokens", sampling.max_tokens, f"at most {most}")
        check_token_ids(sampling, model.vocab_size)
        return sampling

    def _fit(self, field: str, ids: list[int], model: ModelFacts, truncate_to: int | None) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest("prompt", "an empty prompt", "at least one token")
        if truncate_to is not None:
            ids = ids[-truncate_to:]
        # Also of a text: a tokenizer may have grown tokens that the model has no row for.
        if max(ids) >= model.vocab_size:
            raise InvalidRequest(field, f"token id {max(ids)}", f"ids below {model.vocab_size}")
        if len(ids) > model.max_prompt_tokens:
            raise InvalidRequest(
                "prompt",
                f"{len(ids)} tokens",
                f"at most {model.max_prompt_tokens} tokens (the context window is {model.max_context_tokens}); "
                "truncate_prompt_tokens keeps the last ones",
            )
        return tuple(ids)

    async def _tokenize_text(self, text: str) -> list[int]:
        if not text:
            raise InvalidRequest("prompt", "an empty text", "at least one character")
        return await self._run(len(text) <= QUICK_CHARS, lambda: self.tokenizer.encode(text))

    async def _tokenize_chat(self, chat: inference_pb2.ChatPrompt) -> list[int]:
        template = self.chat_template
        if template is None:
            raise InvalidRequest("chat", "messages", "text or token_ids: this model has no chat template")
        messages = [Message(one.role, one.content) for one in chat.messages]
        # The template writes the special tokens itself.
        return await self._run(
            False, lambda: self.tokenizer.encode(template.render(messages), has_special_tokens=False)
        )

    async def _hashes(self, prompt: tuple[int, ...], model: ModelFacts) -> tuple[bytes, ...]:
        key = chain_key(b"", model.hash_seed)
        hashes = await self._run(len(prompt) <= QUICK_TOKENS, lambda: block_hashes(prompt, model.block_size, key))
        return tuple(hashes)

    async def _run(self, is_quick: bool, work: Callable[[], Result]) -> Result:
        if is_quick:
            return work()
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} prompts wait to be tokenised", 0.5)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_waiting -= 1


def _check_scores(sampling: Sampling, num_tokens: int) -> None:
    """They are kept and sent as one."""
    if sampling.prompt_logprobs is not None and num_tokens * (1 + sampling.prompt_logprobs) > MAX_SCORES:
        most = MAX_SCORES // (1 + sampling.prompt_logprobs)
        raise InvalidRequest(
            "prompt_logprobs",
            f"{sampling.prompt_logprobs} for a prompt of {num_tokens} tokens",
            f"at most {most} tokens, or fewer logprobs of each",
        )


def _request_id(request: inference_pb2.GenerateRequest) -> str:
    if not request.HasField("request_id"):
        return secrets.token_hex(8)
    name = request.request_id
    if not 1 <= len(name) <= MAX_REQUEST_ID_CHARS or not name.isprintable():
        raise InvalidRequest(
            "request_id", f"{len(name)} characters", f"1 to {MAX_REQUEST_ID_CHARS} printable characters"
        )
    return name


def _truncation(request: inference_pb2.GenerateRequest, model: ModelFacts) -> int | None:
    if not request.HasField("truncate_prompt_tokens"):
        return None
    count = request.truncate_prompt_tokens
    if not 1 <= count <= model.max_prompt_tokens:
        raise InvalidRequest("truncate_prompt_tokens", count, f"between 1 and {model.max_prompt_tokens}")
    return int(count)

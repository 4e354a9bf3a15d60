"""The answer to one request, and a group of answers to one prompt.

An answer converts token ids to text, checks stop strings, and merges pieces for slow readers. No I/O: the task that
writes to the client waits for `changed` and takes the pending messages (`write_answer`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, Self, final

from google.protobuf.message import Message

from pdserve.core.errors import Cancelled, InternalError, InvalidRequest, PdserveError
from pdserve.core.results import Usage
from pdserve.core.types import MAX_DELTA_TOKENS, FinishReason, Sampling, TokenOut
from pdserve.text.detokenize import Detokenizer
from pdserve.text.stops import ReasoningSplit, StopMatcher
from pdserve.v1 import inference_pb2
from pdserve.wire import convert
from pdserve.wire.protocol import TIMINGS, USAGE
from router.service.resumption import ResumedAnswer, ended_before
from router.state.interface import FinishRequest

NO_KEYS: Final[Mapping[str, bytes]] = {}
MAX_PENDING_TOKENS: Final = 8192  # a client that is further behind is treated as disconnected


@final
class Answer:
    """The runtime adds tokens, and the call's handler drains messages. Both run on the event loop."""

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        sampling: Sampling,
        detokenizer: Detokenizer,
        eos_token_ids: Iterable[int] = (),
        *,
        max_pending_tokens: int = MAX_PENDING_TOKENS,
        changed: asyncio.Event | None = None,
        shows_logprobs: bool = True,
        model: str = "",
        reasoning: str | None = None,
        split: ReasoningSplit | None = None,
        resume_keys: Mapping[str, bytes] = NO_KEYS,
    ) -> None:
        """The answers of one call share `changed`. Without `shows_logprobs`, logprobs are used for ranking only, and
        not sent. Stop strings apply to the text after the reasoning that `split` finds. `resume_keys`: of the call, by
        the weights that may compute it."""
        self.changed = asyncio.Event() if changed is None else changed
        self.error: PdserveError | None = None
        self.is_over = False  # the last message is pending or was taken, or `error` is set
        self.usage: Usage | None = None  # set with the last message
        self.num_tokens = 0
        self.num_resumed = 0  # of them, those that the client had before this call
        self.model = model
        self.ended_s: float | None = None  # when the answer ended, by the runtime's clock
        self._started: inference_pb2.Started | None = inference_pb2.Started(
            request_id=request_id,
            prompt_tokens=num_prompt_tokens,
            model=model,
            reasoning=reasoning,
            seed=sampling.seed,
            resume_key=next(iter(resume_keys.values())) if len(resume_keys) == 1 else b"",
        )
        self._resume_keys = resume_keys
        self._weights = ""  # empty: not known yet
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._split = split if sampling.stop else None
        self._stops = StopMatcher(sampling.stop, is_stop_included=sampling.include_stop_in_output)
        self._has_stops = bool(sampling.stop)
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_token_ids))
        self._end_ids = ends
        # The end of a structured document ends the answer even with ignore_eos or before min_tokens
        # (pdserve/core/attempt.py).
        self._document_end_ids = frozenset() if sampling.grammar is None else frozenset(eos_token_ids)
        self._max_pending_tokens = max_pending_tokens
        self._logprob_sum = 0.0
        self._has_logprobs = sampling.logprobs is not None
        self._shows_logprobs = shows_logprobs
        self._num_to_score = 0 if sampling.prompt_logprobs is None else num_prompt_tokens - 1
        self._scores: list[inference_pb2.PromptLogprobs] = []
        self._last_id: int | None = None
        self._stop: str | None = None
        self._messages: list[inference_pb2.GenerateResponse] = []  # pending deltas, oldest first
        self._delta: inference_pb2.Delta | None = None  # the last of them
        self._num_pending = 0  # tokens in them
        self._num_to_skip = 0  # characters that the client has already
        self._finished: inference_pb2.Finished | None = None

    def resume(self, given: ResumedAnswer) -> None:
        """Continues after the tokens that the client has. Text depends only on the tokens before it, so adding them
        again gives the same state. Called before all other methods. Raises InvalidRequest."""
        assert self._started is not None
        self._started.is_resumed = True
        self._num_to_score = 0
        self.num_resumed = count = len(given.token_ids)
        if given.has_finished:
            self.num_tokens, self.is_over = count, True
            self.usage = Usage(
                prompt_tokens=self._started.prompt_tokens, completion_tokens=count, cached_prompt_tokens=0
            )
            return
        for token_id in given.token_ids:
            if self._stop is not None:
                raise ended_before(self.num_tokens, count)
            self._add(TokenOut(token_id=token_id))
        size = sum(len(message.delta.text) for message in self._messages)
        # The end of an answer may release text without a token.
        if given.num_chars < size or (given.num_chars > size and given.finish is None):
            raise InvalidRequest("resume.answers.num_chars", given.num_chars, f"{size}, the text of {count} tokens")
        self._num_to_skip = given.num_chars - size
        self._messages, self._delta, self._num_pending = [], None, 0
        self._logprob_sum = given.logprob_sum

    @property
    def has_stopped(self) -> bool:
        """A stop string has ended the text."""
        return self._stop is not None

    def score(self, scores: inference_pb2.PromptLogprobs) -> None:
        """Adds logprobs of the prompt. A new attempt sends equal logprobs again, from the first position."""
        if scores.first_position == 1:
            self._scores.clear()
        if self._started is not None and scores.first_position == 1 + self._num_scored():
            self._scores.append(scores)

    def computed_with(self, weights: str) -> None:
        """Called before the first token. Without a key for these weights, the call cannot be resumed."""
        self._weights = weights
        if self._started is not None:
            self._started.resume_key = self._resume_keys.get(weights, b"")

    @property
    def awaits_weights(self) -> bool:
        """Whether the key of the call depends on the weights of this answer, which are not known yet."""
        return len(self._resume_keys) > 1 and not self._weights and not self.is_over

    def share_key_with(self, others: Iterable[Answer]) -> None:
        """Of one call, before the first message: it cannot be resumed if its answers have different weights, because a
        resumed call has the same ones for all."""
        is_one = len(self._resume_keys) <= 1 or all(one._weights == self._weights for one in others)
        if self._started is not None and not is_one:
            self._started.resume_key = b""

    def take(self, tokens: Iterable[TokenOut]) -> int | None:
        """Adds tokens. If one of them completes a stop string, returns the number of output tokens up to there."""
        if self.is_over or self._stop is not None:
            return None
        if self.num_tokens == 0 and self._num_scored() < self._num_to_score:
            self.fail(InternalError(f"{self._num_scored()} of {self._num_to_score} prompt tokens were scored"))
            return None
        for token in tokens:
            self._add(token)
            if self._stop is not None:
                break
        if self._num_pending > self._max_pending_tokens:
            self.fail(Cancelled(f"the reader is more than {self._max_pending_tokens} tokens behind"))
        self.changed.set()
        return None if self._stop is None else self.num_tokens

    def finish(self, end: FinishRequest) -> None:
        """Ends the answer: releases the text that was held back for stop strings, then the last message."""
        if self.is_over:
            return
        if self._stop is None:
            self._write(self._match(self._detokenizer.finish()))
        if self._stop is None and self._split is not None:
            self._write(self._match_content(self._split.finish()))
        if self._stop is None:
            self._write(self._stops.finish())
        is_stopped = self._stop is not None
        reason = FinishReason.STOP if is_stopped else end.reason
        usage = dataclasses.replace(end.usage, completion_tokens=self.num_tokens) if is_stopped else end.usage
        self._finished = inference_pb2.Finished(
            reason=convert.finish_to_proto(reason),
            usage=USAGE.encode(usage),
            timings=TIMINGS.encode(end.timings),
            stop=self._stop,
            stop_token_id=self._last_id if reason is FinishReason.STOP and not is_stopped else None,
            cumulative_logprob=self._logprob_sum if self._has_logprobs else None,
        )
        self.usage, self.is_over = usage, True
        self.changed.set()

    def fail(self, error: PdserveError) -> None:
        if not self.is_over:
            self.error, self.is_over = error, True
            self.changed.set()

    @property
    def is_prompt_scored(self) -> bool:
        """Whether `opening` has all logprobs of the prompt that were asked for: they come before the first token."""
        return self._num_to_score == 0 or self.num_tokens > 0 or self.is_over

    @property
    def mean_logprob(self) -> float:
        return self._logprob_sum / max(self.num_tokens, 1)

    def opening(self) -> list[inference_pb2.GenerateResponse]:
        """Data that is sent once, before everything else."""
        if self._started is None:
            return []
        messages = [inference_pb2.GenerateResponse(started=self._started)]
        messages += [inference_pb2.GenerateResponse(prompt_logprobs=scores) for scores in self._scores]
        self._started, self._scores = None, []
        return messages

    def drain(self) -> list[inference_pb2.GenerateResponse]:
        """Takes everything that may be sent now, in as few messages as possible. Empty before the first token."""
        self.changed.clear()
        messages = self.opening() if self._messages or self._finished is not None else []
        messages += self._messages
        self._messages, self._delta, self._num_pending = [], None, 0
        if self._finished is not None:
            messages.append(inference_pb2.GenerateResponse(finished=self._finished))
            self._finished = None
        return messages

    def _num_scored(self) -> int:
        return sum(len(scores.tokens) for scores in self._scores)

    def _add(self, token: TokenOut) -> None:
        self.num_tokens += 1
        self._last_id = token_id = token.token_id
        delta = self._delta
        # The length of the field is read only if so many tokens are pending at all.
        if delta is None or (self._num_pending >= MAX_DELTA_TOKENS and len(delta.token_ids) == MAX_DELTA_TOKENS):
            delta = self._begin_delta()
        self._num_pending += 1
        delta.token_ids.append(token_id)
        if token.logprob is not None:
            self._logprob_sum += token.logprob
            if self._shows_logprobs:
                delta.logprobs.append(convert.logprobs_to_proto(token))
        is_end = token_id in self._document_end_ids or (
            token_id in self._end_ids and self.num_tokens > self._sampling.min_tokens
        )
        if not is_end or self._sampling.include_stop_in_output:
            text = self._detokenizer.push((token_id,))
            self._write(self._match(text) if self._has_stops else text)

    def _begin_delta(self) -> inference_pb2.Delta:
        message = inference_pb2.GenerateResponse()
        self._messages.append(message)
        self._delta = delta = message.delta
        return delta

    def _write(self, text: str) -> None:
        if self._num_to_skip:
            text, self._num_to_skip = text[self._num_to_skip :], max(self._num_to_skip - len(text), 0)
        if text:
            delta = self._begin_delta() if self._delta is None else self._delta
            delta.text += text

    def _match(self, text: str) -> str:
        """The text that may be sent after `text` was added."""
        if self._split is None:
            return self._match_content(text)
        reasoning, content = self._split.push(text)
        return reasoning + (self._match_content(content) if content else "")

    def _match_content(self, text: str) -> str:
        """Stop strings are ignored before min_tokens."""
        if self.num_tokens <= self._sampling.min_tokens:
            return self._stops.push_unmatched(text).text
        piece = self._stops.push(text)
        self._stop = piece.stop
        return piece.text


# --- several answers to one prompt ----------------------------------------------------------------------------
# A group creates the requests of `n` or `best_of`, and merges their outputs into one stream.
#
# Inside the router each answer is a request of its own: placed, preempted, recovered and ended independently. The first
# uses the request's own seed, so it equals the answer for n = 1; the others use seeds derived from it.

MAX_ANSWERS: Final = 16
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


def counts(request: inference_pb2.GenerateRequest, sampling: Sampling) -> tuple[int, int]:
    """The number of returned answers, and the number of sampled ones."""
    n = request.n if request.HasField("n") else 1
    best_of = request.best_of if request.HasField("best_of") else n
    if not 1 <= n <= MAX_ANSWERS:
        raise InvalidRequest("n", n, f"between 1 and {MAX_ANSWERS}")
    if not n <= best_of <= MAX_ANSWERS:
        raise InvalidRequest("best_of", best_of, f"between n ({n}) and {MAX_ANSWERS}")
    if best_of > 1 and sampling.is_greedy:
        field = "n" if n > 1 else "best_of"
        raise InvalidRequest(field, max(n, best_of), "1 with temperature 0, where every answer would be the same")
    return n, best_of


def samplings(sampling: Sampling, n: int, best_of: int) -> list[Sampling]:
    """One Sampling for each sampled answer. Only the first one scores the prompt. Ranking needs the logprobs of the
    sampled tokens."""
    if best_of > n and sampling.logprobs is None:
        sampling = dataclasses.replace(sampling, logprobs=0)
    others = [
        dataclasses.replace(sampling, seed=_sibling_seed(sampling.seed, index), prompt_logprobs=None)
        for index in range(1, best_of)
    ]
    return [sampling, *others]


@final
class Group:
    """Several answers with the interface of one Answer. They share `changed`."""

    def __init__(self, answers: Sequence[Answer], changed: asyncio.Event, *, num_kept: int) -> None:
        """If fewer answers are kept than sampled, those with the largest mean logprob are sent, best first, after all
        have ended."""
        self.changed = changed
        self.answers = tuple(answers)
        self._num_kept = num_kept
        self._is_total_sent = False

    @property
    def error(self) -> PdserveError | None:
        """The error of any answer fails the whole call."""
        return next((one.error for one in self.answers if one.error is not None), None)

    @property
    def is_over(self) -> bool:
        return all(one.is_over for one in self.answers)

    def drain(self) -> list[inference_pb2.GenerateResponse]:
        self.changed.clear()
        kept: Sequence[Answer] = self.answers
        if self._num_kept < len(kept):
            if not self.is_over:
                return []
            kept = sorted(kept, key=lambda one: one.mean_logprob, reverse=True)[: self._num_kept]
        first, *siblings = self.answers
        if not first.is_prompt_scored or any(one.awaits_weights for one in self.answers):
            return []
        first.share_key_with(siblings)
        messages = first.opening()
        for sibling in siblings:
            sibling.opening()  # dropped: the first answer has sent it
        for index, answer in enumerate(kept):
            for message in answer.drain():
                if message.HasField("delta"):
                    message.delta.index = index
                elif message.HasField("finished"):
                    message.finished.index = index
                messages.append(message)
        if self.is_over and not self._is_total_sent and self.error is None:
            self._is_total_sent = True
            messages[-1].finished.total_usage.CopyFrom(USAGE.encode(self._total()))
        return messages

    def _total(self) -> Usage:
        used = [one.usage for one in self.answers if one.usage is not None]
        return dataclasses.replace(used[0], completion_tokens=sum(one.completion_tokens for one in used))


def _sibling_seed(seed: int, index: int) -> int:
    """The seed of answer `index`: splitmix64 (Steele, Lea, Flood 2014), `index` steps from `seed`."""
    value = (seed + index * _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


async def is_shared(first: Answer) -> None:
    """Waits until the other answers can find the prompt's KV: the decode worker has sampled from it, or the request has
    ended.

    The first token may come from a prefill worker before the KV has arrived.
    """
    while first.num_tokens - first.num_resumed < 2 and not first.is_over:
        first.changed.clear()
        await first.changed.wait()


# --- writing answers ------------------------------------------------------------------------------------------


async def write_answer(
    answer: Answer | Group,
    write: Callable[[Message], Awaitable[None]],
    write_s: float,
    accepted: Callable[[], None] = lambda: None,
) -> None:
    """Writes messages as they come. `accepted` is called before each write. Raises the answer's error, and Cancelled if
    a write takes longer than `write_s`."""
    changed = answer.changed
    try:
        async with asyncio.timeout(None) as limit:
            with _WriteWatch(limit, write_s) as watch:
                while True:
                    await changed.wait()
                    messages_out = answer.drain()
                    if answer.error is not None:
                        raise answer.error
                    accepted()
                    watch.begin()
                    for message in messages_out:
                        await write(message)
                    watch.end()
                    if answer.is_over and not changed.is_set():
                        return
    except TimeoutError:
        raise Cancelled(f"the reader took nothing for {write_s:g} s") from None


@final
class _WriteWatch:
    """Lets `limit` expire when a write takes longer than `most_s`. One timer for the whole stream, because setting one
    for each write would take as long as the write."""

    def __init__(self, limit: asyncio.Timeout, most_s: float) -> None:
        self._limit, self._most_s = limit, most_s
        self._now_s = asyncio.get_running_loop().time
        self._began_s: float | None = None  # of the present write

    def begin(self) -> None:
        self._began_s = self._now_s()

    def end(self) -> None:
        self._began_s = None

    def __enter__(self) -> Self:
        self._look_after(self._most_s)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _look_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        spent_s = 0.0 if self._began_s is None else self._now_s() - self._began_s
        if spent_s < self._most_s:
            self._look_after(self._most_s - spent_s)
        else:
            self._limit.reschedule(self._now_s())

"""What follows a failed attempt of a call: when the next one begins, and what it asks for. No I/O.

A call without a token is sent again. A call that has tokens is resumed: another router, or the one that was started
again, continues each answer at its next token (router/service/answer.py).
"""

from __future__ import annotations

import random
import time
from array import array
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.durations import DAY_S, backoff_s
from pdserve.core.errors import NONE_YET, ConfigError, NoWorkers, Overloaded, PdserveError, Unavailable
from pdserve.v1 import inference_pb2
from pdserve.wire.status import is_connection_lost, is_interruption

# --- when --------------------------------------------------------------------------------------------------

MAX_RETRIES: Final = 1000
FIRST_RESUME_S: Final = 0.1  # the calls of a router that died do not reach the next one together
LONGEST_RESUME_S: Final = 2.0
MAX_LOST: Final = 3  # connections without a further token: the call may be what ends its routers
PROGRESS_TOKENS: Final = 8  # since the first of these connections, after which their number counts anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Retries after the first attempt, of a call that has yielded no token.

    An interrupted call, whose connection or router has ended, is sent again for `resume_s` seconds, whatever `limit`
    is. It continues after the tokens that it has yielded. With 0, such a call fails.

    If the server names a retry time (RetryInfo), the wait is that time plus some jitter, so that callers do not return
    together. If it is more than `longest_wait_s`, there is no retry.
    """

    limit: int = 2
    first_backoff_s: float = 0.5
    longest_backoff_s: float = 8.0
    longest_wait_s: float = 30.0
    resume_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.limit <= MAX_RETRIES:
            raise ConfigError("retries.limit", self.limit, f"between 0 and {MAX_RETRIES}")
        for name in ("first_backoff_s", "longest_backoff_s", "longest_wait_s", "resume_s"):
            if not 0.0 <= getattr(self, name) <= DAY_S:
                raise ConfigError(f"retries.{name}", getattr(self, name), f"between 0 and {DAY_S:g} seconds")

    def delay_s(self, error: PdserveError, tries: int, remaining_s: float, noise: float) -> float | None:
        """Seconds to wait before the next attempt; None: raise `error`.

        `tries` is the number of failed attempts, including this one; `remaining_s` is the rest of the call's timeout;
        `noise` is uniform in [0, 1).
        """
        if tries > self.limit or not isinstance(error, Overloaded | Unavailable):
            return None
        asked_s = error.retry_after_s
        if not asked_s or asked_s < 0.0:  # absent, or without a retry time
            ceiling_s = backoff_s(self.first_backoff_s, self.longest_backoff_s, tries - 1)
            delay_s = ceiling_s * (0.5 + 0.5 * noise)
        elif asked_s > self.longest_wait_s:
            return None
        else:
            delay_s = asked_s * (1.0 + 0.25 * noise)
        return delay_s if delay_s < remaining_s else None

    def resume_delay_s(self, error: PdserveError, tries: int, spent_s: float, noise: float) -> float | None:
        """Seconds to wait before the next attempt to continue after the same token; None: the time is over.

        `tries` is the number of failures after this token, including this one; the first was `spent_s` ago.
        """
        if tries == 1:
            delay_s = FIRST_RESUME_S * noise
        else:  # until a router listens, knows its workers, and has room
            asked_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
            ceiling_s = backoff_s(FIRST_RESUME_S, LONGEST_RESUME_S, tries - 1)
            delay_s = max(ceiling_s * (0.5 + 0.5 * noise), asked_s * (1.0 + 0.25 * noise))
        return delay_s if spent_s + delay_s < self.resume_s else None


class CannotResume(Unavailable):
    """The router of a resumed call begins again, because its build is older. Another one may continue the call."""

    def __init__(self) -> None:
        super().__init__("the router that was reached cannot resume the answer; send the whole call again")


def _can_continue(error: PdserveError, *, is_first: bool) -> bool:
    """Whether an attempt may follow that continues the call. `is_first`: the call had a router until now. A router that
    was reached afterwards may have no room, or know no worker yet. All else that it says is the end of the call: it has
    waited for workers itself."""
    if is_interruption(error):
        return True
    is_unaware = isinstance(error, NoWorkers) and error.states == NONE_YET
    return not is_first and (is_unaware or isinstance(error, Overloaded | CannotResume))


class Attempts:
    """One call's deadline and attempts."""

    def __init__(self, timeout_s: float, retries: Retries) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._retries = retries
        self._count = 0
        self._resumes = (0, -1, 0.0)  # failures after so many tokens, and when the first was
        self._num_lost = 0  # of them, those that ended an established connection
        self._lost_from = 0  # tokens at the first of these
        self.has_given_up = False
        """The time for an interrupted call is over, so it is not sent again."""

    @property
    def remaining_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.0)

    def delay_s(self, failure: PdserveError) -> float | None:
        """How long to wait before the next attempt; None: no further attempt."""
        self._count += 1
        return self._retries.delay_s(failure, self._count, self._deadline_s - time.monotonic(), random.random())

    @property
    def is_resuming(self) -> bool:
        """An attempt was interrupted."""
        return self._resumes[0] > 0

    def resume_delay_s(self, failure: PdserveError, num_tokens: int) -> float | None:
        """The same for an interrupted call, whose reader has `num_tokens`."""
        now_s = time.monotonic()
        count, tokens, began_s = self._resumes
        if tokens != num_tokens:
            count, began_s = 0, now_s
        if num_tokens - self._lost_from >= PROGRESS_TOKENS:
            self._num_lost, self._lost_from = 0, num_tokens
        if not _can_continue(failure, is_first=count == 0):
            return None
        self._resumes = (count + 1, num_tokens, began_s)
        self._num_lost += is_connection_lost(failure)
        delay_s = self._retries.resume_delay_s(failure, count + 1, now_s - began_s, random.random())
        if delay_s is not None and self._num_lost <= MAX_LOST and now_s + delay_s < self._deadline_s:
            return delay_s
        self.has_given_up = self._retries.resume_s > 0.0
        return None


# --- what --------------------------------------------------------------------------------------------------


@final
class HeldAnswer:
    """One answer so far. Its tokens take 4 bytes each."""

    __slots__ = ("has_finished", "logprob_sum", "num_chars", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.num_chars = 0
        self.logprob_sum = 0.0
        self.has_finished = False

    def took(self, delta: inference_pb2.Delta) -> None:
        self.token_ids.extend(delta.token_ids)
        self.num_chars += len(delta.text)
        for one in delta.logprobs:
            self.logprob_sum += one.logprob


@final
class HeldCall:
    """All answers of one call. `request` is the next message to send."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self.request = request
        self.answers = [HeldAnswer() for _ in range(_num_answers(request))]
        self.interruption: PdserveError | None = None  # why `request` resumes the call; None: it does not
        self.is_accepted = False  # by the router of the present attempt
        self._num_resumed = 0  # tokens in `request`
        self._started = inference_pb2.Started()

    @property
    def num_tokens(self) -> int:
        return sum(len(one.token_ids) for one in self.answers)

    def started(self, message: inference_pb2.Started) -> None:
        """Raises CannotResume if the answers begin again, although the call was resumed."""
        if self.interruption is not None and not message.is_resumed:
            raise CannotResume
        self._started, self.is_accepted = message, True

    def took(self, delta: inference_pb2.Delta) -> None:
        if delta.index < len(self.answers):
            self.answers[delta.index].took(delta)

    def finished(self, message: inference_pb2.Finished) -> None:
        if message.index < len(self.answers):
            self.answers[message.index].has_finished = True

    def resume(self, interruption: PdserveError) -> bool:
        """Makes `request` the one that continues after the tokens so far. False: the router gave no key for that."""
        started = self._started
        if not started.resume_key or not self.num_tokens:
            return False
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        request.request_id, request.sampling.seed = started.request_id, started.seed
        request.resume.CopyFrom(inference_pb2.Resumption(key=started.resume_key))
        has_logprobs = request.sampling.HasField("logprobs")
        for one in self.answers:
            request.resume.answers.add(
                token_ids=one.token_ids,
                num_chars=one.num_chars,
                cumulative_logprob=one.logprob_sum if has_logprobs else None,
                has_finished=one.has_finished,
            )
        self.request, self.is_accepted = request, False
        if self._num_resumed != self.num_tokens:  # otherwise a further attempt after the same interruption
            self._num_resumed, self.interruption = self.num_tokens, interruption
        return True


def _num_answers(request: inference_pb2.GenerateRequest) -> int:
    """Also for a number that the server will reject."""
    return min(request.n, 1024) if request.HasField("n") else 1

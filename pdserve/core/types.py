"""Types that all packages share: roles, sampling, finish reasons, tokens. Pure: standard library only."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from pdserve.core.durations import SHORTEST_SLO_S, check_duration
from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import Grammar

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_LOGPROBS: Final = 64  # a beam search needs 2 * width
MAX_PROMPT_LOGPROBS: Final = 20
MAX_DELTA_TOKENS: Final = 64  # in one message of a stream, when pieces for a slow reader are merged
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_ALLOWED_TOKEN_IDS: Final = 8192
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARS: Final = 256
# In token sequences: a word has one sequence at the beginning of a text, and another after a space.
MAX_BAD_SEQUENCES: Final = 2 * MAX_BAD_WORDS
MAX_BAD_SEQUENCE_TOKENS: Final = 1024
_COUNTS: Final = (
    ("stop", "stop", "strings", MAX_STOP_STRINGS),
    ("stop_token_ids", "stop_token_ids", "ids", MAX_STOP_TOKEN_IDS),
    ("logit_bias", "logit_bias", "tokens", MAX_LOGIT_BIASES),
    ("allowed_token_ids", "allowed_token_ids", "ids", MAX_ALLOWED_TOKEN_IDS),
    ("bad_token_ids", "bad_words", "token sequences", MAX_BAD_SEQUENCES),
)
MAX_SESSION_ID_CHARS: Final = 128
MAX_MESSAGES: Final = 4096  # of a chat
MAX_TOOL_CALLS: Final = 128  # of a message
MAX_CHAT_CALLS: Final = 8192  # of all messages of a chat
MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 524_288  # of all tools of a chat, as JSON
MAX_SEED: Final = 2**64 - 1
# Before a request's id in its answer over HTTP: of a text, a chat, a response and a message.
TEXT_ID_PREFIX: Final = "cmpl-"
CHAT_ID_PREFIX: Final = "chatcmpl-"
RESPONSE_ID_PREFIX: Final = "resp_"
MESSAGE_ID_PREFIX: Final = "msg_"


def request_id_of(answer_id: str) -> str:
    """The request's id in the id of an answer over HTTP; other ids stay as they are."""
    prefixes = (TEXT_ID_PREFIX, CHAT_ID_PREFIX, RESPONSE_ID_PREFIX, MESSAGE_ID_PREFIX)
    prefix = next((one for one in prefixes if answer_id.startswith(one)), "")
    return answer_id.removeprefix(prefix)


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class FinishReason(StrEnum):
    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context window


class Path(StrEnum):
    REMOTE = "remote"  # prefill on a prefill worker, KV transferred to the decode worker
    LOCAL = "local"  # the decode worker prefills the prompt itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled and when the text ends.

    Raises InvalidRequest with the field and the limit if a value is outside its range.
    """

    max_tokens: int = 256
    min_tokens: int = 0  # before that, end of sequence and stop tokens cannot be sampled
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0  # in (0, 1]
    top_n_sigma: float = 0.0  # in [0, 100]; 0 keeps every token
    min_p: float = 0.0  # in [0, 1]
    repetition_penalty: float = 1.0  # in [0.01, 100]; over prompt and output
    presence_penalty: float = 0.0  # in [-2, 2]; over output
    frequency_penalty: float = 0.0  # in [-2, 2]; over output
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: of the sampled token; k: also of the k most likely tokens
    include_stop_in_output: bool = False
    stop_in_reasoning: bool = False  # stop strings also end the text within a chat's reasoning
    skip_special_tokens: bool = True  # in the text only; token ids always include them
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, in [-100, 100]), added to the logit; ids ascend
    allowed_token_ids: tuple[int, ...] = ()  # no other token can be sampled; empty: no restriction
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that the output never contains
    prompt_logprobs: int | None = None  # like logprobs, for the tokens of the prompt
    grammar: Grammar | None = None  # required form of the output; it can end the output even with ignore_eos

    def __post_init__(self) -> None:
        check_counts(self)
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require("top_k", self.top_k, self.top_k >= 0, "at least 0; 0 keeps every token")
        _require_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("top_n_sigma", self.top_n_sigma, 0.0, 100.0)
        # Logits are divided by the temperature, so a tiny value would overflow.
        _require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require("seed", self.seed, 0 <= self.seed <= MAX_SEED, "an unsigned 64-bit integer")
        for text in self.stop:
            _require(
                "stop",
                f"a string of {len(text)} characters",
                1 <= len(text) <= MAX_STOP_STRING_CHARS,
                f"strings of 1 to {MAX_STOP_STRING_CHARS} characters",
            )
        _require_between("logprobs", self.logprobs, MAX_LOGPROBS)
        _require_between("prompt_logprobs", self.prompt_logprobs, MAX_PROMPT_LOGPROBS)
        for _, bias in self.logit_bias:
            _require_number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        for word in self.bad_token_ids:
            _require("bad_words", "a word without tokens", len(word) > 0, "words of at least one token")
            require_at_most("bad_words", "tokens in a word", len(word), MAX_BAD_SEQUENCE_TOKENS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the allowed tokens depend on the previous tokens, not only on their number. Penalties do not count,
        because an engine counts the tokens that it samples."""
        return bool(self.bad_token_ids) or self.grammar is not None

    @property
    def is_penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change before temperature, apart from banned tokens."""
        return bool(self.logit_bias) or self.is_penalised or self.top_n_sigma > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of Sampling for requests that give none; None: Sampling's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        return {name: value for name in _DEFAULTS if (value := getattr(self, name)) is not None}


_DEFAULTS: Final = tuple(one.name for one in fields(SamplingDefaults))
NO_DEFAULTS: Final = SamplingDefaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency targets. Goodput counts a request only if it meets both."""

    ttft_s: float = 2.0  # arrival to first token
    tpot_s: float = 0.2  # mean seconds per token after the first
    #: Longest gap between two tokens that prompts of other requests may cause; None: four times `tpot_s`. It limits the
    #: steps of decode workers. Goodput does not count it.
    itl_s: float | None = None

    def __post_init__(self) -> None:
        check_duration("slo.ttft_s", self.ttft_s, low=SHORTEST_SLO_S)
        check_duration("slo.tpot_s", self.tpot_s, low=SHORTEST_SLO_S)
        if self.itl_s is not None:
            check_duration("slo.itl_s", self.itl_s, low=SHORTEST_SLO_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAttributes:
    """Properties of a request other than prompt, sampling and targets.

    Router, recording and workers pass them on unchanged. A field has the same name in GenerateRequest and in the
    workers' Sequence. Its attribute in spans and logs is in pdserve/telemetry/names.py. Raises InvalidRequest.
    """

    priority: int = 0  # larger goes first
    session_id: str = ""  # groups the requests of one user or conversation; empty: none
    #: Time from its end within which its prefix is used again; 0: never, since its session ends; None: unknown.
    reuse_within_s: float | None = None

    def __post_init__(self) -> None:
        if self.reuse_within_s is not None:
            check_duration("reuse_within_s", self.reuse_within_s)
        is_short = len(self.session_id) <= MAX_SESSION_ID_CHARS
        if not is_short or not self.session_id.isprintable():
            given = "characters that cannot be printed" if is_short else f"{len(self.session_id)} characters"
            raise InvalidRequest("session_id", given, f"at most {MAX_SESSION_ID_CHARS} printable characters")

    def attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ATTRIBUTES}


_ATTRIBUTES: Final = tuple(one.name for one in fields(RequestAttributes))


# Never changed, but not frozen: that would triple the time of creation, and there is one for each token.
@dataclass(slots=True, kw_only=True)
class TokenOut:
    """One sampled token, or a scored one of the prompt."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    rank: int | None = None  # of a scored token: 1 plus the number of tokens that are more likely


def check_counts(sampling: object) -> None:
    """Checks the lengths of lists, in a Sampling or, before anything is copied, in its message.

    Raises InvalidRequest.
    """
    for attribute, field, noun, most in _COUNTS:
        require_at_most(field, noun, len(getattr(sampling, attribute)), most)


def check_bad_words(words: Sequence[str]) -> None:
    """Checks bad words before they are tokenised. Raises InvalidRequest."""
    require_at_most("bad_words", "words", len(words), MAX_BAD_WORDS)
    for word in words:
        _require(
            "bad_words",
            f"a word of {len(word)} characters",
            1 <= len(word) <= MAX_BAD_WORD_CHARS,
            f"words of 1 to {MAX_BAD_WORD_CHARS} characters",
        )


def check_token_ids(sampling: Sampling, vocab_size: int, of: str = "") -> None:
    """Raises InvalidRequest if a token id is outside the vocabulary, or if the bans leave no token.

    `of` is a prefix for the field names.
    """
    named = {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": tuple(token_id for token_id, _ in sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": tuple(token_id for word in sampling.bad_token_ids for token_id in word),
    }
    for field, token_ids in named.items():
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidRequest(of + field, max(token_ids), f"ids below {vocab_size}")
    never = {word[0] for word in sampling.bad_token_ids if len(word) == 1}
    if never and never.issuperset(sampling.allowed_token_ids or range(vocab_size)):
        field = "allowed_token_ids" if sampling.allowed_token_ids else "bad_words"
        raise InvalidRequest(of + field, "bad_words that ban every token", "at least one token that they do not ban")


def _require(field: str, seen: object, holds: bool, expected: str) -> None:
    if not holds:
        raise InvalidRequest(field, seen, expected)


def require_at_most(field: str, noun: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(field, f"{count} {noun}", f"at most {most}")


def _require_between(field: str, value: int | None, most: int) -> None:
    if value is not None:
        _require(field, value, 0 <= value <= most, f"between 0 and {most}")


def _require_number(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    """Values come from the wire as float32, which may lie outside a bound that float32 cannot represent."""
    if (low < value if low_open else low <= value) and value <= high:  # false for NaN
        return
    least, most = min(low, _float32(low)), max(high, _float32(high))
    if not ((least < value if low_open else least <= value) and value <= most):
        raise InvalidRequest(field, value, f"a number in {'(' if low_open else '['}{low:g}, {high:g}]")


def _float32(value: float) -> float:
    """The nearest float32."""
    [rounded] = struct.unpack("f", struct.pack("f", value))
    return float(rounded)

"""Words that every room shares: roles, sampling, finish reasons, tokens. Pure: standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdserve.core.errors import InvalidRequest

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_LOGPROBS: Final = 20
MAX_SEED: Final = 2**64 - 1


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context window


class Path(Enum):
    REMOTE = "remote"  # prefill on a prefill worker, KV moved to the decode worker
    LOCAL = "local"  # the decode worker reads the prompt itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn and when the text ends.

    Raises InvalidRequest, naming the field and the limit, on values outside the stated ranges.
    """

    max_tokens: int = 256
    min_tokens: int = 0  # end of sequence and stop tokens cannot be drawn before
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1]
    repetition_penalty: float = 1.0  # in [0.01, 100]; over prompt and output
    presence_penalty: float = 0.0  # in [-2, 2]; over output
    frequency_penalty: float = 0.0  # in [-2, 2]; over output
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: the drawn token's; k: and of the k most likely
    include_stop_in_output: bool = False

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require("top_k", self.top_k, self.top_k >= 0, "at least 0; 0 keeps every token")
        _require_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        # Logits are divided by it: a tiny one would overflow them.
        _require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require("seed", self.seed, 0 <= self.seed <= MAX_SEED, "an unsigned 64-bit integer")
        _require("stop", f"{len(self.stop)} strings", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            _require(
                "stop",
                f"a string of {len(text)} characters",
                1 <= len(text) <= MAX_STOP_STRING_CHARS,
                f"strings of 1 to {MAX_STOP_STRING_CHARS} characters",
            )
        _require(
            "stop_token_ids",
            f"{len(self.stop_token_ids)} ids",
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"at most {MAX_STOP_TOKEN_IDS}",
        )
        if self.logprobs is not None:
            _require("logprobs", self.logprobs, 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Promised times. Goodput counts a request only if it kept both."""

    ttft_s: float = 2.0  # arrival to first token
    tpot_s: float = 0.2  # mean seconds per token after the first

    def __post_init__(self) -> None:
        _require_number("slo.ttft_s", self.ttft_s, 0.0, 86_400.0, low_open=True)
        _require_number("slo.tpot_s", self.tpot_s, 0.0, 86_400.0, low_open=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOut:
    """One drawn token."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


def _require(field: str, seen: object, holds: bool, expected: str) -> None:
    if not holds:
        raise InvalidRequest(field, seen, expected)


def _require_number(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = math.isfinite(value) and (low < value if low_open else low <= value) and value <= high
    _require(field, value, inside, f"a number in {'(' if low_open else '['}{low:g}, {high:g}]")

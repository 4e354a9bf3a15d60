"""The field-driven codec, on small dataclasses beside real messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.attempt import AttemptKey, RefusalReason
from pdserve.core.cost.latency import CostPrior
from pdserve.core.errors import InvalidRequest
from pdserve.core.types import FinishReason
from pdserve.v1 import inference_pb2, worker_pb2
from pdserve.wire.codec import Codec, Special


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    key: AttemptKey
    reason: RefusalReason
    retry_after_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    token_id: int
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    key: AttemptKey
    token: Scored
    waited_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0
    finish: FinishReason | None = None


REFUSAL = Codec(Refusal, worker_pb2.Refused)
LOGPROB = Codec(Logprob, inference_pb2.TopLogprob)
SCORED = Codec(Scored, worker_pb2.Token, nested=(LOGPROB,))
FIRST = Codec(First, worker_pb2.FirstToken, nested=(SCORED,), renamed={"waited_s": "queue_s"})
FLOATS = st.floats(width=32, allow_nan=False)
TOPS = st.builds(Logprob, token_id=st.integers(0, 2**32 - 1), logprob=FLOATS)


@given(
    st.builds(
        First,
        key=st.builds(AttemptKey, st.just("p0"), st.text(max_size=8), st.integers(0, 2**32 - 1)),
        token=st.builds(
            Scored,
            token_id=st.integers(0, 2**32 - 1),
            logprob=st.none() | FLOATS,
            top=st.lists(TOPS, max_size=3).map(tuple),
        ),
        waited_s=st.floats(0.0, 86_400.0),
        prefill_s=st.floats(0.0, 86_400.0),
        cached_tokens=st.integers(0, 2**32 - 1),
        finish=st.none() | st.sampled_from(FinishReason),
    )
)
def test_a_message_decodes_to_what_was_encoded(first: First) -> None:
    data = FIRST.encode(first).SerializeToString()
    assert FIRST.decode(worker_pb2.FirstToken.FromString(data), "p0") == first


def test_wire_defaults_override_dataclass_defaults() -> None:
    refusal = Refusal(key=AttemptKey("d0", "a", 1), reason=RefusalReason.DRAINING, retry_after_s=0.0)
    assert REFUSAL.decode(REFUSAL.encode(refusal), "d0") == refusal


def test_zero_is_not_absent() -> None:
    message = SCORED.encode(Scored(token_id=1, logprob=0.0))
    assert message.HasField("logprob")
    assert SCORED.decode(message).logprob == 0.0
    assert SCORED.decode(worker_pb2.Token(token_id=1)).logprob is None


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 86_401.0])
def test_a_duration_out_of_bounds_is_rejected_by_name(seconds: float) -> None:
    with pytest.raises(InvalidRequest) as raised:
        FIRST.decode(worker_pb2.FirstToken(queue_s=seconds), "p0")
    assert raised.value.field == "queue_s"


@pytest.mark.parametrize("number", [0, 99])
def test_an_enum_value_without_a_name_is_rejected_or_replaced(number: int) -> None:
    message = worker_pb2.Refused(request_id="a", attempt=1)
    message.reason = number  # type: ignore[assignment]
    with pytest.raises(InvalidRequest):
        REFUSAL.decode(message, "d0")
    lenient = Codec(Refusal, worker_pb2.Refused, unknown={"reason": RefusalReason.INBOX_FULL})
    assert lenient.decode(message, "d0").reason is RefusalReason.INBOX_FULL


def test_an_unknown_finish_is_rejected_and_an_unspecified_one_is_none() -> None:
    message = worker_pb2.FirstToken(request_id="a", attempt=1)
    assert FIRST.decode(message, "p0").finish is None
    message.finish = 99  # type: ignore[assignment]
    with pytest.raises(InvalidRequest):
        FIRST.decode(message, "p0")


def test_a_client_accepts_unknown_names() -> None:
    lenient = Codec(First, worker_pb2.FirstToken, nested=(SCORED,), renamed={"waited_s": "queue_s"}, is_lenient=True)
    message = worker_pb2.FirstToken(queue_s=90_000.0)
    message.finish = 99  # type: ignore[assignment]
    first = lenient.decode(message, "p0")
    assert (first.waited_s, first.finish) == (90_000.0, None)


def test_special_fields_and_given_ones() -> None:
    double = Special(lambda value: value * 2, lambda value: value // 2)
    codec = Codec(Logprob, inference_pb2.TopLogprob, special={"token_id": double})
    assert codec.encode(Logprob(token_id=4, logprob=0.5)).token_id == 8
    assert codec.decode(inference_pb2.TopLogprob(token_id=8, logprob=0.5)).token_id == 4
    partial = Codec(Logprob, inference_pb2.TopLogprob, given=("logprob",), ignored=("logprob",))
    assert partial.decode(inference_pb2.TopLogprob(token_id=8), logprob=1.5) == Logprob(token_id=8, logprob=1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    token_id: int
    logprob: float
    other: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    token_id: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MayBeNone:
    token_id: int | None
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NotATuple:
    token_id: int
    logprob: float | None
    top: int


class Colour(Enum):
    RED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEnum:
    key: AttemptKey
    reason: Colour
    retry_after_s: float


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        (Extra, inference_pb2.TopLogprob, "Extra.other has no field other"),
        (Wrong, inference_pb2.TopLogprob, "cannot hold"),
        (MayBeNone, inference_pb2.TopLogprob, "must be optional"),
        (NotATuple, worker_pb2.Token, "is repeated"),
        (OtherEnum, worker_pb2.Refused, "different members"),
        (Logprob, worker_pb2.Token, "differ in"),
        (First, worker_pb2.FirstToken, "needs a codec"),
        (CostPrior, worker_pb2.Load, "has no field"),
    ],
)
def test_mismatched_fields_are_found_when_the_codec_is_built(kind: type, message: type, expected: str) -> None:
    renamed = {"waited_s": "queue_s"} if kind is First else {}
    with pytest.raises(TypeError, match=expected):
        Codec(kind, message, renamed=renamed)

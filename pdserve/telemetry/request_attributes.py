"""The attributes that the GenAI conventions ask for, of a GenerateRequest. Never a text of the caller. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdserve.telemetry import names
from pdserve.telemetry.propagate import AttributeValue

_SAMPLING: Final[Mapping[str, str]] = {
    "frequency_penalty": names.REQUEST_FREQUENCY_PENALTY,
    "max_tokens": names.REQUEST_MAX_TOKENS,
    "presence_penalty": names.REQUEST_PRESENCE_PENALTY,
    "temperature": names.REQUEST_TEMPERATURE,
    "top_p": names.REQUEST_TOP_P,
}
_DIGITS: Final = 6  # of a float32
_MAX_INT: Final = 2**63 - 1  # of an attribute


def operation_of(request: Any) -> str:
    return names.CHAT if request.WhichOneof("prompt") == "chat" else names.TEXT_COMPLETION


def request_attributes(request: Any) -> dict[str, AttributeValue]:
    """Of a GenerateRequest that may be invalid, so only numbers and constants."""
    sampling = request.sampling
    found: dict[str, AttributeValue] = {
        names.OPERATION: operation_of(request),
        names.PROVIDER: names.PROVIDER_NAME,
        **{name: round(getattr(sampling, one), _DIGITS) for one, name in _SAMPLING.items() if sampling.HasField(one)},
    }
    if request.HasField("n") and request.n != 1:
        found[names.REQUEST_CHOICE_COUNT] = request.n
    if sampling.HasField("top_k"):
        found[names.REQUEST_TOP_K] = float(sampling.top_k)  # a double by the conventions
    if sampling.HasField("seed") and sampling.seed <= _MAX_INT:
        found[names.REQUEST_SEED] = sampling.seed
    if sampling.HasField("structured_output"):
        kind = sampling.structured_output.WhichOneof("kind") or ""
        found[names.OUTPUT_TYPE] = "json" if kind.startswith("json") else "text"
    return found

"""Every documented bound of a number or a count is accepted at the bound and refused beyond it, over HTTP and gRPC.

The bounds are read from the texts of the reference, so a new field with a bound is tried too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.client.options import SAMPLING_SCALARS
from pdserve.core.errors import PdserveError
from pdserve.gateway.api.field_support import MODELS, Endpoint
from tests.unit.gateway.conftest import Served

PATHS: Mapping[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
PROMPTS: Mapping[Endpoint, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "text": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}]},
}
BESIDE: Mapping[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "responses.top_logprobs": {"include": ["message.output_text.logprobs"]},
}
#: Accepted values of fields whose texts name no two numbers.
OTHER: Mapping[str, tuple[Any, ...]] = {
    "seed": (0, 2**64 - 1, -(2**63)),
    "top_k": (0, -1, 2**32 - 1),
    "priority": (-(2**31) + 1, 2**31 - 1),
}
DOCS = Path(__file__).parents[3] / "docs"


@dataclass(frozen=True)
class Bounds:
    low: float
    high: float
    is_open: bool = False  # the lower bound is not included
    unit: str = ""  # of a count

    def inside(self) -> list[float]:
        return [5e-324, self.high] if self.is_open else [self.low, self.high]

    def outside(self) -> list[float]:
        step = 1 if self.unit or self.low == int(self.low) else 0.001
        return [self.low - step if not self.is_open else self.low, self.high + 1]


def bounds(text: str) -> list[Bounds]:
    """The bounds in a text such as `vLLM; 0.01 to 100`, `above 0, to 1`, `up to 16 strings`."""
    number = r"(-?\d+(?:\.\d+)?)"
    open_ones = re.findall(f"above {number}, to {number}", text)
    found = [Bounds(float(low), float(high), is_open=True) for low, high in open_ones]
    text = re.sub(f"above {number}, to {number}", "", text)
    for low, high, unit in re.findall(rf"{number} to {number}( [a-z]+ characters| characters)?", text):
        found.append(Bounds(float(low), float(high), unit=unit and "characters"))
    found += [Bounds(0, float(high), unit="items") for high in re.findall(rf"up to {number}", text)]
    return found


def described(endpoint: Endpoint) -> list[tuple[str, Bounds]]:
    fields = MODELS[endpoint].model_fields
    skipped = ("prompt", "max_tokens")  # several forms, and the server's own limit
    return [
        (name, one)
        for name, field in fields.items()
        if name not in skipped
        for one in bounds(field.description or "")[: 2 if name == "logit_bias" else 1]
    ]


CASES = [(endpoint, name, one) for endpoint in MODELS for name, one in described(endpoint)]


def value_of(endpoint: Endpoint, name: str, one: Bounds, number: float) -> Any:
    if name == "logit_bias":
        return {str(key): 1 for key in range(int(number))} if one.unit else {"40": number}
    if one.unit == "characters":
        return "x" * int(number)
    if one.unit == "items":
        tools: Mapping[str, Callable[[str], Any]] = {
            "chat": lambda name: {"type": "function", "function": {"name": name}},
            "responses": lambda name: {"type": "function", "name": name},
            "messages": lambda name: {"name": name, "input_schema": {"type": "object"}},
        }
        makers: Mapping[str, Callable[[int], Any]] = {
            "stop": lambda index: f"stop {index}",
            "stop_sequences": lambda index: f"stop {index}",
            "tools": lambda index: tools[endpoint](f"f{index}"),
        }
        return [makers.get(name, lambda index: index)(index) for index in range(int(number))]
    return int(number) if number == int(number) else number


def fields_of(endpoint: Endpoint, name: str, value: Any) -> dict[str, Any]:
    beside = BESIDE.get(f"{endpoint}.{name}", BESIDE.get(name, {}) if endpoint == "chat" else {})
    most = "max_output_tokens" if endpoint == "responses" else "max_tokens"
    return {**PROMPTS[endpoint], most: 1, **beside, name: value}


def refused(served: Served, endpoint: Endpoint, name: str, value: Any) -> str | None:
    """The field that the answer names; None if the request is answered."""
    status, answer = served.post(PATHS[endpoint], fields_of(endpoint, name, value))
    assert status in (200, 400), answer
    if status == 200:
        return None
    error = json.loads(answer)["error"]
    return str(error["param"] if "param" in error else error["message"].partition(":")[0])  # of Anthropic's messages


@pytest.fixture
def served(bundled: Served, tooled: Served) -> Callable[[str], Served]:
    return lambda name: tooled if name == "tools" else bundled


@pytest.mark.parametrize(("endpoint", "name", "one"), CASES, ids=[f"{e}-{n}-{b.low:g}-{b.high:g}" for e, n, b in CASES])
def test_a_bound_is_accepted_over_http(
    endpoint: Endpoint, name: str, one: Bounds, served: Callable[[str], Served]
) -> None:
    for number in one.inside():
        if not (one.unit == "items" and name == "logit_bias") or number:
            assert refused(served(name), endpoint, name, value_of(endpoint, name, one, number)) is None, number
    for number in one.outside():
        if number >= 0 or not one.unit:
            field = refused(served(name), endpoint, name, value_of(endpoint, name, one, number))
            assert str(field).split(".")[0] == name, number


def test_the_reference_documents_these_bounds() -> None:
    found = {(endpoint, name) for endpoint, name, _ in CASES}
    numbers = ("temperature", "top_p", "n", "presence_penalty", "min_p", "top_n_sigma", "repetition_penalty")
    for endpoint in ("chat", "text"):
        assert {(endpoint, name) for name in (*numbers, "logit_bias", "stop", "stop_token_ids", "cache_salt")} <= found
    assert {("chat", "top_logprobs"), ("text", "logprobs"), ("responses", "top_p"), ("chat", "tools")} <= found
    assert {("messages", "stop_sequences"), ("messages", "tools")} <= found


@pytest.mark.parametrize("name", OTHER)
def test_a_whole_number_is_accepted_to_its_limits(name: str, bundled: Served) -> None:
    for endpoint in ("chat", "text"):
        for value in OTHER[name]:
            assert refused(bundled, endpoint, name, value) is None, value


GRPC = [(one.name, bound) for one in SAMPLING_SCALARS for bound in bounds(one.text)[:1]]


@pytest.mark.parametrize(("name", "one"), GRPC, ids=[name for name, _ in GRPC])
def test_a_bound_is_accepted_over_grpc(name: str, one: Bounds, bundled: Served) -> None:
    kind = next(scalar.kind for scalar in SAMPLING_SCALARS if scalar.name == name)

    def ask(number: float) -> str | None:
        value = kind(number)
        try:
            bundled.sdk.generate("hi", **{"max_tokens": 1, name: value})
        except PdserveError as error:
            return str(error.field)  # type: ignore[attr-defined]
        return None

    assert [ask(number) for number in one.inside()] == [None, None]
    assert [ask(number) for number in one.outside()] == [name, name]


def test_a_value_that_is_too_small_for_the_wire_is_not_zero(bundled: Served) -> None:
    """Zero means every token, so the smallest value must stay above it."""
    greedy = bundled.sdk.generate("def f", max_tokens=8, temperature=0.0).text
    assert bundled.sdk.generate("def f", max_tokens=8, seed=1, top_n_sigma=1e-60).text == greedy
    assert bundled.sdk.generate("def f", max_tokens=8, seed=1, top_p=5e-324).text == greedy
    assert bundled.sdk.generate("def f", max_tokens=8, seed=1, temperature=1e-60).text == greedy


def test_the_table_of_the_documentation_has_the_same_bounds() -> None:
    table = (DOCS / "sampling.md").read_text()
    for name, text in (("repetition_penalty", "0.01 to 100"), ("top_n_sigma", "to 100"), ("temperature", "0 to 100")):
        [row] = [line for line in table.splitlines() if line.startswith("|") and f"| `{name}` |" in line]
        assert text in row

"""The conversion of requests to SDK calls, without a server."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.client.request import generate_request
from pdserve.client.results import Model
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.types import MAX_TOOL_CALLS
from pdserve.gateway.api import http_input
from pdserve.gateway.api.request_models import MAX_PROMPTS
from pdserve.gateway.api.responses import responses_call
from pdserve.gateway.api.sdk_call import SdkCall, Shown, chat_call, text_call

MODEL = Model(
    name="m", max_context_tokens=1024, max_new_tokens=512, vocab_size=300, eos_token_ids=(1,), has_chat_template=True
)
MESSAGES = [{"role": "user", "content": "hi"}]


def text(**fields: Any) -> SdkCall:
    return text_call({"prompt": "hi", **fields}, MODEL, {})


def test_every_field_becomes_its_option() -> None:
    call = text(
        model="m",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True},
        max_tokens=7,
        temperature=1,
        top_p=0.5,
        n=2,
        stop="x",
        seed=-1,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={"5": 1},
        top_k=-1,
        min_p=0.1,
        top_n_sigma=2.0,
        repetition_penalty=1.1,
        min_tokens=3,
        ignore_eos=True,
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        bad_words=["y"],
        allowed_token_ids=[1, 2],
        truncate_prompt_tokens=9,
        structured_outputs={"json": {"type": "object"}},
        priority=2,
        return_token_ids=True,
        request_id="r",
        best_of=4,
        logprobs=3,
    )
    structures = ("json_schema", "json_object", "regex", "choice", "grammar")
    assert call == SdkCall(
        prompts=["hi"],
        answers_each=2,
        names=dict.fromkeys(structures, "structured_outputs"),
        options={
            "max_tokens": 7,
            "temperature": 1.0,
            "top_p": 0.5,
            "n": 2,
            "stop": "x",
            "seed": 2**64 - 1,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "logit_bias": {5: 1.0},
            "top_k": 0,
            "min_p": 0.1,
            "top_n_sigma": 2.0,
            "repetition_penalty": 1.1,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [4],
            "include_stop_in_output": True,
            "skip_special_tokens": False,
            "bad_words": ["y"],
            "allowed_token_ids": [1, 2],
            "truncate_prompt_tokens": 9,
            "json_schema": {"type": "object"},
            "priority": -2,
            "request_id": "r",
            "best_of": 4,
            "logprobs": 3,
        },
        shown=Shown(
            is_streamed=True,
            has_usage=True,
            has_running_usage=True,
            is_padded=True,
            has_token_ids=True,
            logprobs=3,
        ),
    )
    generate_request(call.prompts[0], call.options)  # The SDK accepts all of them.


def test_a_chat_without_a_limit_may_use_the_server_s() -> None:
    assert chat_call({"messages": MESSAGES}, MODEL, {}).options == {"max_tokens": 512}
    assert text().options == {"max_tokens": 16}


def test_the_two_names_of_the_limit_agree() -> None:
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}):
        assert chat_call({"messages": MESSAGES, **fields}, MODEL, {}).options["max_tokens"] == 5
    with pytest.raises(InvalidRequest, match="max_tokens"):
        chat_call({"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 6}, MODEL, {})


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": False}}, {"json_schema": {}}),
    ],
)
def test_response_formats(form: dict[str, Any], options: dict[str, Any]) -> None:
    assert text(response_format=form).options == {"max_tokens": 16, **options}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_forms_of_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert text(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], ["a"] * (MAX_PROMPTS + 1), ["a", 1], [1, "a"], {"a": 1}, 5, [[1], "a"], [True]])
def test_other_prompts_are_rejected(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        text(prompt=prompt)


def test_an_error_does_not_repeat_the_value() -> None:
    with pytest.raises(InvalidRequest) as caught:
        text(temperature="a secret")
    assert "secret" not in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["prompt", "messages", "logit_bias", "stop", "response_format", "structured_outputs", "seed", "n", "tools", "x"]
)


@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_only_pdserve_errors_are_raised(fields: dict[str, Any]) -> None:
    fields = {name: value for name, value in fields.items() if value is not None}
    for convert in (chat_call, text_call):
        try:
            call = convert(fields, MODEL, {})
            generate_request(call.prompts[0], call.options)
        except PdserveError:
            continue


@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_a_body_is_an_object_or_an_error(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(http_input.parse(body), dict)


def test_null_counts_as_absent() -> None:
    assert http_input.parse(b'{"a": null, "b": 1}') == {"b": 1}


def test_headers_become_options() -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    given_headers = {"x-request-id": "r", "x-session-id": "s", "x-slo-ttft-ms": "1500", "traceparent": trace}
    assert http_input.options(given_headers) == {
        "request_id": "r",
        "session_id": "s",
        "slo": {"ttft_s": 1.5},
        "traceparent": trace,
    }


def test_hints_come_as_headers() -> None:
    given_headers = {"x-reuse-within-s": "0", "x-expected-output-tokens": "40", "x-slo-task-s": "600"}
    expected = {"reuse_within_s": 0.0, "expected_output_tokens": 40, "slo_task_s": 600.0}
    assert http_input.options(given_headers) == expected


@pytest.mark.parametrize(
    ("header", "value"),
    [
        *(("x-slo-task-s", value) for value in ("", "soon", "nan", "inf", "1e999")),
        ("x-reuse-within-s", "soon"),
        ("x-reuse-within-s", "nan"),
        ("x-reuse-within-s", "1" * 33),
        *(("x-expected-output-tokens", value) for value in ("", "-1", "1.5", "\u0661", "1" * 10)),
    ],
)
def test_a_hint_is_a_number(header: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=header):
        http_input.options({header: value})


@pytest.mark.parametrize("value", ["", "s" * 129, "a\tb", "\xff", "\xc2\x80"])
def test_only_the_own_header_of_a_session_may_be_an_error(value: str) -> None:
    given_headers = {"x-claude-code-session-id": value, "session-id": "s" * 128, "x-session-affinity": "other"}
    assert http_input.options(given_headers) == {"session_id": "s" * 128}
    assert http_input.options({"session_id": value}) == {}
    with pytest.raises(InvalidRequest, match=r"x-session-id"):
        http_input.options({**given_headers, "x-session-id": "\xff"})


@pytest.mark.parametrize("value", ["", "soon", "nan", "inf", "1e999", "1" * 33])
def test_a_target_is_a_number(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-slo-tpot-ms"):
        http_input.options({"x-slo-tpot-ms": value})


@pytest.mark.parametrize("priority", [-(2**31), 2**31 + 1, 2**63])
def test_an_error_about_the_priority_repeats_it_with_its_own_sign(priority: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"got {priority}, expected -2147483647 to 2147483648"):
        text_call({"prompt": "a", "priority": priority}, MODEL, {})


@pytest.mark.parametrize(
    ("conversation", "source"), [({"id": "c"}, "conversation.items[1]"), (None, "previous_response_id.items[1]")]
)
def test_an_error_about_a_stored_item_names_where_it_is_stored(conversation: Any, source: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    history = [MESSAGES[0], *[call] * (MAX_TOOL_CALLS + 1)]
    with pytest.raises(InvalidRequest) as caught:
        responses_call({"input": "x"}, MODEL, {}, history=history, stored={"conversation": conversation})
    assert caught.value.field == f"{source}.tool_calls"
    found = responses_call({"input": [*MESSAGES, call]}, MODEL, {}, history=history[:2]).names
    assert found["messages[0]"] == "previous_response_id.items[0]"
    assert found["messages[3].tool_calls[0].function"] == "input[1]"

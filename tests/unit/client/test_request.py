"""The SDK's request messages, and the types that it rejects."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.client.options import Options
from pdserve.client.request import detokenize_request, generate_request, token_ids_of, tokenize_request
from pdserve.core.errors import InvalidRequest
from pdserve.core.types import Slo
from pdserve.v1 import inference_pb2


def test_an_absent_option_stays_absent_on_the_wire() -> None:
    assert generate_request("hi", {}) == inference_pb2.GenerateRequest(text="hi")


def test_none_is_absent_and_zero_is_not() -> None:
    request = generate_request("hi", {"temperature": 0, "top_k": None})
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_k")


def test_token_ids_are_sent_as_token_ids() -> None:
    assert list(generate_request([1, 2, 3], {}).token_ids.ids) == [1, 2, 3]


def test_an_empty_list_is_sent_as_token_ids() -> None:
    assert generate_request([], {}).WhichOneof("prompt") == "token_ids"


def test_messages_are_sent_as_a_chat() -> None:
    request = generate_request([{"role": "user", "content": "hi"}], {})
    assert [(one.role, one.content) for one in request.chat.messages] == [("user", "hi")]


def test_every_option_reaches_its_field() -> None:
    request = generate_request(
        "hi",
        {
            "max_tokens": 5,
            "min_tokens": 1,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "min_p": 0.25,
            "top_n_sigma": 1.5,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.5,
            "seed": 2**64 - 1,
            "stop": ["a", "b"],
            "stop_token_ids": (7, 8),
            "ignore_eos": True,
            "logprobs": 0,
            "include_stop_in_output": False,
            "skip_special_tokens": False,
            "slo": Slo(ttft_s=1.0, tpot_s=0.5, itl_s=2.0),
            "timeout_s": 9,
            "request_id": "mine",
            "priority": -3,
            "session_id": "mine too",
            "reuse_within_s": 0,
            "expected_output_tokens": 40,
            "slo_task_s": 600,
            "truncate_prompt_tokens": 4,
            "logit_bias": {3: -100, 9: 0.5},
            "allowed_token_ids": [3, 9],
            "bad_words": "ugly",
            "prompt_logprobs": 2,
            "n": 3,
            "best_of": 4,
        },
    )
    assert request == inference_pb2.GenerateRequest(
        text="hi",
        sampling=inference_pb2.SamplingParams(
            max_tokens=5,
            min_tokens=1,
            temperature=0.5,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            top_n_sigma=1.5,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.5,
            seed=2**64 - 1,
            stop=["a", "b"],
            stop_token_ids=[7, 8],
            ignore_eos=True,
            logprobs=0,
            include_stop_in_output=False,
            skip_special_tokens=False,
            logit_bias={3: -100.0, 9: 0.5},
            allowed_token_ids=[3, 9],
            bad_words=["ugly"],
            prompt_logprobs=2,
        ),
        n=3,
        best_of=4,
        slo=inference_pb2.Slo(ttft_s=1.0, tpot_s=0.5, itl_s=2.0),
        request_id="mine",
        priority=-3,
        session_id="mine too",
        reuse_within_s=0.0,
        expected_output_tokens=40,
        slo_task_s=600.0,
        truncate_prompt_tokens=4,
    )


def test_every_field_of_a_request_is_an_option() -> None:
    sampling = set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - {"bad_token_ids", "structured_output"}
    prompts = ("text", "token_ids", "chat")
    request = set(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) - {*prompts, "sampling", "resume"}
    output = set(inference_pb2.StructuredOutput.DESCRIPTOR.fields_by_name)
    assert Options.__annotations__.keys() == {
        *sampling,
        *request,
        *output,
        *("timeout_s", "traceparent", "tools", "chat_template_kwargs", "reasoning_effort", "allow_special_tokens"),
    }


def test_one_stop_string_needs_no_list() -> None:
    assert list(generate_request("hi", {"stop": "\n"}).sampling.stop) == ["\n"]


@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        (b"bytes", {}, "prompt"),
        (None, {}, "prompt"),
        (7, {}, "prompt"),
        ([1, "2"], {}, r"prompt\[1\]"),
        ([1, True], {}, r"prompt\[1\]"),
        ([1, 2.0], {}, r"prompt\[1\]"),
        (["text"], {}, r"prompt\[0\]"),
        ([{"role": "user"}], {}, r"prompt\[0\]"),
        ([{"role": "user", "content": 3}], {}, r"prompt\[0\]\['content'\]"),
        ([{"role": "user", "content": "hi", "audio": "x"}], {}, r"prompt\[0\]"),
        ("hi", {"max_tokens": 1.5}, "max_tokens"),
        ("hi", {"max_tokens": True}, "max_tokens"),
        ("hi", {"max_tokens": "5"}, "max_tokens"),
        ("hi", {"temperature": "hot"}, "temperature"),
        ("hi", {"temperature": False}, "temperature"),
        ("hi", {"ignore_eos": 1}, "ignore_eos"),
        ("hi", {"stop": [1]}, "stop"),
        ("hi", {"stop": b"x"}, "stop"),
        ("hi", {"stop_token_ids": "12"}, "stop_token_ids"),
        ("hi", {"stop_token_ids": ["1"]}, r"stop_token_ids\[0\]"),
        ("hi", {"logit_bias": [1, 2]}, "logit_bias"),
        ("hi", {"logit_bias": {"1": 2.0}}, "logit_bias"),
        ("hi", {"logit_bias": {1: "2"}}, r"logit_bias\[1\]"),
        ("hi", {"allowed_token_ids": [1.0]}, "allowed_token_ids"),
        ("hi", {"bad_words": [1]}, "bad_words"),
        ("hi", {"slo": {"ttft": 1.0}}, "slo"),
        ("hi", {"slo": {"ttft_s": "1"}}, "slo"),
        ("hi", {"slo": 0.5}, "slo"),
        ("hi", {"request_id": 5}, "request_id"),
        ("hi", {"session_id": 5}, "session_id"),
        ("hi", {"reuse_within_s": "5"}, "reuse_within_s"),
        ("hi", {"slo_task_s": "5"}, "slo_task_s"),
        ("hi", {"expected_output_tokens": 0.5}, "expected_output_tokens"),
        ("hi", {"timeout_s": "1"}, "timeout_s"),
        ("hi", {"priority": 0.5}, "priority"),
        ("hi", {"max_new_tokens": 5}, "max_new_tokens"),
    ],
)
def test_a_wrong_type_is_refused_by_name(prompt: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(TypeError, match=name):
        generate_request(prompt, options)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([1, -1], {}, "prompt[1]"),
        ([2**32], {}, "prompt[0]"),
        ("hi", {"stop_token_ids": [-5]}, "stop_token_ids[0]"),
        ("hi", {"logit_bias": {-1: 2.0}}, "logit_bias[0]"),
        ("hi", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("hi", {"bad_words": ["a \ud800 surrogate"]}, "bad_words"),
        ("hi", {"max_tokens": -1}, "max_tokens"),
        ("hi", {"top_k": 2**32}, "top_k"),
        ("hi", {"seed": 2**64}, "seed"),
        ("hi", {"seed": -1}, "seed"),
        ("hi", {"priority": 2**31}, "priority"),
        ("hi", {"timeout_s": 0}, "timeout_s"),
        ("hi", {"timeout_s": float("nan")}, "timeout_s"),
        ("a \ud800 surrogate", {}, "prompt"),
    ],
)
def test_a_value_that_cannot_be_encoded_names_its_field(prompt: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request(prompt, options)
    assert caught.value.field == field


def test_tokenize_takes_text_or_messages_but_no_ids() -> None:
    assert tokenize_request("hi").text == "hi"
    assert tokenize_request([{"role": "user", "content": "hi"}]).chat.messages[0].content == "hi"
    assert tokenize_request([{"role": "user", "content": "hi"}], reasoning_effort="low").chat.reasoning_effort == "low"
    with pytest.raises(TypeError, match="prompt"):
        tokenize_request(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="messages"):
        tokenize_request("hi", reasoning_effort="low")


def test_each_kind_of_structured_output_reaches_its_field() -> None:
    def output(**options: object) -> inference_pb2.StructuredOutput:
        return generate_request("hi", options).sampling.structured_output

    assert output(json_schema={"const": "é"}).json_schema == '{"const": "é"}'
    assert output(json_schema=True).json_schema == "true"
    assert output(json_schema='{"const": 1}').json_schema == '{"const": 1}'
    assert output(regex="a+").regex == "a+"
    assert output(grammar='start: "a"').grammar == 'start: "a"'
    assert list(output(choice=["a", "b"]).choice.strings) == ["a", "b"]
    assert output(choice=[]).WhichOneof("kind") == "choice"
    assert output(json_object=True).json_object
    assert not generate_request("hi", {"json_object": False}).sampling.HasField("structured_output")


def test_two_kinds_of_structured_output_or_a_wrong_type_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="regex: got also json_schema"):
        generate_request("hi", {"json_schema": {}, "regex": "a"})
    for options in ({"json_schema": 1}, {"regex": b"a"}, {"choice": "yes"}, {"choice": [1]}, {"json_object": "yes"}):
        with pytest.raises(TypeError, match=next(iter(options))):
            generate_request("hi", options)


def test_detokenize_takes_ids() -> None:
    request = detokenize_request([1, 2], prompt=[3])
    assert (list(request.token_ids), list(request.prompt_token_ids)) == ([1, 2], [3])
    with pytest.raises(TypeError, match="token_ids"):
        detokenize_request("hi")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="token_ids"):
        detokenize_request([-1])


def test_token_ids_differ_from_text_and_messages() -> None:
    assert token_ids_of([1, 2]) == [1, 2]
    assert token_ids_of("hi") is None
    assert token_ids_of([{"role": "user", "content": "hi"}]) is None
    with pytest.raises(TypeError, match=r"prompt\[1\]"):
        token_ids_of([1, "2"])


def test_a_mapping_sets_only_the_targets_that_it_names() -> None:
    request = generate_request("hi", {"slo": {"tpot_s": 0.5}})
    assert request.slo == inference_pb2.Slo(tpot_s=0.5)


@pytest.mark.parametrize("value", ["", "00-abc-def-01", f"00-{'0' * 32}-{'1' * 16}-01", "x" * 10_000])
def test_a_traceparent_is_validated(value: str) -> None:
    with pytest.raises(InvalidRequest, match="traceparent"):
        generate_request("hi", {"traceparent": value})


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "add"}}


def test_messages_may_have_calls_of_tools_and_their_results() -> None:
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
    ]
    expected = inference_pb2.ChatPrompt(
        messages=[
            inference_pb2.ChatMessage(
                role="assistant", content="", tool_calls=[inference_pb2.ToolCall(id="c1", name="add", arguments="{}")]
            ),
            inference_pb2.ChatMessage(role="tool", content="5", tool_call_id="c1", name="add"),
        ],
        tools=['{"type": "function", "function": {"name": "add"}}'],
    )
    assert generate_request(messages, {"tools": [TOOL]}).chat == expected
    assert tokenize_request(messages, [TOOL]).chat == expected


def test_a_value_of_a_message_may_be_none_or_absent() -> None:
    empty = {"tool_calls": None, "tool_call_id": None, "name": None, "reasoning_content": None}
    for message in ({"role": "user", "content": "x", **empty}, {"role": "assistant", "content": "x", **empty}):
        [found] = generate_request([message], {}).chat.messages
        assert [field.name for field, _ in found.ListFields()] == ["role", "content"]
    for more in ({"tool_calls": [CALL]}, {"reasoning_content": "hm"}):
        [found] = generate_request([{"role": "assistant", **more}], {}).chat.messages
        assert not found.HasField("content")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "assistant"},
        {"role": "user", "reasoning_content": "hm"},
        {"role": "user", "content": "x", "audio": "y"},
        {"role": "user", "content": "x", "name": 5},
        {"role": "assistant", "content": "x", "tool_calls": CALL},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "content": "x", "tool_calls": [{**CALL, "id": None}]},
        {"role": "assistant", "content": "x", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
    ],
)
def test_other_messages_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"prompt\[0\]"):
        generate_request([message], {})


def test_tools_need_messages() -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        generate_request("text", {"tools": [TOOL]})
    with pytest.raises(TypeError, match="tools"):
        generate_request([{"role": "user", "content": "x"}], {"tools": ["add"]})  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", -1, "at least 1"),
        ("min_tokens", -1, "between 0 and max_tokens"),
        ("top_k", -2, "at least 0; 0 keeps every token"),
        ("logprobs", -1, "between 0 and 64"),
        ("prompt_logprobs", 2**40, "between 0 and 20"),
        ("seed", -1, "an unsigned 64-bit integer"),
        ("max_tokens", 2**40, "0 to 4294967295"),
        ("n", -1, "0 to 4294967295"),
        ("priority", 2**31, "-2147483648 to 2147483647"),
    ],
)
def test_a_number_that_does_not_fit_the_message_gets_the_servers_words(name: str, value: int, expected: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("x", {name: value})
    assert (caught.value.field, caught.value.expected) == (name, expected)

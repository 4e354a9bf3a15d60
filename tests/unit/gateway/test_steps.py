"""A body is limited in steps, not only in bytes: every array and every object with free names has a limit, and
validation ends at the first error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from pdserve.client.results import Model
from pdserve.core import grammar
from pdserve.core.errors import PdserveError
from pdserve.gateway.api import http_input
from pdserve.gateway.api.messages import messages_call
from pdserve.gateway.api.openapi import OPERATIONS
from pdserve.gateway.api.request_models import ITEMS, MAX_NAMES
from pdserve.gateway.api.responses import responses_call
from pdserve.gateway.api.sdk_call import chat_call, text_call, validated
from pdserve.gateway.endpoints import detokenize_request, tokenize_request
from pdserve.gateway.tools import grammars, plan
from pdserve.gateway.tools.xml_reader import MAX_STEPS, parameter_types
from tests.support.calls import calls_of

MODEL = Model(
    name="toy",
    max_context_tokens=2**21,
    max_new_tokens=64,
    vocab_size=256,
    eos_token_ids=(0,),
    has_chat_template=True,
    tool_format="qwen3_coder",
)
BODY_BYTES = 4 * 2**20
MAX_ERRORS = 8 * MAX_NAMES  # an object with free names has a few alternatives for each value
MAX_CALLS = 200_000  # calls of functions, for a body within the limits; without limits, millions
READ: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "/v1/chat/completions": lambda given: chat_call(given, MODEL, {}),
    "/v1/completions": lambda given: text_call(given, MODEL, {}),
    "/v1/responses": lambda given: responses_call(given, MODEL, {}),
    "/v1/messages": lambda given: messages_call(given, MODEL, {}),
    "/v1/messages/count_tokens": lambda given: messages_call(given, MODEL, {}),
    "/tokenize": lambda given: tokenize_request(given, MODEL),
    "/detokenize": lambda given: detokenize_request(given, MODEL),
}
MODELS = {path: one.request for (_, path), one in OPERATIONS.items() if one.request is not None}


def schemas(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas of pydantic's validator, with where they are."""
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            yield path, node
        for name, one in node.items():
            if name not in ("metadata", "serialization"):
                yield from schemas(one, f"{path}.{name}")
    elif isinstance(node, (list, tuple)):
        for number, one in enumerate(node):
            yield from schemas(one, f"{path}.{number}")


@pytest.mark.parametrize("model", [*MODELS.values(), *ITEMS.values()], ids=lambda one: one.__name__)
def test_every_array_has_a_limit(model: type[BaseModel]) -> None:
    for path, one in schemas(model.__pydantic_core_schema__, model.__name__):
        if one["type"] in ("list", "dict"):
            assert "max_length" in one, f"{path} has no Most(...)"
            assert one["type"] == "dict" or one["fail_fast"], path
        assert one["type"] not in ("set", "frozenset", "tuple", "generator"), path
        if one["type"] == "union":
            kinds = [choice[0] if isinstance(choice, tuple) else choice for choice in one["choices"]]
            num_models = sum(kind["type"] == "model" for kind in kinds)
            assert num_models <= 1, f"{path} is a union of models without a discriminator"


def paths_of(model: type[BaseModel]) -> list[tuple[str, ...]]:
    """The fields of a request, and those of the objects within it."""
    found: list[tuple[str, ...]] = []

    def add(kind: Any, path: tuple[str, ...]) -> None:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for name, field in kind.model_fields.items():
                found.append((*path, field.alias or name))
                add(field.annotation, found[-1])
        for one in get_args(kind):
            add(one, (*path, "[]") if get_origin(kind) is list else path)

    add(model, ())
    return [*dict.fromkeys(found)]


def hostile() -> dict[str, str]:
    """Long values that fail at every item, at the last one, or nowhere; within the limit of parts."""
    return {
        "numbers": "[" + "1," * (http_input.MAX_ITEMS - 400) + "1]",
        "texts": "[" + '"",' * (http_input.MAX_TEXTS - 400) + '""]',
        "mixed": '["a",' + "1," * (http_input.MAX_ITEMS - 400) + "1]",
        "late": "[" + "1," * (http_input.MAX_ITEMS - 400) + '"a"]',
        "objects": "[" + '{"type":"text"},' * 30_000 + "{}]",
        "empty": "[" + "{}," * 60_000 + "1]",
        "arrays": "[" + "[]," * 60_000 + "{}]",
        "nested": "[[" + "1," * (http_input.MAX_ITEMS - 400) + '"a"]]',
        "names": "{" + ",".join(f'"{number:x}":"x"' for number in range(60_000)) + "}",
        "biases": "{" + ",".join(f'"{number}":{number}' for number in range(60_000)) + "}",
        "typed": '{"type":"function",' + ",".join(f'"{number:x}":1' for number in range(60_000)) + "}",
    }


PARSED = {name: http_input.parse(f'{{"x":{text}}}'.encode())["x"] for name, text in hostile().items()}
BESIDE: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
}


def bodies(model: type[BaseModel], beside: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each hostile value at each field, and where it is."""
    for path in paths_of(model):
        for name, value in PARSED.items():
            given: Any = value
            for part in reversed(path[1:]):
                given = [given] if part == "[]" else {"type": "function", "role": "user", part: given}
            yield f"{'.'.join(path)} {name}", {**beside, path[0]: given}


def message_of(read: Callable[[Any], Any], body: dict[str, Any]) -> str:
    try:
        read(body)
    except PdserveError as error:
        return error.message
    return ""


@pytest.mark.parametrize("path", READ)
def test_every_field_costs_few_steps(path: str) -> None:
    costly: dict[str, int] = {}
    for where, body in bodies(MODELS[path], BESIDE.get(path, {})):
        messages: list[str] = []
        count = calls_of(lambda body=body, messages=messages: messages.append(message_of(READ[path], body)))
        assert len(messages[0]) < 1000, where
        if count > MAX_CALLS:
            costly[where] = count
    assert costly == {}


def error_count(model: type[BaseModel], body: dict[str, Any]) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("model", [*MODELS.values(), *ITEMS.values()], ids=lambda one: one.__name__)
def test_errors_are_not_collected(model: type[BaseModel]) -> None:
    counts = {where: error_count(model, body) for where, body in bodies(model, {})}
    assert {where: count for where, count in counts.items() if count > MAX_ERRORS} == {}


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":[' + b"[]," * 1_000_000 + b"1]}",
        b'{"x":[' + b"{}," * 1_000_000 + b"1]}",
        b"{" + b",".join(b'"%x":1' % number for number in range(400_000)) + b"}",
        b'{"x":[' + b'["",""],' * 400_000 + b"1]}",
        b'{"x":[' + b"1," * 300_000 + b"1]}",
        b'{"x":[' + b'"a",' * 150_000 + b'"a"]}',
    ],
    ids=["arrays", "objects", "names", "texts", "numbers", "plain texts"],
)
def test_parts_are_counted_before_they_are_parsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_input.jiter, "from_json", None)
    with pytest.raises(PdserveError, match="at most"):
        http_input.parse(body)


def test_a_prompt_of_a_long_context_may_have_as_many_ids() -> None:
    body = b'{"prompt":[' + b"1," * 400_000 + b"1]}"
    assert len(http_input.parse(body, context_tokens=400_001)["prompt"]) == 400_001
    with pytest.raises(PdserveError, match="at most 365536 of them"):
        http_input.parse(body, context_tokens=300_000)


def test_marks_within_texts_do_not_count() -> None:
    code = '{"a": [1, "b\\\\", {}]}\\' * 150_000
    assert http_input.parse(json.dumps({"prompt": code}).encode()) == {"prompt": code}
    quotes = '"' * 500_000
    assert http_input.parse(json.dumps({"prompt": quotes}).encode()) == {"prompt": quotes}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"max_tokens": 1, "max_tokens": 2}', '"max_tokens"'),
        (b'{"a": [{"b": {"role": 1, "x": 0, "role": 1}}]}', '"role"'),
        (b'{"a": 1, "\\u0061": 2}', '"a"'),
        (b'{"' + b"k" * 5000 + b'": 1, "' + b"k" * 5000 + b'": 1}', '"kkk'),
    ],
)
def test_a_name_comes_once_in_an_object(body: bytes, name: str) -> None:
    with pytest.raises(PdserveError, match="each name once") as caught:
        http_input.parse(body)
    assert name in caught.value.message
    assert len(caught.value.message) < 400
    assert http_input.parse(b'{"a": {"b": 1}, "b": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}')


def test_an_array_over_its_limit_is_named() -> None:
    with pytest.raises(PdserveError, match=r"^messages: got 5000 items, expected at most 4096 items$"):
        chat_call({"messages": [{"role": "user", "content": "x"}] * 5000}, MODEL, {})
    with pytest.raises(PdserveError, match=r"^stop: got 17 items, expected at most 16 items$"):
        text_call({"prompt": "x", "stop": ["x"] * 17}, MODEL, {})


def test_all_tools_together_have_a_limit() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 300_000}}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"description": "x" * 300_000}}}
    messages = [{"role": "user", "content": "x"}]
    assert chat_call({"messages": messages, "tools": [tool]}, MODEL, {}).tools is not None
    for read in (READ["/v1/chat/completions"], READ["/tokenize"]):
        with pytest.raises(PdserveError, match=r"^tools: got 6.* bytes, expected at most 524288"):
            read({"messages": messages, "tools": [tool, other]})


def tools_of(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object", **one}}}
        for number, one in enumerate(schemas)
    ]


def num_pointer_chars(node: Any) -> int:
    if isinstance(node, list):
        return sum(map(num_pointer_chars, node))
    if not isinstance(node, dict):
        return 0
    return len(node.get("$ref", "")) + sum(map(num_pointer_chars, node.values()))


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_references_of_all_tools_together_have_a_limit(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 tools, each of which would be within the limit."""
    written: list[int] = []

    def counting(schema: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = grammar.localized(schema, *args, **kwargs)
        written.append(num_pointer_chars(found))
        return found

    monkeypatch.setattr(plan, "localized", counting)
    monkeypatch.setattr(grammars, "localized", counting)
    num_tools, num_chars, num_references = (128, 1500, 60) if choice == "auto" else (2, 9000, 28)
    properties = {"n" * num_chars: {"$id": "a", "type": "integer"}}
    properties |= {str(number): {"$ref": "a"} for number in range(num_references)}
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": choice}
    message = message_of(
        READ["/v1/chat/completions"], {**body, "tools": tools_of([{"properties": properties}] * num_tools)}
    )
    assert ("references have over" in message) == (choice == "required")
    assert 0 < sum(written) <= grammar.MAX_POINTER_CHARS


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{number}": {"type": "integer"} for number in range(1600)}},
        {
            "properties": {f"p{number}": {"$ref": "#/$defs/a"} for number in range(1600)},
            "$defs": {"a": {"type": "null"}},
        },
        {"properties": {"p": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 4}}},
        {"properties": {f"p{number}": {"enum": [1] * 100} for number in range(200)}},
    ],
    ids=["properties", "references", "paths", "values"],
)
def test_calls_beside_a_schema_cost_few_steps(schema: dict[str, Any]) -> None:
    """The grammar of calls in XML has a rule for each parameter."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools_of([schema]), "response_format": form}
    # A few steps for each byte, because the schema is copied.
    assert calls_of(lambda: message_of(READ["/v1/chat/completions"], body)) < 20 * len(json.dumps(body))


def test_the_types_of_a_parameter_cost_few_steps() -> None:
    unions = {"a": {"anyOf": [{"$ref": "#/$defs/b"}] * 4}, "b": {"oneOf": [{"$ref": "#/$defs/a"}] * 4}}
    for one in ({"$ref": "#/$defs/a"}, {"enum": [1] * 2**18}, {"type": ["null"] * 2**18}, {"allOf": [{}] * 2**18}):
        schema = {"properties": {"x": one}, "$defs": unions}
        assert calls_of(lambda schema=schema: parameter_types(schema, "x")) < 10 * MAX_STEPS
    deep: dict[str, Any] = {"enum": [1, "x"], "const": None}
    for number in range(50):
        deep = {"$ref": "#/$defs/c", ("anyOf", "oneOf", "allOf")[number % 3]: [deep]}
    found = parameter_types({"properties": {"x": deep}, "$defs": {"c": {"type": ["array"]}}}, "x")
    assert found == {"integer", "number", "string", "null", "array"}


@pytest.mark.parametrize("text", ["1" * 301, f"-{'0123456789' * 400}", f'["\\\\", {"9" * 301}]', "0." + "3" * 301])
def test_a_number_has_few_digits(text: str) -> None:
    with pytest.raises(PdserveError, match=r"^body: got a number of over 300 digits"):
        http_input.parse(f'{{"a": {text}}}'.encode())


def test_texts_and_short_numbers_have_any_digits() -> None:
    body = {"a": "1" * 10_000, "b": [int("1" * 300)] * 2, "c" + "2" * 400: f'"\\{"3" * 400}'}
    assert http_input.parse(json.dumps(body, separators=(",", ":")).encode()) == body


def test_validated_names_the_first_error() -> None:
    with pytest.raises(PdserveError, match=r"^prompt: "):
        validated(MODELS["/v1/completions"], {"prompt": ["a", 1]})


@pytest.mark.parametrize(
    ("endpoint", "fields", "least", "most"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 64}, 0, 0),
        ("/v1/completions", {"prompt": "x" * 256, "max_tokens": 64, "echo": True}, 1024, 16_384),
        ("/v1/completions", {"prompt": "x", "n": 16, "logprobs": 64, "max_tokens": 64}, 8 * 2**20, 16 * 2**20),
        ("/v1/completions", {"prompt": [[1] * 1000] * 128, "echo": True, "logprobs": 20}, 2**28, 2**29),
        ("/v1/completions", {"prompt": [1] * 100_000, "prompt_logprobs": 4, "n": 16}, 2**29, 2**31),
        ("/v1/completions", {"prompt": [1] * 100_000, "prompt_logprobs": 4, "truncate_prompt_tokens": 9}, 1024, 16_384),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 20, "max_tokens": 64}, 2**17, 2**18),
        ("/v1/responses", {"input": "x", "max_output_tokens": 64}, 0, 0),
    ],
)
def test_an_answer_is_charged_before_it_exists(endpoint: str, fields: dict[str, Any], least: int, most: int) -> None:
    call = READ[endpoint]({**BESIDE[endpoint], "temperature": 1.0, **fields})
    assert least <= call.answer_bytes(MODEL) <= most

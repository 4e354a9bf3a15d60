"""Every field of OpenAI's answers is filled, or has a documented reason, as OpenAI's client sees it."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

import openai
import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from pdserve.core.errors import KvLost
from scripts.answer_fields import ADDED, EMPTY, FILLED, AnswerKind
from tests.unit.client.conftest import Script, delta, started
from tests.unit.client.conftest import script as script
from tests.unit.client.conftest import target as target
from tests.unit.gateway.conftest import Served, gateway

TYPES: Mapping[AnswerKind, type[pydantic.BaseModel]] = {
    "chat": ChatCompletion,
    "chunk": ChatCompletionChunk,
    "text": Completion,
    "response": Response,
}
#: Fields whose parts have too many types to list; test_responses.py has those that pdserve sends.
WHOLE = ("output", "tools", "tool_choice", "text", "instructions")
MESSAGES: Any = [{"role": "user", "content": "add two numbers"}]
BASE: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 5}
ASKED: dict[str, Any] = {"return_token_ids": True, "prompt_logprobs": 1}
TOOL: Any = {"type": "function", "function": {"name": "stop"}}
SCORED: dict[str, Any] = {"logprobs": True, "top_logprobs": 1}
STREAMED: Any = {"stream": True, "stream_options": {"include_usage": True}}


def seen(value: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    """Paths with a value, without their numbers in a list, and whether OpenAI has the field."""
    if isinstance(value, list):
        for one in value:
            yield from seen(one, path)
    elif isinstance(value, pydantic.BaseModel):
        theirs = set(type(value).model_fields)
        for name in theirs | set(value.model_extra or {}):
            inner = getattr(value, name)
            full = f"{path}.{name}" if path else name
            if inner is None:
                continue
            yield full, name in theirs
            if name in theirs and full not in WHOLE:
                yield from seen(inner, full)


def declared(model: type[pydantic.BaseModel], empty: Mapping[str, str], path: str = "") -> Iterator[str]:
    """Paths of fields of OpenAI's type, except within fields that are never filled."""
    for name, field in model.model_fields.items():
        full = f"{path}.{name}" if path else name
        yield full
        if full not in empty and full not in WHOLE:
            for inner in models_in(field.annotation):
                yield from declared(inner, empty, full)


def models_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models_in(inner)


@pytest.fixture(scope="module")
def answers(bundled: Served, tooled: Served) -> Mapping[AnswerKind, list[Any]]:
    """Answers to requests that ask for every optional field."""
    chat, text, respond = bundled.openai.chat.completions, bundled.openai.completions, bundled.openai.responses
    call: Any = {
        "model": tooled.model,
        "messages": MESSAGES,
        "max_tokens": 60,
        "tools": [TOOL],
        "tool_choice": "required",
    }
    one: Any = {"model": bundled.model, "messages": MESSAGES, **BASE, **SCORED}
    ids = {"return_token_ids": True}
    stop = {"stop": ["e", "a"]}
    answer: Any = {"model": bundled.model, "input": "add", "max_output_tokens": 12}
    return {
        "chat": [
            chat.create(**one, **stop, extra_body=ASKED),
            tooled.openai.chat.completions.create(**call),
        ],
        "chunk": [
            *chat.create(**one, **stop, **STREAMED, extra_body=ids),
            *chat.create(**one, stream=True, stream_options={"include_obfuscation": True}),
            *tooled.openai.chat.completions.create(**call, **STREAMED),
        ],
        "text": [
            text.create(model=bundled.model, prompt="def", logprobs=1, **BASE, **stop, extra_body=ASKED),
            *text.create(model=bundled.model, prompt="def", **BASE, **STREAMED),
        ],
        "response": [
            respond.create(
                **answer, instructions="Write.", metadata={"a": "b"}, temperature=0.5, top_p=0.9, top_logprobs=1
            ),
            tooled.openai.responses.create(
                model=tooled.model,
                input="x",
                max_output_tokens=60,
                tools=[{**TOOL["function"], "type": "function"}],  # type: ignore[list-item]
            ),
        ],
    }


def failed_response(script: Script, target: str) -> Any:
    script.fails(KvLost("a worker crashed"), started(), delta("a", 1))
    with (
        gateway(target) as host,
        openai.OpenAI(base_url=f"http://{host.address}/v1", api_key="x", max_retries=0) as client,
    ):
        *_, last = client.responses.create(model="m", input="hi", stream=True)
    return last.response


@pytest.mark.parametrize("answer", TYPES)
def test_every_field_of_openai_has_one_row(answer: AnswerKind) -> None:
    assert not FILLED[answer].keys() & EMPTY[answer].keys()
    assert set(declared(TYPES[answer], EMPTY[answer])) == {*FILLED[answer], *EMPTY[answer]}


@pytest.mark.parametrize("answer", TYPES)
def test_fields_are_filled_as_the_table_says(
    answers: Mapping[AnswerKind, list[Any]], answer: AnswerKind, script: Script, target: str
) -> None:
    found = [*answers[answer], *([failed_response(script, target)] if answer == "response" else [])]
    theirs = {path for one in found for path, is_theirs in seen(one) if is_theirs}
    assert theirs == set(FILLED[answer])


@pytest.mark.parametrize("answer", TYPES)
def test_added_fields_are_those_of_the_table(answers: Mapping[AnswerKind, list[Any]], answer: AnswerKind) -> None:
    ours = {path for one in answers[answer] for path, is_theirs in seen(one) if not is_theirs}
    # test_reasoning.py has the fields of models that reason.
    assert ours == {path for path in ADDED[answer] if "reasoning" not in path}

"""`--served-model-name`: callers use the operator's names of the model, here through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.support.tooled_model import BUNDLED
from tests.unit.gateway.conftest import Served, serve

NAMES = ("house/small", "gpt-4o", "modèle:1")
TALK: Any = [{"role": "user", "content": "add two numbers"}]


@pytest.fixture(scope="module")
def named() -> Iterator[Served]:
    with serve(model=str(BUNDLED), prefill=0, router={"served_model_name": NAMES}) as served:
        yield served


def chat(client: openai.OpenAI, name: str) -> set[str]:
    return {client.chat.completions.create(model=name, messages=TALK, max_tokens=1).model}


def streamed_chat(client: openai.OpenAI, name: str) -> set[str]:
    return {one.model for one in client.chat.completions.create(model=name, messages=TALK, max_tokens=2, stream=True)}


def completion(client: openai.OpenAI, name: str) -> set[str]:
    return {client.completions.create(model=name, prompt=["a", "b"], max_tokens=1).model}


def streamed_completion(client: openai.OpenAI, name: str) -> set[str]:
    return {one.model for one in client.completions.create(model=name, prompt="a", max_tokens=2, stream=True)}


def response(client: openai.OpenAI, name: str) -> set[str]:
    return {client.responses.create(model=name, input="add", max_output_tokens=16).model}


def streamed_response(client: openai.OpenAI, name: str) -> set[str]:
    events: Any = client.responses.create(model=name, input="add", max_output_tokens=16, stream=True)
    return {one.response.model for one in events if hasattr(one, "response")}


CALLS = (chat, streamed_chat, completion, streamed_completion, response, streamed_response)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", CALLS)
def test_answers_have_the_first_name(named: Served, call: Callable[[openai.OpenAI, str], set[str]], name: str) -> None:
    assert call(named.openai, name) == {NAMES[0]}


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_name_is_told_the_served_ones(named: Served, call: Callable[[openai.OpenAI, str], set[str]]) -> None:
    """The folder's own name is one: the operator's names replace it, as in vLLM."""
    with pytest.raises(openai.NotFoundError) as caught:
        call(named.openai, BUNDLED.name)
    assert caught.value.code == "model_not_found"
    served = "this server serves 'house/small', 'gpt-4o', 'modèle:1'"
    assert f"the model '{BUNDLED.name}' does not exist; {served}" in caught.value.message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": []}),
    ],
)
def test_other_requests_take_each_name(named: Served, path: str, fields: dict[str, Any]) -> None:
    for name in (*NAMES, None):
        given = fields if name is None else {**fields, "model": name}
        status, text = named.post(path, given)
        assert status == 200, text
        assert json.loads(text).get("model", NAMES[0]) == NAMES[0]
    assert named.post(path, {**fields, "model": BUNDLED.name})[0] == 404


def test_models_lists_all_names(named: Served) -> None:
    assert [one.id for one in named.openai.models.list()] == list(NAMES)
    for name in NAMES:
        found = named.openai.models.retrieve(name)
        assert (found.id, found.object) == (name, "model")
        assert found.model_extra is not None
        assert found.model_extra["root"] == NAMES[0]
    with pytest.raises(openai.NotFoundError, match="house/small"):
        named.openai.models.retrieve(BUNDLED.name)


def test_the_sdk_sees_the_names(named: Served) -> None:
    model = named.sdk.model()
    assert (model.name, model.aliases, model.names) == (NAMES[0], NAMES[1:], NAMES)


def test_without_names_the_folder_names_the_model(toy: Served) -> None:
    assert toy.sdk.model().names == ("toy",)
    assert [one.id for one in toy.openai.models.list()] == ["toy"]

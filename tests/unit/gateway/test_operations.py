"""Every endpoint is declared, documented, and closed to callers without a token unless it is declared open."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from starlette.routing import Route

from pdserve.build import FULL_VERSION
from pdserve.client.aio import AsyncClient
from pdserve.config import GatewayConfig
from pdserve.core.installation import VERSION
from pdserve.gateway.api.openapi import BOUNDS, OPERATIONS, document
from pdserve.gateway.api.request_models import ChatRequest
from pdserve.gateway.app import Gateway
from pdserve.gateway.door import Shutdown
from pdserve.telemetry.metrics import Metrics
from tests.support.tooled_model import BUNDLED
from tests.unit.gateway.conftest import Served, serve

TOKEN = "operator-token-0123456789"
MESSAGES = [{"role": "user", "content": "add two numbers"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


@pytest.fixture(scope="module")
def closed() -> Iterator[Served]:
    with serve(token=TOKEN) as served:
        yield served


@dataclass(frozen=True)
class Answer:
    status_code: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


def ask(served: Served, method: str, path: str, token: str | None = None, **fields: Any) -> Answer:
    connection = http.client.HTTPConnection(served.address, timeout=60)
    try:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
        connection.request(method, path, json.dumps(fields) if method == "POST" else None, headers)
        found = connection.getresponse()
        # The live events never end.
        text = "" if found.headers["content-type"] == "text/event-stream" else found.read().decode()
        return Answer(found.status, found.headers, text)
    finally:
        connection.close()


def test_every_route_is_declared() -> None:
    app = Gateway(
        GatewayConfig(router="127.0.0.1:1"),
        AsyncClient("127.0.0.1:1"),
        Metrics("gateway"),
        Shutdown(),
        needs_token=False,
    ).app()
    routes = {
        (method, one.path)
        for one in app.routes
        if isinstance(one, Route)
        for method in (one.methods or ())
        if method != "HEAD"
    }
    assert routes == OPERATIONS.keys()
    paths = document()["paths"]
    documented = {(method.upper(), path) for path, item in paths.items() for method in item}
    assert documented == {(method, path.replace(":path", "")) for method, path in OPERATIONS}


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda one: str(one))
def test_only_open_endpoints_answer_without_a_token(closed: Served, method: str, path: str) -> None:
    concrete = re.sub(r"\{.*?\}", "x", path)
    for token in (None, "another-token"):
        status = ask(closed, method, concrete, token).status_code
        assert (status == 401) != OPERATIONS[method, path].is_open, status


def test_the_token_opens_the_others(closed: Served) -> None:
    assert ask(closed, "GET", "/version", TOKEN).json() == {"version": FULL_VERSION}
    assert ask(closed, "GET", "/load", TOKEN).json() == {"server_load": 0}
    assert VERSION not in ask(closed, "GET", "/openapi.json").text


def test_the_root_leads_to_the_live_view(toy: Served) -> None:
    found = ask(toy, "GET", "/")
    assert (found.status_code, found.headers["location"]) == (307, "/ui")
    assert ask(toy, "GET", found.headers["location"]).headers["content-type"].startswith("text/html")


def test_a_path_with_a_slash_too_many_leads_to_the_same_server(toy: Served) -> None:
    """Also if a proxy ends TLS, or if the host header names another server."""
    for path in ("/docs", "/tokenize", "/v1/chat/completions"):
        found = ask(toy, "GET", path + "/")
        assert (found.status_code, found.headers["location"]) == (307, path)
    for path in ("//", "//docs/", "/docs/x/", "//example.org/"):
        assert ask(toy, "GET", path).status_code == 404


def test_ping_is_health(toy: Served) -> None:
    for method in ("GET", "POST"):
        assert ask(toy, method, "/ping").json() == {"status": "ok"}


def test_the_page_of_the_document_loads_nothing(toy: Served) -> None:
    found = ask(toy, "GET", "/docs")
    assert "default-src 'none'" in found.headers["content-security-policy"]
    assert not re.findall(r"<script|<link|<img|src=|https?://", found.text)
    for _, path in OPERATIONS:
        assert path.replace(":path", "") in found.text
    assert "chat_template_kwargs" in found.text


def test_the_document_is_complete(toy: Served) -> None:
    found = ask(toy, "GET", "/openapi.json").json()
    assert found == document()
    schemas = found["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = str(found)
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) == schemas.keys()
    names = [one["operationId"] for item in found["paths"].values() for one in item.values()]
    assert len(set(names)) == len(names)
    for item in found["paths"].values():
        for one in item.values():
            assert all(answer.get("content") or status in ("204", "307") for status, answer in one["responses"].items())


def conforms(method: str, path: str, found: Answer) -> bool:
    """Whether the document describes the answer."""
    answer = document()["paths"][path][method.lower()]["responses"][str(found.status_code)]
    schema = answer["content"]["application/json"]["schema"]
    jsonschema.validate(found.json(), {**schema, "components": document()["components"]})
    return True


SCORED = {"max_tokens": 4, "temperature": 0.0, "prompt_logprobs": 1, "return_token_ids": True}


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, **SCORED, "logprobs": True, "top_logprobs": 2}, 200),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 30},
            200,
        ),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": MESSAGES, "model": "another"}, 404),
        ("/v1/completions", {"prompt": "def", **SCORED, "logprobs": 2, "stop": ["e"]}, 200),
        ("/v1/completions", {"prompt": "def", "max_tokens": 2, "user": "me"}, 200),
        ("/v1/responses", {"input": "def", "max_output_tokens": 4, "include": ["message.output_text.logprobs"]}, 200),
        ("/v1/responses", {"input": [{"type": "nothing"}]}, 400),
        ("/tokenize", {"prompt": "def", "return_token_strs": True}, 200),
        ("/tokenize", {"messages": MESSAGES, "tools": [TOOL]}, 200),
        ("/tokenize", {}, 400),
        ("/detokenize", {"tokens": [40, 41]}, 200),
        ("/detokenize", {"tokens": [-1]}, 400),
    ],
    ids=str,
)
def test_answers_are_as_documented(tooled: Served, path: str, fields: dict[str, Any], status: int) -> None:
    found = ask(tooled, "POST", path, **fields)
    assert found.status_code == status, found.text
    assert conforms("POST", path, found)


def test_other_answers_are_as_documented(bundled: Served) -> None:
    for path in ("/v1/models", "/health", "/ping", "/version", "/load"):
        assert conforms("GET", path, ask(bundled, "GET", path))
    assert conforms("GET", "/v1/models/{name}", ask(bundled, "GET", f"/v1/models/{bundled.model}"))
    assert conforms("GET", "/v1/models/{name}", ask(bundled, "GET", "/v1/models/a/b"))


def tokens(served: Served, **fields: Any) -> list[int]:
    found = ask(served, "POST", "/tokenize", **fields)
    assert found.status_code == 200, found.text
    ids: list[int] = found.json()["tokens"]
    return ids


TEMPLATE = (
    "{{- style or '' }}{%- for one in messages %}{{- one.role + ': ' + one.content + '\\n' }}{%- endfor %}"
    "{%- if enable_thinking is defined %}{{- 'thinks: ' + enable_thinking | string }}{%- endif %}"
    "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose tokenizer begins a text with a special token, and whose template begins the next message."""
    folder = tmp_path_factory.mktemp("models")
    for path in BUNDLED.iterdir():
        if path.name not in ("tokenizer.json", "chat_template.jinja"):
            (folder / path.name).symlink_to(path)
    text = json.loads((BUNDLED / "tokenizer.json").read_text())
    name = text["added_tokens"][0]["content"]
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {name: {"id": name, "ids": [0], "tokens": [name]}}
    text["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
    (folder / "tokenizer.json").write_text(json.dumps(text))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serve(model=str(folder), prefill=0) as served:
        yield served


def test_a_chat_is_tokenized_with_and_without_the_next_message(begun: Served) -> None:
    whole = tokens(begun, messages=MESSAGES)
    assert whole == tokens(begun, messages=MESSAGES, add_generation_prompt=True, continue_final_message=False)
    without = tokens(begun, messages=MESSAGES, add_generation_prompt=False)
    assert whole == without + tokens(begun, prompt="assistant: ", add_special_tokens=False)
    assert begun.sdk.tokenize(MESSAGES, add_generation_prompt=False) == without
    styled = tokens(begun, messages=MESSAGES, chat_template_kwargs={"style": "def "})
    text = "def user: add two numbers\nassistant: "
    assert styled == tokens(begun, prompt=text, add_special_tokens=False)


@pytest.mark.parametrize(
    "fields",
    [{}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}, {"truncate_prompt_tokens": 3}],
)
def test_tokens_are_counted_as_in_the_request(begun: Served, fields: dict[str, Any]) -> None:
    body = {"model": begun.model, "messages": MESSAGES, **fields}
    counted = ask(begun, "POST", "/v1/messages/count_tokens", **body).json()["input_tokens"]
    used = ask(begun, "POST", "/v1/messages", **body, max_tokens=1).json()["usage"]
    assert counted == used["input_tokens"] + used["cache_read_input_tokens"]
    plain = len(tokens(begun, messages=MESSAGES))
    assert (counted > plain, counted == 3) == ("thinking" in fields, "truncate_prompt_tokens" in fields)


def test_special_tokens_are_added_to_a_text_and_not_to_a_chat(begun: Served) -> None:
    plain = tokens(begun, prompt="def", add_special_tokens=False)
    assert tokens(begun, prompt="def") == tokens(begun, prompt="def", add_special_tokens=True) == [0, *plain]
    whole = tokens(begun, messages=MESSAGES)
    assert whole == tokens(begun, messages=MESSAGES, add_special_tokens=False)
    assert tokens(begun, messages=MESSAGES, add_special_tokens=True) == [0, *whole]
    assert ask(begun, "POST", "/detokenize", tokens=[0, *plain]).json() == {"prompt": "def"}


def test_options_of_a_chat_are_refused_beside_a_text(tooled: Served) -> None:
    for name, value in (("add_generation_prompt", True), ("chat_template_kwargs", {"a": 1}), ("tools", [TOOL])):
        found = ask(tooled, "POST", "/tokenize", prompt="a", **{name: value})
        assert (found.status_code, found.json()["error"]["param"]) == (400, name)
    for given, seen in (({"prompt": "", "messages": MESSAGES}, "both"), ({}, "neither")):
        assert f"got {seen}," in ask(tooled, "POST", "/tokenize", **given).json()["error"]["message"]
    unread = ask(tooled, "POST", "/tokenize", messages=MESSAGES, chat_template_kwargs={"no_such_name": 1})
    assert (unread.status_code, unread.json()["error"]["param"]) == (400, "chat_template_kwargs")


BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "max_tokens": 1},
    "n": {"temperature": 1.0, "max_tokens": 1},
}
MOST = {"maximum": 1, "minimum": -1}
# A boolean in chats; another name of max_tokens; and one that is tried with the other bounds of sampling.
ELSEWHERE = {"logprobs", "max_completion_tokens", "repetition_penalty"}
TRIED = sorted(BOUNDS.keys() & ChatRequest.model_fields.keys() - ELSEWHERE)


@pytest.mark.parametrize("name", TRIED)
def test_documented_bounds_are_those_of_the_server(tooled: Served, name: str) -> None:
    """What is within them is not refused because of the field, and what is beyond them is."""
    for keyword, bound in BOUNDS[name].items():
        for value, is_within in bounded_values(keyword, bound, ChatRequest.model_fields[name].annotation is float):
            given = {"messages": MESSAGES, **BESIDE.get(name, {"max_tokens": 1}), name: value}
            found = ask(tooled, "POST", "/v1/chat/completions", **given)
            if is_within and found.status_code != 200:
                assert found.json()["error"]["param"] != name, (value, found.text)
            elif not is_within:
                assert (found.status_code, found.json()["error"]["param"]) == (400, name), (value, found.text)


def bounded_values(keyword: str, bound: Any, is_float: bool) -> Iterator[tuple[Any, bool]]:
    if keyword in ("minimum", "maximum"):
        yield bound + MOST[keyword] * (0.001 if is_float else 1), False
    elif keyword == "exclusiveMinimum":
        yield bound, False
    elif keyword in ("minLength", "maxLength"):
        yield "a" * bound, True
        yield "a" * (bound + (1 if keyword == "maxLength" else -1)), False
    else:
        yield MESSAGES * (bound + 1 if keyword == "maxItems" else 0), False
    if keyword in ("minimum", "maximum") and bound:
        yield bound, True


# --- sessions -----------------------------------------------------------------------------------------------------


def test_sessions_are_listed_in_pages() -> None:
    with serve() as served:
        for name in "ab":
            body = json.dumps({"prompt": "a prompt of some blocks", "max_tokens": 2})
            headers = {"content-type": "application/json", "x-session-id": name, "x-reuse-within-s": "0"}
            headers |= {"x-slo-task-s": "3600"} if name == "b" else {}
            connection = http.client.HTTPConnection(served.address, timeout=60)
            connection.request("POST", "/v1/completions", body, headers)
            assert connection.getresponse().status == 200
            connection.close()
        page = ask(served, "GET", "/v1/sessions?limit=1").json()
        assert (page["object"], page["has_more"]) == ("list", True)
        [session] = page["data"]
        assert (session["object"], session["session_id"], session["is_named"]) == ("session", "b", True)
        assert session["conversations"][0]["is_over"]
        task = session["task"]
        assert (task["state"], task["turns"]) == ("in_time", 1)
        assert task["due_at_s"] - task["began_at_s"] == pytest.approx(3600.0, abs=1e-3)
        rest = ask(served, "GET", f"/v1/sessions?limit=1&after={session['cursor']}").json()
        assert [(one["session_id"], one["task"]) for one in rest["data"]] == [("a", None)]


def test_a_session_is_ended() -> None:
    with serve() as served:
        served.sdk.generate("a prompt of some blocks", max_tokens=2, session_id="a/é b")
        path = f"/v1/sessions/{quote('a/é b', safe='')}"
        found = ask(served, "DELETE", path)
        assert (found.status_code, found.json()) == (200, {"object": "session", "session_id": "a/é b", "is_over": True})
        [session] = ask(served, "GET", "/v1/sessions?limit=1").json()["data"]
        assert session["conversations"][0]["is_over"]
        for name, status in (("unknown", 404), ("s" * 129, 400)):
            found = ask(served, "DELETE", f"/v1/sessions/{name}")
            assert (found.status_code, found.json()["error"]["type"]) == (status, "invalid_request_error")


def test_only_callers_with_a_token_end_sessions(closed: Served) -> None:
    assert ask(closed, "DELETE", "/v1/sessions/s").status_code == 401
    assert ask(closed, "DELETE", "/v1/sessions/s", TOKEN).status_code == 404


@pytest.mark.parametrize(
    "query",
    ["limit=101", "limit=-1", "limit=1&limit=2", "after=x", "after=" + "9" * 20, "name=a", "a=" * 200, "limit="],
)
def test_a_page_of_sessions_has_bounds(closed: Served, query: str) -> None:
    found = ask(closed, "GET", f"/v1/sessions?{query}", TOKEN)
    assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_value")

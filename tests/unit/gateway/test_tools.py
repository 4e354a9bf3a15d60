"""Readers of tool calls, fed at every split point."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.client.results import Model
from pdserve.core.errors import InvalidRequest
from pdserve.gateway.api.request_models import NamedChoice, Tool
from pdserve.gateway.tools.grammars import calls_schema
from pdserve.gateway.tools.plan import AnswerTools, message, plan_tools
from pdserve.gateway.tools.readers import ArrayReader, NamedReader, make_reader
from pdserve.gateway.tools.reading import Arguments, CallBegan, Event, Reader, Text, joined
from tests.support.slow import slow_except

ADD = '{"name": "add", "arguments": {"a": 1, "b": {"c": "}"}}}'
ADDED: list[Event] = [CallBegan("add"), Arguments('{"a": 1, "b": {"c": "}"}}')]
GET = '{"name": "get", "arguments": {}}'
GOT: list[Event] = [CallBegan("get"), Arguments("{}")]
PARAMETERS: dict[str, Any] = {
    "add": {
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "n": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "b": {"type": ["boolean"]},
            "e": {"enum": [1, "two"]},
            "r": {"$ref": "#/$defs/r~1"},
        },
        "$defs": {"r/": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    },
    "get": {},
}


def called(arguments: str) -> list[Event]:
    return [CallBegan("add"), Arguments(arguments)]


CASES: list[tuple[str, str, list[Event]]] = [
    ("hermes", "plain text", [Text("plain text")]),
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", ADDED),
    ("hermes", f"Let me see.\n<tool_call>{ADD}</tool_call>", [Text("Let me see."), *ADDED]),
    ("hermes", f"<tool_call>{ADD}</tool_call>\n<tool_call>{GET}</tool_call>\n", [*ADDED, *GOT]),
    ("hermes", f"<tool_call>{ADD}</tool_call> done", [*ADDED, Text(" done")]),
    ("hermes", f"<tool_call>{ADD}", ADDED),
    ("hermes", "<tool_call>no JSON</tool_call>", [Text("<tool_call>no JSON</tool_call>")]),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', [Text('<tool_call>{"name": 5}</tool_call>')]),
    ("hermes", "a <tool_ca b <", [Text("a <tool_ca b <")]),
    ("hermes", '<tool_call>{"name": "add", "argum', [CallBegan("add")]),
    ("hermes", '<tool_call>{"na', [Text('<tool_call>{"na')]),
    ("hermes", '<tool_call>{"arguments": [1, 2], "name": "add"}</tool_call>', [CallBegan("add"), Arguments("[1, 2]")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', [CallBegan("add"), Arguments('{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}', [CallBegan("add"), Arguments("{}")]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', [CallBegan("add"), Arguments("{}")]),
    ("hermes", '<tool_call>{"id": [1, {"name": "x"}], "name": "add"}', [CallBegan("add"), Arguments("{}")]),
    (
        "hermes",
        '<tool_call>{"name": "n\\u00e4me", "arguments": {"é": "\\""}}',
        [
            CallBegan("näme"),
            Arguments('{"é": "\\""}'),
        ],
    ),
    ("llama3", ADD.replace("arguments", "parameters"), ADDED),
    ("llama3", f"<|python_tag|>{ADD}", ADDED),
    ("llama3", f"\n {ADD}; {GET}", [*ADDED, *GOT]),
    ("llama3", f"{ADD}\n{GET}\n", [*ADDED, *GOT]),
    ("llama3", '{"answer": 5, "name": "nobody"}', [Text('{"answer": 5, "name": "nobody"}')]),
    ("llama3", '{"answer": 5}', [Text('{"answer": 5}')]),
    ("llama3", "{ not JSON", [Text("{ not JSON")]),
    ("llama3", f"Sure: {ADD}", [Text(f"Sure: {ADD}")]),
    ("llama3", "<|python_x", [Text("<|python_x")]),
    ("llama3", "<|pyth", [Text("<|pyth")]),
    ("llama3", "  ", [Text("  ")]),
    ("llama3", f"{ADD} and text", [*ADDED, Text(" and text")]),
    ("mistral", "plain [text]", [Text("plain [text]")]),
    ("mistral", f"[TOOL_CALLS] [{ADD}]", ADDED),
    ("mistral", f"Hm. [TOOL_CALLS][{ADD}, {GET}]", [Text("Hm."), *ADDED, *GOT]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', [CallBegan("add"), Arguments('{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]x1[ARGS] {"a": 1}', [CallBegan("add"), Arguments('{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]get{}', [CallBegan("add"), Arguments('{"a": 1}'), *GOT]),
    ("mistral", "[TOOL_CALLS]add", [Text("[TOOL_CALLS]add")]),
    ("mistral", "[TOOL_CAL", [Text("[TOOL_CAL")]),
    ("mistral", "[TOOL_CALLS]{}", [Text("[TOOL_CALLS]{}")]),
    ("qwen3_coder", "a < b <func <tool_", [Text("a < b <func <tool_")]),
    (
        "qwen3_coder",
        "Let me see.\n\n<tool_call>\n<function=get>\n<parameter=q>\nx\ny\n</parameter>\n</function>\n</tool_call>",
        [Text("Let me see."), CallBegan("get"), Arguments('{"q": "x\\ny"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=get></function></tool_call>\n<tool_call>\n<function=get>\n</function>\n</tool_call> so",
        [*GOT, *GOT, Text(" so")],
    ),
    ("qwen3_coder", "<function=get></function></tool_call>", GOT),
    ("qwen3_coder", "<function=other></function>", [Text("<function=other></function>")]),
    ("qwen3_coder", "<tool_call><function=other></function>", [CallBegan("other"), Arguments("{}")]),
    ("qwen3_coder", "<tool_call>x</tool_call>", [Text("<tool_call>x</tool_call>")]),
    ("qwen3_coder", "<tool_call><fun<tool_call><function=get></function>", [Text("<tool_call><fun"), *GOT]),
    ("qwen3_coder", "<tool_call><function=a<function=get></function>", [Text("<tool_call><function=a"), *GOT]),
    ("qwen3_coder", "<tool_call> <function=ge", [Text("<tool_call> <function=ge")]),
    ("qwen3_coder", "<tool_call>", [Text("<tool_call>")]),
    (
        "qwen3_coder",
        "<tool_call><function=get><parameter=a>1<parameter=b>\n\n</parameter><parameter=c></parameter></function>",
        [CallBegan("get"), Arguments('{"a": "1", "b": "", "c": ""}')],
    ),
    (
        "qwen3_coder",
        '<tool_call><function=get><parameter=k>say "</par" \\ é',
        [CallBegan("get"), Arguments('{"k": "say \\"</par\\" \\\\ é')],
    ),
    ("qwen3_coder", "<function=add><parameter=i>\n12\n</parameter></function>", called('{"i": 12}')),
    ("qwen3_coder", "<function=add><parameter=i>a lot</parameter></function>", called('{"i": "a lot"}')),
    ("qwen3_coder", "<function=add><parameter=n>None</parameter></function>", called('{"n": null}')),
    ("qwen3_coder", "<function=add><parameter=n>-1.5e3</parameter></function>", called('{"n": -1.5e3}')),
    ("qwen3_coder", "<function=add><parameter=n>1e999</parameter></function>", called('{"n": 1e999}')),
    ("qwen3_coder", "<function=add><parameter=n>NaN</parameter></function>", called('{"n": "NaN"}')),
    ("qwen3_coder", "<function=add><parameter=b>True</parameter></function>", called('{"b": true}')),
    ("qwen3_coder", "<function=add><parameter=e>1</parameter></function>", called('{"e": 1}')),
    ("qwen3_coder", "<function=add><parameter=e>two</parameter></function>", called('{"e": "two"}')),
    ("qwen3_coder", '<function=add><parameter=r>{"x": [1]}</parameter></function>', called('{"r": {"x": [1]}}')),
    ("qwen3_coder", "<function=add><parameter=r>{'x': None}</parameter></function>", called('{"r": {"x": null}}')),
    ("qwen3_coder", "<function=add><parameter=r>{1, 2}</parameter></function>", called('{"r": "{1, 2}"}')),
    ("qwen3_coder", "<function=add><parameter=s>12</parameter></function>", called('{"s": "12"}')),
    ("hermes", f"<tool_call>{ADD}{GET}</tool_call>", [*ADDED, *GOT]),
    ("hermes", f"<tool_call>{ADD},\n{GET}</tool_call> so", [*ADDED, *GOT, Text(" so")]),
    ("hermes", f"<tool_call>{ADD}\n<tool_call>{GET}</tool_call>", [*ADDED, *GOT]),
    ("hermes", f"<tool_call>{ADD} and {{</tool_call>", [*ADDED, Text(" and {")]),
    ("hermes", f"<tool_call>{ADD}<tool_call>x</tool_call>", [*ADDED, Text("<tool_call>x</tool_call>")]),
    ("hermes", f"<tool_call>{ADD}</tool_call></tool_call>", [*ADDED, Text("</tool_call>")]),
    ("hermes", f"<tool_call>{ADD}</tool_c", ADDED),
    ("hermes", '<tool_call>{"na<tool_call>', [Text('<tool_call>{"na<tool_call>')]),
    ("hermes", f'<tool_call>{{"name" <tool_call>{GET}', [Text('<tool_call>{"name"'), *GOT]),
    (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {{"a": 1<tool_call>{GET}',
        [CallBegan("add"), Arguments('{"a": 1'), *GOT],
    ),
    (
        "hermes",
        '<tool_call>{"name": "get", "why": "so", "arguments": {}, "arguments": {"a": 1}} x',
        [*GOT, Text('"why": "so""arguments": {"a": 1} x')],
    ),
    ("hermes", '<tool_call>{"name": "get", "arguments": {}, "wh', [*GOT, Text(', "wh')]),
    ("hermes", '<tool_call>{"name": "get", "arguments": {} why}', [*GOT, Text(" why}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": 5}', [CallBegan("add"), Arguments("5")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "so"}', [CallBegan("add"), Arguments('"so"')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": ""}', [CallBegan("add"), Arguments("{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": 1', [CallBegan("add"), Arguments("1")]),
    ("llama3", f"{ADD}<|python_tag|>", [*ADDED, Text("<|python_tag|>")]),
    ("mistral", f"[TOOL_CALLS][{ADD} and {GET}]", [*ADDED, Text(f" and {GET}]")]),
    ("mistral", f"[TOOL_CALLS][{ADD}{GET}", [*ADDED, *GOT]),
    ("mistral", f"[TOOL_CALLS][{ADD}[TOOL_CALLS]get{{}}", [*ADDED, *GOT]),
    ("mistral", '[TOOL_CALLS][{"x": 1}]', [Text('[TOOL_CALLS][{"x": 1}]')]),
    ("mistral", "[TOOL_CALLS] []", [Text("[TOOL_CALLS] []")]),
    ("mistral", "[TOOL_CALLS] [so", [Text("[TOOL_CALLS] [so")]),
    ("mistral", f"[TOOL_CALLS]{GET} so", [*GOT, Text(" so")]),
    ("mistral", "[TOOL_CALLS]add[ARGS]so", [Text("[TOOL_CALLS]add[ARGS]so")]),
    ("mistral", "[TOOL_CALLS]it is a {}", [Text("[TOOL_CALLS]it is a {}")]),
    ("mistral", "[TOOL_CALLS]add[TOOL_CALLS]get{}", [Text("[TOOL_CALLS]add"), *GOT]),
    ("mistral", '[TOOL_CALLS]add{"a": [1[TOOL_CALLS]get{}', [CallBegan("add"), Arguments('{"a": [1'), *GOT]),
    (
        "qwen3_coder",
        "<function=get>so <parameter=q>x</parameter>y\n<parameter=k\n</function></tool_call>",
        [CallBegan("get"), Arguments('{"q": "x"}'), Text("so y\n<parameter=k")],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=get><parameter=q>x</parameter></tool_call><tool_call><function=get></function>",
        [CallBegan("get"), Arguments('{"q": "x"}'), *GOT],
    ),
    ("qwen3_coder", "<tool_call><function=get><function=get></function>", [*GOT, *GOT]),
    (
        "qwen3_coder",
        "<function=get></function></tool_call><tool_call>x</tool_call>",
        [*GOT, Text("<tool_call>x</tool_call>")],
    ),
    ("qwen3_coder", "<function=add><parameter=i>\n12", called('{"i": 12')),
    ("qwen3_coder", "<function=add><parameter=s>\n12 <", called('{"s": "12 <')),
    ("qwen3_coder", "<function=add><parameter=ke", [CallBegan("add"), Arguments("{"), Text("<parameter=ke")]),
    ("array", f"[{ADD}] so", [*ADDED, Text("] so")]),
    ("array", '[{"na', [Text('[{"na')]),
    ("array", f"[{ADD}]", ADDED),
    ("array", f"[ {ADD} ,\n{GET} ]", [*ADDED, *GOT]),
    ("named", '{"a": [1]}', [CallBegan("add"), Arguments('{"a": [1]}')]),
]


def reader(form: str) -> Reader:
    others: dict[str, Callable[[], Reader]] = {"array": ArrayReader, "named": lambda: NamedReader("add")}
    return others[form]() if form in others else make_reader(form, PARAMETERS)


def read(form: str, pieces: list[str]) -> list[Event]:
    one = reader(form)
    found = [event for piece in pieces for event in one.feed(piece)]
    return joined([*found, *one.end()])


NEAR = 16  # characters; longer than any mark


def is_chosen(first: int, second: int) -> bool:
    """About an eighth of the pairs of cuts: all that are near each other, and every first one with some others."""
    return second - first <= NEAR or (first + second) % 8 == 0


@pytest.mark.parametrize("are_all", slow_except([False, True], False))
@pytest.mark.parametrize(("form", "text", "events"), CASES)
def test_a_text_is_parsed_equally_at_every_split(form: str, text: str, events: list[Event], are_all: bool) -> None:
    """At every cut and, if `are_all`, at every pair. The rest is read once for each state that the reader has before
    it."""
    assert read(form, [text]) == events
    assert read(form, list(text)) == events
    passed: set[tuple[int, tuple[Event, ...], bytes]] = set()
    for first in range(len(text)):
        one = reader(form)
        begun, kept = one.feed(text[:first]), pickle.dumps(one)
        for second in range(first + 1, len(text) + 1):
            if not are_all and second < len(text) and not is_chosen(first, second):
                continue
            one = pickle.loads(kept)  # noqa: S301
            found = joined([*begun, *one.feed(text[first:second])])
            state = (second, tuple(found), pickle.dumps(one))
            if state not in passed:
                assert joined([*found, *one.feed(text[second:]), *one.end()]) == events
                passed.add(state)


FORMS = ["hermes", "llama3", "mistral", "qwen3_coder"]
PARTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<function=",
    "</function>",
    "add>",
    "<parameter=",
    "i>",
    "</parameter>",
    "\n",
    ADD,
    GET,
    "{",
    "}",
    '"',
    '{"name": "add", ',
    '"arguments": ',
    '"arguments": {"α": "β"}',
    ', "γ": "δ"',
    "\\",
    " ",
    ";",
    "[",
    "]",
    ",",
    "x",
    "null",
    "1.5",
    "αβ",
]
ANSWERS = {  # well-formed, with calls
    "hermes": f"Hm.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{GET}</tool_call>",
    "llama3": f"<|python_tag|>{ADD.replace('arguments', 'parameters')}; {GET}",
    "mistral": f"Hm.[TOOL_CALLS] [{ADD}, {GET}][TOOL_CALLS]add[CALL_ID]x[ARGS]{{}}[TOOL_CALLS]get{{}}",
    "qwen3_coder": "Hm.\n<tool_call>\n<function=add>\n<parameter=s>\nso\n</parameter>\n<parameter=i>\n1\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call><function=get></function></tool_call>",
}
WORDS = "αβγδεζηθ"  # stand for what a model wrote; they are no syntax of any form


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted(min(one, len(text)) for one in cuts)
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]


def check_nothing_is_lost(form: str, text: str, found: list[Event]) -> None:
    """Each character is in a call, in the text in its order, or part of a call's syntax. A text without a call is
    unchanged."""
    content = "".join(one.text for one in found if isinstance(one, Text))
    calls = "".join(one.text if isinstance(one, Arguments) else one.name for one in found if not isinstance(one, Text))
    for word in WORDS:
        assert (content + calls).count(word) == text.count(word), (word, text, found)
    rest = iter(text)
    assert all(char in rest for char in content if not char.isspace()), (text, found)
    if not calls:
        assert content == text


@given(st.sampled_from(FORMS), st.lists(st.sampled_from(PARTS), max_size=12), st.lists(st.integers(0, 200), max_size=4))
def test_nothing_of_any_text_is_lost(form: str, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    found = read(form, [text])
    assert read(form, in_pieces(text, cuts)) == read(form, list(text)) == found
    check_nothing_is_lost(form, text, found)


@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from([*PARTS, *WORDS])), max_size=4),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 12)), max_size=2),
    st.integers(0, 300),
)
def test_nothing_of_a_damaged_call_is_lost(
    form: str, insertions: list[tuple[int, str]], deletions: list[tuple[int, int]], end: int
) -> None:
    """Text is put into an answer with calls, parts are deleted, and the end is cut off."""
    text = ANSWERS[form]
    for place, part in insertions:
        text = text[:place] + part + text[place:]
    for place, size in deletions:
        text = text[:place] + text[place + size :]
    text = text[:end]
    found = read(form, [text])
    assert read(form, list(text)) == found
    check_nothing_is_lost(form, text, found)


@pytest.mark.parametrize("form", FORMS)
def test_a_word_anywhere_in_an_answer_is_kept(form: str) -> None:
    whole = ANSWERS[form]
    for place in range(len(whole) + 1):
        text = f"{whole[:place]}αβ{whole[place:]}"
        check_nothing_is_lost(form, text, read(form, [text]))


@given(
    st.sampled_from(FORMS),
    st.text(alphabet='ab <>/[]{}"_toolcaTOOLCALLS\n', max_size=40),
)
def test_text_without_a_call_is_kept(form: str, text: str) -> None:
    check_nothing_is_lost(form, text, read(form, [text]))


def test_arguments_come_before_their_end() -> None:
    one = make_reader("hermes", PARAMETERS)
    assert one.feed('<tool_call>{"name": "add", "arguments": {"a": "lo') == [CallBegan("add"), Arguments('{"a": "lo')]
    assert one.feed("ng") == [Arguments("ng")]


# --- plans ------------------------------------------------------------------------------------------------------

MODEL = Model(
    name="m",
    max_context_tokens=512,
    max_new_tokens=100,
    vocab_size=300,
    eos_token_ids=(1,),
    has_chat_template=True,
    tool_format="hermes",
)
ADD_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    Tool.model_validate(
        {"type": "function", "function": {"name": "add", "parameters": ADD_PARAMETERS, "strict": True}}
    ),
    Tool.model_validate({"type": "function", "function": {"name": "get", "description": "gets"}}),
]


def named(name: str) -> NamedChoice:
    return NamedChoice.model_validate({"type": "function", "function": {"name": name}})


def test_none_shows_no_tools() -> None:
    assert plan_tools(TOOLS, "none", MODEL, is_parallel=True, is_thinking=True) is None
    assert plan_tools([], "auto", MODEL, is_parallel=True, is_thinking=True) is None


def test_the_template_gets_tools_without_strict() -> None:
    plan = plan_tools(TOOLS, None, MODEL, is_parallel=True, is_thinking=True)
    assert plan is not None
    assert plan.tools == [
        {"type": "function", "function": {"name": "add", "parameters": ADD_PARAMETERS}},
        {"type": "function", "function": {"name": "get", "description": "gets"}},
    ]
    assert (dict(plan.options), plan.most_calls) == ({}, None)


def test_a_named_function_s_schema_is_the_grammar() -> None:
    plan = plan_tools(TOOLS, named("add"), MODEL, is_parallel=True, is_thinking=True)
    assert plan is not None
    assert plan.options == {"json_schema": ADD_PARAMETERS}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    other = plan_tools(TOOLS, named("get"), MODEL, is_parallel=True, is_thinking=True)
    assert other is not None
    assert other.options == {"json_schema": nothing}


@pytest.mark.parametrize(("is_parallel", "most"), [(True, 16), (False, 1)])
def test_required_is_an_array_of_calls(is_parallel: bool, most: int) -> None:
    plan = plan_tools(TOOLS, "required", MODEL, is_parallel=is_parallel, is_thinking=True)
    assert plan is not None
    schema = plan.options["json_schema"]
    assert (schema["minItems"], schema["maxItems"]) == (1, most)
    assert [one["properties"]["name"] for one in schema["items"]["anyOf"]] == [{"const": "add"}, {"const": "get"}]


def test_references_point_to_the_moved_schema() -> None:
    parameters = {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "item": {"$ref": "#/$defs/item"}, "$ref": {"type": "string"}},
        "$defs": {"item": {"type": "integer"}},
    }
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    schema = calls_schema([tool], 2)
    assert schema["items"]["properties"]["arguments"] == {"$ref": "#/$defs/tool0"}
    assert schema["$defs"]["tool0"]["properties"] == {
        "child": {"$ref": "#/$defs/tool0"},
        "item": {"$ref": "#/$defs/tool0/$defs/item"},
        "$ref": {"type": "string"},
    }


def test_only_references_of_a_tools_schema_are_moved() -> None:
    data = {"$ref": "#/$defs/item", "$id": "x"}
    parameters = {
        "$id": "https://example.org/tools/f",
        "type": "object",
        "properties": {
            "by_id": {"$ref": "other"},
            "by_anchor": {"$ref": "#here"},
            "fixed": {"const": data, "enum": [data], "default": data, "examples": [data]},
        },
        "$defs": {
            "item": {"$anchor": "here", "type": "integer"},
            "part": {
                "$id": "other",
                "properties": {"a": {"$ref": "#/$defs/deep"}},
                "$defs": {"deep": {"type": "null"}},
            },
        },
    }
    moved = calls_schema([function("f", parameters), function("g", parameters)], 2)["$defs"]["tool1"]
    assert moved["properties"] == {
        "by_id": {"$ref": "#/$defs/tool1/$defs/part"},
        "by_anchor": {"$ref": "#/$defs/tool1/$defs/item"},
        "fixed": parameters["properties"]["fixed"],
    }
    assert moved["$defs"]["part"]["properties"]["a"] == {"$ref": "#/$defs/tool1/$defs/part/$defs/deep"}


def test_a_reference_that_leads_out_of_a_tools_schema_is_refused() -> None:
    tool = function("f", {"properties": {"a": {"$ref": "https://example.org/b"}}})
    with pytest.raises(
        InvalidRequest, match=r"tools\[0\]\.function\.parameters: got .*https://example.org/b.*nothing is fetched"
    ):
        calls_schema([tool], 2)


def test_the_schemas_of_tools_are_bounded_before_they_are_rewritten() -> None:
    tool = function("f", {"properties": {f"a{index}": {"$ref": "#"} for index in range(5000)}})
    with pytest.raises(InvalidRequest, match=r"tools: got \d+ bytes of parameters, expected at most 65536 bytes"):
        calls_schema([tool], 2)


def function(name: str, parameters: dict[str, Any]) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


@pytest.mark.parametrize(
    ("tools", "choice", "model_format", "field"),
    [
        ([*TOOLS, TOOLS[0]], "auto", "hermes", "tools"),
        ([], "required", "hermes", "tool_choice"),
        ([], named("add"), "hermes", "tool_choice"),
        (TOOLS, named("nobody"), "hermes", "tool_choice"),
        (TOOLS, "auto", "other", "tool_choice"),
        (TOOLS, "auto", "", "takes no tools"),
        (TOOLS, "required", "", "takes no tools"),
    ],
)
def test_impossible_choices_are_rejected(tools: list[Tool], choice: Any, model_format: str, field: str) -> None:
    model = Model(**{**{name: getattr(MODEL, name) for name in Model.__slots__}, "tool_format": model_format})
    with pytest.raises(InvalidRequest, match=field):
        plan_tools(tools, choice, model, is_parallel=True, is_thinking=True)


def test_deltas_add_up_to_the_message() -> None:
    plan = plan_tools(TOOLS, "auto", MODEL, is_parallel=True, is_thinking=True)
    assert plan is not None
    tools = AnswerTools(plan)
    text = f"Hm.<tool_call>{ADD}</tool_call><tool_call>{GET}</tool_call>"
    found = message([*(delta for char in text for delta in tools.feed(char)), *tools.end()])
    assert (found["content"], tools.num_calls) == ("Hm.", 2)
    assert [one["function"]["name"] for one in found["tool_calls"]] == ["add", "get"]
    assert [json.loads(one["function"]["arguments"]) for one in found["tool_calls"]] == [{"a": 1, "b": {"c": "}"}}, {}]
    assert len({one["id"] for one in found["tool_calls"]}) == 2


def test_calls_over_the_limit_are_dropped() -> None:
    plan = plan_tools(TOOLS, "auto", MODEL, is_parallel=False, is_thinking=True)
    assert plan is not None
    tools = AnswerTools(plan)
    found = message([*tools.feed(f"<tool_call>{ADD}</tool_call><tool_call>{GET}</tool_call>"), *tools.end()])
    assert [one["function"]["name"] for one in found["tool_calls"]] == ["add"]

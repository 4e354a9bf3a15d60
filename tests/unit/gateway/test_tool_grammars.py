"""Grammars of calls or an answer by a schema: what they allow is what the readers find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pdserve.core.grammar import Grammar, GrammarKind, choice
from pdserve.gateway.api.request_models import Tool
from pdserve.gateway.tools.grammars import terminal
from pdserve.gateway.tools.plan import AnswerTools, ToolPlan, message, plan_tools
from pdserve.structured import checker
from pdserve.structured.checker import reason_against
from pdserve.structured.compile import Compiler
from tests.support.tooled_model import BUNDLED
from tests.unit.gateway.test_tools import MODEL

ADD = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/$defs/number"},
        "how": {"type": "string", "enum": ["fast", "é"]},
        "why": {"type": "string"},
    },
    "required": ["a"],
    "$defs": {"number": {"type": "integer", "maximum": 9}},
    "additionalProperties": False,
}
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "add", "parameters": ADD}}),
    Tool.model_validate({"type": "function", "function": {"name": "stop"}}),
]
ANSWER = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
XML = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n{}</function>\n</tool_call>"
ALLOWED: dict[str, list[tuple[str, list[tuple[str, Any]]]]] = {
    "hermes": [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [("add", {"a": 1})]),
        (
            '<tool_call>{"name": "stop", "arguments": {}}</tool_call>\n<tool_call>\n'
            '{"name": "add", "arguments": {"a": 1, "how": "fast"}}\n</tool_call>',
            [("stop", {}), ("add", {"a": 1, "how": "fast"})],
        ),
        ('{"text": "<tool_call>{}</tool_call>"}', []),
    ],
    "llama3": [
        ('{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        (
            '{"name": "stop", "parameters": {}}; {"name": "add", "parameters": {"a": 9}}',
            [("stop", {}), ("add", {"a": 9})],
        ),
        ('{"text": "so"}', []),
    ],
    "qwen3_coder": [
        (XML.format(1, ""), [("add", {"a": 1})]),
        (XML.format(1, "<parameter=how>\né\n</parameter>\n"), [("add", {"a": 1, "how": "é"})]),
        (XML.format(1, "<parameter=why>\na <b>\n\nc\n</parameter>\n"), [("add", {"a": 1, "why": "a <b>\n\nc"})]),
        (
            "<tool_call>\n<function=stop>\n</function>\n</tool_call>\n" + XML.format(2, ""),
            [("stop", {}), ("add", {"a": 2})],
        ),
        ('{"text": "<function=stop></function>"}', []),
    ],
    "mistral": [('[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]), ('{"text": "[]"}', [])],
    "other": [('[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]), ('{"text": "[]"}', [])],
}
FORBIDDEN = {
    "hermes": [
        '<tool_call>{"name": "add", "arguments": {"a": 10}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "none", "arguments": {}}</tool_call>',
        '{"text": 5}',
        "so",
    ],
    "llama3": ['{"name": "add", "parameters": {"a": 10}}', '{"name": "stop", "parameters": {}}, {', "so"],
    "qwen3_coder": [XML.format(10, ""), XML.format("x", ""), XML.format(1, "<parameter=how>\nslow\n</parameter>\n")],
    "mistral": ["[]", '{"text": 5}'],
    "other": ["[]", '{"text": 5}'],
}


def plan(form: str, *, is_parallel: bool = True, answer: Any = ANSWER) -> ToolPlan:
    model = type(MODEL)(**{**{name: getattr(MODEL, name) for name in MODEL.__slots__}, "tool_format": form})
    found = plan_tools(TOOLS, "auto", model, is_parallel=is_parallel, is_thinking=True, answer=answer)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts the CPU time of the whole process, which has other threads here."""
    monkeypatch.setattr(checker, "MAX_COMPILE_S", 60.0)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    config = json.loads((BUNDLED / "config.json").read_text())
    return Compiler(BUNDLED, config["vocab_size"], [config["eos_token_id"]])


def is_allowed(compiler: Compiler, grammar: str, text: str) -> bool:
    matcher = compiler.compile(Grammar(GrammarKind.LARK, grammar))
    ids = Tokenizer.from_file(str(Path(BUNDLED) / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("form", ALLOWED)
def test_what_a_grammar_allows_is_what_its_reader_finds(compiler: Compiler, form: str) -> None:
    one = plan(form)
    grammar = one.options["grammar"]
    assert reason_against(compiler, Grammar(GrammarKind.LARK, grammar)) is None
    for text, calls in ALLOWED[form]:
        assert is_allowed(compiler, grammar, text), text
        tools = AnswerTools(one)
        found = message([*(delta for char in text for delta in tools.feed(char)), *tools.end()])
        functions = [call["function"] for call in found.get("tool_calls", ())]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
        assert found["content"] == (None if calls else text)
    for text in FORBIDDEN[form]:
        assert not is_allowed(compiler, grammar, text), text


@pytest.mark.parametrize("form", ["hermes", "llama3", "qwen3_coder"])
def test_one_call_is_the_most_without_parallel_calls(compiler: Compiler, form: str) -> None:
    grammar = plan(form, is_parallel=False).options["grammar"]
    assert [is_allowed(compiler, grammar, text) for text, _ in ALLOWED[form]] == [
        len(calls) < 2 for _, calls in ALLOWED[form]
    ]


OTHER_ANSWERS = [
    (choice(["yes", '"<no>"\n', "[é]"]), ["yes", '"<no>"\n', "[é]"], ["", "ye", "yes "]),
    (Grammar(GrammarKind.REGEX, r"[<a/]{2}\n\/"), ["<a\n/", "//\n/"], ["a\n/", "<a\n\\/"]),
    (Grammar(GrammarKind.REGEX, "a\nb|\\[c?"), ["a\nb", "[c", "["], ["ab", "a\\nb"]),
]


@pytest.mark.parametrize("form", ALLOWED)
@pytest.mark.parametrize(("answer", "allowed", "forbidden"), OTHER_ANSWERS)
def test_an_answer_may_be_a_choice_or_a_regex(
    compiler: Compiler, form: str, answer: Grammar, allowed: list[str], forbidden: list[str]
) -> None:
    one = plan(form, answer=terminal(answer))
    grammar = one.options["grammar"]
    assert reason_against(compiler, Grammar(GrammarKind.LARK, grammar)) is None
    [(call, _), *_] = ALLOWED[form]
    assert is_allowed(compiler, grammar, call)
    for text in allowed:
        assert is_allowed(compiler, grammar, text), text
        tools = AnswerTools(one)
        found = message([*(delta for char in text for delta in tools.feed(char)), *tools.end()])
        assert (found["content"], "tool_calls" in found) == (text, False)
    for text in forbidden:
        assert not is_allowed(compiler, grammar, text), text

"""Values that a message may lack, and arguments of calls, in the form that a chat template takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.text.chat import EFFORTS, ChatTemplate, Message, ToolCall, compile_templates, read_templates

CALL = "{{ call.function.name }}:"
CALLS = "{% for call in m.tool_calls or [] %}"
AS_JSON = "{% for m in messages %}{{ m.content or '' }}" + CALLS + CALL + "{{ call.function.arguments | tojson }}"
AS_TEXT = "{% for m in messages %}{{ m.content or '' }}" + CALLS + "{{ call.function.name + call.function.arguments }}"
AS_EITHER = (
    "{% for m in messages %}{{ m.content or '' }}" + CALLS + CALL + "{% if call.function.arguments is string %}"
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}"
)
AS_ITEMS = (
    "{% for m in messages %}{{ m.content or '' }}"
    + CALLS
    + CALL
    + "{% for key, value in call.function.arguments.items() %}"
    "{{ key }}={{ value }};{% endfor %}"
)
PRINTED = "{% for m in messages %}{{ m.content or '' }}" + CALLS + CALL + "{{ call.function.arguments }}"
END = "{% endfor %}{% endfor %}{{ '' if tools else '' }}"


def talk(arguments: str, content: str | None = None) -> list[Message]:
    return [Message("user", "?"), Message("assistant", content, (ToolCall("c1", "add", arguments),))]


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        (AS_JSON, '{"a":1}', '?add:{"a": 1}'),
        (AS_EITHER, '{"a":1}', '?add:{"a": 1}'),
        (AS_TEXT, '{"a":1}', '?add{"a":1}'),
        (AS_ITEMS, '{"a":1}', "?add:a=1;"),
        (PRINTED, '{"a":true}', '?add:{"a":true}'),  # not {'a': True}
        *((source, empty, expected) for empty in ("", " ", "null") for source, expected in
          ((AS_JSON, "?add:{}"), (AS_TEXT, "?add{}"), (AS_EITHER, "?add:{}"), (AS_ITEMS, "?add:"))),
        *((AS_TEXT, cut, "?add" + cut) for cut in ('{"a": 1', "[1]", "nul", '"x"')),
        *((AS_EITHER, cut, "?add:" + cut) for cut in ('{"a": 1', "[1]", "nul", '"x"')),
        (AS_JSON, '{"a": 1', '?add:"{\\"a\\": 1"'),
        (AS_EITHER, "[" * 100_000, "?add:" + "[" * 100_000),
    ],
)  # fmt: skip
def test_arguments_have_the_form_that_the_template_takes(source: str, arguments: str, expected: str) -> None:
    assert ChatTemplate(source + END).render(talk(arguments)) == expected


def test_cut_arguments_are_rejected_by_their_place_where_a_template_takes_only_objects() -> None:
    talked = [*talk("{}"), Message("assistant", "", (ToolCall("c1", "a", "{}"), ToolCall("c2", "b", '{"a": 1')))]
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(AS_ITEMS + END).render(talked)
    assert caught.value.field == "chat.messages[2].tool_calls[1].function.arguments"
    assert "a JSON object" in caught.value.message


@pytest.mark.parametrize(
    ("test", "null", "empty"),
    [
        ("m.content is none", "N", ""),
        ("m['content'] is none", "N", ""),
        ("m.content is none and m.tool_calls", "N", ""),
        ("m.content == ''", "", "N"),
    ],
)
def test_a_missing_content_stays_null(test: str, null: str, empty: str) -> None:
    source = "{% for m in messages %}{% if " + test + " %}N{% endif %}" + CALLS + CALL
    template = ChatTemplate(source + "{{ call.function.arguments | tojson }}" + END)
    assert template.render(talk("{}")) == f"{null}add:{{}}"
    assert template.render(talk("{}", "")) == f"{empty}add:{{}}"


def test_a_template_that_shows_calls_only_without_content_shows_them() -> None:
    """As DeepSeek's do, which join the arguments as text."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}" + CALLS
        + "{{ call.function.name + '<' + call.function.arguments + '>' }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ '' if tools else '' }}"
    )  # fmt: skip
    assert ChatTemplate(source).render(talk('{"a": 1}')) == '?add<{"a": 1}>'


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ m.content }}", "?add:{}"),  # not the text None
        ("{{ m.content + '' }}", "?add:{}"),
        ("{{ m.content.strip() }}", "?add:{}"),
        ("{% if '</think>' in m.content %}T{% endif %}{{ m.content }}", "?add:{}"),
        ("{% if m.content is defined %}{{ m.content }}{% endif %}", "?add:{}"),
    ],
)
def test_a_template_that_cannot_take_null_gets_none(shown: str, expected: str) -> None:
    source = "{% for m in messages %}" + shown + CALLS + CALL + "{{ call.function.arguments | tojson }}" + END
    assert ChatTemplate(source).render(talk("{}")) == expected


def test_a_template_of_parts_gets_parts() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(source).render([Message("user", "hello")]) == "hello"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_name_that_the_template_reads(name: str) -> None:
    for source in (f"{{{{ messages[0].{name} }}}}", f"{{{{ messages[0]['{name}'] }}}}"):
        assert ChatTemplate(source).render([Message("assistant", "x", reasoning_content="hm")]) == "hm"


def test_optional_values_stay_absent_or_empty() -> None:
    names = ("name", "tool_call_id", "reasoning_content", "tool_calls", "content")
    states = "".join(
        f"{{{{ '-' if m.{name} is undefined else 'null' if m.{name} is none else m.{name} | length }}}} "
        for name in names
    )
    template = ChatTemplate("{% for m in messages %}" + states + "{% endfor %}{{ tools is none }}")
    assert template.render([Message("user", "")]) == "- - - - 0 True"
    assert template.render([Message("tool", "ab", (), "", "", "")]) == "0 0 0 - 2 True"


def test_a_template_error_names_the_message() -> None:
    source = (
        "{%- macro show(one) %}{{ one.content + 'x' if one.role != 'tool' else one.content.nothing.at_all }}"
        "{%- endmacro %}{% for message in messages %}{{ show(message) }}{% endfor %}"
    )
    talked = [Message("user", "a"), Message("assistant", "b"), Message("tool", "c"), Message("user", "d")]
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render(talked)
    assert caught.value.field == "chat.messages[2]"


# --- several templates

DEFAULT = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL_USE = "<tool_call>{{ tools | length }}" + AS_TEXT + END


@pytest.mark.parametrize("is_in_files", [False, True])
def test_requests_with_tools_use_the_template_for_tools(tmp_path: Path, is_in_files: bool) -> None:
    if is_in_files:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
        (tmp_path / "chat_template.jinja").write_text(DEFAULT)
    else:
        named = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOL_USE}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    sources = read_templates(tmp_path)
    assert sources is not None
    template = compile_templates(sources)
    assert template.tool_format == "hermes"
    assert template.render([Message("user", "hi")]) == "hi"
    tool = '{"type": "function", "function": {"name": "add"}}'
    assert template.render(talk('{"a":1}'), [tool]) == '<tool_call>1?add{"a":1}'  # its own form of arguments


# --- reasoning effort

EFFORT = "{{ messages[0].content }}"


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_the_effort_sets_the_template_s_switch(switch: str) -> None:
    template = ChatTemplate(EFFORT + "{{ " + switch + " }}")
    talked = [Message("user", "x")]
    assert template.render(talked) == "x"
    seen = {effort: template.render(talked, effort=effort) for effort in EFFORTS}
    assert seen.pop("none") == "xFalse"
    assert set(seen.values()) == {"xTrue"}
    assert template.render(talked, (), json.dumps({switch: True}), "none") == "xTrue"


def test_the_effort_itself_goes_to_a_template_that_reads_it() -> None:
    template = ChatTemplate(EFFORT + "{{ reasoning_effort }}{{ enable_thinking }}")
    assert template.render([Message("user", "x")], effort="high") == "xhighTrue"
    assert ChatTemplate(EFFORT).render([Message("user", "x")], effort="high") == "x"
    with pytest.raises(InvalidRequest, match="reasoning_effort"):
        ChatTemplate(EFFORT).render([Message("user", "x")], effort="much")

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.text.chat import ChatTemplate, Message, TemplateSources, ToolCall, compile_templates, read_templates

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
HELPERS = (
    "{%- set ns = namespace(count=0) -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}"
    "{%- set ns.count = ns.count + 1 -%}{{ {'text': m.content} | tojson }}{%- endfor -%}"
    "{{ ns.count }} {{ strftime_now('%Y') | length }} {{ 'tools' if tools else 'none' }}"
)
TALK = [Message("user", " Hi <there> "), Message("assistant", "Hello"), Message("user", "Bye")]


def write(folder: Path, config: dict[str, object]) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path) -> ChatTemplate:
    sources = read_templates(folder)
    assert isinstance(sources, TemplateSources)
    return compile_templates(sources)


@pytest.mark.parametrize("source", [CHATML, STRICT, HELPERS])
def test_rendering_matches_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    named = {"bos_token": "<s>", "eos_token": "</s>"}
    plain = [{"role": one.role, "content": one.content} for one in TALK]
    expected = render_jinja_template([plain], chat_template=source, add_generation_prompt=True, **named)
    text = ChatTemplate(source, named).render(TALK)
    assert [text] == (expected[0] if isinstance(expected, tuple) else expected)


def test_a_template_error_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(STRICT, {"bos_token": "<s>"}).render([Message("assistant", "I begin")])
    assert caught.value.field == "chat.messages[0]"
    assert "must alternate" in caught.value.message


@pytest.mark.parametrize(("messages", "field"), [([], "chat.messages"), ([Message("", "x")], "chat.messages[0].role")])
def test_messages_without_content_or_role_are_rejected(messages: list[Message], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.field == field


def test_a_long_prompt_is_a_model_error() -> None:
    with pytest.raises(ModelError):
        ChatTemplate("{% for i in range(1000) %}{{ 'x' * 1000 }}{% endfor %}", max_chars=100_000).render(TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% include 'secret' %}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises((InvalidRequest, ModelError)):
        ChatTemplate(source).render(TALK)


def test_a_template_that_does_not_parse_is_a_model_error() -> None:
    with pytest.raises(ModelError) as caught:
        ChatTemplate("{% for %}")
    assert caught.value.field == "chat_template"


def test_a_template_file_overrides_the_config(tmp_path: Path) -> None:
    assert read_templates(tmp_path) is None
    write(tmp_path, {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}config"})
    template = loaded(tmp_path)
    assert template.render(TALK) == "<s>config"
    named = [{"name": "default", "template": "one of several"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, {"chat_template": named})
    template = loaded(tmp_path)
    assert template.render(TALK) == "one of several"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = loaded(tmp_path)
    assert template.render(TALK) == "file"


HERMES = (
    "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '</tools> <tool_call></tool_call>' }}{%- endif %}"
    "{%- for message in messages %}{{- '\\n' + message.role + ': ' + message.content }}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{%- set called = {'name': call.function.name, 'arguments': call.function.arguments} %}"
    "{{- '<tool_call>' + (called | tojson) + '</tool_call>' }}"
    "{%- endfor %}{%- endif %}{%- if message.tool_call_id %}{{- ' for ' + message.tool_call_id }}{%- endif %}"
    "{%- endfor %}"
)
TOOL = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'


def test_tools_and_their_calls_are_rendered() -> None:
    template = ChatTemplate(HERMES)
    talk = [
        Message("user", "2+3?"),
        Message("assistant", "", tool_calls=(ToolCall("c1", "add", '{"a": 2, "b": 3}'),)),
        Message("tool", "5", tool_call_id="c1"),
    ]
    assert template.render(talk, [TOOL]) == (
        f"<tools>\n{TOOL}</tools> <tool_call></tool_call>\nuser: 2+3?\nassistant: "
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>\ntool: 5 for c1'
    )
    assert template.tool_format == "hermes"


def test_a_template_without_tools_rejects_them() -> None:
    template = ChatTemplate(CHATML)
    assert template.tool_format == ""
    with pytest.raises(InvalidRequest, match="takes no tools"):
        template.render(TALK, [TOOL])


def test_tools_are_counted_and_must_be_objects() -> None:
    with pytest.raises(InvalidRequest, match="129 tools, expected at most 128"):
        ChatTemplate(HERMES).render(TALK, [TOOL] * 129)
    for broken in ("[]", "{", "[" * 100_000):
        with pytest.raises(InvalidRequest, match="tools"):
            ChatTemplate(HERMES).render(TALK, [broken])


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ('"parameters"', "llama3"),
        ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3_coder"),
        ("<seed:tool_call><function=f><parameter=p>", "other"),
        ("<function=f>{}</function>", "other"),
        ("unknown", "other"),
    ],
)
def test_the_template_shows_the_form_of_tool_calls(mark: str, expected: str) -> None:
    assert ChatTemplate("{% if tools %}" + mark + "{% endif %}").tool_format == expected


SWITCHES = (
    "{{ messages[0].content }}{{ messages[0].reasoning_content }}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ level }}"
)


def test_a_request_sets_what_the_template_reads() -> None:
    template = ChatTemplate(SWITCHES, {"bos_token": "<s>"})
    talk = [Message("user", "hi", reasoning_content="-hm-")]
    assert template.render(talk) == "hi-hm-"
    assert template.render(talk, arguments='{"enable_thinking": false, "level": 3}') == "hi-hm-<think></think>3"
    assert template.render(talk, arguments='{"enable_thinking": true, "level": "<b>"}') == "hi-hm-<b>"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('{"thinking": true}', "reads: enable_thinking, level"),
        ('{"messages": "x"}', "reads: enable_thinking, level"),
        ('{"_pdserve_clock": 1}', "reads: enable_thinking, level"),
        ('{"bos_token": "x"}', "reads: enable_thinking, level"),
        ('{"level": [1]}', "a text, a number or a boolean"),
        ('{"level": null}', "a text, a number or a boolean"),
        ("[]", "a JSON object"),
        ('{"level": "' + "x" * 4096 + '"}', "at most 4096 characters"),
    ],
)
def test_a_request_sets_nothing_else(arguments: str, says: str) -> None:
    source = SWITCHES + "{{ bos_token }}{{ raise_exception }}"
    with pytest.raises(InvalidRequest, match="chat_template_kwargs") as caught:
        ChatTemplate(source, {"bos_token": "<s>"}).render([Message("user", "hi")], arguments=arguments)
    assert says in caught.value.message


def test_a_template_that_cannot_be_read_is_a_model_error(tmp_path: Path) -> None:
    folder = write(tmp_path, {"chat_template": [{"name": ["default"], "template": "{{ 1 }}"}]})
    assert read_templates(folder) is None
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="UTF-8"):
        read_templates(folder)

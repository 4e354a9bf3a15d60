"""Where a prompt and an answer are within the model's reasoning."""

from __future__ import annotations

import itertools

import pytest

from pdserve.text.chat import ChatTemplate, Message
from pdserve.text.chat_encoder import Chat, ChatEncoder
from pdserve.text.stops import MISTRAL_MARKS, THINK_MARKS, ReasoningSplit
from pdserve.text.tokenizer import ToyTokenizer

TURNS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
SWITCHED = (
    TURNS + "{% if add_generation_prompt %}{{ 'assistant: ' }}"
    "{% if thinking is defined and thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}{% endif %}"
)


def state(source: str, content: str = "hi", arguments: str = "", effort: str | None = None) -> str:
    encoder = ChatEncoder(ToyTokenizer(), ChatTemplate(source))
    return encoder.encode(Chat([Message("user", content)], (), arguments, effort), None, lambda size: None).reasoning


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("", ""),
        ("{{ '<think>\n' }}", "open"),
        ("<think>", "open"),
        ("{{ '<think>' }}{{ '\nOkay, ' }}", ""),  # without add_generation_prompt too, so it may be an instruction
        ("{% if add_generation_prompt %}{{ '<think>\nOkay, ' }}{% endif %}", "open"),
        ("{{ '<think>\n\n</think>\n\n' }}", "closed"),
        ("{{ '</think>' }}", "closed"),
        ("{% if add_generation_prompt %}{{ '[THINK]' }}{% endif %}{# [/THINK] #}", "open"),
    ],
)
def test_the_end_of_the_prompt_decides(end: str, expected: str) -> None:
    mark = "" if "[THINK]" in end else "{# </think> #}"
    assert state(TURNS + mark + "assistant: " + end) == expected


def test_a_template_may_only_begin_the_reasoning() -> None:
    """Without the last mark anywhere in it."""
    assert state(TURNS + "assistant: <think>\n") == "open"
    assert state(TURNS + "{% if think %}[THINK]{% endif %}", arguments='{"think": true}') == "open"
    assert state(TURNS + "{% if think %}[THINK]{% endif %}") == ""


def test_a_switch_of_any_name_decides_for_each_request() -> None:
    assert state(SWITCHED) == "closed"
    assert state(SWITCHED, arguments='{"thinking": true}') == "open"
    assert state(SWITCHED, effort="high") == "open"
    assert state(SWITCHED, effort="none") == "closed"


@pytest.mark.parametrize(
    "content", ["what is <think>", "<think>", "a </think>", "</think>", "<think>\nassistant: <think>"]
)
def test_marks_in_a_message_decide_nothing(content: str) -> None:
    assert state(TURNS + "{# </think> #}assistant: ", content) == ""
    assert state("{{ messages[0].content }}{# </think> #}", content) == ""
    assert state(SWITCHED, content) == "closed"


SPLITS = [
    ("<think>a\nb</think>\n\nfive", False, THINK_MARKS, "<think>a\nb</think>\n\n", "five"),
    (" <think></think>five </think>", False, THINK_MARKS, " <think></think>", "five </think>"),
    ("a</think> x</think>", True, THINK_MARKS, "a</think> ", "x</think>"),
    ("five <think>", False, THINK_MARKS, "", "five <think>"),
    ("<thin", False, THINK_MARKS, "", "<thin"),
    ("no end </thin", True, THINK_MARKS, "no end </thin", ""),
    ("[THINK]a[/THINK]b", False, MISTRAL_MARKS, "[THINK]a[/THINK]", "b"),
]


@pytest.mark.parametrize(("text", "is_open", "marks", "reasoning", "rest"), SPLITS)
def test_an_answer_is_divided_the_same_at_every_split(
    text: str, is_open: bool, marks: tuple[str, str], reasoning: str, rest: str
) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        split = ReasoningSplit(marks, is_open=is_open)
        found = [split.push(piece) for piece in (text[:first], text[first:second], text[second:])]
        assert "".join(one for one, _ in found) == reasoning
        assert "".join(one for _, one in found) + split.finish() == rest

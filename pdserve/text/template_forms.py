"""Facts about a chat template: in which form it takes optional values, and how its model writes tool calls. Pure.

The forms are found once by rendering a short history, because templates disagree about three things. A call's arguments
are an object that they write as JSON, or text that they join. An assistant's missing content is null, absent or an
empty text. A message's content is text, or a list of parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Content = Literal["null", "absent", "empty"]
Render = Callable[[Sequence[dict[str, Any]], bool], str | None]  # messages, and whether there are tools; None: refused

PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe_call",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}
_ARGUMENTS: Final = {"probe_key": "it's a probe value"}
_TEXT: Final = json.dumps(_ARGUMENTS)
_CALL_ID: Final = "probe0001"  # nine letters and digits, as Mistral's templates require
_CONTENTS: Final[tuple[Content, ...]] = ("null", "absent", "empty")


@dataclass(frozen=True, slots=True)
class TemplateForms:
    takes_text: bool = False  # arguments that are text appear in the prompt
    prefers_text: bool = False  # arguments that are an object do not, or not as JSON
    no_content: Content = "null"  # of an assistant
    takes_parts: bool = False  # only content that is a list of parts appears in the prompt


def find_forms(render: Render) -> TemplateForms:
    takes_parts = _takes_parts(render)
    for turns, has_tools in ((3, True), (5, True), (2, True), (3, False), (5, False), (2, False)):

        def rendered(content: Content, arguments: Any, turns: int = turns, has_tools: bool = has_tools) -> str | None:
            return render(_history(content, arguments, takes_parts)[:turns], has_tools)

        for arguments in (_ARGUMENTS, _TEXT):
            for content in _CONTENTS:
                if _is_shown(rendered(content, arguments), rendered("empty", arguments)):
                    prefers_text = arguments is _TEXT
                    takes_text = prefers_text or _is_shown(rendered(content, _TEXT), rendered("empty", _TEXT))
                    return TemplateForms(takes_text, prefers_text, content, takes_parts)
    for content in _CONTENTS:  # the template shows no calls
        text = render(_history(content, _ARGUMENTS, takes_parts)[:2], False)
        if text is not None and not _has_null(text, render(_history("empty", _ARGUMENTS, takes_parts)[:2], False)):
            return TemplateForms(no_content=content, takes_parts=takes_parts)
    return TemplateForms(takes_parts=takes_parts)


def _is_shown(text: str | None, with_empty: str | None) -> bool:
    """Whether the call and its arguments are in the prompt, and neither these nor a null are written as Python does."""
    if text is None or _has_null(text, with_empty):
        return False
    is_there = all(one in text for one in ("probe_call", "probe_key", "a probe value"))
    return is_there and str(_ARGUMENTS) not in text


def _has_null(text: str, with_empty: str | None) -> bool:
    return with_empty is not None and text.count("None") > with_empty.count("None")


def _takes_parts(render: Render) -> bool:
    parts = [{"type": "text", "text": "probe text"}]
    as_text = render([{"role": "user", "content": "probe text"}], False)
    if as_text is not None and "probe text" in as_text:
        return False
    as_parts = render([{"role": "user", "content": parts}], False)
    return as_parts is not None and "probe text" in as_parts and "{" not in as_parts


def _history(content: Content, arguments: Any, takes_parts: bool) -> list[dict[str, Any]]:
    def said(text: str) -> Any:
        return [{"type": "text", "text": text}] if takes_parts else text

    call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe_call", "arguments": arguments}}
    calling: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if content != "absent":
        calling["content"] = None if content == "null" else ""
    return [
        {"role": "user", "content": said("probe")},
        calling,
        {"role": "tool", "tool_call_id": _CALL_ID, "name": "probe_call", "content": said("result")},
        {"role": "assistant", "content": said("answer")},
        {"role": "user", "content": said("probe")},
    ]


# --- format of tool calls -------------------------------------------------------------------------------------
# Recognised by texts in the template.

#: The texts in a template that together only templates of this family have, by format.
_MARKS: Final = (
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),  # Qwen3-Coder and Qwen3.5
    ("other", ("<function=",)),  # other forms of XML
    ("hermes", ("<tool_call>",)),  # Hermes, Qwen2.5 and Qwen3
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('"parameters"',)),  # Llama 3.x: {"name": .., "parameters": ..}
)


def tool_format(template: str) -> str:
    """Of a template that takes tools; `other` if it is no known one."""
    return next((name for name, marks in _MARKS if all(mark in template for mark in marks)), "other")

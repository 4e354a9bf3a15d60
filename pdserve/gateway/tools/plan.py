"""Converts the tool fields of a request to options of the SDK's call, and the answer's text to the calls in it. Pure.

With `auto` the model decides whether to call; the form of its calls is found from its chat template. `required` and a
named function are enforced by a grammar, so their arguments always validate, and the answer is JSON in our own form.
They win over a schema for the answer. With `auto` and such a schema a grammar allows either
(pdserve/gateway/tools/grammars.py). The reader also splits reasoning from the rest of the answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, final

from pydantic_core import to_json

from pdserve.client.results import Model
from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import PointerChars, localized
from pdserve.core.types import MAX_TOOLS_BYTES, require_at_most
from pdserve.gateway.api.request_models import NamedChoice, Tool
from pdserve.gateway.tools.grammars import MAX_CALLS, calls_or_answer, calls_schema, parameters_of
from pdserve.gateway.tools.readers import ArrayReader, FirstCharReader, NamedReader, make_reader
from pdserve.gateway.tools.reading import SPACE, Arguments, CallBegan, Event, Mark, Reader, Reasoning, Text, joined

# --- reader of reasoning --------------------------------------------------------------------------------------
# Reasoning is between marks, at the beginning of an answer.


@final
class TextReader(Reader):
    """An answer without calls."""

    def feed(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def end(self) -> list[Event]:
        return []


class _Place(Enum):
    BEFORE = "before the first mark"
    INSIDE = "within the reasoning"
    AFTER = "in the space after the last mark"
    REST = "in the rest"


@final
class ReasoningReader(Reader):
    """Space around the marks is dropped. The rest is read by another reader."""

    def __init__(self, rest: Reader, *, is_open: bool, marks: tuple[str, str] = ("<think>", "</think>")) -> None:
        """`is_open`: the prompt ended with the first mark, so the answer begins within the reasoning."""
        self._rest = rest
        self._place = _Place.INSIDE if is_open else _Place.BEFORE
        self._open, self._close = map(Mark, marks)
        self._space = ""  # before the first mark, or after text of the reasoning
        self._has_text = False
        self._found: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        for index, char in enumerate(text):
            if self._place is _Place.REST:
                self._found += self._rest.feed(text[index:])
                break
            self._char(char)
        return self._taken()

    def end(self) -> list[Event]:
        if self._place is _Place.BEFORE:
            self._found += self._rest.feed(self._space + self._open.rest())
        elif self._place is _Place.INSIDE:
            self._think(self._close.rest())
        self._found += self._rest.end()
        return self._taken()

    # ------------------------------------------------------------------------------------------------------------

    def _char(self, char: str) -> None:
        if self._place is _Place.BEFORE:
            self._before(char)
        elif self._place is _Place.INSIDE:
            self._think(self._close.feed(char))
            if self._close.found():
                self._place = _Place.AFTER
        elif char not in SPACE:  # AFTER
            self._place = _Place.REST
            self._found += self._rest.feed(char)

    def _before(self, char: str) -> None:
        if not self._open.held and char in SPACE:
            self._space += char
            return
        passed = self._open.feed(char)
        if self._open.found():
            self._place, self._space = _Place.INSIDE, ""
        elif passed:
            self._place = _Place.REST
            self._found += self._rest.feed(self._space + passed + self._open.rest())

    def _think(self, text: str) -> None:
        for char in text:
            if char in SPACE:
                self._space += char if self._has_text else ""
                continue
            self._found.append(Reasoning(self._space + char))
            self._space, self._has_text = "", True

    def _taken(self) -> list[Event]:
        found, self._found = joined(self._found), []
        return found


# --- plan for the tools of a request --------------------------------------------------------------------------

UNKNOWN: Final = "other"  # Model.tool_format of a template that takes tools, but shows no known form of calls
_FIRST: Final = {"hermes": "<", "qwen3_coder": "<"}  # the first character of a call; JSON begins with another
_MARKS: Final = {"tagged": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}  # of reasoning


@dataclass(frozen=True, slots=True)
class ToolPlan:
    tools: Sequence[Mapping[str, Any]]  # for the chat template
    options: Mapping[str, Any]  # of the SDK's call, beside the tools
    make_reader: Callable[[], Reader]  # of the answer after its reasoning
    most_calls: int | None = None
    has_short_ids: bool = False  # Mistral's templates take ids of nine characters only
    marks: tuple[str, str] | None = None  # of reasoning that may come before the answer
    is_open: bool = False  # the prompt ends within the reasoning, if the router does not say how it ends

    def reader(self, reasoning: str | None) -> Reader:
        """For one answer. `reasoning` is how its prompt ends: open, closed, or empty without a mark."""
        rest = self.make_reader()
        if self.marks is None or reasoning == "closed":
            return rest
        is_open = self.is_open if reasoning is None else reasoning == "open"
        return ReasoningReader(rest, is_open=is_open, marks=self.marks)


def plan_tools(
    tools: Sequence[Tool],
    choice: str | NamedChoice | None,
    model: Model,
    *,
    is_parallel: bool,
    is_thinking: bool,
    answer: Mapping[str, Any] | str | None = None,
) -> ToolPlan | None:
    """None if the answer is text alone: neither calls nor marks of reasoning. Raises InvalidRequest.

    `is_thinking`: the request does not turn the reasoning off. A template then closes it in the prompt. `answer`: the
    schema of an answer without calls, or a terminal of Lark.
    """
    form = model.reasoning_format
    is_open = is_thinking and form == "open"
    marks = _MARKS.get(form, _MARKS["tagged"]) if form else None
    names = [one.function.name for one in tools]
    if len(set(names)) != len(names):
        raise InvalidRequest("tools", "several functions of one name", "different names")
    if not tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "a choice without tools", "tools beside it")
        return ToolPlan((), _shown(form), TextReader, marks=marks, is_open=is_open) if form else None
    if not model.tool_format:
        raise InvalidRequest("tools", f"{len(tools)} tools", "none: this model's chat template takes no tools")
    check_tools_bytes(tools)
    shown = [_for_template(one) for one in tools]
    most = None if is_parallel else 1
    is_short = model.tool_format == "mistral"
    chars = PointerChars()  # of all tools of the request
    if isinstance(choice, NamedChoice):
        named = next((one for one in tools if one.function.name == choice.function.name), None)
        if named is None:
            raise InvalidRequest("tool_choice", repr(choice.function.name), "the name of one of the tools")
        options = {"json_schema": parameters_of(named)}
        return ToolPlan(shown, options, lambda: NamedReader(named.function.name), 1, is_short)
    if choice == "required":
        schema = calls_schema(tools, most or MAX_CALLS, chars)
        return ToolPlan(shown, {"json_schema": schema}, ArrayReader, most, is_short)
    parameters = {one.function.name: parameters_of(one) for one in tools}
    if model.tool_format == "qwen3_coder":  # the only form whose reader looks at the schemas
        parameters = {name: _with_pointers(one, chars) for name, one in parameters.items()}
    if answer is not None:
        grammar = calls_or_answer(model.tool_format, tools, answer, most or MAX_CALLS, chars)
        return ToolPlan(
            shown, {"grammar": grammar}, lambda: _either_reader(model.tool_format, parameters), most, is_short
        )
    if model.tool_format == UNKNOWN:
        expected = "required, a named function, or a response_format: the form of this model's calls is not known"
        raise InvalidRequest("tool_choice", "auto", expected)
    shows = _shown(model.tool_format, form)
    return ToolPlan(
        shown,
        shows,
        lambda: make_reader(model.tool_format, parameters),
        most,
        is_short,
        marks=marks,
        is_open=is_open,
    )


def check_tools_bytes(tools: Sequence[Tool]) -> None:
    """Before the schemas are copied and their references are resolved. Raises InvalidRequest."""
    require_at_most("tools", "bytes", sum(len(to_json(one)) for one in tools), MAX_TOOLS_BYTES)


def _either_reader(tool_format: str, parameters: Mapping[str, Any]) -> Reader:
    """Of an answer that is calls, or JSON, in which a mark of a call means nothing."""
    if tool_format == "llama3":
        return make_reader(tool_format, parameters)
    if first := _FIRST.get(tool_format):
        return FirstCharReader(first, make_reader(tool_format, parameters))
    return FirstCharReader("[", ArrayReader(parameters))


def _shown(*formats: str) -> dict[str, Any]:
    """Options by which a reader sees the marks of these formats, if they are special tokens."""
    return {} if {"mistral", "special"}.isdisjoint(formats) else {"skip_special_tokens": False}


def _with_pointers(parameters: dict[str, Any], chars: PointerChars) -> dict[str, Any]:
    """The types of a function's parameters are found through its references, where these can be resolved."""
    try:
        return localized(parameters, chars=chars)
    except (ValueError, RecursionError):
        return parameters


def _for_template(tool: Tool) -> dict[str, Any]:
    found: dict[str, Any] = tool.model_dump(exclude_none=True)
    found["function"].pop("strict", None)
    return found


# --- calls of one answer --------------------------------------------------------------------------------------
# As OpenAI's clients read them: whole, or as deltas.


@final
class AnswerTools:
    """Belongs to one answer."""

    def __init__(self, plan: ToolPlan, reasoning: str | None = None) -> None:
        """`reasoning`: how the prompt ends."""
        self._reader = plan.reader(reasoning)
        self._most = plan.most_calls
        self._has_short_ids = plan.has_short_ids
        self.num_calls = 0
        self._is_dropped = False  # the last call is over the limit

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The deltas that are complete after this text."""
        return self._deltas(self._reader.feed(text))

    def end(self) -> list[dict[str, Any]]:
        """After the last text, the deltas that were held back."""
        return self._deltas(self._reader.end())

    def _deltas(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        found = (self._delta(one) for one in events)
        return [one for one in found if one is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, CallBegan):
            self._is_dropped = self._most is not None and self.num_calls >= self._most
            if self._is_dropped:
                return None
            self.num_calls += 1
            call = {
                "index": self.num_calls - 1,
                "id": secrets.token_hex(5)[:9] if self._has_short_ids else f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        assert isinstance(event, Arguments)
        if self._is_dropped:
            return None
        return {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": event.text}}]}


def message(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The whole message that deltas add up to. Without text, `content` is null."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({name: part[name] for name in ("id", "type")} | {"function": dict(part["function"])})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    found: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        found["reasoning_content"] = reasoning
    return found | ({"tool_calls": calls} if calls else {})

"""Converts the tool fields of a request to options of the SDK's call and a reader for the answer. Pure.

With `auto` the model decides whether to call; the form of its calls is found from its chat template. `required` and a
named function are enforced by a grammar, so their arguments always validate, and the answer is JSON in our own form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.client.results import Model
from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import MAX_GRAMMAR_BYTES
from pdserve.core.json_schema import localized
from pdserve.gateway.request_models import NamedChoice, Tool
from pdserve.gateway.sse import to_json
from pdserve.gateway.tools.events import Reader
from pdserve.gateway.tools.readers import ArrayReader, NamedReader, make_reader
from pdserve.gateway.tools.reasoning import ReasoningReader, TextReader

MAX_CALLS: Final = 16  # of one answer with a grammar
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
    tools: Sequence[Tool], choice: str | NamedChoice | None, model: Model, *, is_parallel: bool, is_thinking: bool
) -> ToolPlan | None:
    """None if the answer is text alone: neither calls nor marks of reasoning. Raises InvalidRequest.

    `is_thinking`: the request does not turn the reasoning off. A template then closes it in the prompt.
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
    shown = [_for_template(one) for one in tools]
    most = None if is_parallel else 1
    is_short = model.tool_format == "mistral"
    if isinstance(choice, NamedChoice):
        named = next((one for one in tools if one.function.name == choice.function.name), None)
        if named is None:
            raise InvalidRequest("tool_choice", repr(choice.function.name), "the name of one of the tools")
        options = {"json_schema": _parameters(named)}
        return ToolPlan(shown, options, lambda: NamedReader(named.function.name), 1, is_short)
    if choice == "required":
        schema = calls_schema(tools, most or MAX_CALLS)
        return ToolPlan(shown, {"json_schema": schema}, ArrayReader, most, is_short)
    if not model.tool_format:
        expected = "required or a named function: the form of this model's calls is not known"
        raise InvalidRequest("tool_choice", "auto", expected)
    parameters = {one.function.name: _parameters(one) for one in tools}
    if model.tool_format == "qwen3_coder":  # the only form whose reader looks at the schemas
        parameters = {name: _with_pointers(one) for name, one in parameters.items()}
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


def _shown(*formats: str) -> dict[str, Any]:
    """Options by which a reader sees the marks of these formats, if they are special tokens."""
    return {} if {"mistral", "special"}.isdisjoint(formats) else {"skip_special_tokens": False}


def calls_schema(tools: Sequence[Tool], most_calls: int) -> dict[str, Any]:
    """The schema of an array of calls. A function's schema with references is moved to $defs, and its references are
    changed accordingly. Raises InvalidRequest if they are too long or a reference cannot be resolved."""
    definitions: dict[str, Any] = {}
    calls = []
    num_bytes = sum(len(to_json(_parameters(one))) for one in tools)
    if num_bytes > MAX_GRAMMAR_BYTES:  # checked before the schemas are rewritten
        raise InvalidRequest("tools", f"{num_bytes} bytes of parameters", f"at most {MAX_GRAMMAR_BYTES} bytes")
    for index, tool in enumerate(tools):
        parameters = _parameters(tool)
        try:
            moved = localized(parameters, f"#/$defs/tool{index}")
        except (ValueError, RecursionError) as error:
            place, expected = f"tools.{index}.function.parameters", "a schema with references to its own parts"
            raise InvalidRequest(place, str(error), expected) from None
        if moved != parameters:
            definitions[f"tool{index}"] = moved
            moved = {"$ref": f"#/$defs/tool{index}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": moved},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "maxItems": most_calls,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    return schema | ({"$defs": definitions} if definitions else {})


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _with_pointers(parameters: dict[str, Any]) -> dict[str, Any]:
    """The types of a function's parameters are found through its references, where these can be resolved."""
    try:
        return localized(parameters)
    except (ValueError, RecursionError):
        return parameters


def _for_template(tool: Tool) -> dict[str, Any]:
    found: dict[str, Any] = tool.model_dump(exclude_none=True)
    found["function"].pop("strict", None)
    return found

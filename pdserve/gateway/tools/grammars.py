"""Grammars of answers with tools: calls alone, or calls or an answer by a schema. Pure.

`required` and a named function get a JSON schema, and the answer is JSON in our own form. With `auto` and a schema
(or a choice, or a regex) for the answer, one Lark grammar allows calls in the form that the model knows from its chat
template, or such an answer. Mistral's mark is a special token, which has no text, and some models' form is unknown:
their calls are an array, as with `required`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, PointerChars, localized
from pdserve.gateway.api.request_models import Tool
from pdserve.gateway.api.sse import to_json
from pdserve.gateway.tools.xml_reader import parameter_types

MAX_CALLS: Final = 16  # of one answer with a grammar
_XML_VALUE: Final = 'xml_value[suffix="\\n</parameter>\\n"]: /(?s:.*)/\n'


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments, which are always an object. Raises InvalidRequest if they cannot be."""
    schema = tool.function.parameters
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        expected = f"the type object, because the arguments of {tool.function.name!r} are an object"
        raise InvalidRequest("tools", f"parameters of type {json.dumps(kind)}", expected)
    return {**schema, "type": "object"}


def calls_schema(tools: Sequence[Tool], most_calls: int, chars: PointerChars | None = None) -> dict[str, Any]:
    """The schema of an array of calls. A function's schema with references is moved to $defs, and its references are
    changed accordingly, and charged to `chars`. Raises InvalidRequest if they are too long or a reference cannot be
    resolved."""
    definitions, call = _call_schema(tools, "arguments", chars or PointerChars())
    schema = {"type": "array", "minItems": 1, "maxItems": most_calls, "items": call}
    return schema | ({"$defs": definitions} if definitions else {})


def calls_or_answer(
    tool_format: str, tools: Sequence[Tool], answer: Mapping[str, Any] | str, most_calls: int, chars: PointerChars
) -> str:
    """A Lark grammar: one to `most_calls` calls, or a document of the schema `answer`, or a text of this terminal.
    Raises InvalidRequest."""
    if tool_format == "hermes":
        rules = _repeated("block", most_calls)
        marks = "block: OPEN call CLOSE\nOPEN: /<tool_call>\\n?/\nCLOSE: /\\n?<\\/tool_call>\\n?/\n"
        rules += marks + _json_call(tools, "arguments", chars)
    elif tool_format == "llama3":
        rules = _repeated("call", most_calls, '"; "') + _json_call(tools, "parameters", chars)
    elif tool_format == "qwen3_coder":
        rules = _repeated("block", most_calls) + _XML_VALUE + _xml_calls(tools, chars)
    else:
        rules = f"calls: %json {json.dumps(calls_schema(tools, most_calls, chars))}\n"
    form = f"ANSWER\nANSWER: {answer}" if isinstance(answer, str) else f"%json {json.dumps(answer)}"
    return f"start: calls | answer\nanswer: {form}\n{rules}"


def terminal(grammar: Grammar) -> str:
    """Of Lark, for a CHOICE or REGEX."""
    if grammar.kind is GrammarKind.CHOICE:
        return " | ".join(map(_text, grammar.choices()))
    escaped = re.sub(
        r"\\.|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), grammar.text, flags=re.S
    )
    return f"/{escaped}/"


def _repeated(rule: str, most: int, separator: str = "") -> str:
    more = f" ({separator} {rule}){{0,{most - 1}}}" if most > 1 else ""
    return f"calls: {rule}{more}\n"


def _json_call(tools: Sequence[Tool], key: str, chars: PointerChars) -> str:
    definitions, call = _call_schema(tools, key, chars)
    return f"call: %json {json.dumps(call | ({'$defs': definitions} if definitions else {}))}\n"


def _call_schema(tools: Sequence[Tool], key: str, chars: PointerChars) -> tuple[dict[str, Any], dict[str, Any]]:
    """Definitions, and the schema of one call; `key` is the name of its arguments."""
    definitions: dict[str, Any] = {}
    calls = []
    _check_size(tools)
    for index, tool in enumerate(tools):
        parameters = parameters_of(tool)
        moved = _moved(index, parameters, f"#/$defs/tool{index}", chars)
        if moved != parameters:
            definitions[f"tool{index}"] = moved
            moved = {"$ref": f"#/$defs/tool{index}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, key: moved},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return definitions, calls[0] if len(calls) == 1 else {"anyOf": calls}


def _xml_calls(tools: Sequence[Tool], chars: PointerChars) -> str:
    """In XML a string is bare text. Other constraints than its `enum` cannot be enforced there."""
    _check_size(tools)
    rules = f"block: {' | '.join(f'tool{index}' for index in range(len(tools)))}\n"
    for index, tool in enumerate(tools):
        rules += _xml_call(index, tool, MAX_GRAMMAR_BYTES - len(rules), chars)
    return rules


def _xml_call(number: int, tool: Tool, most: int, chars: PointerChars) -> str:
    """Raises InvalidRequest if the rules have over `most` characters: each parameter repeats a schema with
    references."""
    schema = parameters_of(tool)

    @cache
    def definitions() -> dict[str, Any]:
        moved = _moved(number, schema, "#/$defs/tool", chars)
        return {} if moved == schema else {"$defs": {"tool": moved}}

    properties, required = schema.get("properties"), schema.get("required")
    needed = {one for one in required if isinstance(one, str)} if isinstance(required, list) else ()
    parts, rules = [_text(f"<tool_call>\n<function={tool.function.name}>\n")], ""
    for index, key in enumerate(properties if isinstance(properties, dict) else ()):
        name = f"tool{number}_{index}"
        parts.append(f"{name}{'' if key in needed else '?'}")
        rules += f"{name}: {_text(f'<parameter={key}>' + chr(10))} {_xml_value(schema, key, definitions)}\n"
        if len(rules) > most:
            expected = f"parameters that become a grammar of at most {MAX_GRAMMAR_BYTES} bytes"
            raise InvalidRequest(f"tools[{number}].function.parameters", "a longer grammar", expected)
    parts.append('"</function>\\n</tool_call>" "\\n"?')
    return f"{rules}tool{number}: {' '.join(parts)}\n"


def _xml_value(schema: dict[str, Any], key: str, definitions: Callable[[], dict[str, Any]]) -> str:
    """`definitions`: the schema with its references below #/$defs/tool, if it has any."""
    one = schema["properties"][key]
    end = '"\\n</parameter>\\n"'
    types = parameter_types(schema, key)
    if "string" in types:
        values = one.get("enum") if isinstance(one, dict) else None
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return f"({' | '.join(_text(value) for value in values)}) {end}"
        return "xml_value"
    if moved := definitions():
        escaped = key.replace("~", "~0").replace("/", "~1")
        one = {"$ref": f"#/$defs/tool/properties/{escaped}", **moved}
    return f"%json {json.dumps(one)} {end}"


def _text(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _check_size(tools: Sequence[Tool]) -> None:
    """Before the schemas are rewritten. Raises InvalidRequest."""
    num_bytes = sum(len(to_json(parameters_of(one))) for one in tools)
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest("tools", f"{num_bytes} bytes of parameters", f"at most {MAX_GRAMMAR_BYTES} bytes")


def _moved(index: int, parameters: dict[str, Any], root: str, chars: PointerChars) -> dict[str, Any]:
    """The parameters of tool `index`, with references to `root`, their place in the grammar. Raises InvalidRequest."""
    try:
        return localized(parameters, root, chars)
    except (ValueError, RecursionError) as error:
        place, expected = f"tools[{index}].function.parameters", "a schema with references to its own parts"
        raise InvalidRequest(place, str(error), expected) from None

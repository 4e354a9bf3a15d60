"""Recognises how a model writes tool calls, by its chat template. Pure."""

from __future__ import annotations

from typing import Final

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

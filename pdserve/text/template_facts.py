"""What a program knows about a model's chat templates: found by a child process, because templates run nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.errors import ModelError
from pdserve.isolated.process import BlockingChild, ChildEnded
from pdserve.text.chat import TemplateSources
from pdserve.text.child import load_message

MODULE: Final = "pdserve.text.child"


@final
@dataclass(frozen=True, slots=True)
class TemplateFacts:
    tool_format: str = ""  # empty: the templates take no tools
    reasoning_format: str = ""


def find_facts(sources: TemplateSources | None) -> TemplateFacts:
    """Raises ModelError if a template does not compile."""
    if sources is None:
        return TemplateFacts()
    loaded = ask_once(load_message(sources))[0]
    return TemplateFacts(loaded["tool_format"], loaded["reasoning_format"])


def ask_once(load: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of a child that then ends. Raises ModelError if it cannot load the model's files."""
    try:
        answers = BlockingChild(MODULE).ask_all(load, *messages)
    except ChildEnded:
        raise ModelError(
            "chat_template", "one that needs too much time or memory", "one that compiles within its limits"
        ) from None
    if answers[0]["failed"] is not None:
        raise ModelError(*answers[0]["failed"])
    return answers

"""What a program knows about a model's chat templates: found by a child process, because templates run nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.errors import InternalError, ModelError, PdserveError
from pdserve.isolated.process import BlockingChild, ChildEnded
from pdserve.text.chat import TemplateSources
from pdserve.text.child import load_message

MODULE: Final = "pdserve.text.child"


@final
@dataclass(frozen=True, slots=True)
class TemplateFacts:
    tool_format: str = ""  # empty: the templates take no tools
    reasoning_format: str = ""


@contextmanager
def finding_facts(sources: TemplateSources | None) -> Iterator[Callable[[], TemplateFacts]]:
    """The child starts while the caller loads something else. The function raises ModelError if a template does not
    compile."""
    if sources is None:
        yield TemplateFacts
        return
    child = BlockingChild(MODULE)

    def found() -> TemplateFacts:
        return facts_of(_answers(child, load_message(sources))[0])

    try:
        yield found
    finally:
        child.end()


def facts_of(loaded: Mapping[str, Any]) -> TemplateFacts:
    """In a child's first answer, which has none without templates."""
    return TemplateFacts(loaded.get("tool_format", ""), loaded.get("reasoning_format", ""))


def not_loaded(status: int | None) -> PdserveError:
    """Why a child with this exit status has not answered its first message."""
    if status is not None and status > 0:  # no limit ends it in this way
        return InternalError(
            f"the process that reads chat templates ended with status {status}: try `{sys.executable} -m {MODULE}`"
        )
    return ModelError("chat_template", "one that needs too much time or memory", "one that compiles within its limits")


def ask_once(load: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of a child that then ends. Raises ModelError if it cannot load the model's files."""
    return _answers(BlockingChild(MODULE), load, *messages)


def _answers(child: BlockingChild, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        answers = child.ask_all(*messages)
    except ChildEnded as ended:
        raise not_loaded(ended.status) from None
    if answers[0]["failed"] is not None:
        raise ModelError(*answers[0]["failed"])
    return answers

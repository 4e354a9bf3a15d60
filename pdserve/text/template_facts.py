"""What a program knows about a model's chat templates: found by a child process, because templates run nowhere else."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.errors import InternalError, ModelError, PdserveError
from pdserve.isolated.child import LATE
from pdserve.isolated.process import START_S, BlockingChild, ChildEnded, outcome
from pdserve.text.chat import TemplateSources
from pdserve.text.child import load_message, part_of

MODULE: Final = "pdserve.text.child"
# Native code aborts without memory.
_AT_LIMIT: Final[Mapping[int, str]] = {signal.SIGPROF: "CPU time", signal.SIGABRT: "memory"}


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
    load = load_message(sources)
    child = _begun(load)

    def found() -> TemplateFacts:
        return facts_of(_answers(child, load)[0])

    try:
        yield found
    finally:
        child.end()


def facts_of(loaded: Mapping[str, Any]) -> TemplateFacts:
    """In a child's first answer, which has none without templates."""
    return TemplateFacts(loaded.get("tool_format", ""), loaded.get("reasoning_format", ""))


def not_loaded(cause: BaseException | None, load: Mapping[str, Any]) -> PdserveError:
    """Why a child has not answered its first message `load`."""
    process = f"the process that reads {part_of(load)}"
    if isinstance(cause, OSError) and not isinstance(cause, TimeoutError):
        return InternalError(f"{process} cannot be started: {cause}")
    status = cause.status if isinstance(cause, ChildEnded) else None
    if status is None or status == LATE:
        return InternalError(f"{process} was not ready within {START_S:g} s: this machine is too busy; try again")
    if status >= 0:  # no limit ends it in this way
        return InternalError(f"{process} {outcome(status)}: try `{sys.executable} -m {MODULE}`")
    if (what := _AT_LIMIT.get(-status)) is not None:
        return ModelError(part_of(load), f"one that needs too much {what}", f"one that loads with less {what}")
    advice = "; if by the kernel, this machine has too little memory" if status == -signal.SIGKILL else ""
    return InternalError(f"{process} {outcome(status)}{advice}")


def ask_once(load: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of a child that then ends. Raises ModelError if it cannot load the model's files."""
    return _answers(_begun(load), load, *messages)


def _begun(load: Mapping[str, Any]) -> BlockingChild:
    try:
        return BlockingChild(MODULE)
    except OSError as error:
        raise not_loaded(error, load) from None


def _answers(child: BlockingChild, load: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        answers = child.ask_all(load, *messages)
    except ChildEnded as ended:
        raise not_loaded(ended, load) from None
    if answers[0]["failed"] is not None:
        raise ModelError(*answers[0]["failed"])
    return answers

"""The environment in which chat templates run: jinja2's immutable sandbox with the helpers of Hugging Face templates.

It also limits the time of a rendering, and the size of an operator's result.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any, Final, NoReturn, final

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from pdserve.core.errors import ModelError


class TemplateRefusal(jinja2.TemplateError):
    """The template called raise_exception."""


CLOCK: Final = "_pdserve_clock"


@final
class RenderClock:
    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._end_s = time.monotonic() + limit_s

    def check(self) -> None:
        if time.monotonic() > self._end_s:
            raise ModelError("chat_template", "a longer rendering", f"one within {self._limit_s:g} s")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also limits the size of an operator's result, and checks the time at every call."""

    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        clock = __context.get(CLOCK)
        if isinstance(clock, RenderClock):
            clock.check()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or any(isinstance(one, int) and abs(one) > 2**63 for one in (left, right)):
            raise jinja2.exceptions.SecurityError("a chat template may not raise to a power")
        for one, other in ((left, right), (right, left)):
            if isinstance(one, (str, list, tuple)) and isinstance(other, int) and len(one) * other > 2**20:
                raise jinja2.exceptions.SecurityError("a chat template may not repeat so much")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks an assistant's text for training; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore, which give access to the interpreter."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r}")
        super().__setitem__(name, value)


def sandbox() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, it does not escape <, > and &, because a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

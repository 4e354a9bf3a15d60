"""The environment in which chat templates run: jinja2's immutable sandbox with the helpers of Hugging Face templates.

It bounds neither time nor memory: templates run in a child process that does (pdserve/text/child.py).
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils


class TemplateRefusal(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generator(jinja2.compiler.CodeGenerator):
    """Evaluates no expression of the template while it is compiled."""

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _Generator


class _Variables(_Generator, jinja2.meta.TrackingCodeGenerator):
    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)  # type: ignore[call-arg]
        self.optimizer = None


def undeclared_variables(environment: jinja2.Environment, parsed: jinja2.nodes.Template) -> set[str]:
    """Like jinja2's own function, but it evaluates nothing."""
    found = _Variables(environment)
    found.visit(parsed)
    return found.undeclared_identifiers


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
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
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

"""Converts chat messages to a prompt by a chat template in the model's folder.

A template is a program written by the model's author. It runs in jinja2's immutable sandbox, with the helpers of
Hugging Face templates. Only a child process that the kernel limits (pdserve/text/child.py) makes a ChatTemplate; other
processes read TemplateSources. Templates never come from a request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, final

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from pdserve.bounded_file import read_text
from pdserve.core.errors import InvalidRequest, ModelError, PdserveError, shortened
from pdserve.core.types import MAX_MESSAGES, MAX_TOOLS
from pdserve.text.stops import MISTRAL_MARKS, THINK_MARKS
from pdserve.text.template_forms import PROBE_TOOL, find_forms, tool_format
from pdserve.text.tokenizer import NAMED_TOKENS, named_token, read_tokenizer_config

# --- sandbox of the templates ---------------------------------------------------------------------------------
# It bounds neither time nor memory: the child process does.


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


# --- chats and templates --------------------------------------------------------------------------------------

MAX_SOURCE_CHARS: Final = 2**20
MAX_TEMPLATE_BYTES: Final = 2**20  # of a file; the largest known has 100 KB
MAX_RENDERED_CHARS: Final = 16 * 2**20
MAX_ARGUMENTS_CHARS: Final = 4096
_OWN: Final = ("messages", "add_generation_prompt", "tools", "documents")  # what render() gives to every template
#: The names under which templates read whether the model shall reason.
_SWITCHES: Final = ("enable_thinking", "thinking", "enable_reasoning", "reasoning")
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON; an object unless the model wrote something else, or its answer was cut


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str | None  # None: an assistant that only called tools or reasoned
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool_call_id: str | None = None  # of a tool's result
    name: str | None = None
    reasoning_content: str | None = None  # of an assistant


@final
@dataclass(frozen=True, slots=True)
class TemplateSources:
    """The templates of a model, which are not compiled."""

    default: str
    tool_use: str | None  # replaces the default in requests with tools
    named_tokens: Mapping[str, str]


#: Of the toy models.
TOY_TEMPLATES: Final = TemplateSources(
    "{% for one in messages %}{{ one.role }}: {{ one.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    None,
    {},
)

Probe = Callable[[Callable[[], str]], str | None]  # None: it has no end, or needs too much memory


def _render_here(render: Callable[[], str]) -> str:
    return render()


@final
class ChatTemplate:
    """Thread-safe."""

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str] | None = None,
        *,
        tool_use: ChatTemplate | None = None,
        max_chars: int = MAX_RENDERED_CHARS,
        probe: Probe = _render_here,
    ) -> None:
        """`tool_use` replaces this template in requests with tools. `probe` renders the histories from which the
        template's forms are found. Raises ModelError when the template does not parse."""
        self.source = source
        self.tool_use = tool_use
        self.named_tokens = dict(named_tokens or {})
        self._max_chars = max_chars
        self.probe = probe
        self._environment = sandbox()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError("chat_template", f"line {error.lineno}: {error.message}", "a jinja template") from error
        except (RecursionError, SyntaxError, ValueError) as error:
            raise ModelError("chat_template", shortened(error), "a jinja template that Python compiles") from error
        parsed = self._environment.parse(source)
        read = undeclared_variables(self._environment, parsed)
        self.takes_tools = "tools" in read
        self._arguments = read.difference(_OWN, self.named_tokens, self._environment.globals)
        self._reads_reasoning = any(
            (isinstance(one, jinja2.nodes.Getattr) and one.attr == "reasoning")
            or (isinstance(one, jinja2.nodes.Getitem) and _is_constant(one.arg, "reasoning"))
            for one in parsed.find_all((jinja2.nodes.Getattr, jinja2.nodes.Getitem))
        )
        self.tool_format = tool_format(source) if self.takes_tools else ""
        # A template that only begins the reasoning does not contain the last mark.
        self.reasoning_mark = next(
            (close for begin, close in (MISTRAL_MARKS, THINK_MARKS) if begin in source or close in source), None
        )
        if tool_use is not None:
            self.tool_format = tool_use.tool_format
            self.reasoning_mark = self.reasoning_mark or tool_use.reasoning_mark
        self.forms = find_forms(self._probe)

    def rewritten(self, rewrite: Callable[[jinja2.nodes.Template], jinja2.nodes.Template]) -> ChatTemplate:
        """The same template with another program. It has the same forms and limits."""
        found = object.__new__(ChatTemplate)
        found.__dict__.update(self.__dict__)
        found._template = self._environment.from_string(rewrite(self._environment.parse(self.source)))
        return found

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[str] = (),
        arguments: str = "",
        effort: str | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """`tools` are JSON objects. So is `arguments`, with values for names that the template reads. `effort` is one
        of EFFORTS.

        Raises InvalidRequest if the template rejects the messages, and ModelError if it exceeds a limit.
        """
        if tools and self.tool_use is not None:
            return self.tool_use.render(messages, tools, arguments, effort, add_generation_prompt=add_generation_prompt)
        if not messages:
            raise InvalidRequest("chat.messages", "no message", "at least one message")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest("chat.messages", f"{len(messages)} messages", f"at most {MAX_MESSAGES} messages")
        for index, message in enumerate(messages):
            if not message.role:
                raise InvalidRequest(f"chat.messages[{index}].role", "an empty role", "a role such as user")
        if len(tools) > MAX_TOOLS:
            raise InvalidRequest("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS} tools")
        if tools and not self.takes_tools:
            raise InvalidRequest("tools", f"{len(tools)} tools", "none: this model's chat template takes no tools")
        given = self._effort_arguments(effort) | (self._checked(arguments) if arguments else {})
        plain = [self._plain(f"chat.messages[{index}]", message) for index, message in enumerate(messages)]
        objects = [_object("tools", one) for one in tools]
        try:
            return self._rendered(plain, objects, add_generation_prompt, given)
        except RecursionError as error:
            raise ModelError("chat_template", "endless recursion", "a template that ends") from error
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                _place(error, plain), "this value", f"what the chat template takes: {shortened(error)}"
            ) from error

    def _rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        given: Mapping[str, Any],
    ) -> str:
        chunks: list[str] = []
        num_chars = 0
        for chunk in self._template.generate(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=list(tools) or None,
            documents=None,
            **{**self.named_tokens, **given},
        ):
            num_chars += len(chunk)
            if num_chars > self._max_chars:
                raise ModelError("chat_template", "over that", f"at most {self._max_chars} characters of prompt")
            chunks.append(chunk)
        return _as_unicode("".join(chunks))

    def _probe(self, messages: Sequence[dict[str, Any]], has_tools: bool) -> str | None:
        if has_tools and not self.takes_tools:
            return None

        def render() -> str:
            return self._rendered(messages, [PROBE_TOOL] if has_tools else [], True, {})

        try:
            return self.probe(render)
        except (*_TEMPLATE_ERRORS, PdserveError, RecursionError):
            return None

    def _effort_arguments(self, effort: str | None) -> dict[str, Any]:
        """As in vLLM: the effort itself, and whether the model shall reason, under the names that the template reads.

        Raises InvalidRequest.
        """
        if effort is None:
            return {}
        if effort not in EFFORTS:
            raise InvalidRequest("reasoning_effort", "another value", f"one of {', '.join(EFFORTS)}")
        found: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in self._arguments}
        return found | ({"reasoning_effort": effort} if "reasoning_effort" in self._arguments else {})

    def _checked(self, arguments: str) -> dict[str, Any]:
        """Raises InvalidRequest: a name that the template does not read would change nothing."""
        field = "chat_template_kwargs"
        if len(arguments) > MAX_ARGUMENTS_CHARS:
            raise InvalidRequest(field, f"{len(arguments)} characters", f"at most {MAX_ARGUMENTS_CHARS} characters")
        found = _object(field, arguments)
        for name, value in found.items():
            if name not in self._arguments:
                known = ", ".join(sorted(self._arguments)) or "no name"
                raise InvalidRequest(field, repr(name), f"what this model's chat template reads: {known}")
            if not isinstance(value, (str, bool, int, float)):
                raise InvalidRequest(field, f"another value of {name!r}", "a text, a number or a boolean")
        return found

    def _plain(self, place: str, message: Message) -> dict[str, Any]:
        """As templates of Hugging Face read it. An absent value stays absent."""
        found: dict[str, Any] = {"role": message.role}
        if message.content is not None:
            is_parts = self.forms.takes_parts
            found["content"] = [{"type": "text", "text": message.content}] if is_parts else message.content
        elif self.forms.no_content != "absent":
            found["content"] = None if self.forms.no_content == "null" else ""
        if message.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": self._call_arguments(
                            f"{place}.tool_calls[{index}].function.arguments", call.arguments
                        ),
                    },
                }
                for index, call in enumerate(message.tool_calls)
            ]
        if message.tool_call_id is not None:
            found["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            found["name"] = message.name
        if message.reasoning_content is not None:
            # The names under which templates read it; transformers fills the first two.
            names = ("reasoning_content", "thinking", *(("reasoning",) if self._reads_reasoning else ()))
            found |= dict.fromkeys(names, message.reasoning_content)
        return found

    def _call_arguments(self, place: str, text: str) -> Any:
        """An object if the template takes it. Text that is no JSON object stays text."""
        try:
            value = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            value = text
        if value is None:
            value = {}
        if isinstance(value, dict):
            return (text if text.strip() not in ("", "null") else "{}") if self.forms.prefers_text else value
        if not self.forms.takes_text:
            raise InvalidRequest(
                place, "a text that is no JSON object", "a JSON object: this model's chat template takes nothing else"
            )
        return text


_TEMPLATE_ERRORS: Final = (
    TemplateRefusal,
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
)


def _place(error: BaseException, messages: Iterable[dict[str, Any]]) -> str:
    """The message that the template was reading: the one in the innermost variable of its program."""
    numbers = {id(one): index for index, one in enumerate(messages)}
    found = None
    trace = error.__traceback__
    while trace is not None:
        # jinja replaces the frames of a template by frames with the template's own names.
        seen = {name: numbers[id(value)] for name, value in trace.tb_frame.f_locals.items() if id(value) in numbers}
        if seen:
            found = seen.get("message", [*seen.values()][-1])
        trace = trace.tb_next
    return "chat.messages" if found is None else f"chat.messages[{found}]"


def reasoning_format(template: ChatTemplate) -> str:
    """How the model marks its reasoning: mistral, tagged, open (its prompt ends with <think>), or empty: no marks."""
    if template.reasoning_mark is None:
        return ""
    if template.reasoning_mark == "[/THINK]":
        return "mistral"
    try:
        prompt = template.probe(lambda: template.render([Message("user", "x")]))
    except (InvalidRequest, ModelError):
        return "tagged"
    return "open" if prompt is not None and prompt.rstrip().endswith("<think>") else "tagged"


def read_templates(folder: Path) -> TemplateSources | None:
    """The templates `default` and `tool_use` of a model; None if it has neither.

    Files override tokenizer_config.json: chat_template.jinja, and those in additional_chat_templates.
    """
    config = read_tokenizer_config(folder)
    sources = _sources(config.get("chat_template"))
    for name, path in (
        ("tool_use", folder / "additional_chat_templates" / "tool_use.jinja"),
        ("default", folder / "chat_template.jinja"),
    ):
        if os.path.lexists(path):
            sources[name] = read_text(path, MAX_TEMPLATE_BYTES, path.name, ModelError)
            if name == "default" and not (folder / "additional_chat_templates").is_dir():
                sources.pop("tool_use", None)  # of the config, which belongs to another default
    named = {name: named_token(config, name) for name in NAMED_TOKENS}
    tokens = {name: token for name, token in named.items() if token is not None}
    for name, source in sources.items():
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelError(
                f"chat_template {name}", f"{len(source)} characters", f"at most {MAX_SOURCE_CHARS} characters"
            )
    if "default" in sources:
        return TemplateSources(sources["default"], sources.get("tool_use"), tokens)
    return TemplateSources(sources["tool_use"], None, tokens) if "tool_use" in sources else None


def compile_templates(sources: TemplateSources, probe: Probe = _render_here) -> ChatTemplate:
    """Raises ModelError."""
    named = sources.named_tokens
    tool_use = None if sources.tool_use is None else ChatTemplate(sources.tool_use, named, probe=probe)
    return ChatTemplate(sources.default, named, tool_use=tool_use, probe=probe)


def _sources(held: Any) -> dict[str, str]:
    """By name. `chat_template` is one template or a list of named ones. Raises ModelError."""
    if held is None:
        return {}
    if isinstance(held, str):
        return {"default": held}
    if not isinstance(held, list):
        raise ModelError("chat_template", type(held).__name__, "text, or a list of named templates")
    named = {str(one.get("name")): one.get("template") for one in held if isinstance(one, dict)}
    found: dict[str, str] = {}
    for name in ("default", "tool_use"):
        source = named.get(name)
        if isinstance(source, str):
            found[name] = source
        elif name in named:
            raise ModelError(f"chat_template {name}", type(source).__name__, "text")
    return found


def _as_unicode(text: str) -> str:
    """With U+FFFD in place of each surrogate, which JSON of a request can escape and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _is_constant(node: jinja2.nodes.Node, value: str) -> bool:
    return isinstance(node, jinja2.nodes.Const) and node.value == value


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "a text that is no JSON object", "a JSON object")
    return value

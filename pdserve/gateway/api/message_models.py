"""The fields of Anthropic's requests, as pydantic models. Pure: types and meanings only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from pdserve.core.types import MAX_MESSAGES, MAX_STOP_STRINGS, MAX_TOOLS
from pdserve.gateway.api.request_models import (
    MAX_KEYWORDS,
    MAX_PARTS,
    History,
    Most,
    OtherTool,
    SamplingFields,
    Schema,
    Strict,
    TemplateArguments,
    by_type,
    described,
)

#: Arguments of an earlier call.
Arguments = Annotated[dict[str, Any], Most(MAX_KEYWORDS)]


class TextBlock(History):
    type: Literal["text"]
    text: str


class TextSource(History):
    type: Literal["text"]
    data: str


class DocumentBlock(History):
    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(one for one in (self.title, self.context, self.source.data) if one)


ReadBlock = Annotated[TextBlock | DocumentBlock, Field(discriminator="type")]


class ThinkingBlock(History):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(History):
    """What another server has encrypted. The model does not see it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(History):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Arguments


class ToolResultBlock(History):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ReadBlock], Most(MAX_PARTS)] | None = None
    is_error: bool = False


Block = Annotated[
    TextBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class TurnMessage(History):
    role: Literal["user", "assistant", "system"]  # Claude Code sends messages of the system after the first turn
    content: str | Annotated[list[Block], Most(MAX_PARTS)]


class CustomTool(History):
    """Other fields of it (`cache_control`, `defer_loading`) do not change what the model sees."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(History):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(SamplingFields):
    messages: Annotated[list[TurnMessage], Most(MAX_MESSAGES)] = Field(
        description="roles user, assistant and system; content is text or blocks: `text`, `document` of text, "
        "`tool_use`, `tool_result` and `thinking`. The last message is not the assistant's"
    )
    max_tokens: int | None = described(
        "most generated tokens; absent or more: the server's limit; 0 computes the prompt only, so that it is cached"
    )
    system: str | Annotated[list[TextBlock], Most(MAX_PARTS)] | None = described(
        "the system message, without blocks that begin with `x-anthropic-billing-header:`"
    )
    stop_sequences: Annotated[list[str], Most(MAX_STOP_STRINGS)] | None = described("up to 16 strings")
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[CustomTool, Tag("function")] | Annotated[OtherTool, Tag("other")], by_type(None, "custom")
                ]
            ],
            Most(2 * MAX_TOOLS),  # with those that are ignored
        ]
        | None
    ) = described("functions that the model may call; up to 128. Tools of other types than `custom` are ignored")
    tool_choice: ToolChoice | None = described(
        "`auto`, `any`, `tool` or `none`; `any` and `tool` are enforced by a grammar"
    )
    thinking: Thinking | None = described(
        "`disabled` is the effort `none`, other types the effort `high` where none is given; absent: the model's "
        "default. `budget_tokens` and `display` have no effect"
    )
    output_config: OutputConfig | None = described(
        "`effort` as `reasoning_effort` of a chat; `format`: a JSON schema, which is always enforced"
    )
    chat_template_kwargs: TemplateArguments | None = described(
        "vLLM; values for names that the model's chat template reads, such as `enable_thinking`"
    )

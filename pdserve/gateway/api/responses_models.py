"""The fields of OpenAI's requests to /v1/responses, as pydantic models. Pure: types and meanings only."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from pdserve.core.types import MAX_MESSAGES, MAX_TOOLS
from pdserve.gateway.api.request_models import (
    MAX_NAMES,
    MAX_PARTS,
    History,
    JsonObjectFormat,
    Most,
    NullIsAbsent,
    PlainFormat,
    RefusalPart,
    SamplingFields,
    Schema,
    Strict,
    TemplateArguments,
    described,
)

LOGPROBS: Final = "message.output_text.logprobs"


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class InputPart(History):
    type: Literal["input_text", "output_text", "text"]
    text: str


_Part = Annotated[InputPart | RefusalPart, Field(discriminator="type")]


class InputMessage(History):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_Part], Most(MAX_PARTS)]


class InputCall(History):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | None = None


class InputResult(History):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[InputPart], Most(MAX_PARTS)]


class InputReasoning(History):
    """Reasoning of an earlier answer. Its text becomes `reasoning_content` of the assistant's message that follows."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], Most(MAX_PARTS)] | None = None
    content: Annotated[list[Any], Most(MAX_PARTS)] | None = None


class FunctionTool(History):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class OtherTool(NullIsAbsent):
    """One that OpenAI's service runs, or whose calls are no JSON. The model does not see it."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: str = Field(pattern=r"^[a-z0-9_]{1,64}$")


def _tool_kind(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "function" if kind == "function" else "other"


_ByKind: Final = Discriminator(_tool_kind)


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: PlainFormat | JsonObjectFormat | SchemaFormat | None = Field(default=None, discriminator="type")
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(History):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponseStreamOptions(Strict):
    """The usage comes with the last event in any case."""

    include_obfuscation: bool = False
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


ITEMS: Final = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputResult,
    "reasoning": InputReasoning,
}


class ResponsesRequest(SamplingFields):
    input: str | Annotated[list[Annotated[dict[str, Any], Most(MAX_NAMES)]], Most(MAX_MESSAGES)] = Field(
        description="a text, or items: messages, `function_call` and `function_call_output`"
    )
    instructions: str | None = described("a system message before the input")
    max_output_tokens: int | None = described("most generated tokens; absent: the server's limit")
    stream_options: ResponseStreamOptions | None = described("`include_obfuscation`; the usage is always sent")
    text: TextOptions | None = described(
        "`format`: `text`, `json_object` or `json_schema`, which is always enforced; `verbosity` has no effect"
    )
    reasoning: ReasoningOptions | None = described("`effort` as `reasoning_effort` of a chat; `summary` has no effect")
    tools: (
        Annotated[
            list[Annotated[Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")], _ByKind]],
            Most(2 * MAX_TOOLS),  # with those that are ignored
        ]
        | None
    ) = described("functions that the model may call; up to 128. Tools of other types are ignored")
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = described(
        "`none`, `auto`, `required` or a function; the last two are enforced by a grammar"
    )
    parallel_tool_calls: bool | None = described("false allows one call")
    chat_template_kwargs: TemplateArguments | None = described(
        "vLLM; values for names that the model's chat template reads, such as `enable_thinking`"
    )
    include: Annotated[list[Include], Most(MAX_NAMES)] | None = described(
        f"`{LOGPROBS}`; the others name parts that no answer has"
    )
    top_logprobs: int | None = described("0 to 64 most likely tokens, with the logprobs in `include`")

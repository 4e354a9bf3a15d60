"""The fields of OpenAI's requests to /v1/responses, as pydantic models. Pure: types and meanings only."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from pdserve.gateway.request_models import JsonObjectFormat, PlainFormat, Strict, described

LOGPROBS: Final = "message.output_text.logprobs"


class InputPart(Strict):
    """A part of a message. Clients send annotations and logprobs back with an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart | RefusalPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | None = None
    id: str | None = None
    status: str | None = None


class InputResult(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: str | None = None


class InputReasoning(Strict):
    """Reasoning of an earlier answer. Its text becomes `reasoning_content` of the assistant's message that follows."""

    type: Literal["reasoning"]
    id: str | None = None
    status: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: PlainFormat | JsonObjectFormat | SchemaFormat | None = Field(default=None, discriminator="type")


class ResponseStreamOptions(Strict):
    include_obfuscation: bool = False


ITEMS: Final = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputResult,
    "reasoning": InputReasoning,
}


class ResponsesRequest(Strict):
    input: str | list[dict[str, Any]] = Field(
        description="a text, or items: messages, `function_call` and `function_call_output`"
    )
    model: str | None = described("name of the served model; may be absent")
    instructions: str | None = described("a system message before the input")
    max_output_tokens: int | None = described("most generated tokens; absent: the server's limit")
    temperature: float | None = described("0 to 100; 0 is greedy; 1 where absent")
    top_p: float | None = described("above 0, to 1")
    stream: bool | None = described("events, as OpenAI's client names them")
    stream_options: ResponseStreamOptions | None = described("`include_obfuscation`")
    text: TextOptions | None = described("`format`: `text`, `json_object` or `json_schema`, which is always enforced")
    tools: list[FunctionTool] | None = described("functions that the model may call; up to 128")
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = described(
        "`none`, `auto`, `required` or a function; the last two are enforced by a grammar"
    )
    parallel_tool_calls: bool | None = described("false allows one call")
    include: list[Literal["message.output_text.logprobs"]] | None = described(f"`{LOGPROBS}`")
    top_logprobs: int | None = described("0 to 64 most likely tokens, with the logprobs in `include`")
    cache_salt: str | None = described(
        "vLLM; only requests with the same salt share cached prefixes; 1 to 256 characters"
    )
    seed: int | None = described("pdserve only; random where absent")
